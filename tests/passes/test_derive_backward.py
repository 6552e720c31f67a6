"""The derived backward pass against autograd of the reference, in float64; and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_engine.errors import BackwardNotDerived
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var
from attention_engine.frontend.tracing import trace
from attention_engine.ir.program import Program
from attention_engine.library import OnlineSoftmax
from attention_engine.passes.check_cuts import check_online
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.reference.dense import attend, attend_backward, saved_rows
from tests.cases import CASES, Shape, engine_for
from tests.programs import BATCH, EXAMPLES, HEADS, MASKS, Example, scaled

LIMIT = 1e-12
QUERIES, KEYS = 7, 9


def tensors(kv_heads: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = {"q": (HEADS, QUERIES, 5), "k": (kv_heads, KEYS, 5), "v": (kv_heads, KEYS, 3), "do": (HEADS, QUERIES, 3)}
    return {n: torch.randn(BATCH, *s, generator=generator, dtype=torch.float64) for n, s in sizes.items()}


def exact_gradients(program: Program, given: dict[str, Tensor], custom: dict[str, Tensor], d_rows: dict[str, Tensor]):
    """Output, rows and all gradients by autograd of the reference."""
    leaves = {n: t.clone().requires_grad_() for n, t in {**given, **custom}.items() if n != "do"}
    o, rows = attend(program, leaves["q"], leaves["k"], leaves["v"], {n: leaves[n] for n in custom})
    roots, seeds = [o], [given["do"]]
    for (name, _), row in zip(program.finals, rows, strict=True):
        if name in d_rows and row.requires_grad:
            finite = row.isfinite()
            roots.append(torch.where(finite, row, 0.0))
            seeds.append(torch.where(finite, d_rows[name], 0.0))
    gradients = torch.autograd.grad(roots, list(leaves.values()), seeds, allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves.values(), gradients, strict=True)]
    return o.detach(), rows, dict(zip(leaves, filled, strict=True))


def derived_gradients(
    program: Program, given: dict[str, Tensor], custom: dict[str, Tensor], d_rows: dict[str, Tensor], o: Tensor
):
    backward = derive_backward(program)
    saved = saved_rows(program, backward, given["q"], given["k"], custom)
    delta = (o * given["do"]).sum(-1)
    found = attend_backward(
        program, backward, given["q"], given["k"], given["v"], custom, saved, delta, given["do"], d_rows
    )
    return {"q": found.q, "k": found.k, "v": found.v, **found.custom}


def compare(program: Program, custom: dict[str, Tensor], returned_rows: bool = False) -> None:
    given = tensors()
    d_rows = {}
    if returned_rows:
        d_rows = {n: torch.randn(BATCH, HEADS, QUERIES, dtype=torch.float64) for n, _ in program.finals}
        d_rows = {n: d for n, d in d_rows.items() if n not in dict(derive_backward(program).undifferentiated)}
        assert d_rows, "no returned row has a gradient"
    o, _, exact = exact_gradients(program, given, custom, d_rows)
    found = derived_gradients(program, given, custom, d_rows, o)
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        assert gradient.isfinite().all(), f"the yardstick of d{name} is not finite"
        assert found[name].shape == gradient.shape
        error = (found[name] - gradient).abs().max().item()
        assert error <= LIMIT * max(1.0, gradient.abs().max().item()), (
            f"d{name} is off by {error}\n{program}\n{derive_backward(program)}"
        )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_derived_backward_agrees_with_autograd(name, mask):
    example = EXAMPLES[name]
    compare(example.trace(MASKS[mask]), example.custom())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "name", ["softmax", "softmax one", "relu2 row sum", "sink", "tempered", "live retention", "gated"]
)
def test_the_gradient_of_a_returned_row_agrees_with_autograd(name, mask):
    example = EXAMPLES[name]
    compare(example.trace(MASKS[mask]), example.custom(), returned_rows=True)


class WithMaximum(OnlineSoftmax):
    """Softmax that returns its max too, which steadies the weights but not itself."""

    def __init__(self):
        super().__init__()
        self.final_rowscales = {"lse": 0.0, "m": 0.0}

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o, {**rows, "m": online_rowscales["m"]}


@pytest.mark.parametrize("mask", MASKS)
def test_a_returned_maximum_has_its_gradient_beside_the_others(mask):
    program = Example(WithMaximum).trace(MASKS[mask])
    backward = derive_backward(program)
    assert backward.undifferentiated == ()
    assert [(e.kind, str(e.value)) for e in backward.extremes] == [("max", "0.4 * qk")]
    compare(program, {}, returned_rows=True)


def test_a_maximum_that_only_steadies_is_not_looked_for():
    for name in ("softmax", "softmax one", "sink", "tempered"):
        assert derive_backward(EXAMPLES[name].trace()).extremes == ()


class OverMaximum(OnlineFunc):
    def __init__(self):
        super().__init__({"top": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"top": online_rowscales["top"].max(scores.get_reduce("absmax"))}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / (online_rowscales["top"] + 1.0), {}


@pytest.mark.parametrize("mask", MASKS)
def test_an_extreme_in_the_weights_has_its_gradient(mask):
    compare(Example(OverMaximum).trace(MASKS[mask]), {})


class SumToItsMaximum(OnlineFunc):
    """Raw sums of exponentials less the maximum, which move with it: they are returned, and one divides the weights."""

    def __init__(self):
        super().__init__({"m": float("-inf"), "r": 0.0, "u": 0.0}, {"r": 0.0, "u": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        before, r = online_rowscales["m"], online_rowscales["r"]
        m = before.max(scores.get_reduce("max"))
        e, rescale = (scores - m).exp(), (before - m).exp()
        moved = torch.where(r > 0, rescale * (online_rowscales["u"] + (before - m) * r), 0.0)
        u = moved + (e * (scores - m)).get_reduce("sum")
        return e, {"m": m, "r": r * rescale + e.get_reduce("sum"), "u": u}, rescale

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        r, u = online_rowscales["r"], online_rowscales["u"]
        return o / (r + 1), {"r": r, "u": u}


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_an_extreme_inside_sums_has_its_gradient(mask):
    compare(Example(SumToItsMaximum).trace(MASKS[mask]), {}, returned_rows=True)


class WithoutState(OnlineSoftmax):
    """A returned row whose gradient asks for a sum that no state carries."""

    def __init__(self):
        super().__init__()
        self.online_rowscales = {**self.online_rowscales, "g": SymbolScalar("g", Var("0.0"))}
        self.final_rowscales = {**self.final_rowscales, "g": SymbolScalar("g", Var("0.0"))}

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        weights, rows, rescale = OnlineSoftmax.online_fwd(scores, online_rowscales, b, h, q_idx)
        return weights, {**rows, "g": online_rowscales["g"] + (scores - rows["m"]).sigmoid().get_reduce("sum")}, rescale

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o, {**rows, "g": online_rowscales["g"]}


def test_a_row_whose_gradient_is_not_derived_leaves_the_others_theirs():
    program = Example(WithoutState).trace()
    reason = (
        "the backward pass needs row_sum((1 - sigmoid(score - state.m)) * sigmoid(score - state.m)), which no row "
        "state carries to the end of the row"
    )
    assert derive_backward(program).undifferentiated == (("g", reason),)
    compare(program, {}, returned_rows=True)


class ScaledRow(OnlineSoftmax):
    """A custom input that stands in the sums and in the returned row."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        return OnlineSoftmax.online_fwd(scores * custom["heat"], online_rowscales, b, h, q_idx)

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx, custom):
        o, rows = OnlineSoftmax.online_fwd_epilogue(o, online_rowscales, b, h, q_idx)
        return o * custom["heat"], {"lse": rows["lse"] * custom["heat"]}


