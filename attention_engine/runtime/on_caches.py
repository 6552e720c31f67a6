"""The part of an AttentionEngine that attends to keys and values in a cache."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from attention_engine.errors import AttentionEngineError
from attention_engine.frontend.frames import brief
from attention_engine.runtime.cached import with_cache
from attention_engine.runtime.inputs import check_flag
from attention_engine.runtime.shown import Shown

WithRows: TypeAlias = tuple[Tensor, dict[str, Tensor]]


class OnCaches(Shown):
    """An engine whose calls may name a cache."""

    def with_cache(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *custom: Tensor, kv_lengths: Tensor,
        page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None, q_starts: Tensor | None = None,
        num_splits: int | None = None, out: Tensor | None = None, return_rowscales: bool = False, **named: Tensor,
    ) -> Tensor | WithRows:  # fmt: skip
        """The output for a few queries of each request, whose keys and values lie in a cache. Inference alone.

        Args:
            q: (batch, queries, heads, dim), the newest tokens of each request.
            k_cache, v_cache: (batch, most keys, key heads, dim), or with page_table (pages, keys of a page, key heads,
                dim), pages of 16, 32, ... 256 keys; with layout="bhsd" heads come before keys. v_cache=None: values are
                the first columns of keys, as many as the third meta has (without metas, all).
            custom: custom inputs as in a call. "batch" counts requests, "seq_len" the queries of this call, each read
                at its own row; q_idx and kv_idx are places in the request.
            kv_lengths: int32 (batch,), each request's keys, those of its queries among them. What lies behind them in
                the cache may hold anything.
            page_table: int32 (batch, most pages), where each request's pages lie; entries behind its length are any.
            cu_seqlens_q: int32 (batch + 1,), where each request's queries begin in q, which is then (rows, heads,
                dim), as the output is; returned rows are (heads, rows).
            q_starts: int32 (batch,), the place of each request's first query; None: the last query stands at the last
                key.
            num_splits: how many parts each row's keys are cut into, which run side by side. None: chosen from the
                shapes. With a number a request's bits don't depend on its neighbours.
            out: a tensor for the output.
            return_rowscales: return the rows of the epilogue, too.

        Nothing waits for the GPU, and nothing is compiled for other lengths, batches, queries or numbers of parts.

        Raises:
            CacheNotDifferentiable: a tensor requires a gradient.
            BadInput: tensors that don't fit.
        """
        try:
            check_flag("return_rowscales", return_rowscales)
            tensors = (q, k_cache, v_cache, kv_lengths, page_table, q_starts, cu_seqlens_q, out)
            return with_cache(self, tensors, custom, named, num_splits, return_rowscales)
        except AttentionEngineError as error:
            raise brief(error) from error.__cause__
