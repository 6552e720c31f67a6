"""Tracing: what a user's functions become, what each of them may take and return, and every way to get it wrong."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from attention_engine.errors import BadInitialValue, BranchOnSymbol, UnknownState, WrongArity, WrongResult
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Expr, Op, Type, const, make, topological
from attention_engine.ir.program import (
    DELTA,
    KV_IDX,
    OUTPUT,
    PRODUCT,
    Q_IDX,
    SCORE,
    WEIGHT,
    WEIGHT_GRADIENT,
    B,
    H,
    Program,
)
from attention_engine.library import OnlineRetention, OnlineSoftmax, alibi, causal, prefix_lm, softcap
from attention_engine.library import scale as scale_mod
from tests.programs import EXAMPLES, scaled

IO = CustomIO({"x": ("heads",)})
X = make(Op.LOAD, H, arg="x", dtype=Type.FLOAT)


def program(score_mod=None, mask_mod=None, online_func=None, **types: Type) -> Program:
    return trace(score_mod, mask_mod, online_func, IO, types)


def holds(expr: Expr | None, *nodes: Expr) -> bool:
    return expr is not None and set(nodes) <= set(topological(expr))


def test_without_mods_the_weights_are_the_products():
    p = program()
    assert p.score is PRODUCT and p.weights is SCORE and p.output is OUTPUT
    assert p.mask is None and p.states == () and p.finals == () and p.rescale is const(1.0)
    assert p.forward is None and p.backward is None


def test_the_shipped_score_mods_and_masks_are_traced():
    assert program(scale_mod(0.5)).score is program(lambda s, custom, b, h, q, kv: s * 0.5).score
    assert holds(program(softcap(2.0, 0.1)).score, PRODUCT)
    assert holds(program(alibi(0.1, "x")).score, PRODUCT, X, Q_IDX, KV_IDX)
    assert program(mask_mod=causal).mask is make(Op.LESS_EQUAL, KV_IDX, Q_IDX)
    assert program(mask_mod=prefix_lm(3)).mask.op is Op.OR


def test_a_number_may_be_a_score_or_a_weight():
    assert program(lambda s, custom, b, h, q, kv: 1).score is const(1.0)


def test_a_mask_that_keeps_all_is_none():
    assert program(mask_mod=lambda b, h, q, kv: True).mask is None
    assert program(mask_mod=lambda b, h, q, kv: q == q).mask is None
    assert program(mask_mod=lambda b, h, q, kv: False).mask is const(False)


def test_loops_over_python_numbers_unroll():
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        total = 0
        for n in range(3):
            total = total + score * 0.5**n
        return total

    assert program(score_mod).score is program(lambda s, custom, b, h, q, kv: s * 1.75).score


class Indexed(OnlineSoftmax):
    """Uses every index in every method."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return OnlineSoftmax.online_fwd(scores + (b + h + q_idx) * 0.1, online_rowscales, b, h, q_idx)

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o * (b + h + q_idx), rows

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"]).exp() * (b + h + q_idx + kv_idx)

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return (dp - doosum_rowscales) * scores * (b + h + q_idx + kv_idx)


def test_indices_may_be_used_in_every_mod_and_method():
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * (b + h + q_idx + kv_idx)

    def mask_mod(b, h, q_idx, kv_idx):
        return b + h + q_idx > kv_idx

    p = program(score_mod, mask_mod, Indexed())
    for expr in (p.score, p.mask, p.forward, p.backward):
        assert holds(expr, B, H, Q_IDX, KV_IDX)
    assert holds(p.weights, B, H, Q_IDX) and holds(p.output, B, H, Q_IDX)


