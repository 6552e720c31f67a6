"""Odd names, constants and results: a program works on both backends, or its constructor says what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, errors, meta_tensor, where
from attention_engine.library import OnlineSoftmax

BACKENDS = ("reference", "interpret")
METAS = (meta_tensor(1, 2, 6, 16, dtype=torch.float32),) * 3
NAMES = ["q", "o", "delta", "m", "score", "naïve", "with space", "state.m", "x" * 300, "_0", "row0", "_kept", "class",
         "kv_idx", "", 'a"b', "a\nb", "final.lse", "length"]  # fmt: skip


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 6, 2, 16) for _ in range(3)]


def results(backend: str, *custom: Tensor, **options: Any) -> list[Tensor]:
    """The output, the returned rows, and all gradients."""
    engine = AttentionEngine(METAS, backend=backend, **options)
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in (*qkv(), *custom)]
    output, rows = engine(*leaves, return_rowscales=True)
    gradients = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
    return [output, *rows.values(), *(torch.zeros(()) if g is None else g for g in gradients)]


def alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)


def online(forward: Callable[..., Any], epilogue: Callable[..., Any] | None = None, states: Any = None,
           finals: Any = None) -> OnlineFunc:  # fmt: skip
    methods: dict[str, Any] = {"online_fwd": staticmethod(forward)}
    methods["__init__"] = lambda self: OnlineFunc.__init__(self, states or {}, finals or {})
    if epilogue is not None:
        methods["online_fwd_epilogue"] = staticmethod(epilogue)
    return type("Online", (OnlineFunc,), methods)()


def softmax(state: str = "m", row: str = "lse") -> OnlineFunc:
    def forward(s: Any, rows: Any, b: Any, h: Any, i: Any) -> Any:
        m = rows[state].max(s.get_reduce("max"))
        rescale, weights = (rows[state] - m).exp(), (s - m).exp()
        return weights, {state: m, "sum": rows["sum"] * rescale + weights.get_reduce("sum")}, rescale

    def epilogue(o: Any, rows: Any, b: Any, h: Any, i: Any) -> Any:
        return o / rows["sum"], {row: rows["sum"].log() + rows[state]}

    return online(forward, epilogue, {state: -math.inf, "sum": 0.0}, {row: 0.0})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_a_state_and_a_custom_input_may_have_any_name(name, backend):
    plain = results("reference", online_func=OnlineSoftmax())
    alike(results(backend, online_func=softmax(row=name)), plain)
    alike(results(backend, online_func=softmax(state=name)), plain)
    slopes = torch.tensor([0.5, 0.25])
    found, expected = (
        results(run, slopes, custom_io=CustomIO({n: ("heads",)}), online_func=OnlineSoftmax(),
                score_mod=lambda s, c, b, h, i, j, n=n: s * c[n])
        for run, n in ((backend, name), ("reference", "slopes"))
    )  # fmt: skip
    alike(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_returned_row_and_a_saved_one_have_their_own_names(backend):
    """The backward pass of this one saves rows, which are called _0, _1 ... where no returned row is."""

    def forward(s: Any, rows: Any, b: Any, h: Any, i: Any) -> Any:
        return s, {"n": rows["n"] + (s * s).get_reduce("sum")}, 1.0

    def epilogue(o: Any, rows: Any, b: Any, h: Any, i: Any, name: str = "_0") -> Any:
        return o / (1.0 + rows["n"]), {name: rows["n"] * 3.0 + 7.0}

    def plain(o: Any, rows: Any, b: Any, h: Any, i: Any) -> Any:
        return epilogue(o, rows, b, h, i, "other")

    def odd(o: Any, rows: Any, b: Any, h: Any, i: Any) -> Any:
        return epilogue(o, rows, b, h, i)

    states = {"n": 0.0}
    expected = results("reference", online_func=online(forward, plain, states, {"other": 0.0}))
    alike(results(backend, online_func=online(forward, odd, states, {"_0": 0.0})), expected)


CONSTANTS = {
    "numpy float": np.float32(0.5), "numpy int": np.int64(2), "numpy bool": np.bool_(True), "half": np.float16(0.5),
    "a torch number": torch.tensor(0.5), "a torch int": torch.tensor(2), "True": True, "tiny": 1e-300, "huge": 1e300,
    "inf": math.inf, "nan": math.nan, "2**40": 2**40,
}  # fmt: skip
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda s, c: s + c, "*": lambda s, c: s * 0.01 * c, "max": lambda s, c: s.max(c),
    "where": lambda s, c: where(s > 0, s, c), "==": lambda s, c: where(s == c, 1.0, s),
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_means_the_same_on_both_backends(constant, operation):
    if (constant, operation) == ("2**40", "*"):
        pytest.skip("scores of 1e10: gradients are rounding alone")
    ours, theirs = (
        results(backend, online_func=OnlineSoftmax(),
                score_mod=lambda s, c, b, h, i, j: OPERATIONS[operation](s, CONSTANTS[constant]))
        for backend in BACKENDS
    )  # fmt: skip
    alike(theirs, ours)


def of_score(function: Callable[..., Any]) -> dict[str, Any]:
    return {"score_mod": lambda s, c, b, h, i, j: function(s), "online_func": OnlineSoftmax()}


def of_mask(function: Callable[..., Any]) -> dict[str, Any]:
    return {"mask_mod": lambda b, h, i, j: function(i, j), "online_func": OnlineSoftmax()}


X = {"custom_io": CustomIO({"x": ("seq_len_kv",)})}
REFUSED: dict[str, tuple[type[Exception], Callable[[], dict[str, Any]]]] = {
    "an int of many bits": (errors.NumberTooLarge, lambda: of_score(lambda s: s + 2**70)),
    "an int of more bits than a float": (errors.NumberTooLarge, lambda: of_score(lambda s: s * 10**400)),
    "an int of 64 bits in a mask": (errors.NumberTooLarge, lambda: of_mask(lambda i, j: i * 2**63 >= j)),
    "a fraction": (errors.TensorInMod, lambda: of_score(lambda s: s * Fraction(1, 3))),
    "a decimal": (errors.TensorInMod, lambda: of_score(lambda s: s * Decimal(2))),
    "a complex number": (errors.TensorInMod, lambda: of_score(lambda s: s * 1j)),
    "numpy's complex": (errors.TensorInMod, lambda: of_score(lambda s: s * np.complex64(1j))),
    "torch's complex": (errors.TensorInMod, lambda: of_mask(lambda i, j: i >= torch.tensor(1j))),
    "no score": (errors.WrongResult, lambda: of_score(lambda s: None)),
    "a tuple": (errors.WrongResult, lambda: of_score(lambda s: (s,))),
    "a mask of integers": (errors.MaskIsNoCondition, lambda: of_mask(lambda i, j: i - j)),
    "a mask of bits": (errors.MaskIsNoCondition, lambda: of_mask(lambda i, j: (i >> j) & 1)),
    "a mask in a tuple": (errors.MaskIsNoCondition, lambda: of_mask(lambda i, j: (i >= j,))),
    "a row of the score": (errors.MisplacedReduction, lambda: of_score(lambda s: s - s.get_reduce("max"))),
    "a row of the mask": (errors.MisplacedReduction, lambda: of_mask(lambda i, j: j.get_reduce("max") >= i)),
    "a row of a custom input's": (
        errors.MisplacedReduction,
        lambda: X | {"score_mod": lambda s, c, b, h, i, j: s - c["x"].get_reduce("max")},
    ),
    "a row in the epilogue": (
        errors.MisplacedReduction,
        lambda: X | {"online_func": online(lambda s, r, b, h, i: (s, {}, 1.0),
                                           lambda o, r, b, h, i, c: (o * c["x"].get_reduce("sum"), {}))},
    ),
    "an infinite rescale": (
        errors.WrongResult, lambda: {"online_func": online(lambda s, r, b, h, i: (s.sigmoid(), {}, math.inf))},
    ),
    "a state that starts far off": (
        errors.BadInitialValue,
        lambda: {"online_func": online(lambda s, r, b, h, i: (s, {"a": r["a"]}, 1.0), None, {"a": 10**400})},
    ),
    "a custom input called 5": (errors.BadCustomInput, lambda: {"custom_io": CustomIO({5: ("heads",)})}),  # type: ignore[dict-item]
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_by_the_constructor(name, backend):
    error, options = REFUSED[name]
    with pytest.raises(error) as caught:
        AttentionEngine(METAS, backend=backend, **options())
    if not issubclass(error, errors.BadInitialValue):
        assert str(caught.value).startswith("test_odd_programs.py:")


def test_a_misplaced_reduction_is_named_with_its_line():
    def score_mod(s: Any, custom: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - s.get_reduce("max")

    with pytest.raises(errors.MisplacedReduction) as caught:
        AttentionEngine(METAS, score_mod=score_mod, online_func=OnlineSoftmax())
    assert str(caught.value) == (
        f"test_odd_programs.py:{score_mod.__code__.co_firstlineno + 1}: get_reduce in a score_mod. A row is reduced in "
        "online_fwd alone: reduce there.\n  Rows come tile by tile; a row state of the OnlineFunc carries the result."
    )


def test_other_reductions_are_taken_after_a_refusal():
    with pytest.raises(errors.MisplacedReduction):
        AttentionEngine(METAS, **of_score(lambda s: s.get_reduce("max")))
    AttentionEngine(METAS, online_func=OnlineSoftmax())


def state_of(kind: str, epilogue: Callable[..., Any]) -> dict[str, Any]:
    def forward(s: Any, rows: Any, b: Any, h: Any, i: Any, c: Any) -> Any:
        tile = c["x"].get_reduce(kind)
        return s.sigmoid(), {"a": rows["a"] + tile if kind == "sum" else getattr(rows["a"], kind)(tile)}, 1.0

    start = {"sum": 0.0, "max": -math.inf, "min": math.inf}[kind]
    as_they_are = {"score_mod": lambda s, c, b, h, i, j: s}
    return X | as_they_are | {"online_func": online(forward, epilogue, {"a": start}, {"z": 0.0})}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
def test_a_custom_inputs_row_may_be_a_state(kind, backend):
    x = torch.tensor([0.5, 0.25, 2.0, 1.0, 0.75, 1.5])
    options = state_of(kind, lambda o, rows, b, h, i: (o, {"z": rows["a"]}))
    output, row, *_ = results(backend, x, **options)
    q, k, v = (t[0].double().transpose(0, 1) for t in qkv())
    expected = ((q @ k.transpose(1, 2)).sigmoid() @ v).transpose(0, 1)
    torch.testing.assert_close(output[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(row, getattr(x, kind)().expand(row.shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_number_may_come_without_an_axis(backend):
    options = {"custom_io": CustomIO({"t": (1,)}), "online_func": OnlineSoftmax(),
               "score_mod": lambda s, c, b, h, i, j: s * c["t"]}  # fmt: skip
    *found, gradient = results(backend, torch.tensor(0.5), **options)
    *expected, of_row = results("reference", torch.tensor([0.5]), **options)
    alike(found, expected)
    assert gradient.shape == () and gradient.item() == pytest.approx(of_row.item(), rel=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_states_that_nothing_reads_change_nothing(backend):
    def forward(s: Any, rows: Any, b: Any, h: Any, i: Any) -> Any:
        return s.sigmoid(), {"a": rows["a"] + s.get_reduce("sum"), "m": rows["m"].max(s.get_reduce("max"))}, 1.0

    expected = results("reference", online_func=online(lambda s, r, b, h, i: (s.sigmoid(), {}, 1)))
    alike(results(backend, online_func=online(forward, None, {"a": 0.0, "m": -math.inf})), expected)


def test_an_output_that_holds_no_tensor_has_gradients_of_0():
    found = results("reference", online_func=online(lambda s, r, b, h, i: (s, {}, 1), lambda o, r, b, h, i: (2.0, {})))
    assert (found[0] == 2.0).all() and not any(g.any() for g in found[1:])


def many_operations(count):
    def score_mod(s: Any, custom: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        for _ in range(count // 2):
            s = (s * 1.001).tanh()
        return s

    alike(results("interpret", score_mod=score_mod, online_func=OnlineSoftmax()),
          results("reference", score_mod=score_mod, online_func=OnlineSoftmax()))  # fmt: skip


def test_a_score_of_200_operations_runs():
    many_operations(200)


@pytest.mark.slow  # its gradient, a product of all of them, takes their square in time
def test_a_score_of_1000_operations_runs():
    many_operations(1000)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("row", ["custom_table", "table", "pairs"])
def test_the_gradient_of_a_returned_row_has_a_place_of_its_own(row, deterministic):
    """Beside the sums of a custom input's gradient, whatever both are called."""
    table, found = torch.randn(2, 5, generator=torch.Generator().manual_seed(3)), []
    for backend, name in (("interpret", row), ("reference", "lse")):
        engine = AttentionEngine(
            METAS, CustomIO({"table": ("heads", 5)}), lambda s, c, b, h, i, j: s + c["table"][h, (i * j) % 5],
            online_func=softmax(row=name), backend=backend, deterministic=deterministic,
        )  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in (*qkv(), table)]
        output, rows = engine(*leaves, return_rowscales=True)
        found.append(torch.autograd.grad(output.square().sum() + rows[name].square().sum(), leaves))
    alike(*map(list, found))
