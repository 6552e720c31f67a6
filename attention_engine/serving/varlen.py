"""flash_attn_varlen_func: attention of packed sequences, with gradients."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from attention_engine.errors import NotATensor, NotYetSupported
from attention_engine.serving.engines import Window, axes_of, check_int32, engine_of, reach_of, scale_of

WithRows = tuple[Tensor, Tensor, None]


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, block_table: Tensor | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = True, block_table: Tensor | None = None,
) -> WithRows: ...  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor | WithRows:  # fmt: skip
    """flash-attn's function of this name: sequences of any lengths, their rows behind one another; differentiable.

    Args:
        q: (rows, heads, dim).
        k, v: (rows of keys, key heads, dim), or with block_table (pages, keys of a page, key heads, dim).
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1), where each sequence begins, and where the last ends. One
            tensor for both is the faster call.
        max_seqlen_q, max_seqlen_k: not needed.
        dropout_p: each weight is dropped with this probability; torch's generator draws the seed.
        softmax_scale: None is dim ** -0.5.
        causal: the last query of a sequence stands at its last key.
        window_size: keys to the left and to the right of a query's place; -1 is any number.
        softcap: scores become softcap * tanh(score / softcap); 0 leaves them.
        alibi_slopes: fp32 (heads,) or (sequences, heads): slope * |distance| is taken from scores.
        deterministic: gradients are bitwise the same in every run.
        return_attn_probs: return (o, log of each row's sum of exponentials, fp32 (heads, rows), None) too: what
            flash-attn returns. Weights themselves are not made.
        block_table: int32 (sequences, most pages): keys and values lie in pages, and nothing has a gradient.

    >>> q, starts = torch.randn(12, 4, 32), torch.tensor([0, 5, 12], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, starts, starts, 7, 7, causal=True).shape
    torch.Size([12, 4, 32])
    """
    if dropout_p and (return_attn_probs or block_table is not None):
        other = "return_attn_probs" if return_attn_probs else "block_table"
        raise NotYetSupported(f"flash_attn_varlen_func doesn't serve {other} with dropout_p. Leave one of them out.")
    scale = scale_of(softmax_scale, q)
    slopes = () if alibi_slopes is None else (alibi_slopes,)
    reach = reach_of(window_size, causal)
    engine = engine_of(scale, reach, softcap, axes_of(alibi_slopes), dropout_p, deterministic)
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor):
            raise NotATensor(
                f"{name} is {type(starts).__name__}. Give int32 (sequences + 1): where each sequence begins, and where "
                "the last ends."
            )
    if block_table is not None:
        check_int32("block_table", block_table)
        output, rows = engine.with_cache(
            q, k, v, *slopes, kv_lengths=cu_seqlens_k[1:] - cu_seqlens_k[:-1], page_table=block_table,
            cu_seqlens_q=cu_seqlens_q, return_rowscales=True,
        )  # fmt: skip
        return (output, rows["lse"], None) if return_attn_probs else output
    if not return_attn_probs:
        return engine(q, k, v, *slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    output, rows = engine(q, k, v, *slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, return_rowscales=True)
    return output, rows["lse"], None
