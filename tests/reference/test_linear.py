"""The recurrence of a linear attention: beside plain torch's two forms, and differentiated twice."""

import pytest
import torch

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.mods import trace_mods
from attention_engine.reference.linear import recur
from tests import plain_linear
from tests.linear_cases import CASES, Shape, engine_for, engine_results, plain_results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", [plain_linear.recurrence, plain_linear.parallel])
def test_the_reference_is_the_plain_recurrence_and_the_parallel_form(name, form):
    case, shape = CASES[name], Shape(2, 19, 1, 2, 4, 8, 6)
    inputs = {n: x.double() for n, x in shape.inputs(case, torch.float32).items()}
    ours = engine_results(engine_for(case, shape, torch.float32, backend="reference"), inputs)
    expected = plain_results(case, form, inputs, double=True)
    assert ours.keys() == expected.keys() and len(ours) >= 6
    for which, value in ours.items():
        assert value.dtype is torch.float64
        torch.testing.assert_close(value, expected[which], rtol=1e-9, atol=1e-10, msg=which)


@pytest.mark.parametrize("channels", [(), (3,)])
def test_the_recurrence_is_differentiable_twice(channels):
    io = CustomIO({"c": ("heads",)})
    mods = {"v": lambda x, c: (x * c["c"]).tanh(), "decay": lambda x, c: x * c["c"]}
    program = trace_mods(mods, io)
    make = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 1, 3), (1, 4, 1, 3), (1, 4, 2, 2), (1, 4, 2, *channels), (2,), (1, 2, 3, 2)]
    leaves = [torch.rand(s, generator=make, dtype=torch.float64).requires_grad_() for s in shapes]

    def run(q, k, v, decay, c, state):
        return recur(program, q, k, v, -decay, {"c": c}, state)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)
