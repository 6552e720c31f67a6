"""A schedule, run step by step on Python numbers, gives what the program says."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.symbols import where
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import FOLDS, LOWEST, Value, evaluate, evaluate_all
from attention_engine.ir.expr import Axis, Expr, Op, Type, substitute, topological
from attention_engine.ir.program import OUTPUT, PRODUCT, SCORE, Program
from attention_engine.library import OnlineSigmoid, OnlineSoftmax
from attention_engine.passes.derive_backward import derive_backward
from attention_engine.passes.schedule import ForwardSchedule, schedule_backward, schedule_forward
from attention_engine.passes.steps import KEEP, OTHER, TILE, ReduceStep, RowStep, Step, SumStep, TileStep
from tests.programs import EXAMPLES, Example, causal, scaled

KEYS = 9
KEPT = {
    "all": [True] * KEYS,
    "some": [True, False, True, True, False, False, True, True, False],
    "first tile masked": [False] * 4 + [True] * 5,
    "one": [False] * 8 + [True],
    "none": [False] * KEYS,
}
CUTS = [[KEYS], [4, 5], [1, 3, 5]]


def draw_values(*roots: Expr, seed: int = 0) -> dict[Expr, Value]:
    """A value for every variable and every read of a custom input; a row where it depends on the key."""
    draw = random.Random(seed)
    values: dict[Expr, Value] = {}
    for node in topological(*roots):
        if node.op in (Op.VAR, Op.LOAD):
            row = [draw.randrange(6) if node.dtype is Type.INT else draw.gauss(0, 1.5) for _ in range(KEYS)]
            values[node] = row if Axis.KEY in node.axes else row[0]
    return values


def run_program(
    program: Program, values: dict[Expr, Value], v: Sequence[float], keep: Sequence[bool], rows: Sequence[Expr]
):
    """The output and these rows: the kept keys as one tile; 0 where nothing is kept."""
    kept = [j for j, k in enumerate(keep) if k]
    known = {n: [x[j] for j in kept] if isinstance(x, list) else x for n, x in values.items()}
    score = evaluate(program.score, known, len(kept))
    known[SCORE] = score if isinstance(score, list) else [score] * len(kept)
    known |= {s.variable: max(min(s.initial, -LOWEST), LOWEST) for s in program.states}
    weights, *updates = evaluate_all([program.weights, *(s.update for s in program.states)], known, len(kept))
    weights = weights if isinstance(weights, list) else [weights] * len(kept)
    known |= {s.variable: u for s, u in zip(program.states, updates, strict=True)}
    known[OUTPUT] = math.fsum(w * v[j] for w, j in zip(weights, kept, strict=True))
    return evaluate(program.output, known) if kept else 0.0, evaluate_all(rows, known)


def run_schedule(
    schedule: ForwardSchedule, values: dict[Expr, Value], v: Sequence[float], keep: Sequence[bool], cut: list[int]
):
    """The same as a kernel does it: every pair of a tile is computed, and masked ones hold `fill`."""
    known = dict(values)
    for variable, expr in schedule.block:
        known[variable] = evaluate(expr, known)
    known |= dict(schedule.initial)
    output, start = 0.0, 0
    for length in cut:
        keys = range(start, start + length)
        start += length
        tile = {n: [x[j] for j in keys] for n, x in known.items() if isinstance(x, list)}
        tile[KEEP] = [keep[j] for j in keys]
        at = {**known, **tile}
        held = as_row(evaluate(schedule.score, at, length), length)
        if schedule.fill is not None:
            held = [x if k else schedule.fill for x, k in zip(held, tile[KEEP], strict=True)]
        at[TILE] = held
        for step in schedule.steps:
            run_step(step, at, length)
        if schedule.rescale is not None:
            output *= at[schedule.rescale]
        output += sum(w * v[j] for w, j in zip(at[TILE], keys, strict=True))
        known |= {s: at[s] for s, _ in schedule.initial}
    known |= zip((n for n, _ in schedule.output_rows.assignments),
                 evaluate_all([e for _, e in schedule.output_rows.assignments], known), strict=True)  # fmt: skip
    return evaluate(schedule.output, {**known, OUTPUT: output}), [evaluate(e, known) for _, e in schedule.rows]


def as_row(value: Value, length: int) -> list:
    return value if isinstance(value, list) else [value] * length


def run_step(step: Step, at: dict[Expr, Value], length: int) -> None:
    match step:
        case ReduceStep(variable, kind, absolute, source):
            row = as_row(at[TILE] if source is None else evaluate(source, at, length), length)
            at[variable] = FOLDS[kind]([abs(x) for x in row] if absolute else row)
        case RowStep(assignments):
            assert all(Axis.KEY not in e.axes for _, e in assignments)
            at |= zip((n for n, _ in assignments), evaluate_all([e for _, e in assignments], at, length), strict=True)
        case SumStep(state, factor):
            at[state] = at[state] * (1.0 if factor is None else at[factor]) + math.fsum(as_row(at[TILE], length))
        case TileStep(value, other):
            beside = {} if other is None else {OTHER: as_row(evaluate(other, at, length), length)}
            at |= {TILE: as_row(evaluate(value, at, length), length), **beside}


def close(a: float, b: float) -> bool:
    """Beyond 1e20 all numbers stand for infinity: a masked tile's LOWEST may have met a scale. NaN is NaN."""
    if abs(a) > 1e20:
        return abs(b) > 1e20 and (a > 0) == (b > 0)
    return a == b or (a != a and b != b) or abs(a - b) <= 1e-10 * max(1.0, abs(a), abs(b))


