"""engine.check(): of programs, of what users write of the backward pass, of cuts, and in fp32 with tf32 allowed."""

import pytest
import torch

from attention_engine import OnlineFunc
from attention_engine.errors import NotOnline
from attention_engine.library import OnlineSoftmax
from attention_engine.passes.check_cuts import KEYS, check_online, random_cuts
from attention_engine.runtime import check
from tests.runtime.engines import BACKENDS, build, late, qkv
from tests.runtime.test_gradients import BentByHand, ByHand, StraightThrough, Topped


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_backward_agrees_with_the_derived_one(backend):
    report = build(online_func=ByHand(), backend=backend).check(*qkv(33))
    assert report.ok and [(f.method, f.name) for f in report.formulas] == [
        ("backward", "dq"), ("backward", "dk"), ("forward", "dv"),
    ]  # fmt: skip
    assert all(f.distance < 1e-12 for f in report.formulas)


def test_a_backward_that_is_not_the_derived_one_is_named(capsys):
    report = build(online_func=StraightThrough(), layout="bhsd").check(*(t.transpose(1, 2) for t in qkv(33)))
    assert not report.ok and [f.ok for f in report.formulas] == [False, False, True]
    assert "\ndq by your `backward` is NOT the derived one: off by " in capsys.readouterr().out


class WrongWeights(OnlineSoftmax):
    """Its `forward` forgets half of the row's normaliser."""

    @staticmethod
    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):
        return (scores - final_rowscales["lse"] * 0.5).exp()


def test_final_weights_that_are_not_the_derived_ones_are_named():
    report = build(online_func=WrongWeights(), backend="reference").check(*qkv(33))
    assert not report.ok
    assert [(f.method, f.name) for f in report.formulas if not f.ok] == [("forward", n) for n in ("dq", "dk", "dv")]


def test_a_formula_is_held_to_rounding_even_where_the_kernels_error_hides_it():
    class Nearly(ByHand):
        @staticmethod
        def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):
            return (dp - doosum_rowscales) * scores * 1.00001

    report = build(online_func=Nearly(), dtype=torch.float16).check(*(t.half() for t in qkv(33)))
    assert all(row.ratio <= report.limit for row in report.rows)  # fp16 is too coarse to see it
    assert not report.ok and report.formulas[0].distance == pytest.approx(1e-5, rel=1e-2)


def test_where_no_backward_pass_is_derived_the_outputs_are_checked():
    report = build(online_func=BentByHand()).check(*qkv(33))
    assert report.ok and [row.name for row in report.rows] == ["o", "lse"]
    assert report.notes[1].startswith("gradients are not there to check: the epilogue's output is tanh(o / row_sum(")


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_returned_rows_are_checked(backend):
    report = build(online_func=Topped(), mask_mod=late, backend=backend).check(*qkv(33))
    own = ["o", "lse", "top", "dq", "dk", "dv"]
    assert report.ok and [r.name for r in report.rows] == [*own, "dq of lse", "dk of lse", "dq of top", "dk of top"]


def test_a_wrong_gradient_through_a_row_is_found(monkeypatch):
    """Of a maximum that reaches twice as many pairs as it does."""
    from attention_engine.runtime.run import _Launch

    run = _Launch.run

    def twice(self, memory):
        run(self, memory)
        if self.launch.name == "extremes":
            memory[self.places[-1]] *= 2  # how many pairs share it

    monkeypatch.setattr(_Launch, "run", twice)
    report = build(online_func=Topped()).check(*qkv(33))
    assert not report.ok and [r.name for r in report.rows if r.ratio > report.limit] == ["dq of top", "dk of top"]


def test_rows_whose_gradient_is_not_derived_are_left_out():
    report = build(online_func=ByHand()).check(*qkv(33))
    assert report.ok and [row.name for row in report.rows] == ["o", "lse", "dq", "dk", "dv"]


class CountsToFive(OnlineFunc):
    """Right for up to five tiles."""

    def __init__(self):
        super().__init__({"n": 0.0}, {"n": 0.0})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        return scores, {"n": online_rowscales["n"] + 1}, 1

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o, {"n": (online_rowscales["n"] - 5).max(0)}


def test_random_cuts_find_what_the_few_of_the_constructor_do_not(capsys):
    engine = build(online_func=CountsToFive())
    with pytest.raises(NotOnline) as caught:
        engine.check(*qkv(33))
    assert "the returned row 'n' depends on how a row is cut into tiles" in str(caught.value)
    assert "in random order: " in str(caught.value)
    build().check(*qkv(33))
    assert "\n50 random cuts of a row into tiles give the same result\n" in capsys.readouterr().out


def test_random_cuts_hold_each_key_once_and_differ():
    import random

    cuts = list(random_cuts(random.Random(0), 100))
    for cut in cuts:
        assert sorted(j for tile in cut.tiles for j in tile) == list(range(KEYS)), cut.name
    assert len({cut.tiles for cut in cuts}) > 95 and max(len(cut.tiles) for cut in cuts) > 10
    assert any(not tile for cut in cuts for tile in cut.tiles[:1])  # a first tile that is masked whole
    check_online(build()._program, tuple(cuts))


@pytest.fixture
def tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_where_tf32_is_allowed_eager_is_held_to_it_on_a_cpu_too(tf32):
    report = build().check(*qkv(33))
    assert report.ok and all(row.error > 1e-5 and row.eager > 1e-5 for row in report.rows)


def test_a_product_in_tf32_is_one_of_rounded_operands():
    a, b = (torch.randn(3, 4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True))
    rounded = [check._tf32(t) for t in (a, b)]
    for given, short in zip((a, b), rounded):
        assert ((given - short).abs() <= given.abs() * 2**-11).all() and not (short.view(torch.int32) & 0x1FFF).any()
    with check._Tf32():
        found = a @ b
    torch.testing.assert_close(found, rounded[0] @ rounded[1])
    d = torch.randn_like(found)
    da, db = torch.autograd.grad(found, (a, b), d)
    torch.testing.assert_close(da, check._tf32(d) @ rounded[1].T)
    torch.testing.assert_close(db, (rounded[0].transpose(1, 2) @ check._tf32(d)).sum(0))
