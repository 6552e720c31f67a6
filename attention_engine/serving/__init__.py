"""Serving with flash-attn's names and signatures: one changed import is enough.

>>> from attention_engine.serving import flash_attn_varlen_func, flash_attn_with_kvcache
"""

from __future__ import annotations

from attention_engine.serving.kv_cache import flash_attn_with_kvcache
from attention_engine.serving.varlen import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
