"""The tables of packed sequences by a kernel of their own, where calls run kernels: one launch in place of many."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernel, pass_configs
from attention_engine.ir.packing import TABLES, Packing
from attention_engine.ir.problem import Problem
from attention_engine.runtime.arguments import template

ANY = Problem(1, 1, 64, 64, "float16")  # tables are of no problem


@functools.lru_cache(maxsize=16)
def tables_kernel(packing: Packing, device: Arch) -> Kernel:
    """The kernel that makes them."""
    return Kernel("packed_tables.packed_tables", (ANY, packing), device, ANY, pass_configs(ANY))


@functools.lru_cache(maxsize=64)
def _begun(packing: Packing, device: torch.device) -> Kernel:
    kernel = tables_kernel(packing, detect(device))
    kernel.begin()
    return kernel


@functools.lru_cache(maxsize=256)
def _templates(packing: Packing, sequences: int, queries: int, keys: int, device: torch.device) -> tuple[Tensor, ...]:
    lengths = {"seq_len": queries, "seq_len_kv": keys}
    shapes = [(lengths[str(axes[0])],) if axes[0] in lengths else (sequences + 1, int(axes[1]))
              for axes in TABLES[packing].values()]  # fmt: skip
    return tuple(template(shape, torch.int32, device) for shape in shapes)


def tables_by_kernel(
    packing: Packing, starts_q: Tensor, starts_k: Tensor, queries: int, keys: int
) -> tuple[Tensor, ...] | None:
    """The tables in order; None while the kernel is being compiled, and where no row is there."""
    device = starts_q.device
    kernel = _begun(packing, device)
    if not kernel.ready or not (queries and keys):
        return None
    found = tuple(map(torch.empty_like, _templates(packing, starts_q.shape[0] - 1, queries, keys, device)))
    begins = (starts_q,) if packing is Packing.ALIKE else (starts_q, starts_k)
    kernel.run(*[starts.contiguous() for starts in begins], *found)
    return found
