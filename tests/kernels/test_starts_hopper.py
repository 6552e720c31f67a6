"""The hand-placed kernels for Hopper on a part of an attention, in the warp simulator: starts in bounds and scores."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine
from attention_engine import library as lib
from attention_engine.passes.maths import analyse
from attention_engine.runtime.moved import Portion, call_portion
from attention_engine.runtime.op import ATTENTIONS
from attention_engine.runtime.program_kernels import ProgramKernels
from tests.cases import Shape
from tests.kernels.test_hopper_interpret import forward_tile, kernels, key_tile, ran, skew  # noqa: F401 - a fixture
from tests.moved_cases import Rectangle, errors

WHOLE = Shape(1, 420, 420, 4, 2)
PART = Rectangle((0, 2, 201, 26), (1, 2, 200, 333))
LATE = Rectangle((0, 2, 210, 26), (1, 2, 140, 200), ("heads", "seq_len", "seq_len_kv"))  # whole tiles lie before it
FORMS = {
    "forward-64": ((64, 64), {"forward": forward_tile(192, threads=384)}),
    "forward-128": ((128, 128), {"forward": forward_tile(128)}),
    "persistent forward": ((128, 128), {"forward": forward_tile(128, persistent=True)}),
    "queries ahead": ((128, 128), {"forward": forward_tile(128, persistent=True, queries_ahead=True)}),
    "backward-64": ((64, 64), {"backward": key_tile(128)}),
    "backward-128": ((128, 128), {"backward": key_tile(80)}),
    "persistent backward": ((128, 128), {"backward": key_tile(64, persistent=True)}),
}
PAIRS = [("scaled", "late window"), ("alibi", "causal"), ("relative", "two-sided window"), ("scaled", "documents")]


@pytest.mark.parametrize("name", FORMS)
def test_kernels_of_a_part_keep_the_rule(name, kernels):  # noqa: F811
    dims, tiles = FORMS[name]
    kernels.update(tiles)
    number = list(FORMS).index(name)
    for turn in range(2):
        score, mask = PAIRS[(number + turn) % len(PAIRS)]
        if score == "relative" and "backward" in name:
            kernels.update(backward=skew(tiles["backward"]))
        part, floor = (PART, LATE)[turn], 2e-3
        assert errors(score, mask, WHOLE, part, torch.float16, floor, dims=dims, backend="interpret")
    assert ran("forward" if "forward" in tiles else "backward")


@pytest.mark.parametrize(("pair", "held"), [(("scaled", "offset"), True), (("alibi", "causal"), False)])
def test_rows_come_to_registers_where_pairs_read_starts_alone(pair, held, kernels):  # noqa: F811
    kernels.update(backward=key_tile(80))
    assert errors(*pair, WHOLE, PART, torch.float16, 2e-3, dims=(128, 128), kv_heads=2, backend="interpret")
    made = [k.backward for a in ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    (script,) = {kernel.prim_func.script() for kernel in made if "compiled" in vars(kernel)}
    assert "custom__starts" in script and [f"row{n}_held" in script for n in range(2)] == [held] * 2


@pytest.mark.parametrize("slope", [0.0, 0.01], ids=["mask", "score"])
def test_starts_are_not_read_behind_additions(slope, kernels):  # noqa: F811
    """A mask's are read where partial tiles ask for them; a score's once for all heads of a block."""
    kernels.update(backward=key_tile(80))
    torch.manual_seed(0)
    q, k, v, d_o = (torch.randn(1, n, h, 128, dtype=torch.float16) for n, h in ((200, 4), (260, 2), (260, 2), (200, 4)))

    def engine(first, **how):
        """Whose queries stand there and behind it."""

        def score(s, custom, b, h, q_idx, kv_idx):
            return s * 0.1 - slope * (q_idx + first - kv_idx)

        return AttentionEngine(score_mod=score, mask_mod=lib.causal_from(first), **how)

    def gradients(attend, *tensors):
        leaves = [t.clone().requires_grad_() for t in tensors]
        return torch.autograd.grad(attend(*leaves), leaves, d_o.to(tensors[0].dtype))

    sizes = {"batch": 1, "heads": 4, "seq_len": 270, "seq_len_kv": 260}
    part = Portion(torch.tensor([[0, 0, 70, 0]], dtype=torch.int32), ("seq_len",), sizes)
    found = gradients(lambda *t: call_portion(engine(0, backend="interpret"), part, *t, []), q, k, v)
    made = [k.backward for a in ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
    exact = gradients(engine(70, backend="reference"), *(t.double() for t in (q, k, v)))
    assert all((a - b).norm() < 1e-3 * b.norm() for a, b in zip(found, exact, strict=True))
    (script,) = {kernel.prim_func.script() for kernel in made if "compiled" in vars(kernel)}
    lines = script.splitlines()
    loop = max(n for n, line in enumerate(lines) if "for step in" in line)
    partial = next(n for n, line in enumerate(lines) if n > loop and "if partial" in line)
    in_steps = [n for n, line in enumerate(lines) if n > loop and "custom__starts[" in line]
    assert not in_steps if slope else in_steps and min(in_steps) > partial


@pytest.mark.parametrize("tile", [forward_tile(128), forward_tile(128, persistent=True)], ids=["grid", "persistent"])
def test_parts_of_rows_join(tile, kernels):  # noqa: F811
    """Their sums leave in fp32, so that nothing but what an output loses once is lost."""
    kernels.update(forward=tile)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 128, dtype=torch.float16) for n, h in ((150, 4), (310, 2), (310, 2)))
    given = {"mask_mod": lib.causal_from(160), "online_func": lib.OnlineSoftmaxOne(), "scale": 0.1}
    engine = AttentionEngine(**given, backend="interpret")
    parts = [engine.partial(q, k[:, a:b], v[:, a:b], kv_starts=a) for a, b in ((0, 130), (130, 310))]
    built = [each.forward.builder for one in engine._parted.values() for each in one.program_kernels._kernels.values()]
    assert built == ["hopper.forward.forward_of_part"] and parts[0].o.dtype is torch.float32
    exact = AttentionEngine(**given, backend="reference")(q.double(), k.double(), v.double())
    for mine in (engine.merge(parts), engine(q, k, v)):
        assert (mine.double() - exact).norm() / exact.norm() < 3e-4


@pytest.mark.parametrize("tile", [key_tile(80), None], ids=["hopper", "straight"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_blocks_are_rounded_by_nobody(tile, deterministic, kernels):  # noqa: F811
    """They are those of other calls, before these round them; of whole rows only those of keys are."""
    kernels.update({} if tile is None else {"backward": tile})
    torch.manual_seed(0)
    shapes = ((140, 4), (200, 2), (200, 2), (140, 4))
    q, k, v, d_o = (torch.randn(1, n, h, 128, dtype=torch.float16) for n, h in shapes)
    maths = analyse(AttentionEngine(mask_mod=lib.causal_from(60), scale=0.1)._program)

    def gradients(**how):
        program_kernels = ProgramKernels(replace(maths, **how), [], True, None, deterministic)
        o, rows = program_kernels.forward(q, k, v, [])
        return program_kernels.backward(q, k, v, [], o, rows, d_o, {}, [])[:3]

    rounded = gradients()
    for whole_rows in (False, True):
        found = gradients(in_blocks=True, whole_rows=whole_rows)
        assert [t.dtype is torch.float32 for t in found] == [not whole_rows, True, True]
        assert all(torch.equal(a.half(), b) for a, b in zip(found, rounded, strict=True))