def check(program: Program, kept: str, saved: tuple[tuple[str, Expr], ...] = ()) -> None:
    schedule = schedule_forward(program, saved)
    values = draw_values(*(e for _, e in program.named()))
    values = {n: x for n, x in values.items() if n is not SCORE and n is not OUTPUT}
    values.setdefault(PRODUCT, draw_values(PRODUCT)[PRODUCT])
    v = draw_values(TILE, seed=5)[TILE]
    rows = [e for _, e in (*program.finals, *(s for s in saved if s[0] not in dict(program.finals)))]
    expected, expected_rows = run_program(program, values, v, KEPT[kept], rows)
    for cut in CUTS:
        output, found = run_schedule(schedule, values, v, KEPT[kept], cut)
        assert close(output, expected), f"{output} for {expected} in tiles of {cut}\n{program}\n{schedule}"
        assert all(close(a, b) for a, b in zip(found, expected_rows, strict=True)), f"rows {found} for {expected_rows}"


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_schedule_gives_what_the_program_says(name, kept):
    program = EXAMPLES[name].trace()
    check(program, kept, derive_backward(program).saved)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_backward_schedule_is_the_backward_pass(name):
    program = EXAMPLES[name].trace(causal)
    backward = derive_backward(program)
    schedule = schedule_backward(program, backward)
    weights = backward.weights if backward.score is None else substitute(backward.weights, {SCORE: backward.score})
    before = [weights, backward.product_gradient, *(e for _, e in backward.pair_gradients)]
    after = [schedule.weights, schedule.product_gradient, *(e for _, e in schedule.pair_gradients)]
    values = draw_values(*before)
    at = values | {variable: evaluate(expr, values) for variable, expr in schedule.block}
    expected, found = evaluate_all(before, values, KEYS), evaluate_all(after, at, KEYS)
    for i, (e, f) in enumerate(zip(expected, found, strict=True)):
        scale = schedule.scale if i == 1 else 1.0
        assert all(close(a, scale * b) for a, b in zip(as_row(e, KEYS), as_row(f, KEYS), strict=True))
    assert schedule.mask is program.mask


FILLS = {
    "softmax": -math.inf, "softmax one": -math.inf, "softcap": -math.inf, "alibi": -math.inf, "sigmoid bias": -math.inf,
    "relu": -math.inf, "relu2": -math.inf, "relu2 row sum": -math.inf, "retention": 0.0, "live retention": 0.0,
    "identity": 0.0, "sink": -math.inf,
}  # fmt: skip


@pytest.mark.parametrize("name", FILLS)
def test_masked_pairs_are_filled_with(name):
    assert schedule_forward(EXAMPLES[name].trace(causal)).fill == FILLS[name]


