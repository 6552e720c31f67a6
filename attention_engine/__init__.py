"""AttentionEngine: write the maths of an attention in Python, get fused kernels as a torch.nn.Module.

>>> from attention_engine import AttentionEngine, CustomIO, meta_tensor
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attention_engine.collector import seldom_collected

if TYPE_CHECKING:
    from attention_engine import arch, flex, library
    from attention_engine.errors import AttentionEngineError
    from attention_engine.flex.sdpa import scaled_dot_product_attention
    from attention_engine.frontend.custom_io import CustomInputs, CustomIO
    from attention_engine.frontend.meta import meta_tensor
    from attention_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var
    from attention_engine.frontend.symbols import Symbol, SymbolicArray, SymbolicTensor, where
    from attention_engine.runtime.block_rows import BlockRows
    from attention_engine.runtime.blocks import BlockList
    from attention_engine.runtime.functional import attention
    from attention_engine.runtime.linear import LinearAttentionEngine
    from attention_engine.runtime.masks import create_block_mask, create_mask, document_ids
    from attention_engine.runtime.module import AttentionEngine
    from attention_engine.runtime.showing import show_mask, show_scores

__version__ = "0.1.0"
_WHERE = {
    "AttentionEngine": "runtime.module",
    "AttentionEngineError": "errors",
    "BlockList": "runtime.blocks",
    "BlockRows": "runtime.block_rows",
    "CustomIO": "frontend.custom_io",
    "CustomInputs": "frontend.custom_io",
    "LinearAttentionEngine": "runtime.linear",
    "OnlineFunc": "frontend.online_func",
    "Symbol": "frontend.symbols",
    "SymbolScalar": "frontend.online_func",
    "SymbolicArray": "frontend.symbols",
    "SymbolicTensor": "frontend.symbols",
    "Var": "frontend.online_func",
    "attention": "runtime.functional",
    "create_block_mask": "runtime.masks",
    "create_mask": "runtime.masks",
    "document_ids": "runtime.masks",
    "meta_tensor": "frontend.meta",
    "scaled_dot_product_attention": "flex.sdpa",
    "show_mask": "runtime.showing",
    "show_scores": "runtime.showing",
    "where": "frontend.symbols",
}
__all__ = ["AttentionEngine", "AttentionEngineError", "BlockList", "BlockRows", "CustomIO", "CustomInputs",
           "LinearAttentionEngine", "OnlineFunc", "Symbol", "SymbolScalar", "SymbolicArray", "SymbolicTensor", "Var",
           "arch", "attention", "create_block_mask", "create_mask", "document_ids", "flex", "library", "meta_tensor",
           "scaled_dot_product_attention", "show_mask", "show_scores", "where"]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are fetched when first used, so that importing the package is quick (torch is imported by the engines)."""
    whole = name in ("arch", "library", "errors", "flex")
    if not whole and name not in _WHERE:
        raise AttributeError(f"module 'attention_engine' has no attribute {name!r}")
    with seldom_collected():
        module = importlib.import_module(f"attention_engine.{name if whole else _WHERE[name]}")
    return module if whole else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
