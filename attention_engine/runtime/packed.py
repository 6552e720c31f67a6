"""Packed sequences: their rows as one batch, and the tables that say of each row which sequence it is of.

Tables are made on the device, by torch, from where sequences begin: nothing is copied to the host, and nothing depends
on the lengths but the tensors' sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.errors import (
    DevicesDiffer,
    LengthsDiffer,
    NotATensor,
    OptionsClash,
    UnknownOption,
    WrongRank,
    WrongSequences,
    as_given,
)
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.packing import SEQUENCES, TABLES, Packing
from attention_engine.runtime.blocks import GivenBlocks
from attention_engine.runtime.packed_shared import share_tables
from attention_engine.runtime.packed_tables import tables_by_kernel

ROWS = "(rows, heads, dim)"
Packed = Literal["alike", "unlike"] | None


def packing_of(packed: str | None) -> Packing | None:
    """What `packed="alike"` asks for, and so on. Raises UnknownOption."""
    if packed is None:
        return None
    if packed not in ("alike", "unlike"):
        raise UnknownOption(
            f"packed is {as_given(packed)}. "
            'Choose "alike", where queries and keys have the same cu_seqlens, "unlike", or None.'
        )
    return Packing[packed.upper()]


def sizes_of_packed(q: Tensor) -> dict[str, int | None]:
    """The sizes that captured tensors' dimensions may have the names of: those that are read at h. All other indices
    are places in sequences."""
    return {"batch": -1, "heads": q.shape[2], "seq_len": -1, "seq_len_kv": -1}


def tables_of(packing: Packing) -> list[CustomSpec]:
    """The tables as custom inputs."""
    return [CustomSpec(name, axes) for name, axes in TABLES[packing].items()]


def count_sequences(specs: Sequence[CustomSpec]) -> list[CustomSpec]:
    """Custom inputs as kernels have them, that see one batch: an axis "batch" has a length of its own."""
    return [replace(s, axes=tuple(SEQUENCES if axis == "batch" else axis for axis in s.axes)) for s in specs]


@dataclass(frozen=True)
class PackedRows:
    """A call of packed sequences: q, k, v of one batch (1, rows, heads, dim), tables by name, how many sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    packing: Packing
    names: tuple[str, ...]
    tables: tuple[Tensor, ...]
    sequences: int


def refuse_lengths(cu_seqlens_k: object, max_seqlen_q: object, max_seqlen_k: object) -> None:
    """WrongSequences: lengths of packed sequences, and no cu_seqlens_q."""
    given = {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    name = next(name for name, value in given.items() if value is not None)
    raise WrongSequences(f"{name} was given without cu_seqlens_q, which says where the sequences of queries begin.")


def pack(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    blocks: GivenBlocks | None = None, by_kernel: bool = False, shares: bool = False,
) -> PackedRows:  # fmt: skip
    """The call as one of a single batch. by_kernel: may a kernel make the tables? shares: may other calls of the same
    starts use them? Raises BadInput."""
    if blocks is not None:
        raise OptionsClash("block_mask says which blocks of a batch exist, and packed sequences have no such blocks.")
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, Tensor):
            raise NotATensor(f"{name} is {type(tensor).__name__}. Give a tensor {ROWS}.")
        if tensor.ndim != 3:
            raise WrongRank(
                f"{name} has {tensor.ndim} dimensions, {tuple(tensor.shape)}. With cu_seqlens_q give {ROWS}, the rows "
                "of all sequences behind one another."
            )
    if k.shape[0] != v.shape[0]:
        raise LengthsDiffer(f"k has {k.shape[0]} rows and v has {v.shape[0]}. They must be equal.")
    alike = packed_alike(cu_seqlens_q, cu_seqlens_k)
    if cu_seqlens_k is None and q.shape[0] != k.shape[0]:
        raise LengthsDiffer(
            f"q has {q.shape[0]} rows and k has {k.shape[0]}. Say where the sequences of keys begin: cu_seqlens_k=..."
        )
    starts_q = check_starts("cu_seqlens_q", cu_seqlens_q, q)
    starts_k = starts_q if alike or cu_seqlens_k is None else check_starts("cu_seqlens_k", cu_seqlens_k, k)
    if starts_q.shape != starts_k.shape:
        raise WrongSequences(
            f"cu_seqlens_q is of {starts_q.shape[0] - 1} sequences and cu_seqlens_k of {starts_k.shape[0] - 1}."
        )
    packing = Packing.ALIKE if alike else Packing.UNLIKE
    given = (cu_seqlens_q,) if alike or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    tables = _make_tables(packing, given, (starts_q, starts_k), (q.shape[0], k.shape[0]), by_kernel, shares)
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    return PackedRows(q, k, v, packing, tuple(TABLES[packing]), tables, starts_q.shape[0] - 1)


