"""What a row sums up beside its weights is made with them, and a masked pair holds a number that changes none of it."""

from __future__ import annotations

import math

import pytest

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Axis, Expr, Op, topological
from attention_engine.ir.program import PRODUCT
from attention_engine.passes.fills import LOW
from attention_engine.passes.schedule import ForwardSchedule, schedule_forward
from attention_engine.passes.steps import KEEP, OTHER, ReduceStep, RowStep, TileStep
from tests.merges import RIGHT
from tests.passes.test_schedule import KEPT, check
from tests.programs import causal, scaled

ENTROPY = RIGHT["entropy"].trace()


def of_pairs(schedule: ForwardSchedule) -> list[Expr]:
    """What is computed for each pair: a tile's expressions share what they have in common, two tiles' nothing."""
    tiles = [[step.value, step.other] for step in schedule.steps if isinstance(step, TileStep)]
    tiles += [[step.source] for step in schedule.steps if isinstance(step, ReduceStep)]
    return [
        node for tile in tiles for node in topological(*(e for e in tile if e is not None)) if Axis.KEY in node.axes
    ]  # fmt: skip


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", RIGHT)
def test_the_steps_of_rows_with_more_states_give_what_the_program_says(name, kept):
    check(RIGHT[name].trace(), kept)


def test_an_entropy_takes_one_exponential_a_pair_and_asks_for_no_mask():
    schedule = schedule_forward(ENTROPY)
    assert schedule.score is PRODUCT and schedule.fill == LOW
    pairs = of_pairs(schedule)
    assert [node.op for node in pairs].count(Op.EXP2) == 1 and KEEP not in pairs


def test_the_factor_of_the_output_is_known_before_the_pairs_of_an_entropy():
    assert schedule_forward(ENTROPY).rescales_early


def test_no_row_value_is_made_twice():
    for name, function in RIGHT.items():
        schedule = schedule_forward(function.trace())
        before = []
        for step in schedule.steps:
            if isinstance(step, TileStep):
                break
            before += [e for v, e in step.assignments if v.name.startswith("row")] if isinstance(step, RowStep) else []
        assert len(before) == len(set(before)), name


class Moments(OnlineFunc):
    """Softmax that sums up what `of` makes of its scores beside the weights."""

    def __init__(self, of):
        super().__init__({"m": -math.inf, "r": 0.0, "t": 0.0}, {"t": 0.0})
        self.of = of

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        m, r, t = (online_rowscales[n] for n in "mrt")
        new = m.max(scores.get_reduce("max"))
        back, weights = (m - new).exp(), (scores - new).exp()
        t = t * back + (weights * self.of(scores)).get_reduce("sum")
        return weights, {"m": new, "r": r * back + weights.get_reduce("sum"), "t": t}, back

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {"t": online_rowscales["t"]}


BEYOND = {  # what a pair that is left out may not hold, as it would leave fp32's numbers
    "a square": lambda x: x * x,
    "a large factor": lambda x: 1e3 * x + 1.0,
    "an exponential of the opposite": lambda x: (-x).exp(),
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_mask_is_asked_where_the_low_number_would_overflow(name):
    schedule = schedule_forward(trace(scaled, causal, Moments(BEYOND[name]), CustomIO()))
    assert schedule.fill is None and KEEP in of_pairs(schedule)


def test_a_mask_is_asked_where_scores_may_be_lower():
    def with_bias(score, custom, b, h, q_idx, kv_idx):
        return score + custom["bias"]

    io = CustomIO({"bias": (1, "heads", "seq_len", "seq_len_kv")})
    schedule = schedule_forward(trace(with_bias, causal, Moments(lambda x: x), io))
    assert schedule.fill is None
    exponentials = [node for node in of_pairs(schedule) if node.op is Op.EXP2]
    assert len(exponentials) == 1, "with the weights all the same"


def test_what_weights_read_is_not_made_beside_them():
    class Normal(OnlineFunc):
        """Weights over the largest sum of squares so far, which a tile's weights read."""

        def __init__(self):
            super().__init__({"n": 1.0})

        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            n = online_rowscales["n"] + (scores * scores).get_reduce("sum")
            return scores / n, {"n": n}, online_rowscales["n"] / n

    program = trace(scaled, None, Normal(), CustomIO())
    schedule = schedule_forward(program)
    assert all(step.other is None for step in schedule.steps if isinstance(step, TileStep))
    assert OTHER not in [step.source for step in schedule.steps if isinstance(step, ReduceStep)]
    check(program, "some")
