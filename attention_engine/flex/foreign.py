"""torch's own BlockMask as ours: by its mask_mod, and by its blocks where they say something else."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.errors import WrongBlockMask
from attention_engine.flex.masks import PART, WHOLE, BlockMask, noop_mask, of_kinds
from attention_engine.runtime.flex import FLEX, is_block_mask
from attention_engine.runtime.masks import create_block_mask

_KNOWN: weakref.WeakKeyDictionary[Any, tuple[Any, Any, BlockMask]] = weakref.WeakKeyDictionary()


def taken(mask: Any) -> BlockMask:
    """The same mask, found once for each object; WrongBlockMask for what is none."""
    if callable(mask):
        raise WrongBlockMask(
            "block_mask is a function. Make a mask of it: create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)."
        )
    if is_compiling():
        return _by_blocks(mask, mask.mask_mod)
    if not is_block_mask(mask):
        raise WrongBlockMask(
            f"block_mask is {type(mask).__name__}. Give create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN).\n"
            "  A tensor over pairs is read in a mask_mod: lambda b, h, q_idx, kv_idx: mask[b, h, q_idx, kv_idx]."
        )
    known = _KNOWN.get(mask)
    if known is None or known[0] is not mask.mask_mod or known[1] is not mask.kv_indices:
        known = _KNOWN[mask] = mask.mask_mod, mask.kv_indices, _read(mask)
    if known[2].seq_lengths != tuple(mask.seq_lengths):
        known[2].seq_lengths = tuple(mask.seq_lengths)
    return known[2]


def _read(mask: Any) -> BlockMask:
    flex: Any = sys.modules[FLEX]
    if mask.mask_mod is getattr(flex, "_sliced_mask_mod_error", None):
        raise WrongBlockMask(
            "block_mask was sliced by torch, which leaves it without a mask_mod. Set it: sliced.mask_mod = ...\n"
            "  A BlockMask of attention_engine.flex keeps its mask_mod, shifted."
        )
    if mask.BLOCK_SIZE[0] >= 1 << 30:
        return BlockMask(tuple(mask.seq_lengths), None)
    mask_mod = noop_mask if mask.mask_mod is flex.noop_mask else mask.mask_mod
    *_, queries, keys = mask.shape
    kinds, size = _kinds(mask), tuple(mask.BLOCK_SIZE)
    batch, heads = kinds.shape[:2]
    said = create_block_mask(mask_mod, batch, heads, queries, keys, kinds.device, *size)
    if said.shape[2:] == kinds.shape[2:] and bool((said == (kinds != 0)).all()) and _wholly(mask_mod, kinds, mask):
        return BlockMask((queries, keys), mask_mod, size, batch=batch, heads=heads, device=kinds.device)
    return _by_blocks(mask, mask_mod)


def _wholly(mask_mod: Any, kinds: Tensor, mask: Any) -> bool:
    """Does the function keep every pair of the blocks that are listed as whole?"""
    if mask_mod is noop_mask or mask.full_kv_num_blocks is None:
        return True

    def left_out(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~mask_mod(b, h, q_idx, kv_idx)

    batch, heads, queries, keys = mask.shape
    some = create_block_mask(left_out, batch, heads, queries, keys, kinds.device, *mask.BLOCK_SIZE)
    return not bool((some.bool() & (kinds == WHOLE)).any())


def _kinds(mask: Any) -> Tensor:
    """Its blocks: 0, PART or WHOLE, int8 (batch or 1, heads or 1, rows, columns)."""
    columns = -(-mask.seq_lengths[1] // mask.BLOCK_SIZE[1])
    kinds = torch.where(_listed(mask.kv_num_blocks, mask.kv_indices, columns), PART, 0)
    if mask.full_kv_num_blocks is not None:
        kinds = torch.where(_listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns), WHOLE, kinds)
    return kinds.to(torch.int8)


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Which columns of blocks stand among the first `counts` of each row's list of indices."""
    counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    among = torch.zeros(*counts.shape, columns, dtype=torch.int32, device=indices.device)
    return among.scatter_add_(-1, indices.where(counted, 0).long(), counted.int()) > 0


def _by_blocks(mask: Any, mask_mod: Any) -> BlockMask:
    """The mask that its blocks and its function say together."""
    size = (mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1])
    kinds = _kinds(mask)
    queries, keys = mask.seq_lengths
    of_blocks = of_kinds(kinds, mask_mod, size)
    return BlockMask((queries, keys), of_blocks, size, batch=kinds.shape[0], heads=kinds.shape[1])
