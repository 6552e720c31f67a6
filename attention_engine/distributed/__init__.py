"""Attention over more than one GPU: sequences that are split among the ranks of a device mesh."""

from attention_engine.distributed.layout import Layout
from attention_engine.distributed.module import ContextParallel

__all__ = ["ContextParallel", "Layout"]