class Shifted(OnlineFunc):
    """No filling leaves a pair out of both the max of exp(x) + 1 and the sum of cos."""

    def __init__(self):
        super().__init__({"r": 0.0, "low": math.inf})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        r, low = online_rowscales["r"], online_rowscales["low"]
        states = {"r": r + scores.cos().get_reduce("sum"), "low": low.min((scores.exp() + 1.0).get_reduce("min"))}
        return scores.cos(), states, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / (online_rowscales["r"] + 20.0) / online_rowscales["low"], {}


@pytest.mark.parametrize("kept", KEPT)
def test_where_no_filling_does_the_mask_is_asked(kept):
    program = trace(scaled, None, Shifted(), CustomIO())
    schedule = schedule_forward(program)
    assert schedule.fill is None
    assert KEEP in topological(*(s.value for s in schedule.steps if isinstance(s, TileStep)))
    check(program, kept)


class Raw(OnlineFunc):
    """Scores are weights."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {}, 1


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, custom, b, h, q, k: where((q - k).abs() < 9, s, 0.5 * s - 1),
        lambda s, custom, b, h, q, k: where(q < 1000, s, s + 1),
        lambda s, custom, b, h, q, k: where(custom["near"], s, s + 1),
        lambda s, custom, b, h, q, k: s + (q - 2000).max(0),
        lambda s, custom, b, h, q, k: s + k // 64,
    ],
)
def test_a_filling_is_right_for_far_pairs_and_both_sides_of_a_condition(score_mod):
    """A product of 0 isn't a weight of 0 where another place, or another mask, adds something."""
    program = trace(score_mod, causal, Raw(), CustomIO({"near": (1,)}), {"near": Type.BOOL})
    schedule = schedule_forward(program)
    assert schedule.score is not PRODUCT  # the tile holds what the mask has left out


class ShiftedOutput(OnlineFunc):
    """An output that isn't 0 where nothing is summed."""

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o + 1.0, {}


