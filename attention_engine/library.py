"""Shipped attentions, each written once as a user would write it: row normalisers, masks and score functions.

Examples take `import torch` and `from attention_engine import AttentionEngine, CustomIO, create_mask` for granted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from attention_engine.frontend.custom_io import CustomInputs
from attention_engine.frontend.made import made_by, positive, refuse
from attention_engine.frontend.online_func import OnlineFunc, Rows, SymbolScalar, Var
from attention_engine.frontend.signatures import Index
from attention_engine.frontend.symbols import Symbol, SymbolicTensor
from attention_engine.frontend.tracing import call

Mask = Callable[..., Any]


class OnlineIdentity(OnlineFunc):
    """`w_j = x_j`: the scores themselves, 0 where a pair is masked.

    >>> AttentionEngine(online_func=OnlineIdentity(), scale=0.1)(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """


class OnlineSoftmax(OnlineFunc):
    """`w_j = exp(x_j) / sum exp(x)`, which an engine uses where none is given. It returns `lse = log sum exp(x)`.

    Milakov and Gimelshein, 2018 (arXiv 1805.02867).

    >>> o, rows = AttentionEngine(online_func=OnlineSoftmax())(*torch.randn(3, 1, 8, 2, 16), return_rowscales=True)
    >>> rows["lse"].shape  # (batch, heads, length)
    torch.Size([1, 2, 8])
    """

    def __init__(self) -> None:
        super().__init__(
            online_rowscales={"m": SymbolScalar("m", Var("-inf")), "r": SymbolScalar("r", Var("0.0"))},
            final_rowscales={"lse": SymbolScalar("lse", Var("0.0"))},
        )

    @staticmethod
    def online_fwd(
        scores: SymbolicTensor, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any], Any]:
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        rescale = (m - m_new).exp()
        scores = (scores - m_new).exp()
        r = r * rescale + scores.get_reduce("sum")
        return scores, {"m": m_new, "r": r}, rescale

    @staticmethod
    def online_fwd_epilogue(
        o: Symbol, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any]]:
        m, r = online_rowscales["m"], online_rowscales["r"]
        return o / r, {"lse": r.log() + m}


class OnlineSoftmaxOne(OnlineSoftmax):
    """`w_j = exp(x_j) / (1 + sum exp(x))`, "off by one". It returns `lse = log(1 + sum exp(x))`.

    >>> AttentionEngine(online_func=OnlineSoftmaxOne())(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """

    @staticmethod
    def online_fwd_epilogue(
        o: Symbol, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any]]:
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_one = m.max(0.0)  # the 1 is exp(0): a score of 0 that every row has
        total = r * (m - m_one).exp() + (-m_one).exp()
        return o * (m - m_one).exp() / total, {"lse": total.log() + m_one}


class OnlineSoftmaxSink(OnlineSoftmax):
    """`w_j = exp(x_j) / (exp(sink) + sum exp(x))`, the sink a custom input "sinks" ("heads",), as in GPT-OSS.

    It returns `lse = log(exp(sink) + sum exp(x))`. Xiao et al., 2023 (arXiv 2309.17453).

    >>> engine = AttentionEngine(custom_io=CustomIO({"sinks": ("heads",)}), online_func=OnlineSoftmaxSink())
    >>> engine(*torch.randn(3, 1, 8, 2, 16), sinks=torch.zeros(2)).shape
    torch.Size([1, 8, 2, 16])
    """

    @staticmethod
    def online_fwd_epilogue(  # type: ignore[override]
        o: Symbol, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol, custom: CustomInputs
    ) -> tuple[Any, dict[str, Any]]:
        m, r, sink = online_rowscales["m"], online_rowscales["r"], custom["sinks"]
        top = m.max(sink).detach()  # it cancels
        total = r * (m - top).exp() + (sink - top).exp()
        return o * (m - top).exp() / total, {"lse": total.log() + top}


class OnlineSigmoid(OnlineFunc):
    """`w_j = 1 / (1 + exp(-x_j))`. A bias, often `-log(keys)`, belongs in score_mod.

    Ramapuram et al., 2024 (arXiv 2409.04431).

    >>> AttentionEngine(online_func=OnlineSigmoid(), scale=0.25)(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """

    @staticmethod
    def online_fwd(
        scores: SymbolicTensor, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any], Any]:
        return scores.sigmoid(), {}, 1.0


class OnlineRelu(OnlineFunc):
    """`w_j = max(x_j, 0)`.

    >>> AttentionEngine(online_func=OnlineRelu(), scale=0.25)(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """

    @staticmethod
    def online_fwd(
        scores: SymbolicTensor, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any], Any]:
        return scores.relu(), {}, 1.0


class OnlineRetention(OnlineFunc):
    """`w_j = x_j / max(sum |x|, 1)`, the normaliser a constant to the gradient, as RetNet trains.

    Sun et al., 2023 (arXiv 2307.08621). It returns the normaliser `r`.

    >>> AttentionEngine(online_func=OnlineRetention(), scale=0.25)(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """

    def __init__(self) -> None:
        super().__init__(
            online_rowscales={"w": SymbolScalar("w", Var("0.0")), "r": SymbolScalar("r", Var("1.0"))},
            final_rowscales={"r": SymbolScalar("r", Var("0.0"))},
        )

    @staticmethod
    def online_fwd(
        scores: SymbolicTensor, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any], Any]:
        w = online_rowscales["w"] + scores.get_reduce("abssum")
        r = w.max(1.0).detach()
        return scores / r, {"w": w, "r": r}, online_rowscales["r"] / r

    @staticmethod
    def online_fwd_epilogue(
        o: Symbol, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any]]:
        return o, {"r": online_rowscales["r"]}


def causal(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
    """Keys up to the query.

    >>> create_mask(causal, None, None, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    return q_idx >= kv_idx


@made_by
def causal_from(offset: int) -> Mask:
    """Keys up to the query, which stands `offset` places further on: Skv - Sq lets the last query see every key.

    >>> create_mask(causal_from(1), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 1], [1, 1, 1]]
    """
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


@made_by
def sliding_window(left: int, right: int = 0) -> Mask:
    """Keys from `left` before the query to `right` after it, not counting the query. Both are 0 or more.

    >>> create_mask(sliding_window(1), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    says = f"a window of {left} and {right} keys: give 0 or more. For no limit (-1 elsewhere): causal, or no mask."
    refuse(says, left < 0, right < 0)
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx <= left) & (kv_idx - q_idx <= right)


@made_by
def with_global(tokens: int, mask: Mask) -> Mask:
    """A mask, but the first `tokens` see all keys, and all queries see them, as in Longformer (arXiv 2004.05150).

    >>> create_mask(with_global(1, sliding_window(0)), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 1, 1], [1, 1, 0], [1, 0, 1]]
    """
    return or_masks(mask, lambda b, h, q_idx, kv_idx: (q_idx < tokens) | (kv_idx < tokens))


@made_by
def prefix_lm(prefix: int) -> Mask:
    """The first `prefix` keys, and keys up to the query.

    >>> create_mask(prefix_lm(2), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx)


@made_by
def dilated(step: int) -> Mask:
    """Keys up to the query whose distance is a multiple of `step`.

    >>> create_mask(dilated(2), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((q_idx - kv_idx) % positive(step, "step") == 0)


@made_by
def block_diagonal(size: int) -> Mask:
    """Keys of the query's own block of `size`.

    >>> create_mask(block_diagonal(2), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    return lambda b, h, q_idx, kv_idx: q_idx // positive(size, "block") == kv_idx // size


@made_by
def block_causal(size: int) -> Mask:
    """Keys of the query's block of `size` and of those before it.

    >>> create_mask(block_causal(2), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return lambda b, h, q_idx, kv_idx: q_idx // positive(size, "block") >= kv_idx // size


@made_by
def neighbourhood(width: int, rows: int, columns: int) -> Mask:
    """Pixels at most so many rows and columns away, of an image whose pixels come row by row.

    Args:
        width: of the image, in pixels.
        rows, columns: how far away a row and a column may be.

    >>> create_mask(neighbourhood(2, 1, 0), None, None, 4, 4)[0, 0].int().tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    def mask(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Index:
        near_row = (q_idx // width - kv_idx // width).abs() <= rows
        return near_row & ((q_idx % width - kv_idx % width).abs() <= columns)

    return mask


@made_by
def document(ids: str = "documents") -> Mask:
    """Keys of the query's document, where documents are packed in one row. Queries and keys are the same tokens.

    Args:
        ids: a custom input ("batch", "seq_len") of integers, the document of each token. `document_ids` makes it.

    >>> engine = AttentionEngine(custom_io=CustomIO({"documents": ("batch", "seq_len")}), mask_mod=document())
    >>> engine(*torch.randn(3, 1, 8, 2, 16), documents=document_ids([5, 3])).shape
    torch.Size([1, 8, 2, 16])
    """
    return lambda b, h, q_idx, kv_idx, custom: custom[ids][b, q_idx] == custom[ids][b, kv_idx]


@made_by
def padding(lengths: str = "lengths") -> Mask:
    """The first keys of each batch. `lengths` names a custom input ("batch",) of integers that says how many.

    >>> engine = AttentionEngine(custom_io=CustomIO({"lengths": ("batch",)}), mask_mod=padding())
    >>> engine(*torch.randn(3, 2, 8, 2, 16), lengths=torch.tensor([8, 5])).shape
    torch.Size([2, 8, 2, 16])
    """
    return lambda b, h, q_idx, kv_idx, custom: kv_idx < custom[lengths][b]


@made_by
def tree(seen: str = "tree", context: str = "context") -> Mask:
    """Keys of the context, and of a tree of drafts behind it those that a draft sees: itself and its ancestors.

    Args:
        seen: a custom input ("batch", drafts, drafts) of integers or bools: does this draft see that one?
        context: a custom input ("batch",) of integers, the keys before the first draft.

    >>> io = CustomIO({"tree": ("batch", 3, 3), "context": ("batch",)})
    >>> AttentionEngine(custom_io=io, mask_mod=tree()).mask_mod
    tree()
    """

    def mask(b: Index, h: Index, q_idx: Index, kv_idx: Index, custom: CustomInputs) -> Any:
        first = custom[context][b]
        return (kv_idx < first) | (custom[seen][b, q_idx - first, kv_idx - first] != 0)

    return mask


def _ask(mask: Mask, place: list[Index], custom: CustomInputs | None) -> Any:
    return call(mask, "b, h, q_idx, kv_idx", place, custom)


def _joined(masks: tuple[Mask, ...], join: Callable[[Index, Index], Index]) -> Mask:
    refuse("no masks to join: give one or more.", not masks)
    return lambda b, h, q_idx, kv_idx, custom: functools.reduce(
        join, (_ask(m, [b, h, q_idx, kv_idx], custom) for m in masks)
    )


@made_by
def and_masks(*masks: Mask) -> Mask:
    """Pairs that every mask keeps.

    >>> create_mask(and_masks(causal, block_diagonal(2)), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    return _joined(masks, lambda a, b: a & b)


@made_by
def or_masks(*masks: Mask) -> Mask:
    """Pairs that some mask keeps.

    >>> create_mask(or_masks(causal, block_diagonal(2)), None, None, 3, 3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return _joined(masks, lambda a, b: a | b)


@made_by
def not_mask(mask: Mask) -> Mask:
    """Pairs that the mask leaves out.

    >>> create_mask(not_mask(causal), None, None, 3, 3)[0, 0].int().tolist()
    [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
    """
    return lambda b, h, q_idx, kv_idx, custom: ~_ask(mask, [b, h, q_idx, kv_idx], custom)


@made_by
def scale(factor: float) -> Callable[..., Any]:
    """`score * factor`.

    >>> AttentionEngine(score_mod=scale(16**-0.5))(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """
    return lambda score, custom, b, h, q_idx, kv_idx: score * factor


@made_by
def softcap(cap: float, factor: float = 1.0) -> Callable[..., Any]:
    """`cap * tanh(score * factor / cap)`, as Gemma 2 does (arXiv 2408.00118).

    >>> AttentionEngine(score_mod=softcap(50.0, 16**-0.5))(*torch.randn(3, 1, 8, 2, 16)).shape
    torch.Size([1, 8, 2, 16])
    """
    refuse("a cap of 0: give one above 0, or scale(factor) for none.", cap == 0)
    return lambda score, custom, b, h, q_idx, kv_idx: cap * (score * (factor / cap)).tanh()


@made_by
def alibi(factor: float, slopes: str = "slopes") -> Callable[..., Any]:
    """`score * factor - slope * (q_idx - kv_idx)`, with a slope for each head. Press et al., 2021 (arXiv 2108.12409).

    Args:
        factor: of the score, usually head dim ** -0.5.
        slopes: the name of a custom input ("heads",).

    >>> engine = AttentionEngine(custom_io=CustomIO({"slopes": ("heads",)}), score_mod=alibi(0.25), mask_mod=causal)
    >>> engine(*torch.randn(3, 1, 8, 2, 16), slopes=torch.tensor([0.5, 0.25])).shape
    torch.Size([1, 8, 2, 16])
    """
    return lambda score, custom, b, h, q_idx, kv_idx: score * factor - custom[slopes] * (q_idx - kv_idx)


@made_by
def relative_bias(table: str, reach: int, factor: float = 1.0) -> Callable[..., Any]:
    """`score * factor` and the head's learned number for the distance. Shaw et al., 2018 (arXiv 1803.02155).

    Args:
        table: the name of a custom input ("heads", 2 * reach + 1), the number of the distance -reach first.
        reach: the largest distance, either way; a larger one counts as this.
        factor: of the score.

    >>> engine = AttentionEngine(custom_io=CustomIO({"t": ("heads", 9)}), score_mod=relative_bias("t", 4))
    >>> engine(*torch.randn(3, 1, 8, 2, 16), t=torch.zeros(2, 9)).shape
    torch.Size([1, 8, 2, 16])
    """
    return lambda score, custom, b, h, q_idx, kv_idx: (
        score * factor + custom[table].of_length(2 * reach + 1)[h, (q_idx - kv_idx).clamp(-reach, reach) + reach]
    )
