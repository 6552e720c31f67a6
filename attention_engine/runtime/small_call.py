"""What `check()` runs of a call on a CPU: with backend="auto" the kernels, on the interpreter and on a part of it."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from attention_engine.errors import BadInput
from attention_engine.runtime.engine import Engine

MOST = {"batch": 2, "seq_len": 96, "seq_len_kv": 96}  # more than a tile of the interpreter, and not whole tiles
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Kind = TypeVar("Kind", bound=Engine)


def to_run(engine: Kind, q: Tensor) -> tuple[Kind, str]:
    """The engine that a check of tensors like q runs, and the reason where it is not the very one."""
    if engine.backend != "auto" or q.device.type != "cpu" or q.dtype not in KERNEL_DTYPES:
        return engine, ""
    if importlib.util.find_spec("tilelang") is None:
        return engine, "TileLang is not installed"
    twin = copy.copy(engine)
    twin.backend = "interpret"
    return twin, ""


def spell_run(backend: str, device: torch.device, cut: Sequence[str], lacking: str) -> str:
    """What ran, in words. cut: the tensors that were cut, with what their shapes were."""
    if backend == "reference":
        way_out = f"({lacking})" if lacking else '(backend="interpret" runs them)'
        return f"reference: plain PyTorch; the kernels were not run {way_out}"
    if backend == "interpret":
        small = f", on a part of the tensors: {', '.join(cut)}" if cut else ""
        return f"interpret: the kernels ran, emulated on a CPU{small}"
    return f"tilelang: the kernels ran on {torch.cuda.get_device_name(device)}"


def cut_call(
    tensors: Mapping[str, tuple[Tensor, Sequence[object]]],
) -> tuple[dict[str, Tensor], list[str]]:
    """The first batches, queries and keys of each tensor, by its axes, and which were cut."""
    found, cut = {}, []
    for name, (tensor, axes) in tensors.items():
        small = tensor
        for n, axis in enumerate(axes):
            if isinstance(axis, str) and axis in MOST and small.shape[n] > MOST[axis]:
                small = small.narrow(n, 0, MOST[axis])
        if small.shape != tensor.shape:
            cut.append(f"{name} of {tuple(tensor.shape)}")
        found[name] = small
    return found, cut


def draw(engine: Engine) -> list[Tensor]:
    """Random q, k and v for an engine, of its metas and small lengths, on the GPU if there is one."""
    if not engine.qkv_meta:
        raise BadInput("check() has no q, k and v, and the engine has no metas to draw them by. Give q, k and v.")
    place = torch.device("cuda" if torch.cuda.is_available() and engine.backend in ("auto", "tilelang") else "cpu")
    found = []
    for meta in engine.qkv_meta:
        length = min(meta.length, MOST["seq_len"]) if isinstance(meta.length, int) else MOST["seq_len"]
        tensor = torch.randn(1, length, meta.heads, meta.dim, device=place)
        tensor = tensor.to(getattr(torch, meta.dtype_name))
        found.append(tensor.transpose(1, 2) if engine.layout == "bhsd" else tensor)
    return found
