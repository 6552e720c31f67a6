"""engine.check(): of programs, of what users write of the backward pass, of cuts, and in fp32 with tf32 allowed."""

import math

import pytest
import torch

from attention_engine import AttentionEngine, OnlineFunc
from attention_engine.errors import NotOnline
from attention_engine.library import OnlineSoftmax
from attention_engine.passes.check_cuts import KEYS, check_online, random_cuts
from attention_engine.runtime import check, small_call
from attention_engine.runtime.check_report import CheckReport, CheckRow, check_row
from tests.merges import UNWRITTEN
from tests.runtime.engines import BACKENDS, build, late, qkv
from tests.runtime.test_gradients import BentByHand, ByHand, StraightThrough, Topped


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_backward_agrees_with_the_derived_one(backend):
    report = build(online_func=ByHand(), backend=backend).check(*qkv(33))
    assert report.ok and [(f.method, f.name) for f in report.formulas] == [
        ("backward", "dq"), ("backward", "dk"), ("forward", "dv"),
    ]  # fmt: skip
    assert all(f.distance < 1e-12 for f in report.formulas)


def test_a_backward_that_is_not_the_derived_one_is_named():
    report = build(online_func=StraightThrough(), layout="bhsd").check(*(t.transpose(1, 2) for t in qkv(33)))
    assert not report.ok and [f.ok for f in report.formulas] == [False, False, True]
    assert "\ndq by your `backward` is NOT the derived one: off by " in str(report)
    assert "\n  Mend your method as its line below says, or leave it out: then it is derived.\n" in str(report)


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


def test_random_cuts_find_what_the_few_of_the_constructor_do_not():
    engine = build(online_func=CountsToFive())
    with pytest.raises(NotOnline) as caught:
        engine.check(*qkv(33))
    assert "the returned row 'n' depends on how a row is cut into tiles" in str(caught.value)
    assert "in random order: " in str(caught.value)
    assert "\n50 random cuts of a row into tiles give the same result\n" in str(build().check(*qkv(33)))


def test_random_cuts_hold_each_key_once_and_differ():
    import random

    cuts = list(random_cuts(random.Random(0), 100))
    for cut in cuts:
        assert sorted(j for tile in cut.tiles for j in tile) == list(range(KEYS)), cut.name
    assert len({cut.tiles for cut in cuts}) > 95 and max(len(cut.tiles) for cut in cuts) > 10
    assert any(not tile for cut in cuts for tile in cut.tiles[:1])  # a first tile that is masked whole
    check_online(build()._program, tuple(cuts))


@pytest.fixture
def few_cuts(monkeypatch):
    """For tests of many reports on one program, whose cuts are tried above."""
    monkeypatch.setattr(check, "RANDOM_CUTS", 1)


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


# ---- what the report says


def test_a_report_is_the_table_and_nothing_is_printed_or_drawn_from_the_users_generator(capsys):
    engine, tensors = build({"bias": ("heads",)}, score_mod=lambda s, c, b, h, i, j: s + c["bias"]), qkv(9)
    before = torch.get_rng_state()
    report = engine.check(*tensors, torch.ones(4))
    assert capsys.readouterr().out == "" and torch.equal(torch.get_rng_state(), before)
    lines = repr(report).splitlines()
    assert str(report) == repr(report) and max(map(len, lines)) < 120
    assert lines[:2] == [
        "backend  interpret: the kernels ran, emulated on a CPU",
        "tensors  q (2, 9, 4, 16) float32; k (2, 9, 2, 16) float32; v (2, 9, 2, 24) float32; bias (4,) float32",
    ]
    assert lines[-1] == "ok: the limit is 10 x the error of eager PyTorch in the same dtype"


