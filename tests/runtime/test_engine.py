"""An engine as users call it: layouts, strides, sizes, dtypes, and what it shows of itself."""

import re

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var, arch, meta_tensor
from attention_engine.errors import NotOnline
from attention_engine.library import OnlineSoftmax, and_masks, document, softcap
from attention_engine.runtime.program_kernels import ProgramKernels, with_strides
from tests import plain
from tests.runtime.engines import (
    BACKENDS,
    CLOSE,
    DIM,
    DIM_V,
    HEADS,
    KV_HEADS,
    agrees,
    build,
    causal,
    close,
    exactly,
    late,
    qkv,
    results,
    same,
    scaled,
)

LAYOUTS = ("bshd", "bhsd")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_engine_is_the_attention_that_it_says(backend, dtype):
    q, k, v = qkv(19, 23, dtype=dtype)
    o = build(dtype=dtype, backend=backend)(q, k, v)
    assert (o.shape, o.dtype, o.is_contiguous()) == ((2, 19, HEADS, DIM_V), dtype, True)
    exact = exactly((q, k, v))
    want = plain.attention(*exact, "softmax", causal=True, score=plain.scaled(0.25))
    d_o = torch.randn_like(want).to(dtype)
    found = torch.autograd.grad(o, (q, k, v), d_o)
    assert [g.dtype for g in found] == [dtype] * 3
    close([o, *found], [want, *torch.autograd.grad(want, exact, d_o.double())], CLOSE[dtype])


def test_auto_runs_the_reference_on_a_cpu_in_any_floating_dtype():
    inputs = exactly(qkv())
    engine = build(backend="auto")
    o, rows = engine(*inputs, return_rowscales=True)
    assert o.dtype == rows["lse"].dtype == torch.float64
    want = plain.attention(*inputs, "softmax", causal=True, score=plain.scaled(0.25), return_lse=True)
    close([o, rows["lse"]], list(want), 1e-12)
    half = [t.detach().half() for t in inputs]
    assert engine(*half).dtype is torch.float16  # though the engine was built for float32


def test_the_rows_are_asked_for_by_name():
    engine = build()
    o, rows = engine(*qkv(13), return_rowscales=True)
    assert list(rows) == ["lse"] and rows["lse"].shape == (2, HEADS, 13) and rows["lse"].dtype is torch.float32
    assert torch.equal(engine(*qkv(13)), o)


def test_layouts_differ_in_nothing_but_the_order_of_dims():
    inputs = qkv(9, 14)
    turned = tuple(t.detach().transpose(1, 2).requires_grad_() for t in inputs)
    for backend in BACKENDS:
        found = results(build(backend=backend), *inputs, loss=lambda o, rows: (o * o.detach().roll(1)).sum())
        other = results(
            build(backend=backend, layout="bhsd"),
            *turned,
            loss=lambda o, rows: (o * o.detach().transpose(1, 2).roll(1).transpose(1, 2)).sum(),
        )
        assert other[0].shape == (2, HEADS, 9, DIM_V)
        close([other[0].transpose(1, 2), other[1], *(g.transpose(1, 2) for g in other[2:])], found, 1e-6)


