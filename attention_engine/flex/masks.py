"""BlockMask: a mask_mod and the lengths it was made for. Its blocks are worked out when somebody asks for them."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.errors import BadInput, NotAFunction, NotYetSupported, WrongArity, as_given
from attention_engine.frontend.frames import briefly
from attention_engine.frontend.tracing import place_of
from attention_engine.runtime import masks
from attention_engine.runtime.kept_lists import KeptLists, hold
from attention_engine.runtime.pictures import MaskPicture
from attention_engine.runtime.showing import show_mask

USUAL_BLOCK = 128
MaskMod = Callable[..., Any]
PART, WHOLE = 1, 2  # what a list of blocks says of one: its pairs are asked, or all are kept


def noop_mask(batch: Any, head: Any, token_q: Any, token_kv: Any) -> Any:
    """Every pair."""
    return True


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Pairs that every mask keeps."""
    _check_masks(mask_mods)

    def and_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = noop_mask(b, h, q_idx, kv_idx)
        for mask in mask_mods:
            kept = mask(b, h, q_idx, kv_idx) & kept
        return kept

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Pairs that some mask keeps."""
    _check_masks(mask_mods)

    def or_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kept = q_idx != q_idx
        for mask in mask_mods:
            kept = mask(b, h, q_idx, kv_idx) | kept
        return kept

    return or_mask


def _check_masks(mask_mods: tuple[MaskMod, ...]) -> None:
    for mask in mask_mods:
        if not callable(mask):
            raise NotAFunction(
                f"a {type(mask).__name__} was given where a function of (b, h, q_idx, kv_idx) belongs."
                + " Give block_mask.mask_mod." * isinstance(mask, BlockMask)
            )


class BlockMask:
    """A mask_mod, and the batch, heads and lengths that it is for.

    `create_block_mask` makes one. mask_mod and seq_lengths may be replaced. A mask that captures tensors and serves
    several calls keeps the lists of tiles that these made, 32 MB at most (runtime/kept_lists.py): a tensor that torch
    writes makes new ones. Nothing else is kept, however long the lengths are.

    mask_mod: (b, h, q_idx, kv_idx) -> is the pair kept? seq_lengths: queries and keys. BLOCK_SIZE: queries and keys of
    the blocks that `to_dense`, `sparsity` and the picture count in; kernels choose tiles of their own.
    """

    def __init__(
        self, seq_lengths: tuple[int, int], mask_mod: MaskMod | None = None,
        BLOCK_SIZE: int | tuple[int, int] = USUAL_BLOCK, *, batch: int = 1, heads: int = 1,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        self.seq_lengths = (seq_lengths[0], seq_lengths[1])
        self.mask_mod = noop_mask if mask_mod is None else mask_mod
        self.BLOCK_SIZE = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else (BLOCK_SIZE[0], BLOCK_SIZE[1])
        self.batch, self.heads, self.device = batch, heads, device
        self._served = False
        self._lists: KeptLists | None = None

    def hold(self, tensors: Sequence[Tensor]) -> KeptLists | None:
        """From its second call on, keeps what kernels make of the tensors that its function captured."""
        if self._served:
            self._lists = hold(tensors, self._lists)
        self._served = True
        return self._lists

    @classmethod
    def from_kv_blocks(
        cls, kv_num_blocks: Tensor, kv_indices: Tensor, full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None, BLOCK_SIZE: int | tuple[int, int] = USUAL_BLOCK,
        mask_mod: MaskMod | None = None, seq_lengths: tuple[int, int] | None = None, compute_q_blocks: bool = True,
    ) -> BlockMask:  # fmt: skip
        """The mask that lists of blocks say, as FlexAttention writes them: mask_mod decides within the blocks of
        kv_indices, all pairs are kept in those of full_kv_indices, none elsewhere.

        kv_num_blocks: (batch, heads, rows of blocks), how many entries of a row count. kv_indices: (batch, heads, rows,
        columns of blocks), integers. compute_q_blocks: has no effect on what is kept.
        """
        if kv_indices.ndim != 4 or kv_num_blocks.ndim != 3:
            raise BadInput(
                f"kv_num_blocks has shape {tuple(kv_num_blocks.shape)} and kv_indices {tuple(kv_indices.shape)}. Give "
                "(batch, heads, rows) and (batch, heads, rows, columns)."
            )
        kinds = _listed(kv_num_blocks, kv_indices) * PART
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            kinds = torch.where(_listed(full_kv_num_blocks, full_kv_indices), WHOLE, kinds)
        sizes = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        rows, columns = kinds.shape[2:]
        lengths = (rows * sizes[0], columns * sizes[1]) if seq_lengths is None else seq_lengths
        batch, heads = kinds.shape[:2]
        mask = of_kinds(kinds.to(torch.int8), noop_mask if mask_mod is None else mask_mod, sizes)
        return cls(lengths, mask, sizes, batch=batch, heads=heads, device=kinds.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys); 1 where the mask doesn't depend on the batch, or on the head."""
        return (self.batch, self.heads, *self.seq_lengths)

    def numel(self) -> int:
        """How many pairs it tells of."""
        batch, heads, queries, keys = self.shape
        return batch * heads * queries * keys

    def to_dense(self) -> Tensor:
        """Which blocks hold a kept pair: int32 (batch, heads, rows of blocks, columns of blocks), 1 or 0."""
        found = masks.create_block_mask(self.mask_mod, *self.shape, self.device, *self.BLOCK_SIZE)
        return found.expand(self.batch, self.heads, -1, -1).to(torch.int32)

    def sparsity(self) -> float:
        """The blocks that hold no kept pair, in percent."""
        return 100.0 * (1.0 - float(self.to_dense().double().mean()))

    def show(self) -> MaskPicture:
        """A picture, its blocks framed: SVG in a notebook, block characters where it is printed."""
        blocks = self.BLOCK_SIZE if max(s / b for s, b in zip(self.seq_lengths, self.BLOCK_SIZE)) <= 32 else None
        return show_mask(self.mask_mod, *self.shape, tile=blocks)

    def to_string(self, grid_size: int | tuple[int, int] = (20, 20), limit: int = 4) -> str:
        """The blocks as characters, in at most so many rows and columns (-1: each block), of so many batches and heads.

        A dark cell: every block in it holds a kept pair; a light one: some do; an empty one: none does.
        """
        dense, panels = self.to_dense().float(), []
        rows, columns = dense.shape[2:]
        most = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
        down, across = (max(1, -(-n // (m if m > 0 else n))) for n, m in zip((rows, columns), most, strict=True))
        for b, h in list(itertools.product(range(self.batch), range(self.heads)))[:limit]:
            parts = [[part.mean().item() for part in band.split(across, 1)] for band in dense[b, h].split(down)]
            drawn = ["".join("█" * 2 if x == 1 else " " * 2 if x == 0 else "░" * 2 for x in row) for row in parts]
            panels.append("\n".join([f"({b}, {h})", *drawn]))
        left = self.batch * self.heads - len(panels)
        return "\n".join(
            [*panels, *([f"... and {left} more: to_string(limit=...), or block_mask[b, h]"] if left else [])]
        )

    def _repr_html_(self) -> str:
        return self.show().svg()

    def __str__(self) -> str:
        return f"BlockMask(shape={self.shape}, sparsity={self.sparsity():.2f}%,\n{self.to_string()}\n)"

    def __repr__(self) -> str:
        return f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, mask_mod={place_of(self.mask_mod)})"

    def _copied(self) -> BlockMask:
        other = copy.copy(self)
        other._served, other._lists = False, None
        return other

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask, its blocks counted on this device. Tensors that mask_mod captured stay where they are."""
        other = self._copied()
        other.device = device
        return other

    def __getitem__(self, index: Any) -> BlockMask:
        """Of these batches, heads and rows of blocks: ints or slices. mask_mod is shifted, so that it says the same of
        what is left; as FlexAttention's code does, one may replace mask_mod and seq_lengths instead."""
        first, last = [], []
        rows = -(-self.seq_lengths[0] // self.BLOCK_SIZE[0])
        listed = (*(index if isinstance(index, tuple) else (index,)), *[slice(None)] * 3)[:3]
        for at, size in zip(listed, (self.batch, self.heads, rows), strict=True):
            if isinstance(at, Tensor) and at.numel() == 1:
                at = int(at)
            if isinstance(at, int):
                at = slice(at % size, at % size + 1) if -size <= at < size else slice(size, size)
            if not isinstance(at, slice) or at.step not in (None, 1):
                raise NotYetSupported(f"a BlockMask is indexed by {as_given(at)}. Give ints, or slices without a step.")
            start, stop, _ = at.indices(size)
            if stop <= start:
                raise BadInput(f"a BlockMask of shape {self.shape} is indexed by {as_given(index)}, where nothing is.")
            first.append(start)
            last.append(stop)
        block = self.BLOCK_SIZE[0]
        queries = min(last[2] * block, self.seq_lengths[0]) - first[2] * block
        other = self._copied()
        other.seq_lengths = (queries, self.seq_lengths[1])
        other.batch, other.heads = last[0] - first[0], last[1] - first[1]
        if any(first):
            other.mask_mod = _shifted(self.mask_mod, (first[0], first[1], first[2] * block), self.device)
        return other


def _shifted(mask_mod: MaskMod, shifts: tuple[int, int, int], device: torch.device | str | None) -> MaskMod:
    """The mask further on: by tensors, so that no other shift is another program."""
    batch, head, query = torch.tensor(shifts, dtype=torch.int32, device=device).unbind()

    def shifted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_mod(b + batch, h + head, q_idx + query, kv_idx)

    return shifted


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Which blocks lists name: bool (batch, heads, rows, columns). Entries behind the counts are ignored."""
    columns = indices.shape[-1]
    counted = torch.arange(columns, device=indices.device) < counts[..., None]
    place = torch.where(counted, indices, columns).long()
    named = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return named.scatter(-1, place, torch.ones_like(place, dtype=torch.bool))[..., :columns]


def of_kinds(kinds: Tensor, mask_mod: MaskMod, sizes: tuple[int, int]) -> MaskMod:
    """The mask that a tensor over blocks says, 0, PART or WHOLE: int8 (batch or 1, heads or 1, rows, columns)."""
    one_batch, one_head = kinds.shape[0] == 1, kinds.shape[1] == 1
    queries, keys = sizes

    def of_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        at = (0 if one_batch else b, 0 if one_head else h, q_idx // queries, kv_idx // keys)
        kind = kinds[at]
        return (kind == WHOLE) | ((kind == PART) & mask_mod(b, h, q_idx, kv_idx))

    return of_blocks


def _number(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except (TypeError, RuntimeError):  # torch's, of a tensor of several numbers
        number = least - 1
    if number < least:
        raise BadInput(
            f"{name} is {as_given(value)}. Give an integer, at least {least}"
            f"{', or None for 1' if name in 'BH' else ''}: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."
        )
    return number


def _block_size(size: Any) -> tuple[int, int]:
    sizes = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(sizes) != 2:
        raise BadInput(f"BLOCK_SIZE is {as_given(size)}. Give one number, or two: (of queries, of keys).")
    return _number("BLOCK_SIZE", sizes[0], 1), _number("BLOCK_SIZE", sizes[1], 1)


@briefly
def create_block_mask(
    mask_mod: MaskMod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
    device: torch.device | str | None = None, BLOCK_SIZE: int | tuple[int, int] = USUAL_BLOCK, _compile: bool = False,
    separate_full_blocks: bool = True, compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """The mask of a function of (b, h, q_idx, kv_idx), for these lengths, at no cost: no block is looked at.

    B, H: how many batches and heads it differs in; None is 1. device: where its blocks are counted, should somebody
    ask for them. `_compile` and separate_full_blocks say how FlexAttention makes its lists of blocks, and change
    nothing of the mask. compute_dq_write_order is refused: gradients are made repeatable by
    kernel_options={"deterministic": True}.

    >>> mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 1 << 20, 1 << 20)
    >>> mask.shape
    (1, 1, 1048576, 1048576)
    """
    if not callable(mask_mod):
        raise NotAFunction(f"a {type(mask_mod).__name__} was given where a function of (b, h, q_idx, kv_idx) belongs.")
    if not is_compiling() and getattr(getattr(mask_mod, "__code__", None), "co_argcount", 4) == 5:
        raise WrongArity(
            f"{place_of(mask_mod)} takes 5 arguments, as a score_mod does. A mask_mod takes (b, h, q_idx, kv_idx)."
        )
    if compute_dq_write_order:
        raise NotYetSupported(
            "compute_dq_write_order=True is for FlexAttention's own kernels. Leave it out, and give "
            'kernel_options={"deterministic": True} to flex_attention: gradients are then the same in every run.'
        )
    batch, heads, lengths, sizes = 1 if B is None else B, 1 if H is None else H, (Q_LEN, KV_LEN), BLOCK_SIZE
    if not is_compiling():
        batch, heads, sizes = _number("B", batch, 1), _number("H", heads, 1), _block_size(sizes)
        lengths = _number("Q_LEN", Q_LEN, 0), _number("KV_LEN", KV_LEN, 0)
    return BlockMask(lengths, mask_mod, sizes, batch=batch, heads=heads, device=device)