@pytest.mark.parametrize("mask", MASKS)
def test_a_custom_input_may_stand_in_the_sums_the_output_and_the_returned_row(mask):
    example = Example(ScaledRow, scaled, {"heat": ("heads",)}, {"heat": (HEADS,)})
    compare(example.trace(MASKS[mask]), example.custom(), returned_rows=True)


def test_a_gate_of_0_gets_its_gradient():
    example = EXAMPLES["gated"]
    custom = example.custom()
    custom["gate"][1] = 0.0
    compare(example.trace(), custom)


class HandTempered(EXAMPLES["tempered"].online_func):
    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx, custom):
        return (dp - doosum_rowscales) * scores * custom["heat"]


def test_custom_inputs_of_online_fwd_get_gradients_beside_a_backward_written_by_hand():
    example = EXAMPLES["tempered"]
    compare(Example(HandTempered, scaled, example.axes, example.shapes).trace(), example.custom())


class Doubled(OnlineSoftmax):
    @staticmethod
    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
        return 2.0 * (dp - doosum_rowscales) * scores


def test_a_backward_written_by_hand_is_used_as_it_is():
    given = tensors()
    programs = [trace(scaled, None, func(), CustomIO()) for func in (OnlineSoftmax, Doubled)]
    o = attend(programs[0], given["q"], given["k"], given["v"])[0]
    once, twice = (derived_gradients(p, given, {}, {}, o) for p in programs)
    assert torch.allclose(twice["q"], 2 * once["q"], rtol=1e-12)
    assert torch.equal(twice["v"], once["v"])
    reason = "a `backward` written by hand doesn't say it"
    assert derive_backward(programs[1]).undifferentiated == (("lse", reason),)