class Customised(OnlineSoftmax):
    """Every method takes the custom inputs, under whatever name."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        return OnlineSoftmax.online_fwd(scores * custom["x"], online_rowscales, b, h, q_idx)

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx, inputs):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o * inputs["x"], rows

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx, custom=None):
        return (scores * custom["x"] - final_rowscales["lse"]).exp()

    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx, custom):
        return (dp - doosum_rowscales) * scores * custom["x"]


def test_every_method_may_take_the_custom_inputs_as_one_more_last_argument():
    p = program(mask_mod=lambda b, h, q, kv, custom: custom["x"] > kv, online_func=Customised())
    for expr in (p.weights, p.output, p.forward, p.backward, p.mask):
        assert holds(expr, X)


def test_an_argument_with_a_default_of_its_own_keeps_it():
    def mask_mod(b, h, q_idx, kv_idx, width=3):
        return q_idx - kv_idx < width

    assert program(mask_mod=mask_mod).mask is program(mask_mod=lambda b, h, q, kv: q - kv < 3).mask
    narrow = functools.partial(mask_mod, width=2)
    assert program(mask_mod=narrow).mask is program(mask_mod=lambda b, h, q, kv: q - kv < 2).mask


def test_any_callable_will_do():
    class Mod:
        def __call__(self, score, custom, b, h, q_idx, kv_idx):
            return score * 2

        def method(self, score, custom, b, h, q_idx, kv_idx):
            return score * 2

        def anything(self, *args):
            return args[0] * 2

    expected = make(Op.MUL, const(2.0), PRODUCT)
    assert program(Mod()).score is program(Mod().method).score is program(Mod().anything).score is expected


def test_custom_inputs_have_the_types_of_their_tensors():
    assert program(mask_mod=lambda b, h, q, kv, custom: kv < custom["x"], x=Type.INT).mask.args[1].dtype is Type.INT
    assert program(mask_mod=lambda b, h, q, kv, custom: custom["x"], x=Type.BOOL).mask.op is Op.LOAD


class Named(OnlineFunc):
    """The key is the name; a number will do for a first value."""

    def __init__(self):
        super().__init__(
            {"m": SymbolScalar("maximum", Var("-inf")), "r": 0, "t": SymbolScalar("t", 2.5)},
            {"lse": SymbolScalar("x", 0)},
        )

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, dict(online_rowscales), SymbolScalar("o_scale", Var("1"))

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"lse": online_rowscales["m"] + online_rowscales["r"]}


def test_the_key_of_a_state_is_its_name_and_numbers_are_first_values():
    p = program(online_func=Named())
    assert [(s.name, s.initial) for s in p.states] == [("m", -math.inf), ("r", 0.0), ("t", 2.5)]
    assert [n for n, _ in p.finals] == ["lse"]
    assert p.rescale is const(1.0)


@pytest.mark.parametrize("one", [1, 1.0, True, SymbolScalar("o_scale", Var("1")), SymbolScalar("o_scale", 1)])
def test_a_rescale_of_1_says_none(one):
    class Plain(OnlineFunc):
        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            return scores, {}, one

    assert program(online_func=Plain()).rescale is const(1.0)


def test_a_method_may_write_on_the_dict_it_is_handed():
    class Writing(OnlineSoftmax):
        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            weights, rows, rescale = OnlineSoftmax.online_fwd(scores, online_rowscales, b, h, q_idx)
            online_rowscales.update(rows)
            return weights, online_rowscales, rescale

    assert program(online_func=Writing()).fingerprint == program(online_func=OnlineSoftmax()).fingerprint


def test_methods_need_not_be_static():
    class Bound(OnlineFunc):
        factor = 3.0

        def online_fwd(self, scores, online_rowscales, b, h, q_idx):
            return scores * self.factor, {}, 1

    assert program(online_func=Bound()).weights is make(Op.MUL, const(3.0), SCORE)


def test_what_is_written_by_hand_is_kept():
    p = EXAMPLES["softmax by hand"].trace()
    assert holds(p.forward, SCORE) and holds(p.backward, WEIGHT, WEIGHT_GRADIENT, DELTA)


def test_tracing_twice_gives_the_same_program():
    func = OnlineRetention()
    assert program(scaled, causal, func) == program(scaled, causal, func)


# ---- mistakes


def message_of(error: type[Exception], **mods: Any) -> str:
    with pytest.raises(error) as caught:
        program(**mods)
    return str(caught.value)


def place(function: Any) -> str:
    return f"test_tracing.py:{function.__code__.co_firstlineno}: {function.__qualname__.rpartition('<locals>.')[2]}"


def few(score, custom):
    return score


def many(score, custom, b, h, q_idx, kv_idx, more):
    return score


def few_mask(b, h):
    return b == h


SCORE_ARGUMENTS = "(score, custom, b, h, q_idx, kv_idx)"


@pytest.mark.parametrize(
    ("mods", "function", "count", "called"),
    [
        ({"score_mod": few}, few, 2, f"{SCORE_ARGUMENTS}."),
        ({"score_mod": many}, many, 7, f"{SCORE_ARGUMENTS}."),
        (
            {"mask_mod": few_mask},
            few_mask,
            2,
            "(b, h, q_idx, kv_idx), and one more, custom, if it reads custom inputs.",
        ),
    ],
)
def test_a_wrong_number_of_arguments(mods, function, count, called):
    assert message_of(WrongArity, **mods) == f"{place(function)} takes {count} arguments. It is called with {called}"


def test_a_method_with_a_wrong_number_of_arguments():
    class Few(OnlineFunc):
        @staticmethod
        def online_fwd(scores, b):
            return scores, {}, 1

    assert message_of(WrongArity, online_func=Few()) == (
        f"{place(Few.online_fwd)} takes 2 arguments. It is called with (scores, online_rowscales, b, h, q_idx), "
        "and one more, custom, if it reads custom inputs."
    )


def test_a_row_function_that_asks_for_keys_is_told_where_they_are():
    class OfKeys(OnlineFunc):
        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx, kv_idx):
            return scores * kv_idx, {}, 1

    assert message_of(WrongArity, online_func=OfKeys()) == (
        f"{place(OfKeys.online_fwd)} asks for kv_idx, and is called with (scores, online_rowscales, b, h, q_idx), and "
        "one more, custom.\n  What depends on the key belongs in score_mod, before a row's scores are reduced."
    )


def nothing(score, custom, b, h, q_idx, kv_idx):
    score * 2


def a_mask(score, custom, b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_a_mask_as_score_mod_is_told_its_place():
    assert message_of(WrongResult, score_mod=a_mask) == (
        f"{place(a_mask)} returned a condition, kv_idx <= q_idx, as the score. A mask is given as mask_mod; the number "
        "of a condition is condition.float()."
    )


def text(score, custom, b, h, q_idx, kv_idx):
    return "score"


def a_number(b, h, q_idx, kv_idx):
    return q_idx - kv_idx


def a_word(b, h, q_idx, kv_idx):
    return "causal"


def branching(b, h, q_idx, kv_idx):
    if q_idx > kv_idx:
        return b == 0
    return h == 0


def test_a_score_mod_that_returns_no_value():
    assert message_of(WrongResult, score_mod=nothing) == (
        f"{place(nothing)} returned NoneType as the score. Return a symbolic value, or a number "
        "(is a `return` missing?)."
    )
    assert message_of(WrongResult, score_mod=text) == (
        f"{place(text)} returned str as the score. Return a symbolic value, or a number."
    )


def test_a_mask_that_is_no_condition():
    ask = "Return a condition, True where the pair is kept: q_idx >= kv_idx."
    assert message_of(WrongResult, mask_mod=a_number) == f"{place(a_number)} returned the number q_idx - kv_idx. {ask}"
    assert message_of(WrongResult, mask_mod=a_word) == f"{place(a_word)} returned str. {ask}"


def test_a_branch_in_a_mask_names_the_line():
    line = branching.__code__.co_firstlineno + 1
    found = message_of(BranchOnSymbol, mask_mod=branching)
    assert found.startswith(f"test_tracing.py:{line}: Python asked for the truth of a symbolic value, kv_idx < q_idx.")


def func(
    states: dict[str, Any] | None = None, online: Any = None, epilogue: Any = None, finals: Any = None
) -> OnlineFunc:
    """An OnlineFunc whose methods return these, whatever they are given."""

    class Func(OnlineFunc):
        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            return online(scores, online_rowscales) if online else (scores, dict(online_rowscales), 1)

        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            return epilogue(o, online_rowscales) if epilogue else (o, {})

    return Func(states, finals)


ONLINE, EPILOGUE = "Func.online_fwd", "Func.online_fwd_epilogue"
R = {"r": 0.0}
MISTAKES = {
    "reads unknown": (UnknownState, func(R, lambda s, rows: (s, {"r": rows["m"]}, 1)),
                      "Func reads the row state 'm', which isn't declared. Declared: 'r'."),
    "reads unknown of none": (UnknownState, func({}, lambda s, rows: (s, {"r": rows["m"]}, 1)),
                              "Func reads the row state 'm', which isn't declared. Declared: none."),
    "returns unknown": (UnknownState, func(R, lambda s, rows: (s, {"r": rows["r"], "m": 1.0}, 1)),
                        f"{ONLINE} gives a row state 'm' that isn't declared. Declared: 'r'."),
    "forgets a state": (UnknownState, func({"r": 0.0, "m": 0.0}, lambda s, rows: (s, {"r": 1.0}, 1)),
                        f"{ONLINE} gives no row state 'm'. Return each: 'r', 'm'."),
    "forgets a row": (UnknownState, func(finals={"lse": 0.0}),
                      f"{EPILOGUE} gives no returned row 'lse'. Return each: 'lse'."),
    "unknown row": (UnknownState, func(epilogue=lambda o, rows: (o, {"lse": 1.0})),
                    f"{EPILOGUE} gives a returned row 'lse' that isn't declared. Declared: none."),
    "two results": (WrongResult, func(online=lambda s, rows: (s, {})),
                    f"{ONLINE} returned a tuple of 2. Return (weights, new_rowscales, rescale)."),
    "no tuple": (WrongResult, func(online=lambda s, rows: s),
                 f"{ONLINE} returned SymbolicTensor. Return (weights, new_rowscales, rescale)."),
    "one result": (WrongResult, func(epilogue=lambda o, rows: o),
                   f"{EPILOGUE} returned SymbolicArray. Return (o, final_rowscales)."),
    "no dict": (WrongResult, func(R, lambda s, rows: (s, [rows["r"]], 1)),
                f"{ONLINE} returned list where a dict of row states belongs."),
    "unreduced state": (WrongResult, func(R, lambda s, rows: (s, {"r": rows["r"] + s}, 1)),
                        f"{ONLINE} returned the row state 'r' that still holds a value of each key: state.r + score. "
                        "Reduce it: x.get_reduce('sum')."),
    "unreduced rescale": (WrongResult, func(online=lambda s, rows: (s, {}, s)),
                          f"{ONLINE} returned rescale that still holds a value of each key: score. "
                          "Reduce it: x.get_reduce('sum')."),
    "rescale None": (WrongResult, func(online=lambda s, rows: (s, {}, None)),
                     f"{ONLINE} returned NoneType as rescale. Return a symbolic value, or a number "
                     "(is a `return` missing?)."),
    "output in a row": (WrongResult, func(finals={"lse": 0.0}, epilogue=lambda o, rows: (o, {"lse": o * 2})),
                        f"{EPILOGUE} returned the returned row 'lse' that still holds the output: o * 2. "
                        "Make it of the row states alone."),
    "first value": (BadInitialValue, func({"m": "-inf"}),
                    "Func: the row state 'm' starts at '-inf'. Write a number, 0.0 or -math.inf, or Var('-inf')."),
    "first value True": (BadInitialValue, func({"m": True}),
                         "Func: the row state 'm' starts at True. Write a number, 0.0 or -math.inf, or Var('-inf')."),
    "first value nan": (BadInitialValue, func({"m": math.nan}),
                        "Func: the row state 'm' starts at nan. Write a number, 0.0 or -math.inf, or Var('-inf')."),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_online_func(name):
    error, wrong, message = MISTAKES[name]
    found = message_of(error, online_func=wrong)
    if message.startswith("Func reads"):
        message = f"test_tracing.py:{wrong.online_fwd.__closure__[0].cell_contents.__code__.co_firstlineno}: {message}"
    if message.startswith("Func.online"):
        method = getattr(wrong, message.split(" ")[0].rsplit(".", 1)[1])
        message = f"test_tracing.py:{method.__code__.co_firstlineno}: {message}"
    assert found == message


def test_a_final_row_that_is_not_declared_is_named_in_forward():
    class Forward(OnlineSoftmax):
        @staticmethod
        def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
            return scores - final_rowscales["m"]

    line = Forward.forward.__code__.co_firstlineno + 2
    assert message_of(UnknownState, online_func=Forward()) == (
        f"test_tracing.py:{line}: Forward reads the returned row 'm', which isn't declared. Declared: 'lse'."
    )
