"""Plans of linear attention: valid in every form of a call, with one launch for each result."""

from dataclasses import replace

import pytest

from attention_engine.arch import H100
from attention_engine.compiler import LinearKernels
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.linear import LinearProblem
from attention_engine.plan.launches import Launch
from attention_engine.plan.verify import verify_steps
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles
from tests.linear_cases import CASES

BATCH, LENGTH = 2, 300
BOTH = (False, True)


def plan(name, per, kind, groups):
    case, (heads, shared) = CASES[name], groups
    custom = tuple((n, "float32", axes) for n, axes in case.axes.items())
    problem = LinearProblem(heads, shared, shared, 64, 64, "bfloat16", custom=custom, per_channel=per == "channel")
    program = trace_mods(case.mods, CustomIO(case.axes))
    if per == "channel":
        tiles = default_channel_tiles(problem, H100())
    else:
        tiles = default_linear_tiles(program, problem, H100())
        tiles = replace(tiles, plan=kind, walks=dict.fromkeys(("dq", "dk", "dv"), tiles.forward))
    return LinearKernels(program, problem, tiles, H100()).plan


def written(steps):
    """How often each place is filled."""
    places = [p for step in steps for p in (step.writes if isinstance(step, Launch) else [step.target.place])]
    return {place: places.count(place) for place in places}


FORMS = [("token", "auto"), ("token", "walk"), ("token", "chunks"), ("channel", "auto")]


@pytest.mark.parametrize("groups", [(4, 4), (4, 2)], ids=["ungrouped", "grouped"])
@pytest.mark.parametrize(("per", "kind"), FORMS)
@pytest.mark.parametrize("name", CASES)
def test_each_result_is_made_once(name, per, kind, groups):
    made = plan(name, per, kind, groups)
    for starts in BOTH:
        for ends in BOTH:
            forward = made.forward_steps(BATCH, LENGTH, starts, ends)
            verify_steps(forward)
            assert written(forward)["o"] == 1 and (not ends or written(forward)["last"] == 1)
            for wanted in ((), ("decay",), ("decay", *CASES[name].axes)):
                backward = made.backward_steps(BATCH, LENGTH, wanted, starts, ends)
                verify_steps(backward)
                found = written(backward)
                assert [found[n] for n in ("dq", "dk", "dv")] == [1, 1, 1] and set(found.values()) == {1}
                assert not starts or found["d_initial"] == 1
                assert ("d_decay" in found) is made.of_decay(wanted)
                assert all(place in found for _, place, _ in made.reads_of(BATCH, LENGTH, wanted))
    for wanted in ((), ("decay", *CASES[name].axes)):  # in pieces, from what two launches found of states alone
        passes = {
            False: made.forward_steps(BATCH, LENGTH, True, False, pieces=True),
            True: made.backward_steps(BATCH, LENGTH, wanted, True, True, pieces=True),
        }
        for reverse, steps in passes.items():
            ahead = made.piece_steps(reverse)
            verify_steps((*ahead, *steps))
            (alone,) = (place for place in written(ahead) if not place.startswith("sums"))
            assert alone == ("d_states of pieces" if reverse else "states of pieces")
            assert {*written(steps)} >= ({"dq", "dk", "dv"} if reverse else {"o"})
