"""Masks as tensors, from the functions that users write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import BadInput, NotATensor, UnknownOption, as_given
from attention_engine.frontend.custom_io import INDEX, CustomIO
from attention_engine.frontend.frames import briefly
from attention_engine.frontend.signatures import DeclaredAxis, MaskMod
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.reference.evaluate import Evaluator
from attention_engine.runtime.captured import capturing, tensors_now
from attention_engine.runtime.inputs import type_of

Place = torch.device | str | None


def document_ids(lengths: Sequence[int] | Tensor, total: int | None = None, device: Place = None) -> Tensor:
    """Which document each token of a packed row is of, int32 (1, total): what `library.document` reads.

    lengths: of the documents, in order. total: tokens of the row; those after the last document are one of their own.
    """
    counts = torch.as_tensor(lengths, device=device)
    if counts.ndim != 1 or (counts.is_floating_point() and len(counts)):
        raise BadInput(f"lengths of documents are {as_given(lengths)}. Give integers: document_ids([5, 3]).")
    counts = counts.long()
    ends = counts.cumsum(0)
    last = int(ends[-1]) if len(counts) else 0
    total = last if total is None else total
    if total < last or bool((counts < 0).any()):
        what_to_do = "lengths of at least 0" if bool((counts < 0).any()) else f"a total of at least {last}"
        raise BadInput(f"documents of lengths {counts.tolist()} don't fit {total} tokens. Give {what_to_do}.")
    tokens = torch.arange(total, device=counts.device)
    return torch.searchsorted(ends, tokens, right=True).to(torch.int32)[None]


def io_of(custom: Mapping[str, Tensor], sizes: Sequence[int | None]) -> CustomIO:
    """A declaration of these tensors."""
    return CustomIO({name: axes_of(name, tensor, sizes) for name, tensor in custom.items()})


def axes_of(name: str, tensor: Tensor, sizes: Sequence[int | None]) -> tuple[DeclaredAxis, ...]:
    """The axes of a custom input that is not declared. Only a mod that reads it without indices needs their names.

    A dimension has one where it is as long as exactly one of the batch, the heads, the queries and the keys (`sizes`).
    Where there are as many queries as keys, two dimensions of that length are those of the queries and of the keys.
    """
    if not isinstance(tensor, Tensor):
        raise NotATensor(f"custom input '{name}' is {type(tensor).__name__}. Give a tensor.")
    axes: list[DeclaredAxis] = []
    of_pairs = [
        n for n, length in enumerate(tensor.shape) if length == sizes[2] == sizes[3] and length not in sizes[:2]
    ]
    for n, length in enumerate(tensor.shape):
        fits = [axis for axis, size in zip(INDEX, sizes, strict=True) if size == length]
        if len(of_pairs) == 2 and n in of_pairs:
            axes.append("seq_len" if n == of_pairs[0] else "seq_len_kv")
        else:  # a compiler knows how long a range is: an axis is a plain number
            axes.append(fits[0] if len(fits) == 1 and length != 1 else len(range(length)))
    return tuple(axes)


class TracedMask:
    """A mask's condition, and the tensors that it reads by name: custom inputs and captured ones.

    batch, heads: how many the mask differs in, 1 where it doesn't depend on them.
    """

    def __init__(self, condition: Expr | None, tensors: Mapping[str, Tensor], sizes: Sequence[int | None]) -> None:
        """sizes: batch, heads, queries, keys."""
        self.condition, self.tensors = condition, tensors
        axes = condition.axes if condition is not None else frozenset[Axis]()
        self.batch, self.heads = (
            (size or 1) if variable.axes <= axes else 1 for variable, size in zip((B, H), sizes, strict=False)
        )

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Is the pair kept? Of indices that broadcast."""
        shape = torch.broadcast_shapes(batch.shape, head.shape, query.shape, key.shape)
        if self.condition is None:
            return torch.ones(shape, dtype=torch.bool, device=query.device)
        values = {B: batch, H: head, Q_IDX: query, KV_IDX: key}
        return Evaluator(values, self.tensors, torch.float32, query.device)(self.condition).expand(shape)


def trace_mask(
    mask_mod: Callable[..., Any], sizes: Sequence[int | None], custom: Mapping[str, Tensor]
) -> TracedMask:  # fmt: skip
    """The mask that a function writes. sizes: batch, heads, queries, keys."""
    io = io_of(custom, sizes)
    types = {name: type_of(tensor) for name, tensor in custom.items()}
    with capturing(tuple(custom), types) as capture:
        program = trace(None, mask_mod, None, io, types)
    held = zip(capture.names, tensors_now(list(capture.captured.values())), strict=True)
    return TracedMask(program.mask, {**custom, **dict(held)}, sizes)


def check_place(device: Any) -> None:
    """UnknownOption where something else than a device, a CustomIO say, stands in its place."""
    if not (device is None or isinstance(device, (torch.device, str, int))):
        raise UnknownOption(
            f"device is {as_given(device)}. Give a device, or None. Custom inputs are given as tensors, by name: "
            "name=..."
        )


@briefly
def create_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Sq: int, Skv: int, device: Place = None,
    **custom: Tensor,
) -> Tensor:  # fmt: skip
    """The mask as bool (B or 1, H or 1, Sq, Skv), True where a pair is kept: for looking at, not for the kernels.

    custom: the custom inputs that the mask reads, by name. Tensors that it captures are read as they are.

    Example:
        >>> create_mask(library.document(), 1, None, 3, 3, documents=document_ids([2, 1]))[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    check_place(device)
    mask = trace_mask(mask_mod, (B, H, Sq, Skv), custom)
    axes = [torch.arange(n, device=device) for n in (mask.batch, mask.heads, Sq, Skv)]
    return mask.at(*torch.meshgrid(*axes, indexing="ij"))


@briefly
def create_block_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Sq: int, Skv: int, device: Place = None,
    Q_BLOCK_SIZE: int = 128, KV_BLOCK_SIZE: int = 128, **custom: Tensor,
) -> Tensor:  # fmt: skip
    """Which blocks hold a kept pair: int8 (B or 1, H or 1, ceil(Sq / Q_BLOCK_SIZE), ceil(Skv / KV_BLOCK_SIZE)).

    custom: as `create_mask` takes them. Rows of blocks are made one after another, so memory stays at O(tiles) and one
    row of blocks.
    """
    check_place(device)
    mask = trace_mask(mask_mod, (B, H, Sq, Skv), custom)
    rows, columns = -(-Sq // Q_BLOCK_SIZE), -(-Skv // KV_BLOCK_SIZE)
    blocks = torch.zeros(mask.batch, mask.heads, rows, columns, dtype=torch.int8, device=device)
    b = torch.arange(mask.batch, device=device).view(-1, 1, 1, 1)
    h = torch.arange(mask.heads, device=device).view(1, -1, 1, 1)
    key = torch.arange(columns * KV_BLOCK_SIZE, device=device).view(1, 1, 1, -1)
    for row in range(rows):
        query = torch.arange(row * Q_BLOCK_SIZE, min((row + 1) * Q_BLOCK_SIZE, Sq), device=device).view(1, 1, -1, 1)
        kept = (mask.at(b, h, query, key) & (key < Skv)).any(2)
        blocks[:, :, row] = kept.unflatten(-1, (columns, KV_BLOCK_SIZE)).any(-1)
    return blocks