class DoubledWeights(OnlineSoftmax):
    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return 2.0 * (scores - final_rowscales["lse"]).exp()


def test_a_forward_written_by_hand_is_used_as_it_is():
    given = tensors()
    programs = [trace(scaled, None, func(), CustomIO()) for func in (OnlineSoftmax, DoubledWeights)]
    o = attend(programs[0], given["q"], given["k"], given["v"])[0]
    once, twice = (derived_gradients(p, given, {}, {}, o) for p in programs)
    assert torch.allclose(twice["v"], 2 * once["v"], rtol=1e-12)


def test_softmax_saves_its_lse_and_nothing_else():
    backward = derive_backward(trace(scaled, None, OnlineSoftmax(), CustomIO()))
    assert [name for name, _ in backward.saved] == ["lse"]


def test_a_detached_normaliser_costs_no_delta():
    live, constant = (derive_backward(EXAMPLES[n].trace()) for n in ("live retention", "retention"))
    assert "delta" in str(live).split("delta = dO . o")[1]
    assert "delta" not in str(constant).split("delta = dO . o")[1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_program_reads_as(name, golden):
    program = EXAMPLES[name].trace(MASKS["causal"])
    assert f"{program}\n{derive_backward(program)}" == golden


# ---- random programs: weight = phi(x) * c(sums of functions of x), the law's own form


@settings(max_examples=60)
@given(st.data())
def test_random_programs_of_the_right_form_are_derived(data):
    phis = [lambda x: x, lambda x: x * x, torch.exp, torch.sigmoid, torch.relu, lambda x: x * torch.tanh(x) + 1.0]
    sums = [lambda x: x * x, torch.exp, torch.abs, lambda x: torch.relu(x).square(), lambda x: torch.sigmoid(x) * x * x]
    factors = [lambda r, s: 1 / (r + 1), lambda r, s: 1 / (r + s + 2), lambda r, s: (1 + s).rsqrt() * (1 + r).log(),
               lambda r, s: torch.maximum(r, s).clamp(min=1.0) ** -1.5, lambda r, s: (-0.1 * r).exp()]  # fmt: skip
    phi, f, g, c = (data.draw(st.sampled_from(table)) for table in (phis, sums, sums, factors))

    class Random(OnlineFunc):
        def __init__(self):
            super().__init__({"r": 0.0, "s": 0.0}, {"sum": 0.0})

        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            r, s = online_rowscales["r"], online_rowscales["s"]
            r, s = r + f(scores).get_reduce("sum"), s + g(scores).get_reduce("sum")
            return phi(scores), {"r": r, "s": s}, 1

        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            r, s = online_rowscales["r"], online_rowscales["s"]
            return o * c(r, s), {"sum": r * s}

    program = trace(scaled, MASKS[data.draw(st.sampled_from(list(MASKS)))], Random(), CustomIO())
    check_online(program)
    compare(program, {}, returned_rows=True)


# ---- refusals, whole messages


class BentOutput(OnlineSoftmax):
    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return (o / online_rowscales["r"]).tanh(), {"lse": 0.0}


class ShiftedOutput(OnlineFunc):
    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o + 1.0, {}


class MaximumInSum(OnlineFunc):
    """The max matters, but only inside a sum."""

    def __init__(self):
        super().__init__({"top": float("-inf"), "r": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        top = online_rowscales["top"].max(scores.get_reduce("max"))
        r = online_rowscales["r"] + (scores - top).sigmoid().get_reduce("sum")
        return scores, {"top": top, "r": r}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {}


class SumInMaximum(OnlineFunc):
    """An extreme of what another reduction stands in."""

    def __init__(self):
        super().__init__({"top": 0.0, "r": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"] + scores.square().get_reduce("sum")
        return scores, {"r": r, "top": online_rowscales["top"].max((scores / (1 + r)).get_reduce("max"))}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / (online_rowscales["top"] + 1), {}


class Uncarried(OnlineFunc):
    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores / scores.exp().get_reduce("sum"), {}, 1


class Nested(OnlineFunc):
    def __init__(self):
        super().__init__({"r": 0.0, "s": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"] + scores.square().get_reduce("sum")
        s = online_rowscales["s"] + (scores + r).sigmoid().get_reduce("sum")
        return scores, {"r": r, "s": s}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["s"], {}


class NoProduct(OnlineFunc):
    def __init__(self):
        super().__init__({"r": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        r = online_rowscales["r"] + scores.square().get_reduce("sum")
        return (scores - r).sigmoid(), {"r": r}, 1


REFUSALS = {
    BentOutput: (
        "the epilogue's output is tanh(o / row_sum(exp(score - row_max(score)))), which is not the output so far times "
        "a factor of the row.\n  Return o times or divided by row values; apply the rest to the engine's output."
    ),
    ShiftedOutput: (
        "the epilogue's output is o + 1, which is not the output so far times a factor of the row.\n"
        "  Return o times or divided by row values; apply the rest to the engine's output."
    ),
    MaximumInSum: (
        "the backward pass needs row_sum((1 - sigmoid(score - state.top)) * sigmoid(score - state.top)), which no row "
        "state carries to the end of the row.\n"
        "  Keep it in a state (online_rowscales), or write the static method `backward`."
    ),
    SumInMaximum: (
        "the gradient of row_max(score / (row_sum(score * score) + 1)) is not derived, as row_sum(score * score) "
        "stands inside.\n  Detach it (`.detach()`), or write the static method `backward`."
    ),
    Uncarried: (
        "the backward pass needs row_sum(exp(score)), which no row state carries to the end of the row.\n"
        "  Keep it in a state (online_rowscales), or write the static method `backward`."
    ),
    Nested: (
        "the backward pass needs row_sum((1 - sigmoid(score + state.r)) * sigmoid(score + state.r)), which no row "
        "state carries to the end of the row.\n"
        "  Keep it in a state (online_rowscales), or write the static method `backward`."
    ),
    NoProduct: (
        "the final weight sigmoid(score - row_sum(score * score)) is not a factor of the score times a factor of "
        "the row (seen at row_sum(score * score)).\n  Write the static method `backward`."
    ),
}


@pytest.mark.parametrize("func", REFUSALS, ids=lambda f: f.__name__)
def test_what_cannot_be_derived_is_refused_with_the_reason(func):
    with pytest.raises(BackwardNotDerived) as error:
        derive_backward(trace(None, None, func(), CustomIO()))
    assert str(error.value) == REFUSALS[func]


def test_a_max_that_no_number_shows_to_be_harmless_has_a_gradient():
    """A weight that is NaN for every row tried proves nothing."""

    class Nowhere(OnlineFunc):
        def __init__(self):
            super().__init__({"top": 0.0})

        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            top = online_rowscales["top"].max(scores.get_reduce("max"))
            return (-1.0 - scores * scores).sqrt() * top, {"top": top}, 1

    assert derive_backward(trace(None, None, Nowhere(), CustomIO())).extremes


@pytest.mark.parametrize(
    ("name", "exact"), [("softmax", False), ("softmax_one", False), ("relu2_row_sum", True), ("relu2", False)]
)
def test_delta_is_summed_exactly_where_its_error_would_be_magnified(name, exact):
    maths = engine_for(CASES[name], Shape(), torch.float16, causal=True)._maths()
    assert maths.backward is not None and maths.backward.exact_delta is exact