def fused(kind, batch=2, length=11):
    """q, k, v as views of other memory, of one kind."""
    torch.manual_seed(1)
    match kind:
        case "slices of one projection":
            sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM_V]
            parts = torch.randn(batch, length, sum(sizes)).split(sizes, -1)
            return [p.unflatten(-1, (-1, d)) for p, d in zip(parts, (DIM, DIM, DIM_V))]
        case "heads before the length":
            return [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in qkv(length)]
        case "length before the batch":
            return [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in qkv(length)]
        case "one batch for all":
            return [t.detach()[:1].expand(batch, -1, -1, -1) for t in qkv(length)]
        case "one key head for all":
            q, k, v = (t.detach() for t in qkv(length))
            return [q, k[:, :, :1].expand(-1, -1, KV_HEADS, -1), v[:, :, :1].expand(-1, -1, KV_HEADS, -1)]
        case "last dim apart":
            return [torch.randn(*t.shape[:3], 2 * t.shape[3])[..., ::2] for t in qkv(length)]
        case "dim before the length":
            return [t.detach().transpose(1, 3).contiguous().transpose(1, 3) for t in qkv(length)]
        case "an offset of one entry":
            return [torch.randn(t.numel() + 1)[1:].view(t.shape) for t in qkv(length)]
        case "rows of odd length":
            return [torch.randn(*t.shape[:3], t.shape[3] + 1)[..., :-1] for t in qkv(length)]
        case "every other row":
            return [torch.randn(batch, 2 * length, *t.shape[2:])[:, ::2] for t in qkv(length)]
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "slices of one projection",
        "heads before the length",
        "length before the batch",
        "one batch for all",
        "one key head for all",
        "last dim apart",
        "dim before the length",
        "an offset of one entry",
        "rows of odd length",
        "every other row",
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_no_number(kind, layout):
    views = fused(kind)
    if kind not in ("length before the batch", "heads before the length"):
        assert not all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in views)
    plain_copies = tuple(t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in views)
    turn = (lambda t: t.transpose(1, 2)) if layout == "bhsd" else (lambda t: t)
    engine = build(layout=layout, deterministic=True)
    weight = torch.randn(2, 11, HEADS, DIM_V)
    want = build(deterministic=True)(*plain_copies)
    gradients = torch.autograd.grad(want, plain_copies, weight)
    leaves = [t.detach().requires_grad_() for t in views]
    o = engine(*map(turn, leaves))
    found = torch.autograd.grad(o, leaves, turn(weight))
    same([turn(o), *found], [want, *gradients])


APART = ("one batch for all", "last dim apart", "an offset of one entry", "rows of odd length")


@pytest.mark.parametrize("kind", APART)
def test_kernels_get_only_addresses_that_wide_reads_and_tma_take(kind):
    for tensor in fused(kind):
        *strides, given = with_strides(tensor, unit=8)
        assert torch.equal(given, tensor) and given.data_ptr() % 16 == 0 and given.stride(3) == 1
        assert [8 * s for s in strides] == list(given.stride()[:3]) and min(strides) > 0
    for tensor in fused("slices of one projection"):
        assert with_strides(tensor, unit=8)[-1] is tensor  # no copy where none is needed


def test_the_gradient_of_the_output_may_have_any_strides():
    inputs = qkv()
    o = build(deterministic=True)(*inputs)
    weight = torch.randn(2, 11, HEADS, 2 * DIM_V)[..., ::2]
    for d_o in (weight, torch.ones(()).expand(o.shape), weight.transpose(1, 2).contiguous().transpose(1, 2)):
        found = torch.autograd.grad(o, inputs, d_o, retain_graph=True)
        same(list(found), list(torch.autograd.grad(o, inputs, d_o.contiguous(), retain_graph=True)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (0, 0, 0)], ids=str)
