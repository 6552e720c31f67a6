"""What is valid of schedules, row sums and bent outputs: each law, and something that breaks it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_engine import OnlineFunc
from attention_engine.errors import AttentionEngineError
from attention_engine.ir.expr import Axis, Op, Type, VarKind, const, make, var
from attention_engine.ir.program import (
    DELTA,
    OUTPUT,
    PAIR,
    PRODUCT,
    SCORE,
    H,
    final_variable,
    made_variable,
    row_variable,
    state_variable,
)
from attention_engine.ir.verify import InvalidIR
from attention_engine.passes.bent_output import part_output
from attention_engine.passes.maths import Maths, analyse
from attention_engine.passes.mods import differentiate_mod
from attention_engine.passes.row_sums import Correction, plan_row_sums
from attention_engine.passes.row_terms import KV_FIRST, KV_PLACE
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.passes.steps import KEEP, TILE, ReduceStep, RowStep, SumStep, TileStep
from attention_engine.passes.verify_schedule import (
    verify_backward_schedule,
    verify_bend,
    verify_forward_schedule,
    verify_row_sums,
)
from tests import cases, linear_cases
from tests.fuzz.check import names_of
from tests.fuzz.scripts import draw
from tests.programs import EXAMPLES, MASKS, Example, OnlineSoftmax


def with_table(score, custom, b, h, q_idx, kv_idx):
    return score + custom["table"][h, (q_idx - kv_idx).clamp(-8, 8) + 8]


SOFTMAX, HEAT = (analyse(EXAMPLES[name].trace(MASKS["causal"])) for name in ("softmax", "tempered"))
TABLE = analyse(Example(OnlineSoftmax, with_table, {"table": ("heads", 17)}).trace(MASKS["causal"]))
FORWARD, WITH_ENDS = SOFTMAX.forward_schedule, TABLE.forward_schedule
M, R, MADE = state_variable("m"), state_variable("r"), made_variable("new")
BLOCK = var("block7", [Axis.HEAD], kind=VarKind.BLOCK)
PLACE = KV_PLACE[0]
PLACE_TIMES_TILE = TILE * make(Op.CAST, PLACE, arg=Type.FLOAT)


def before(step: Any) -> ForwardSchedule:
    return replace(FORWARD, steps=(step, *FORWARD.steps))


def after(step: Any) -> ForwardSchedule:
    return replace(FORWARD, steps=(*FORWARD.steps, step))


def assigned(variable: Any, value: Any) -> RowStep:
    return RowStep(((variable, value),))


NO_FORWARD: dict[str, tuple[str, ForwardSchedule]] = {
    "a tile of scores": ("the tile's first value: reads score", replace(FORWARD, score=SCORE)),
    "a tile that reduces": (
        "the tile's first value: reduces a row", replace(FORWARD, score=make(Op.REDUCE, PRODUCT, arg="max"))
    ),
    "a tile of a value that no block has": (
        "the tile's first value: reads block7 (block", replace(FORWARD, score=PRODUCT * BLOCK)
    ),
    "a mask of tiles": ("mask: reads keep", replace(FORWARD, mask=KEEP)),
    "a block's value of rows": ("block7: differs along query", replace(FORWARD, block=((BLOCK, M),))),
    "a block's value under another kind": (
        "values of a block: new doesn't stand for", replace(FORWARD, block=((MADE, const(1.0)),))
    ),
    "a block's value of other axes": (
        "values of a block: block7 doesn't stand for", replace(FORWARD, block=((BLOCK, const(1.0)),))
    ),
    "a block's value twice": (
        "values of a block: block7 stands twice",
        replace(FORWARD, block=((BLOCK, make(Op.CAST, H, arg=Type.FLOAT)),) * 2),
    ),
    "a state that starts at no number": (
        "initial states: one that starts at -inf", replace(FORWARD, initial=((M, -math.inf), (R, 0.0)))
    ),
    "a first value of what is no state": (
        "initial states: one that starts at 0.0", replace(FORWARD, initial=(*FORWARD.initial, (MADE, 0.0)))
    ),
    "a state that starts twice": (
        "initial states: state.m stands twice", replace(FORWARD, initial=FORWARD.initial * 2)
    ),
    "a row of what is not made": ("step 0: new: reads rescale", before(assigned(MADE, made_variable("rescale")))),
    "a row of its own step": ("step 0: other: reads new", before(
        RowStep(((MADE, const(1.0)), (made_variable("other"), MADE))))
    ),
    "a row of pairs": ("step 0: new: differs along key", before(assigned(MADE, TILE))),
    "a row assigned twice at once": (
        "step 0: variables: new stands twice", before(RowStep(((MADE, const(1.0)), (MADE, M))))
    ),
    "a row assigned again": (
        "step 1: is assigned again", replace(FORWARD, steps=(*[assigned(MADE, M)] * 2, *FORWARD.steps))
    ),
    "a state assigned at the end": (
        "the rows of the end: no row that a schedule makes is", replace(FORWARD, output_rows=assigned(M, const(1.0)))
    ),
    "a row of fewer axes": (
        "step 0: n: has not the axes of", before(assigned(made_variable("n", [Axis.HEAD]), M))
    ),
    "an assignment to a score": ("step 0: no row that a schedule makes is", before(assigned(SCORE, const(1.0)))),
    "a sum that is read early": ("step 0: new: reads state.r", before(assigned(MADE, R))),
    "a sum that is assigned": ("step 0: no row that a schedule makes is", before(assigned(R, const(1.0)))),
    "weights of products": ("step 0: reads qk", replace(FORWARD, steps=(TileStep(PRODUCT),))),
    "weights that ask the mask behind a fill": (
        "step 0: reads keep",
        replace(FORWARD, steps=(TileStep(make(Op.WHERE, KEEP, TILE, const(0.0))),), rescale=None),
    ),
    "weights twice": ("the steps: make the weights 2 times", after(TileStep(TILE))),
    "a reduction to a state": ("step 0: is no new row", before(ReduceStep(M, "max", False, None))),
    "a reduction over again": (
        "step 1: is no new row", before(ReduceStep(made_variable("reduced0"), "max", False, None))
    ),
    "no such reduction": ("step 0: a reduction 'mean' of this", before(ReduceStep(MADE, "mean", False, None))),
    "an absolute value of another source": (
        "step 0: a reduction 'max' of this", before(ReduceStep(MADE, "max", True, TILE))
    ),
    "a reduction of products": ("step 0: reads qk", before(ReduceStep(MADE, "max", False, PRODUCT))),
    "a sum to no state": ("step 0: no row state is", before(SumStep(MADE, None))),
    "a sum by a factor that is not made": (
        "step 0: no step has assigned the factor", before(SumStep(R, made_variable("rescale")))
    ),
    "a rescale that is not made": ("rescale: no step has assigned", replace(FORWARD, rescale=MADE)),
    "an output of what is not made": ("output: reads new", replace(FORWARD, output=OUTPUT * MADE)),
    "an output of tiles": ("output: differs along key", replace(FORWARD, output=OUTPUT * TILE)),
    "a row of the end of tiles": (
        "the rows of the end: new: differs along key", replace(FORWARD, output_rows=assigned(MADE, TILE))
    ),
    "a written row of steps": ("row lse: reads reduced0", replace(FORWARD, rows=(("lse", made_variable("reduced0")),))),
    "two written rows of one name": (
        "rows that are written: lse stands twice", replace(FORWARD, rows=FORWARD.rows * 2)
    ),
    "an end of a tile": (
        "the end below: reads tile", replace(WITH_ENDS, ends=replace(WITH_ENDS.ends, below=TILE))
    ),
    "an index that is no integer": (
        "the index with ends: is of type float", replace(WITH_ENDS, ends=replace(WITH_ENDS.ends, index=const(1.0)))
    ),
    "ends that cross": (
        "the ends: 9 stands above 8", replace(WITH_ENDS, ends=replace(WITH_ENDS.ends, least=9, most=8))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_FORWARD)
def test_what_is_no_forward_schedule_is_refused(name):
    law, schedule = NO_FORWARD[name]
    program = (TABLE if schedule.ends is not None else SOFTMAX).program
    with pytest.raises(InvalidIR) as error:
        verify_forward_schedule(schedule, program)
    assert str(error.value).startswith(law)


def test_places_in_tiles_may_be_read_where_tiles_are():
    valid = replace(FORWARD, score=PRODUCT + make(Op.CAST, PLACE, arg=Type.FLOAT))
    first = made_variable("first")
    verify_forward_schedule(
        replace(valid, steps=(assigned(first, make(Op.CAST, KV_FIRST, arg=Type.FLOAT)), *valid.steps)), SOFTMAX.program
    )
    with pytest.raises(InvalidIR, match="output: differs along key"):
        verify_forward_schedule(replace(FORWARD, output=OUTPUT * PLACE_TIMES_TILE), SOFTMAX.program)


ROW0, READ = row_variable("row0"), TABLE.backward_schedule.pair_gradients[0]
NO_PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "weights of scores": ("weights: reads score", {"weights": SCORE}),
    "weights of a row that is not made": ("weights: reads row9", {"weights": PRODUCT * row_variable("row9")}),
    "weights that reduce": ("weights: reduces a row", {"weights": make(Op.REDUCE, PRODUCT, arg="sum")}),
    "a mask of floats": ("mask: is of type float", {"mask": const(1.0)}),
    "a gradient of delta": ("d_qk: reads delta", {"product_gradient": PRODUCT * DELTA}),
    "a gradient of saved rows": ("d_qk: reads final.lse", {"product_gradient": PRODUCT * final_variable("lse")}),
    "a gradient without a factor": ("d_qk: has the factor inf", {"scale": math.inf}),
    "a block's value of rows": ("block7: differs along query", {"block": ((BLOCK, ROW0),)}),
    "a gradient of tiles": ("d_table[h, ", {"pair_gradients": ((READ[0], TILE),)}),
    "gradients of no read": ("gradients of reads: are not those of the backward pass", {"pair_gradients": ()}),
    "an end of rows that are not made": (
        "the end above: reads row9",
        {"ends": replace(TABLE.backward_schedule.ends, above=PRODUCT * row_variable("row9"))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_backward_schedule_is_refused(name):
    law, changes = NO_PAIRS[name]
    schedule = TABLE.backward_schedule
    verify_backward_schedule(schedule, TABLE.backward, TABLE.program)
    with pytest.raises(InvalidIR) as error:
        verify_backward_schedule(replace(schedule, **changes), TABLE.backward, TABLE.program)
    assert str(error.value).startswith(law)


class TopSoftmax(OnlineFunc):
    """The row's maximum, returned; its gradient goes to the pairs that reach it."""

    def __init__(self):
        super().__init__({"m": -math.inf}, {"top": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"m": online_rowscales["m"].max(scores.get_reduce("max"))}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"top": online_rowscales["m"]}