def test_the_reference_says_that_no_kernel_ran():
    report = build(backend="reference").check(*qkv(9))
    assert report.backend == "reference"
    assert 'plain PyTorch; the kernels were not run (backend="interpret" runs them)' in str(report)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_on_a_cpu_the_kernels_of_an_automatic_backend_run_on_a_part(layout, monkeypatch):
    monkeypatch.setitem(small_call.MOST, "seq_len", 20)
    monkeypatch.setitem(small_call.MOST, "seq_len_kv", 30)
    axes = {"bias": ("batch", 1, "seq_len", "seq_len_kv")}
    engine = build(axes, score_mod=lambda s, c, b, h, i, j: s + c["bias"], backend="auto", layout=layout, mask_mod=None,
                   block_size=(16, 16))  # fmt: skip
    tensors, bias = qkv(40, 60, batch=3), torch.randn(3, 1, 40, 60)
    blocks = torch.ones(1, 1, 3, 4, dtype=torch.int8)
    blocks[..., 1] = 0
    turned = [t.transpose(1, 2) for t in tensors] if layout == "bhsd" else list(tensors)
    report = engine.check(*turned, bias, block_mask=blocks)
    said = " ".join(str(report).split())
    assert report.ok and report.backend == "interpret" and engine.backend == "auto"
    assert "emulated on a CPU, on a part of the tensors: q of " in said and "bias of (3, 1, 40, 60)" in said
    assert "bias (2, 1, 20, 30) float32" in said
    small = [t[:2, :n].detach() for t, n in zip(tensors, (20, 30, 30))]
    small = [t.transpose(1, 2) for t in small] if layout == "bhsd" else small
    engine.backend = "interpret"
    again = engine.check(*small, bias[:2, :, :20, :30], block_mask=blocks[:, :, :2, :2])
    assert again.rows == report.rows


def test_without_tileLang_a_check_says_why_no_kernel_ran(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = build(backend="auto").check(*qkv(9))
    assert report.ok and "the kernels were not run (TileLang is not installed)" in str(report)


def test_float64_goes_to_the_reference():
    report = build(backend="auto").check(*(t.double() for t in qkv(9)))
    assert report.ok and report.backend == "reference"


def test_tensors_that_nobody_gives_are_drawn():
    report = build({"bias": ("heads",)}, score_mod=lambda s, c, b, h, i, j: s + c["bias"], backend="auto").check(
        bias=torch.ones(4)
    )
    assert report.ok and "q (1, 96, 4, 16) float32" in str(report)


def test_what_is_nan_in_float64_too_is_told():
    """Nothing can be compared there; an error of 0 is no praise."""
    row = check_row("o", torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]).double(), torch.zeros(2))
    assert row.ok(1.1) and row.undefined == (1, 2)
    assert "\nwarning: o is NaN in float64 at 1 of 2 entries, which were not compared.\n" in str(
        CheckReport((row,), 1.1)
    )
    report = AttentionEngine(score_mod=lambda s, c, b, h, i, j: (s - 1e4).log()).check(*torch.randn(3, 1, 8, 1, 16))
    assert not report.ok
    assert "\nNOT ok: o is NaN in float64 at 128 of 128 entries.\n" in str(report)
    assert "\n  Look for a log, a division or a root of 0 in your functions" in str(report)


def test_what_is_not_ok_has_a_reason_and_a_remedy(monkeypatch):
    from attention_engine.runtime.run import _Launch

    run = _Launch.run

    def spoilt(self, memory):
        run(self, memory)
        if self.launch.name == "forward":
            memory["o"][0, 3, 1, 2] += wrong

    monkeypatch.setattr(_Launch, "run", spoilt)
    wrong = 1.0
    report = build().check(*qkv(9))
    (row,) = [r for r in report.rows if r.name == "o"]
    assert not report.ok and row.worst == (0, 3, 1, 2) and row.numbers[0] - row.numbers[1] == pytest.approx(1, abs=1e-3)
    assert f"\nNOT ok: o at (0, 3, 1, 2) is {row.numbers[0]:.7g}, where float64 has {row.numbers[1]:.7g}" in str(report)
    assert '\n  Check with backend="reference". If that is ok, please report it with print(engine.program()).' in str(
        report
    )
    wrong = float("nan")
    assert "Look for a log, a division or a root of 0 in your functions" in str(build().check(*qkv(9)))
    row = CheckRow("dk", float("inf"), 1e-3, (0,), (float("inf"), 1.0, 1.0))
    assert "fp16 ends at 65504: try bfloat16 or float32" in str(CheckReport((row,), 1.1, tensors="q (2,) float16"))


