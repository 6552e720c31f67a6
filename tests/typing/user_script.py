"""A user's script in which every name has a type; a test has mypy read it in strict mode."""

from typing import Any, assert_type

import torch
from torch import Tensor

from attention_engine import (
    AttentionEngine,
    CustomIO,
    LinearAttentionEngine,
    OnlineFunc,
    SymbolicArray,
    SymbolicTensor,
    SymbolScalar,
    Var,
    arch,
    attention,
    create_block_mask,
    create_mask,
    library,
    meta_tensor,
    show_mask,
    show_scores,
    where,
)
from attention_engine.errors import AttentionEngineError, BadInput
from attention_engine.library import OnlineSoftmax, and_masks, causal, scale, sliding_window


def score_mod(score: SymbolicTensor, custom: Any, b: Any, h: Any, q_idx: SymbolicArray, kv_idx: SymbolicTensor) -> Any:
    score = 2 * (score / 2).tanh() + 1.0
    return where(q_idx > kv_idx, score * custom["slopes"], score.exp())


def mask(b: Any, h: Any, q_idx: SymbolicArray, kv_idx: SymbolicTensor) -> Any:
    return (q_idx >= kv_idx) & (kv_idx % 3 != 0)


class Mine(OnlineFunc):
    def __init__(self) -> None:
        super().__init__({"m": SymbolScalar("m", Var("-inf")), "r": 0.0}, {"lse": 0.0})

    @staticmethod
    def online_fwd(
        scores: SymbolicTensor, online_rowscales: Any, b: Any, h: Any, q_idx: Any
    ) -> tuple[Any, dict[str, Any], Any]:
        return scores, {"m": online_rowscales["m"].max(scores.get_reduce("max"))}, 1.0


engine = AttentionEngine(
    (meta_tensor(1, 2, None, 16, dtype=torch.float16),) * 3, CustomIO({"slopes": ("heads",), "x": (1, 4)}), score_mod,
    mask, OnlineSoftmax(), block_size=(64, 64), layout="bhsd", device=arch.H100(), backend="reference",
)  # fmt: skip
other = AttentionEngine(engine.qkv_meta, None, scale(0.5), and_masks(causal, sliding_window(4)), Mine())
q = torch.randn(1, 2, 8, 16)
assert_type(engine.program(), str)
assert_type(engine.source("forward", form="cuda"), str)
assert_type(engine.check(q, q, q).ok, bool)
assert_type(create_mask(causal, 1, 1, 8, 8), Tensor)
assert_type(create_block_mask(library.causal, None, None, 8, 8), Tensor)
assert_type(create_mask(library.document(), 1, 1, 8, 8, documents=q), Tensor)
picture: str = show_mask(library.causal, Sq=8).svg() + engine.show_mask(Sq=8).svg() + show_scores(q, q).svg()
assert_type(engine(q, q, q), Tensor)
assert_type(engine(q, q, q, return_rowscales=True), tuple[Tensor, dict[str, Tensor]])
linear = LinearAttentionEngine(v_mod=lambda x: x * 2)
assert_type(linear(q, q, q, output_final_state=True), tuple[Tensor, Tensor])
assert_type(linear(q, q, q, output_final_state=False), Tensor)
assert_type(attention(q, q, q, score_mod=score_mod, custom={"slopes": q}), Tensor)
assert_type(attention(q, q, q, return_rowscales=True), tuple[Tensor, dict[str, Tensor]])
try:
    engine(q, q, q)
except BadInput as error:
    base: AttentionEngineError = error