def test_extremes_are_of_products():
    found = analyse(Example(TopSoftmax).trace())
    (extreme,) = found.backward_schedule.extremes
    with pytest.raises(InvalidIR, match="extreme0: reads score"):
        verify_backward_schedule(
            replace(found.backward_schedule, extremes=(replace(extreme, value=SCORE),)), found.backward, found.program
        )
    with pytest.raises(InvalidIR, match="d_qk: reads extreme0"):
        verify_backward_schedule(replace(found.backward_schedule, extremes=()), found.backward, found.program)


SUMS = plan_row_sums(HEAT.backward_schedule, HEAT.backward, full_fp32=False)
NO_SUMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a sum of tiles": ("row sum 0: reads tile", {"sums": (TILE, *SUMS.sums[1:])}),
    "a gradient of a sum that there is not": ("row sums: one of", {"sums": SUMS.sums[:1]}),
    "a correction of pairs": (
        "a correction of d_heat[h]: differs along key",
        {"gradients": (replace(SUMS.gradients[0], corrections=(Correction(0, PRODUCT),)),)},
    ),
    "a correction of states": (
        "a correction of d_heat[h]: reads state.m",
        {"gradients": (replace(SUMS.gradients[0], corrections=(Correction(0, M),)),)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_are_no_row_sums_is_refused(name):
    law, changes = NO_SUMS[name]
    verify_row_sums(SUMS, HEAT.backward, HEAT.backward_schedule, HEAT.program)
    with pytest.raises(InvalidIR) as error:
        verify_row_sums(replace(SUMS, **changes), HEAT.backward, HEAT.backward_schedule, HEAT.program)
    assert str(error.value).startswith(law)


class Bent(OnlineFunc):
    """tanh of the output and of the row's sum."""

    def __init__(self):
        super().__init__({"r": 0.0}, {})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"r": online_rowscales["r"] + scores.get_reduce("sum")}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return (o + online_rowscales["r"]).tanh(), {}


BEND = part_output(Example(Bent).trace())
NO_BEND: dict[str, tuple[str, dict[str, Any]]] = {
    "no program inside": ("score: reads score", {"inner": replace(BEND.inner, score=SCORE)}),
    "an output of states": ("the bent output: reads state.r", {"output": OUTPUT * R}),
    "an output of pairs": ("the bent output: differs along key", {"output": var("weight", PAIR)}),
    "a gradient of what is no row": (
        "the bent output: no gradient is made of", {"gradients": ((SCORE, const(1.0)),)}
    ),
    "a gradient of pairs": ("d_o: differs along key", {"gradients": ((OUTPUT, TILE),)}),
    "a row that is not returned": ("the bent output: no row 'other' is returned", {"kept": "other"}),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_BEND)
def test_what_is_no_bent_output_is_refused(name):
    law, changes = NO_BEND[name]
    verify_bend(BEND)
    with pytest.raises(InvalidIR) as error:
        verify_bend(replace(BEND, **changes))
    assert str(error.value).startswith(law)


# ---- when, and of what

SCHEDULES: dict[str, Callable[[], Any]] = {
    "forward": lambda: analyse(EXAMPLES["softmax"].trace()),
    "forward of fp16": lambda: analyse(EXAMPLES["relu2"].trace()).forward_of("float16"),
    "forward with rows parted": lambda: analyse(EXAMPLES["alibi"].trace()).forward_parted,
    "forward of a bent output": lambda: analyse(Example(Bent).trace()),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_analysis_checks_forward_schedules(name, monkeypatch):
    from attention_engine.passes import maths

    real = maths.schedule_forward
    monkeypatch.setattr(maths, "schedule_forward", lambda *a: replace(real(*a), rescale=MADE))
    with pytest.raises(InvalidIR, match="rescale: no step has assigned"):
        SCHEDULES[name]()


def test_analysis_checks_backward_schedules(monkeypatch):
    from attention_engine.passes import maths

    monkeypatch.setattr(maths, "schedule_backward", lambda *a: replace(SOFTMAX.backward_schedule, weights=SCORE))
    with pytest.raises(InvalidIR, match="weights: reads score"):
        analyse(EXAMPLES["softmax"].trace())
    with pytest.raises(InvalidIR, match="weights: reads score"):
        SOFTMAX.wanting([])


def test_analysis_checks_bent_outputs(monkeypatch):
    from attention_engine.passes import maths

    monkeypatch.setattr(maths, "part_output", lambda program: replace(BEND, output=OUTPUT * R))
    with pytest.raises(InvalidIR, match=r"the bent output: reads state\.r"):
        analyse(Example(Bent).trace())


def check_all(maths: Maths) -> None:
    """Asks for all that an analysis may hand on, which checks it."""
    for dtype in ("float16", "bfloat16"):
        for found in (maths, maths.trained):
            found.forward_of(dtype), found.forward_parted_of(dtype)
    found = maths.trained
    if found.backward is not None and found.backward_schedule is not None:
        found.wanting([])
        for full_fp32 in (False, True):
            sums = plan_row_sums(found.backward_schedule, found.backward, full_fp32)
            verify_row_sums(sums, found.backward, found.backward_schedule, found.program)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_programs_of_the_tests_are_valid_in_all_their_forms(name, mask):
    check_all(analyse(EXAMPLES[name].trace(MASKS[mask])))


@pytest.mark.parametrize("name", cases.CASES)
def test_cases_are_valid_in_all_their_forms(name):
    check_all(analyse(cases.engine_for(cases.CASES[name], cases.Shape(), torch.float16, True)._program))


@pytest.mark.parametrize("name", linear_cases.CASES)
def test_linear_attentions_are_valid(name):
    engine = linear_cases.engine_for(linear_cases.CASES[name], linear_cases.Shape(), torch.float16)
    for decays in (True, False):
        program = engine._trace(engine._types, decays)
        for mod in ("q", "k", "v", "decay"):
            differentiate_mod(program, mod)


@pytest.mark.parametrize("first", [0, 20, *(pytest.param(n, marks=pytest.mark.slow) for n in range(40, 200, 20))])
def test_random_programs_are_valid_in_all_their_forms(first):
    for number in range(first, first + 20):
        names = names_of(draw(31, number).text)
        try:
            check_all(analyse(names["engine"]("reference")._program))
        except AttentionEngineError:  # what is refused has no program
            continue