# ---- gradients of few numbers


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_one_learned_number_is_held_to_what_eagers_errors_come_to(dtype, few_cuts):
    engine = build({"t": ()}, score_mod=lambda s, c, b, h, i, j: s * c["t"], dtype=dtype)
    ratios, lucky = [], []
    for seed in range(12):
        report = engine.check(*(t.to(dtype) for t in qkv(33, seed=seed)), torch.tensor(0.3))
        assert report.ok, report
        (row,) = [r for r in report.rows if r.name == "dt"]
        ratios.append(row.ratio)
        lucky.append(row.error / max(row.eager, 1e-300))
    assert max(ratios) < report.limit
    assert max(lucky) > 2 * max(ratios)  # one draw of eager's error is no yardstick


@pytest.mark.slow  # forty draws; one draw is held to such a yardstick below and above
def test_a_yardstick_of_terms_is_the_root_mean_square_of_eagers_error(few_cuts):
    """Over draws, beside plain torch: within a fifth of it, so that a check by it is no weaker."""
    engine = build({"t": ()}, score_mod=lambda s, c, b, h, i, j: s * c["t"], dtype=torch.float16, backend="reference")
    eager, terms = [], []
    for seed in range(40):
        rows = engine.check(*(t.half() for t in qkv(64, seed=seed)), torch.tensor(0.3)).rows
        (row,) = [r for r in rows if r.name == "dt"]
        eager.append(row.eager)
        terms.append(row.terms)
    rms = [sum(e * e for e in errors) / len(errors) for errors in (eager, terms)]
    assert 0.5 < (rms[1] / rms[0]) ** 0.5 < 1.3


@pytest.mark.parametrize("shape", [(), (1,), ("heads",)], ids=str)
def test_a_wrong_gradient_of_few_numbers_is_found(shape, monkeypatch):
    engine = build({"t": shape}, score_mod=lambda s, c, b, h, i, j: s * c["t"], dtype=torch.float16, mask_mod=late)
    tensors = [t.half() for t in qkv(33)]
    number = torch.full([4 if n == "heads" else n for n in shape], 0.3)
    assert engine.check(*tensors, number).ok

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.02

    call = engine._call
    monkeypatch.setattr(engine, "_call", lambda q, k, v, given, *rest: call(q, k, v, [Off.apply(given[0])], *rest))
    report = engine.check(*tensors, number)
    wrong = [r.name for r in report.rows if not r.ok(report.limit)]
    assert not report.ok and set(wrong) <= {"dt", "dt of lse"} and "dt" in wrong


def test_parts_that_do_not_join_are_told():
    engine = AttentionEngine(online_func=UNWRITTEN, backend="reference")
    told = [
        note for note in engine.check(*qkv(5)).notes if note.startswith("parts of a row do not join: sigmoid(score")
    ]
    assert len(told) == 1 and "Decoding then walks each row in one part." in told[0]
    assert not any("do not join" in note for note in AttentionEngine(backend="reference").check(*qkv(5)).notes)


def test_a_wrong_combine_is_told():
    class Unsummed(OnlineSoftmax):
        @staticmethod
        def combine(final_rowscales):
            return (final_rowscales["lse"] - final_rowscales["lse"].get_reduce("max")).exp()

    notes = AttentionEngine(online_func=Unsummed(), backend="reference").check(*qkv(5)).notes
    assert any(note.startswith("warning: parts of a row do not join: test_check.py") for note in notes)