def test_nothing_gives_nothing(backend, sizes, monkeypatch):
    for name in ("forward", "backward"):
        monkeypatch.setattr(ProgramKernels, name, None)  # a GPU can't be asked for a grid of no blocks
    batch, q_len, kv_len = sizes
    inputs = qkv(q_len, kv_len, batch=batch)
    slopes = torch.ones(HEADS, requires_grad=True)

    def score(s, custom, b, h, q_idx, kv_idx):
        return s * custom["slopes"]

    o, rows = build({"slopes": ("heads",)}, score_mod=score, backend=backend)(*inputs, slopes, return_rowscales=True)
    assert o.shape == (batch, q_len, HEADS, DIM_V) and not o.any()
    assert rows["lse"].shape == (batch, HEADS, q_len) and (rows["lse"] == -torch.inf).all()
    for given, gradient in zip((*inputs, slopes), torch.autograd.grad(o.sum() + 1, (*inputs, slopes))):
        assert gradient.shape == given.shape and not gradient.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_row_that_keeps_nothing_gives_zeros(backend, dtype):
    inputs = qkv(70, dtype=dtype)
    o, lse, dq, dk, dv = results(build(mask_mod=late, dtype=dtype, backend=backend), *inputs)
    assert not o[:, :2].any() and not dq[:, :2].any()
    assert (lse[..., :2] == -torch.inf).all() and lse[..., 2:].isfinite().all()
    assert not dk[:, 68:].any() and not dv[:, 68:].any()  # keys that no row keeps
    close([o, lse, dq, dk, dv], results(build(mask_mod=late, backend="reference"), *exactly(inputs)), CLOSE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_every_row_keeps_nothing_all_is_zero(backend):
    o, lse, *gradients = results(build(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 0, backend=backend), *qkv())
    assert (lse == -torch.inf).all()
    for tensor in (o, *gradients):
        assert not tensor.any()


def test_a_mask_after_softcap_stays_a_mask():
    inputs = qkv(21)
    found = agrees({}, *inputs, score_mod=softcap(2.0, 0.25))
    q, k, v = exactly(inputs)
    want = plain.attention(q, k, v, "softmax", causal=True, score=plain.softcapped(0.25, 2.0))
    close(found[:1], [want], 2e-5)
    engine = build(score_mod=softcap(2.0, 0.25))
    before = engine(*inputs)
    later = [t.detach().clone() for t in inputs]
    later[1][:, 10:] = 1e4  # keys after row 9, which it must not see
    later[2][:, 10:] = 1e4
    same([engine(*later)[:, :10]], [before[:, :10]])


def test_autocast_casts_q_k_and_v_alike():
    inputs = qkv()
    for backend in BACKENDS:
        engine = build(dtype=torch.bfloat16, backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            o = engine(inputs[0], inputs[1].bfloat16(), inputs[2].detach().half())
        assert o.dtype is torch.bfloat16
        found = torch.autograd.grad(o, inputs[:2], torch.ones_like(o))
        assert [g.dtype for g in found] == [torch.float32] * 2
        cast = [t.bfloat16() for t in (inputs[0], inputs[1], inputs[2].half())]
        same([o], [engine(*cast)])
        with torch.autocast("cpu", enabled=False):
            same([o], [engine(*cast)])


def test_two_engines_share_one_custom_io():
    io = CustomIO({"slopes": ("heads",)})
    metas = (meta_tensor(None, HEADS, None, DIM, dtype=torch.float32),) * 3
    inputs = [torch.randn(1, 9, HEADS, DIM) for _ in range(3)]
    slopes = torch.rand(HEADS)

    def minus(score, custom, b, h, q_idx, kv_idx):
        return score - custom["slopes"] * (q_idx - kv_idx)

    def times(score, custom, b, h, q_idx, kv_idx):
        return score * custom["slopes"]

    def alone(mod):
        return AttentionEngine(metas, CustomIO({"slopes": ("heads",)}), mod, causal, OnlineSoftmax())(*inputs, slopes)

    before = repr(io)
    engines = [AttentionEngine(metas, io, mod, causal, OnlineSoftmax()) for mod in (minus, times)]
    for engine, mod in ((engines[0], minus), (engines[1], times), (engines[0], minus)):
        same([engine(*inputs, slopes)], [alone(mod)])
    assert repr(io) == before and engines[0].custom_io is engines[1].custom_io


def test_an_engine_is_a_module_without_state():
    engine = build(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    assert isinstance(engine, torch.nn.Module)
    assert not engine.state_dict() and not list(engine.parameters())
    assert torch.nn.Sequential(engine).half()[0].block_mask.dtype is torch.bool


# ---- seeing inside


def test_the_repr_of_an_engine_is_one_short_line():
    engine = build({"slopes": ("heads",)}, layout="bhsd", deterministic=True, device=arch.H100())
    line = (
        "AttentionEngine(4 heads of 16, 2 key heads, values of 24, float32, score_mod=scaled, mask_mod=causal, "
        "online_func=OnlineSoftmax(), scale=1, layout='bhsd', backend='interpret', deterministic=True, device=H100)"
    )
    assert repr(engine) == line and line in repr(torch.nn.Sequential(engine))
    plain = AttentionEngine((meta_tensor(1, 2, 3, 16),) * 3)
    assert repr(plain) == "AttentionEngine(2 heads of 16, float16, online_func=OnlineSoftmax(), scale=0.25)"


def test_a_printed_engine_says_what_it_was_given_and_what_runs():
    table, number = torch.ones(4), torch.ones(())

    def score(score, custom, b, h, q_idx, kv_idx):
        return score * table[h] * number + custom["bias"]

    first = score.__code__.co_firstlineno
    engine = AttentionEngine(
        (meta_tensor(2, 4, 70, 16, torch.float32),) * 3, CustomIO({"bias": ("heads",), "ids": ("batch", "seq_len")}),
        score, and_masks(causal, document("ids")), backend="interpret",
    )  # fmt: skip
    assert max(map(len, str(engine).splitlines())) < 120
    said = " ".join(str(engine).split())
    for words in (
        "q, k, v 4 heads of 16, float32; tensors are (batch, length, heads, dim)",
        "sizes batch 2, queries 70, keys 70 (hints: calls may have others)",
        f"score score, test_engine.py:{first}",
        "scale q . k comes unscaled: score_mod scales itself",
        "mask and_masks(causal, document('ids')), library.py:",
        "a list of the tiles that hold a kept pair for each batch, made of ids in each call",
        "normaliser OnlineSoftmax(), library.py:",
        "row states: m, r; returned rows: lse",
        "inputs bias (heads), ids (batch, seq_len)",
        "captured table, number (read anew in each call)",
        "backward derived",
        "backend interpret: the kernels, emulated tile by tile on CPU tensors",
        "kernels none compiled in this process so far",
    ):
        assert words in said, words
    q = torch.randn(1, 5, 4, 16)
    engine(q, q, q, torch.ones(4), torch.zeros(1, 5, dtype=torch.int32))
    assert "kernels ready in this process: straight.forward.forward" in " ".join(str(engine).split())
    bounds = str(AttentionEngine((meta_tensor(None, 2, None, 16),) * 3, mask_mod=causal, device=arch.H100()))
    assert "sizes       any batch and length\n  score       q . k\n" in bounds
    assert "bounds of loops: tiles without a kept pair are not visited" in bounds and "for H100" in bounds


def test_a_program_is_shown_with_its_backward_pass():
    text = build().program()
    assert text.index("lse") < text.index("\n\n# backward: ") < text.index("delta")


def test_a_programs_lines_are_numbered_and_name_the_users_functions():
    text = build().program()
    lines = text.splitlines()
    assert lines[0] == "# q . k comes unscaled: score_mod scales itself"
    numbered = [line for line in lines if line and not line.startswith("#")]
    assert [int(line[:3]) for line in numbered] == list(range(1, len(numbered) + 1))
    assert max(map(len, lines)) < 120 and repr(text) == str(text)
    score, keep, m = (next(n for n in numbered if n[5:].startswith(name)) for name in ("score = ", "keep = ", "next.m"))
    assert score.endswith(f"# engines.py:{scaled.__code__.co_firstlineno} scaled")
    assert keep.endswith(f"# engines.py:{causal.__code__.co_firstlineno} causal")
    assert m[5:].startswith("next.m = maximum(state.m, row_max(score))  ") and m.endswith(" OnlineSoftmax.online_fwd")
    assert "weights = exp(score - next.m)" in text
    defined = [line[5:].split(" = ")[0] for line in numbered]
    for n, line in enumerate(numbered):  # each name stands before it is used
        used = line[5:].split(" = ", 1)[1].split("# ")[0]
        assert not [late for late in defined[n + 1 :] if re.search(rf"(?<![\w.]){re.escape(late)}(?![\w.])", used)], (
            line
        )


def test_a_notebook_gets_a_program_as_latex():
    drawn = build({"a_b": ("heads",)}, score_mod=lambda s, c, b, h, i, j: s / c["a_b"] + 2.0).program()._repr_latex_()
    assert drawn.startswith("$$\\begin{aligned}\n") and drawn.endswith("\n\\end{aligned}$$")
    for line in (
        r"m &= -\infty \\",
        r"s &= \frac{q \cdot k}{\mathrm{a\_b}_{h}} + 2 \\",
        r"\mathrm{keep} &= j \le i \\",
        r"m' &= \max\left(m, \max_j s\right) \\",
        r"w &= \exp\left(s - m'\right) \\",
        r"r' &= \sum_j w + r \, \rho \\",
    ):
        assert line in drawn.splitlines(), line


KERNELS = {
    "forward": "forward", "backward": "backward", "preprocess": "backward_preprocess",
    "postprocess": "backward_postprocess", "queries": "backward_queries",
}  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_shown_as_tilelang(kernel):
    text = build(deterministic=kernel == "queries").source(kernel, form="tilelang")
    assert "@T.prim_func" in text and f"def {KERNELS[kernel]}(" in text


def test_what_compile_for_returns_is_shown():
    pytest.importorskip("tilelang")
    engine = build(mask_mod=lambda b, h, i, j: (i + j) % 3 > 0)
    kernels = engine._all_kernels(arch.H100())
    assert "tile map of backward" in kernels and all("@T.prim_func" in engine.source(name) for name in kernels)


def test_check_compares_every_result_with_float64():
    inputs = qkv(33, dtype=torch.float16)
    report = build(dtype=torch.float16).check(*inputs)
    assert report.ok and report.limit == 1.1
    assert [row.name for row in report.rows] == ["o", "lse", "dq", "dk", "dv", "dq of lse", "dk of lse"]
    assert str(report).splitlines()[-1] == "ok: the limit is 1.1 x the error of eager PyTorch in the same dtype"


def test_check_names_what_is_wrong(monkeypatch):
    from attention_engine.runtime import op

    engine = build(dtype=torch.float16)
    run = op.run

    def broken(*arguments):
        output, *rows = run(*arguments)
        return (output + 0.25 * (torch.arange(output.shape[1]) == 7)[:, None, None].to(output.dtype), *rows)

    monkeypatch.setattr(op, "run", broken)
    report = engine.check(*(t.half() for t in qkv()))
    wrong = [row for row in report.rows if row.ratio > report.limit]
    assert not report.ok and wrong[0].name == "o" and wrong[0].worst[1] == 7
    assert str(report).splitlines()[-1].startswith("NOT ok: ")


def test_a_program_that_depends_on_the_cut_is_refused():
    class Running(OnlineFunc):
        def __init__(self):
            super().__init__({"m": SymbolScalar("m", Var("0.0"))}, {"m": SymbolScalar("m", Var("0.0"))})

        @staticmethod
        def online_fwd(scores, online_rowscales, b, h, q_idx):
            m = online_rowscales["m"] * 0.5 + scores.get_reduce("sum")
            return scores, {"m": m}, 1.0

        @staticmethod
        def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
            return o, {"m": online_rowscales["m"]}

    with pytest.raises(NotOnline):
        build(online_func=Running(), score_mod=scaled)


def test_a_kernels_text_has_a_title_and_no_long_line_and_means_the_same():
    import ast

    engine = build({"ids": ("batch", "seq_len")}, mask_mod=document("ids"), device=arch.H100(), dtype=torch.float16)
    for kernel in ("forward", "backward"):
        text, printed = engine.source(kernel), engine._source_kernel(kernel, "tilelang").source("tilelang")
        assert text.startswith(f"# {kernel}: TileLang's own print of the kernel. ")
        assert f"engines.py:{scaled.__code__.co_firstlineno}" in text and max(map(len, text.splitlines())) < 120
        assert max(map(len, printed.splitlines())) > 120  # there was something to fold
        assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(printed))
