"""FlexAttention's BlockMask as what engines take: its function, and its blocks where the function doesn't say them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from attention_engine.errors import OptionsClash
from attention_engine.runtime.masks import create_block_mask

FLEX = "torch.nn.attention.flex_attention"
OURS = "attention_engine.flex.masks"  # which stands above this part of the package


def is_block_mask(value: object) -> bool:
    """Is it FlexAttention's BlockMask? FlexAttention isn't imported to know."""
    flex = sys.modules.get(FLEX)
    return flex is not None and isinstance(value, flex.BlockMask)


def _is_ours(value: object) -> bool:
    return type(value).__module__ == OURS and hasattr(value, "mask_mod")


def of_flex(mask_mod: Any, block_mask: Any, block_size: tuple[int, int]) -> tuple[Any, Any, tuple[int, int]]:
    """mask_mod, block_mask and block_size of an engine, with a BlockMask in either place taken apart."""
    given = [m for m in (mask_mod, block_mask) if is_block_mask(m) or _is_ours(m)]
    if not given:
        return mask_mod, block_mask, block_size
    if mask_mod is not None and block_mask is not None:
        raise OptionsClash("a BlockMask is given beside another mask. Give one: a BlockMask holds its own mask_mod.")
    if _is_ours(given[0]):  # it is its function
        return given[0].mask_mod, None, given[0].BLOCK_SIZE
    return taken_apart(given[0])


def taken_apart(mask: Any) -> tuple[Callable[..., Any] | None, torch.Tensor | None, tuple[int, int]]:
    """Its function, its blocks as a tensor, and their size. Blocks that are those of the function are left out: tiles
    are found from the function, for any lengths. A mask that was made of blocks alone has no function."""
    blocks = mask.to_dense().to(torch.int8)
    size = (int(mask.BLOCK_SIZE[0]), int(mask.BLOCK_SIZE[1]))
    if mask.mask_mod is None or mask.mask_mod is sys.modules[FLEX].noop_mask:
        return None, blocks, size
    batch, heads, queries, keys = mask.shape
    said = create_block_mask(mask.mask_mod, batch, heads, queries, keys, blocks.device, *size)
    alike = said.shape[2:] == blocks.shape[2:] and bool((said == blocks).all())
    return mask.mask_mod, None if alike else blocks, size