class ShiftedRelu(OnlineFunc):
    """A state that a row may leave as it began though it keeps pairs."""

    def __init__(self):
        super().__init__({"r": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        f = (scores - 100.0).relu()
        return f, {"r": online_rowscales["r"] + f.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / (online_rowscales["r"] + 1.0) + 2.0, {}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("func", [ShiftedOutput, ShiftedRelu], ids=lambda f: f.__name__)
def test_an_empty_row_gives_0_whatever_the_epilogue_says(func, kept):
    check(trace(scaled, None, func(), CustomIO()), kept)


def test_the_scale_of_a_softmax_costs_nothing():
    """The tile holds q . k itself; the scale and log2(e) are one factor of one multiply-add."""
    schedule = schedule_forward(Example(OnlineSoftmax).trace())
    assert schedule.score is PRODUCT
    (weights,) = [s.value for s in schedule.steps if isinstance(s, TileStep)]
    assert weights.op is Op.EXP2
    assert [n.op for n in topological(weights) if n.op not in (Op.VAR, Op.CONST)] == [Op.MUL, Op.ADD, Op.EXP2]


def test_scores_that_no_row_reduces_are_part_of_the_weights():
    schedule = schedule_forward(EXAMPLES["sigmoid bias"].trace())
    assert schedule.score is PRODUCT
    (weights,) = [s.value for s in schedule.steps if isinstance(s, TileStep)]
    of_pairs = [n.op for n in topological(weights) if TILE in topological(n) and n is not TILE]
    assert of_pairs == [Op.MUL, Op.ADD, Op.EXP2, Op.ADD, Op.RECIP]  # one multiply-add before exp2


def test_scores_stay_apart_from_weights_where_only_so_masked_pairs_can_be_filled():
    score_mod = EXAMPLES["softcap"].score_mod  # never below -2: a sigmoid of it is never 0
    schedule = schedule_forward(trace(score_mod, causal, OnlineSigmoid(), CustomIO()))
    assert (schedule.score is not PRODUCT, schedule.fill) == (True, -math.inf)


def test_the_other_terms_of_a_score_take_its_scale():
    """The tile holds q . k plus the rest over the scale, which joins the slope."""
    schedule = schedule_forward(EXAMPLES["alibi"].trace())
    assert schedule.score.op is Op.ADD and PRODUCT in schedule.score.args
    products = [n for n in topological(schedule.score) if n.op is Op.MUL and n.dtype is Type.FLOAT]
    assert len([n for n in products if n.axes >= {Axis.QUERY, Axis.KEY}]) == 1


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e7, 1e30])
def test_terms_are_not_divided_by_a_scale_for_which_fp32_has_no_room(scale):
    """1e20 over a scale of 1e-30 is infinite there, and 1e-20 over 1e30 is 0."""

    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * scale + (q_idx - kv_idx) * (1e20 if scale < 1 else 1e-20)

    schedule = schedule_forward(trace(score_mod, None, OnlineSoftmax(), CustomIO()))
    numbers = [abs(n.value) for n in topological(schedule.score) if n.op is Op.CONST and n.dtype is Type.FLOAT]
    assert scale in numbers and all(1e-31 < n < 1e31 for n in numbers if n)


@pytest.mark.parametrize("factor", [math.inf, math.nan], ids=str)
def test_a_factor_that_is_no_number_stays_with_the_pairs(factor):
    """A pair that is masked has the gradient 0, and a sum over pairs times inf would be NaN for all of a row."""
    program = trace(lambda s, c, b, h, i, j: s * factor, None, OnlineSoftmax(), CustomIO())
    schedule = schedule_backward(program, derive_backward(program))
    numbers = [n.value for n in topological(schedule.product_gradient) if n.op is Op.CONST]
    assert schedule.scale == 1 and not all(map(math.isfinite, numbers))


def test_what_a_head_alone_decides_is_computed_once_a_block():
    schedule = schedule_forward(EXAMPLES["retention"].trace())
    assert [v.name for v, _ in schedule.block] == ["block0"]
    assert Op.LOG2 not in {n.op for n in topological(schedule.score)}


def test_a_row_keeps_its_own_names_apart():
    """Every variable that a step writes is written once, but states."""
    for name, example in EXAMPLES.items():
        schedule = schedule_forward(example.trace())
        written = [s.variable for s in schedule.steps if isinstance(s, ReduceStep)]
        written += [n for s in schedule.steps if isinstance(s, RowStep) for n, _ in s.assignments]
        assert len(written) == len(set(written)), name


class Lagging(OnlineFunc):
    """Each tile's weights are added up times the maximum before it: an old state that is read when it has moved on."""

    def __init__(self):
        super().__init__({"m": -5.0, "z": 0.0}, {"z": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        old = online_rowscales["m"]
        m = old.max(scores.get_reduce("max"))
        weights = (scores - m).exp()
        return weights, {"m": m, "z": online_rowscales["z"] + weights.get_reduce("sum") * old}, (old - m).exp()

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"z": online_rowscales["z"]}


def test_the_factor_of_the_output_is_made_before_the_weights():
    for name in ("softmax", "retention", "gated", "softmax by hand"):
        schedule = schedule_forward(EXAMPLES[name].trace())
        made = [n for step in schedule.steps if isinstance(step, RowStep) for n, _ in step.assignments]
        before = itertools.takewhile(lambda step: not isinstance(step, TileStep), schedule.steps)
        early = [n for step in before if isinstance(step, RowStep) for n, _ in step.assignments]
        assert schedule.rescale in made and schedule.rescale in early, name


def test_a_sum_of_weights_that_nothing_reads_before_the_end_is_held_in_parts():
    (found,) = [step for step in schedule_forward(EXAMPLES["softmax"].trace()).steps if isinstance(step, SumStep)]
    assert (found.state.name, found.factor.name) == ("state.r", "rescale")
    (found,) = [s for s in schedule_forward(EXAMPLES["relu2 row sum"].trace()).steps if isinstance(s, SumStep)]
    assert (found.state.name, found.factor) == ("state.r", None)
    for name in ("retention", "live retention"):  # whose weights are made of the sum
        assert not any(isinstance(s, SumStep) for s in schedule_forward(EXAMPLES[name].trace()).steps), name


def test_a_sum_moves_on_by_the_factor_of_the_output_and_no_second_one():
    for parts_rows in (False, True):
        schedule = schedule_forward(EXAMPLES["alibi"].trace(), parts_rows=parts_rows)
        (found,) = [step for step in schedule.steps if isinstance(step, SumStep)]
        assert found.factor is schedule.rescale, parts_rows


def test_what_is_left_of_an_update_reads_the_old_states():
    program = trace(scaled, None, Lagging(), CustomIO({}))
    schedule = schedule_forward(program)
    assert not any(isinstance(step, SumStep) for step in schedule.steps)
    last = schedule.steps[-1]
    assert isinstance(last, RowStep)
    read = topological(*(e for _, e in last.assignments))
    assert "state.m" not in {node.name for node in read if node.op is Op.VAR}
    scores, v = draw_values(PRODUCT)[PRODUCT], [1.0] * KEYS
    rows = [e for _, e in program.finals]
    expected, expected_rows = run_program(program, {PRODUCT: scores}, v, KEPT["all"], rows)
    found, found_rows = run_schedule(schedule, {PRODUCT: scores}, v, KEPT["all"], [KEYS])
    assert close(found, expected) and all(map(close, found_rows, expected_rows))


class Damped(OnlineFunc):
    """The output so far is divided by what the weights of a tile add up to."""

    def __init__(self):
        super().__init__({"t": 1.0}, {"t": 1.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        weights = scores.exp()
        total = weights.get_reduce("sum") + 1.0
        return weights, {"t": online_rowscales["t"] * total}, 1 / total

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"t": online_rowscales["t"]}


class Biased(Lagging):
    """A reduction behind that of the weights, of no scores, reads the maximum as it was."""

    def __init__(self):
        OnlineFunc.__init__(self, {"m": -5.0, "z": 0.0, "y": 0.0}, {"z": 0.0, "y": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx, custom):
        weights, rows, factor = Lagging.online_fwd(scores, online_rowscales, b, h, q_idx)
        of_bias = (custom["bias"] + online_rowscales["m"]).get_reduce("sum")
        return weights, {**rows, "y": online_rowscales["y"] + of_bias}, factor

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {n: online_rowscales[n] for n in "zy"}


@pytest.mark.parametrize("online", [Damped, Biased])
def test_what_comes_after_the_weights_reads_what_it_should(online):
    io = CustomIO({"bias": ("seq_len_kv",)}) if online is Biased else CustomIO({})
    program = trace(scaled, None, online(), io)
    schedule = schedule_forward(program)
    assert schedule.rescales_early is False
    values = draw_values(*(e for _, e in program.named()))
    values = {n: x for n, x in values.items() if n is not SCORE and n is not OUTPUT}
    values[PRODUCT], rows = draw_values(PRODUCT)[PRODUCT], [e for _, e in program.finals]
    expected, expected_rows = run_program(program, values, [1.0] * KEYS, KEPT["all"], rows)
    found, found_rows = run_schedule(schedule, values, [1.0] * KEYS, KEPT["all"], [KEYS])
    assert close(found, expected) and all(map(close, found_rows, expected_rows))


class Fading(OnlineFunc):
    """Weights that read what weights have added up to so far."""

    def __init__(self):
        super().__init__({"z": 0.0}, {"z": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        weights = (scores - online_rowscales["z"]).exp()
        return weights, {"z": online_rowscales["z"] + weights.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"z": online_rowscales["z"]}


class Watching(Fading):
    """A reduction before the weights reads that."""

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        z = online_rowscales["z"]
        weights = (scores - (scores + z).get_reduce("max")).exp()
        return weights, {"z": z + weights.get_reduce("sum")}, 1


@pytest.mark.parametrize("online", [Fading, Watching])
def test_a_sum_that_weights_or_reductions_read_is_joined_at_each_step(online):
    schedule = schedule_forward(trace(scaled, None, online(), CustomIO({})))
    assert not any(isinstance(step, SumStep) for step in schedule.steps)


class Stale(OnlineFunc):
    """Weights and a maximum as it was before them."""

    def __init__(self):
        super().__init__({"m": -5.0}, {"m": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m = online_rowscales["m"]
        return scores + m, {"m": m.max(scores.get_reduce("max"))}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"m": online_rowscales["m"]}


def test_weights_read_the_states_as_they_were():
    program = trace(scaled, None, Stale(), CustomIO({}))
    schedule = schedule_forward(program)
    values, rows = {PRODUCT: draw_values(PRODUCT)[PRODUCT]}, [e for _, e in program.finals]
    expected, expected_rows = run_program(program, values, [1.0] * KEYS, KEPT["all"], rows)
    found, found_rows = run_schedule(schedule, values, [1.0] * KEYS, KEPT["all"], [KEYS])
    assert close(found, expected) and close(found_rows[0], expected_rows[0])