def packed_alike(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None) -> bool:
    """Are keys the queries' rows?"""
    return cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q


def repeat_tables(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, shares: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """The tables of a call like one that passed every check; on a CPU the numbers are still looked at."""
    alike = packed_alike(cu_seqlens_q, cu_seqlens_k)
    starts_q = check_starts("cu_seqlens_q", cu_seqlens_q, q)
    starts_k = starts_q if alike or cu_seqlens_k is None else check_starts("cu_seqlens_k", cu_seqlens_k, k)
    packing = Packing.ALIKE if alike else Packing.UNLIKE
    given = (cu_seqlens_q,) if alike or cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
    rows = q.shape[0], k.shape[0]
    return _make_tables(packing, given, (starts_q, starts_k), rows, starts_q.is_cuda, shares)


def check_starts(name: str, starts: Tensor, rows: Tensor) -> Tensor:
    """Where sequences begin, as int32. Raises WrongSequences, DevicesDiffer; numbers are looked at on a CPU alone."""
    if not isinstance(starts, Tensor):
        raise NotATensor(f"{name} is {type(starts).__name__}. Give an int32 tensor (sequences + 1).")
    if starts.ndim != 1 or starts.shape[0] < 1 or starts.dtype not in (torch.int32, torch.int64):
        raise WrongSequences(
            f"{name} is {starts.dtype} of shape {tuple(starts.shape)}. Give int32 of shape (sequences + 1,): where "
            "each sequence begins, and where the last ends."
        )
    if starts.device != rows.device:
        raise DevicesDiffer(f"{name} is on '{starts.device}' and q on '{rows.device}'. Put them on one device.")
    if type(starts) is Tensor and starts.device.type == "cpu" and not is_compiling():
        check_numbers(name, starts.tolist(), rows.shape[0])
    return starts.to(torch.int32)


def check_numbers(name: str, starts: Sequence[int], rows: int) -> None:
    """WrongSequences unless these are places where sequences of so many rows can begin."""
    if starts[0] != 0:
        raise WrongSequences(f"{name} begins with {starts[0]}. The first sequence begins at row 0.")
    if back := [n for n, (a, b) in enumerate(itertools.pairwise(starts)) if b < a]:
        n = back[0]
        raise WrongSequences(f"{name} goes back from {starts[n]} to {starts[n + 1]} at {n + 1}. Give a running sum.")
    if starts[-1] > rows:
        raise WrongSequences(f"{name} ends at row {starts[-1]}, and there are {rows} rows.")


def _make_tables(
    packing: Packing, given: tuple[Tensor, ...], starts: tuple[Tensor, Tensor], rows: tuple[int, int],
    by_kernel: bool, shares: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """given: the caller's tensors, which say whose the tables are; starts: those of queries and of keys, as int32."""

    def make() -> tuple[Tensor, ...]:
        found = tables_by_kernel(packing, *starts, *rows) if by_kernel else None
        return make_tables(packing, *starts, *rows) if found is None else found

    return share_tables(given, rows, make) if shares else make()


def make_tables(
    packing: Packing, starts_q: Tensor, starts_k: Tensor, queries: int, keys: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """The tables in order. Rows behind the last sequence are of none: no query sees a key there, no key a query."""
    last = starts_q.shape[0] - 1
    of_q = sequences_of(starts_q, queries)
    of_k = of_q if packing is Packing.ALIKE else sequences_of(starts_k, keys)
    places = _places(starts_q, starts_k, queries)
    found = [torch.where(of_q < last, of_q, -1), of_k, starts_k.index_select(0, of_q), places]
    if packing is Packing.UNLIKE:
        found.append(starts_k.index_select(0, of_k))
        found.append((starts_k - starts_q).index_select(0, (of_q + 1).clamp(max=last)))
    return tuple(found)


def _places(starts_q: Tensor, starts_k: Tensor, queries: int) -> Tensor:
    """The NUMBERS of each sequence, and of the rows behind the last."""
    end_q = torch.cat([starts_q[1:], starts_q.new_full((1,), queries)])
    end_k = torch.cat([starts_k[1:], starts_k[-1:]])
    return torch.stack([end_k - end_q - starts_k, -starts_k, end_k, starts_q, end_q], dim=1)


def sequences_of(starts: Tensor, rows: int) -> Tensor:
    """The sequence of each row, int32; behind the last, how many there are."""
    places = torch.arange(rows, dtype=torch.int32, device=starts.device)
    return torch.searchsorted(starts[1:], places, right=True, out_int32=True)
