"""FlexAttention's names, with torch's signatures: one changed import is enough.

>>> from attention_engine.flex import create_block_mask, flex_attention
"""

from __future__ import annotations

from attention_engine.flex.attention import AuxOutput, AuxRequest, flex_attention
from attention_engine.flex.masks import BlockMask, and_masks, create_block_mask, noop_mask, or_masks

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "and_masks", "create_block_mask", "flex_attention", "noop_mask", "or_masks",
]  # fmt: skip
