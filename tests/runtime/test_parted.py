"""Attention to parts of a row's keys, merged: the whole row's, by every row function, wherever the cuts are."""

import copy
import io
import math

import pytest
import torch
from torch.utils import _pytree

from attention_engine import AttentionEngine, CustomIO, library
from attention_engine.errors import BadInput, NoMerge, NotYetSupported, OptionsClash, WrongIndex, WrongShape
from attention_engine.library import OnlineSoftmax, causal
from tests.merges import RIGHT, SOFTMAX, UNWRITTEN, made, softmax_step
from tests.plain import attention

CUTS = ((), (40,), (0, 13, 40, 90, 97))  # of 97 keys, into 1, 2 and 6 parts, of which two hold none
BATCH, QUERIES, KEYS, DIM = 2, 21, 97, 16
SHIPPED = {
    "softmax": library.OnlineSoftmax(), "softmax_one": library.OnlineSoftmaxOne(), "sigmoid": library.OnlineSigmoid(),
    "relu": library.OnlineRelu(), "retention": library.OnlineRetention(),
}  # fmt: skip


def drawn(heads=4, kv_heads=2, dtype=torch.float64, seed=0, keys=KEYS):
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(BATCH, length, number, DIM, generator=draw, dtype=dtype)
        for length, number in ((QUERIES, heads), (keys, kv_heads), (keys, kv_heads))
    ]


def pieces(cuts, keys=KEYS):
    return list(zip((0, *cuts), (*cuts, keys), strict=True))


def merged(engine, q, k, v, cuts, custom=lambda a, b: {}, **starts):
    """The output and the rows, of parts of these keys, the last part first."""
    parts = [
        engine.partial(q, k[:, a:b], v[:, a:b], kv_starts=a, **starts, **custom(a, b))
        for a, b in pieces(cuts, k.shape[1])
    ]
    return engine.merge(parts[::-1], return_rowscales=True)


def plain(row, q, k, v, scale=DIM**-0.5, **custom):
    """In float64, by the formula of the whole row."""
    k, v = (t.double().repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    weights, rows = row.plain(scores, **custom)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), rows


def custom_of(row):
    """The row function's custom inputs: whole ones as the plain formula broadcasts them, and those of some keys."""
    draw = torch.Generator().manual_seed(7)
    sizes = {"batch": BATCH, "seq_len": QUERIES, "seq_len_kv": KEYS}
    whole = {n: torch.rand([sizes[a] for a in axes], generator=draw, dtype=torch.float64) + 0.5
             for n, axes in row.custom.items()}  # fmt: skip
    shaped = {n: t.view(-1, 1) if row.custom[n] == ("seq_len",) else t.view(BATCH, 1, 1, KEYS)
              for n, t in whole.items()}  # fmt: skip

    def some(a, b):
        return {n: t[:, a:b] if "seq_len_kv" in row.custom[n] else t for n, t in whole.items()}

    return shaped, some


@pytest.mark.parametrize("cuts", CUTS, ids=lambda c: f"{len(c) + 1} parts")
@pytest.mark.parametrize("name", RIGHT)
def test_row_functions_of_nobodys_merge(name, cuts):
    row = RIGHT[name]
    engine = AttentionEngine(custom_io=CustomIO(row.custom), online_func=row.func, scale=DIM**-0.5)
    shaped, some = custom_of(row)
    q, k, v = drawn()
    o, rows = merged(engine, q, k, v, cuts, some)
    expected, expected_rows = plain(row, q, k, v, **shaped)
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)
    assert rows.keys() == expected_rows.keys()
    for n, found in rows.items():
        torch.testing.assert_close(found, expected_rows[n], rtol=1e-9, atol=1e-9)


def moved_causal(first):
    return lambda b, h, q_idx, kv_idx: q_idx + first >= kv_idx


@pytest.mark.parametrize("first", [0, 60, -10], ids=["top left", "later", "rows that see nothing"])
@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_row_functions_with_a_mask_of_places(name, first):
    engine = AttentionEngine(mask_mod=causal, online_func=SHIPPED[name], scale=DIM**-0.5)
    q, k, v = drawn()
    expected = attention(q, k, v, name, mask=moved_causal(first))
    for cuts in CUTS:
        o, _ = merged(engine, q, k, v, cuts, q_starts=first)
        torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-9)


def test_rows_that_see_nothing_are_those_of_a_call():
    engine = AttentionEngine(mask_mod=moved_causal(-10))
    q, k, v = drawn()
    o, rows = merged(engine, q, k, v, CUTS[2])
    whole, whole_rows = engine(q, k, v, return_rowscales=True)
    assert not o[:, :10].any()
    torch.testing.assert_close((o, rows), (whole, whole_rows), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [name for name, row in RIGHT.items() if not row.custom])
def test_rows_that_see_nothing_of_scores_that_may_be_far(name):
    """A maximum then starts at the lowest number there is, twice which is no number."""
    engine = AttentionEngine(
        None, CustomIO({"bias": ("seq_len_kv",)}), lambda s, c, b, h, q, kv: s * 0.25 + c["bias"],
        lambda b, h, q_idx, kv_idx: (kv_idx > 45) & (q_idx > 3), RIGHT[name].func,
    )  # fmt: skip
    q, k, v = drawn()
    bias = torch.randn(KEYS, dtype=torch.float64)
    o, rows = merged(engine, q, k, v, CUTS[2], lambda a, b: {"bias": bias[a:b]})
    found = engine(q, k, v, bias, return_rowscales=True)
    assert not o[:, :4].any()
    torch.testing.assert_close((o, rows), found, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["softmax", "retention", "sigmoid"])
def test_kernels_make_the_same_parts(name, dtype):
    """fp32 sums, whatever the inputs are: the output is rounded once, at the end."""
    func = SHIPPED[name]
    q, k, v = drawn(dtype=dtype)
    parts = [
        AttentionEngine(mask_mod=causal, online_func=func, scale=0.25, backend=backend)
        for backend in ("interpret", "reference")
    ]  # fmt: skip
    by_kernels, by_torch = (
        [e.partial(q, k[:, a:b], v[:, a:b], q_starts=70, kv_starts=a) for a, b in pieces((13, 13, 90))] for e in parts
    )
    for mine, theirs in zip(by_kernels, by_torch, strict=True):
        assert mine.o.dtype is torch.float32 and mine.states.keys() == theirs.states.keys()
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        assert (mine.o - theirs.o).norm() <= tolerance * (theirs.o.norm() + 1e-3)
        for state, found in mine.states.items():  # a maximum of nothing is any number that stands for -inf
            found, wanted = (t.clamp(min=-1e20) for t in (found, theirs.states[state]))
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    o = parts[0].merge(by_kernels)
    exact = attention(q, k, v, name, mask=moved_causal(70), score=lambda s, *_: s * 0.25)
    assert o.dtype is dtype
    assert (o.double() - exact).norm() / exact.norm() < {torch.float32: 2e-6, torch.float16: 1e-3}.get(dtype, 8e-3)


@pytest.mark.parametrize("name", ["entropy", "lagging maximum", "moments", "counted keys"])
def test_kernels_carry_states_of_every_kind(name):
    row = RIGHT[name]
    engine = AttentionEngine(custom_io=CustomIO(row.custom), online_func=row.func, scale=DIM**-0.5, backend="interpret")
    shaped, some = custom_of(row)
    q, k, v = drawn(dtype=torch.float32)
    o, rows = merged(engine, q, k, v, CUTS[2], lambda a, b: {n: t.float() for n, t in some(a, b).items()})
    expected, expected_rows = plain(row, q, k, v, **shaped)
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    for n, found in rows.items():
        torch.testing.assert_close(found.double(), expected_rows[n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "softmax_one", "entropy", "moments", "one number"])
def test_many_parts_are_as_exact_as_one(name):
    """In fp32: a sum in parts rounds less."""
    func = SHIPPED[name] if name in SHIPPED else RIGHT[name].func
    engine = AttentionEngine(online_func=func, scale=0.5)
    q, k, v = (t.float() for t in drawn(heads=1, kv_heads=1, keys=2048))
    exact, exact_rows = engine(q.double(), k.double(), v.double(), return_rowscales=True)
    errors = {}
    for count in (1, 8, 64):
        o, rows = merged(engine, q, k, v, tuple(range(2048 // count, 2048, 2048 // count)))
        errors[count] = [((o - exact).norm() / exact.norm()).item()]
        errors[count] += [((rows[n] - e).norm() / e.norm()).item() for n, e in exact_rows.items()]
    for count in (8, 64):
        assert all(many <= 2 * one + 2e-7 for many, one in zip(errors[count], errors[1], strict=True)), errors


def biased(score, custom, b, h, q_idx, kv_idx):
    return score * 0.3 - custom["slopes"] * (q_idx - kv_idx).abs() + custom["bias"]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_custom_inputs_are_the_parts_own_rows(backend):
    """A slope of the head asks for places, a bias of the batch and key for the part's own rows, a sink for the end."""
    axes = {"slopes": ("heads",), "bias": ("batch", "seq_len_kv"), "sinks": ("heads",)}
    engine = AttentionEngine(
        custom_io=CustomIO(axes), score_mod=biased, mask_mod=causal, online_func=library.OnlineSoftmaxSink(),
        backend=backend,
    )  # fmt: skip
    q, k, v = drawn(dtype=torch.float32)
    slopes, sinks, bias = torch.rand(4), torch.randn(4), torch.randn(BATCH, KEYS)
    o, rows = merged(
        engine, q, k, v, CUTS[2], lambda a, b: {"slopes": slopes, "bias": bias[:, a:b], "sinks": sinks}, q_starts=50
    )
    at, j = torch.arange(QUERIES).view(-1, 1) + 50, torch.arange(KEYS)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) * 0.3
    scores = scores - slopes.double().view(-1, 1, 1) * (at - j).abs() + bias.double().view(BATCH, 1, 1, KEYS)
    scores = scores.masked_fill(at < j, -math.inf)
    with_sink = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(BATCH, 4, QUERIES, 1)], -1)
    expected = torch.einsum("bhqk,bkhd->bqhd", with_sink.softmax(-1)[..., :-1], v.double().repeat_interleave(2, 2))
    torch.testing.assert_close(o.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows["lse"].double(), with_sink.logsumexp(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_each_batch_has_a_start_of_its_own(backend):
    engine = AttentionEngine(mask_mod=causal, backend=backend)
    q, k, v = drawn(dtype=torch.float32)
    firsts = torch.tensor([70, 3])
    o, _ = merged(engine, q, k, v, CUTS[1], q_starts=firsts)
    for b, first in enumerate(firsts.tolist()):
        one = [t[b : b + 1] for t in (q, k, v)]
        expected = attention(*one, "softmax", mask=moved_causal(first))
        torch.testing.assert_close(o[b : b + 1].double(), expected, rtol=1e-4, atol=1e-5)


def test_a_captured_table_is_read_at_places():
    table = torch.randn(200)
    engine = AttentionEngine(score_mod=lambda s, custom, b, h, q_idx, kv_idx: s * 0.2 + table[kv_idx])
    q, k, v = drawn(dtype=torch.float32)
    o, _ = merged(engine, q, k, v, CUTS[2])
    torch.testing.assert_close(o, engine(q, k, v), rtol=1e-4, atol=1e-5)


def test_layouts_and_wide_values():
    q, k, _ = drawn(dtype=torch.float32)
    v = torch.randn(BATCH, KEYS, 2, 320)
    expected = attention(q, k, v, "softmax")
    engine = AttentionEngine(backend="interpret")
    assert (merged(engine, q, k, v, CUTS[1])[0] - expected).abs().max() < 1e-5
    engine = AttentionEngine(layout="bhsd")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    parts = [engine.partial(q, k[:, :, a:b], v[:, :, a:b], kv_starts=a) for a, b in pieces(CUTS[1])]
    assert parts[0].o.shape == (BATCH, 4, QUERIES, 320)
    assert (engine.merge(parts).transpose(1, 2) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["softmax", "retention", "entropy", "one number"])
def test_the_reference_has_gradients_through_parts(name):
    func = SHIPPED[name] if name in SHIPPED else RIGHT[name].func
    engine = AttentionEngine(mask_mod=moved_causal(-3), online_func=func, scale=0.3)
    tensors = [t.requires_grad_() for t in drawn()]
    o, rows = merged(engine, *tensors, CUTS[2])
    whole, whole_rows = engine(*tensors, return_rowscales=True)
    kept = slice(3, None)  # rows that see something
    d_o, d_row = torch.randn(o.shape, dtype=o.dtype), torch.randn(BATCH, 4, QUERIES - 3, dtype=o.dtype)
    found, expected = (
        torch.autograd.grad((x * d_o).sum() + sum((r[..., kept] * d_row).sum() for r in y.values()), tensors)
        for x, y in ((o, rows), (whole, whole_rows))
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_a_part_is_a_pytree_and_is_kept():
    engine = AttentionEngine(mask_mod=causal)
    q, k, v = drawn()
    parts = [engine.partial(q, k[:, a:b], v[:, a:b], q_starts=KEYS, kv_starts=a) for a, b in pieces(CUTS[1])]
    leaves, _ = _pytree.tree_flatten(parts[0])
    assert len(leaves) == 3 and leaves[0] is parts[0].o  # o, m, r
    copies = _pytree.tree_map(torch.clone, parts)
    file = io.BytesIO()
    torch.save(copies, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    torch.testing.assert_close(copy.deepcopy(engine).merge(again), engine.merge(parts))
    torch.testing.assert_close(engine.merge(parts), attention(q, k, v, "softmax"), rtol=1e-9, atol=1e-9)


def test_a_plain_call_derives_nothing(monkeypatch):
    from attention_engine.runtime import parted

    monkeypatch.setattr(parted, "derive_merge", None)
    AttentionEngine(mask_mod=causal)(*drawn())


# ---- the user's own combine


class Combined(OnlineSoftmax):
    """Softmax with the factor of each part written by hand."""

    @staticmethod
    def combine(final_rowscales):
        lse = final_rowscales["lse"]
        top = lse.get_reduce("max")
        return (lse - ((lse - top).exp().get_reduce("sum").log() + top)).exp()


class InAnotherBase(OnlineSoftmax):
    """The same with exponentials of base 2, of an lse of base e."""

    @staticmethod
    def combine(final_rowscales):
        lse = final_rowscales["lse"]
        top = lse.get_reduce("max")
        return (lse - ((lse - top).exp2().get_reduce("sum").log2() + top)).exp2()


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_the_users_own_combine_is_taken(backend):
    engine = AttentionEngine(mask_mod=causal, online_func=Combined(), backend=backend)
    q, k, v = drawn(dtype=torch.float32)
    o, rows = merged(engine, q, k, v, CUTS[2], q_starts=30)
    exact, lse = attention(q, k, v, "softmax", mask=moved_causal(30), return_lse=True)
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows["lse"].double(), lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("func", [Combined, InAnotherBase], ids=lambda f: f.__name__)
def test_calls_with_a_cache_take_it_where_it_is_right(func):
    engine = AttentionEngine(mask_mod=causal, online_func=func(), backend="interpret")
    q, k, v = drawn(dtype=torch.float32)
    lengths = torch.full((BATCH,), KEYS, dtype=torch.int32)
    exact = attention(q[:, :1], k, v, "softmax", mask=moved_causal(KEYS - 1))
    torch.testing.assert_close(
        engine.with_cache(q[:, :1], k, v, kv_lengths=lengths).double(), exact, rtol=1e-4, atol=1e-5
    )
    if func is InAnotherBase:  # rows are then not cut
        with pytest.raises(NoMerge, match="combine does not make the row"):
            engine.with_cache(q[:, :1], k, v, kv_lengths=lengths, num_splits=2)
        return
    o, rows = engine.with_cache(q[:, :1], k, v, kv_lengths=lengths, num_splits=2, return_rowscales=True)
    torch.testing.assert_close(o.double(), exact, rtol=1e-4, atol=1e-5)
    assert rows["lse"].isfinite().all()
    kernels = [k for cached in engine._cached.values() for k in cached._kernels.values()]
    assert kernels and all(k.plan.merge.finished for k in kernels)


def test_rows_that_see_nothing_are_0_by_combine_too():
    engine = AttentionEngine(mask_mod=moved_causal(-10), online_func=Combined())
    o, _ = merged(engine, *drawn(), CUTS[2])
    assert o.isfinite().all() and not o[:, :10].any()


def test_a_wrong_combine_is_refused_with_its_line():
    engine = AttentionEngine(online_func=InAnotherBase())
    with pytest.raises(NoMerge, match=r"test_parted.py:\d+: InAnotherBase.combine: combine does not make the row"):
        engine.partial(*drawn())


def hidden(x, s):
    """Softmax with a state that no formula is found for: a sigmoid of the sum of scores."""
    m, back, e, r = softmax_step(x, s)
    total = (s["u"] / (1.0 - s["u"])).log() + 0.01 * x.get_reduce("sum")
    return e, {"m": m, "r": r, "u": total.sigmoid()}, back


HIDDEN = made(
    "Hidden", {**SOFTMAX, "u": 0.5}, hidden, lambda o, s: (o / s["r"], {"lse": s["r"].log() + s["m"], "u": s["u"]}),
    ("lse", "u"),
)  # fmt: skip


def test_combine_serves_where_no_formula_is_found():
    q, k, v = drawn()
    with pytest.raises(NoMerge, match=r"no row state tells row_sum\(score\) of a part. Keep it as a row state"):
        AttentionEngine(online_func=HIDDEN).partial(q, k, v)
    with_combine = type("WithCombine", (type(HIDDEN),), {"combine": staticmethod(Combined.combine)})()
    engine = AttentionEngine(online_func=with_combine, scale=0.25)
    parts = [engine.partial(q, k[:, a:b], v[:, a:b], kv_starts=a) for a, b in pieces(CUTS[2])]
    torch.testing.assert_close(engine.merge(parts), engine(q, k, v), rtol=1e-9, atol=1e-9)
    with pytest.raises(NoMerge, match="joins outputs alone"):
        engine.merge(parts, return_rowscales=True)


# ---- what is refused


def test_no_formula_is_said_where_parts_are_asked_for():
    engine = AttentionEngine(online_func=UNWRITTEN)
    engine(*drawn())
    with pytest.raises(NoMerge, match="is no sum of factors"):
        engine.partial(*drawn())


def test_gradients_through_kernels_are_refused():
    engine = AttentionEngine(backend="interpret")
    q, k, v = (t.float().requires_grad_() for t in drawn())
    with pytest.raises(NotYetSupported, match='backend="reference"'):
        engine.partial(q, k, v)
    with torch.no_grad():
        engine.partial(q, k, v)


def test_mistakes_are_named():
    engine = AttentionEngine(mask_mod=causal)
    q, k, v = drawn()
    with pytest.raises(WrongShape, match=r"q_starts is torch.int64 of shape \(3,\). Give a number, or integers"):
        engine.partial(q, k, v, q_starts=torch.arange(3))
    for start in (1.5, True, None, [1, 2], 2**31):
        with pytest.raises(BadInput, match=r"kv_starts is .*\. Give a place: an integer, or int32 of shape \(\d,\)"):
            engine.partial(q, k, v, kv_starts=start)
    with pytest.raises(WrongShape, match=r"kv_starts is torch\.bool"):
        engine.partial(q, k, v, kv_starts=torch.tensor(True))
    with pytest.raises(WrongShape, match=r"kv_starts is torch\.float32"):
        engine.partial(q, k, v, kv_starts=torch.zeros(BATCH))
    with pytest.raises(BadInput, match=r"given one part. Give a list of all: \[part, ...\]"):
        engine.merge(engine.partial(q, k, v))
    with pytest.raises(BadInput, match="no parts"):
        engine.merge([])
    part = engine.partial(q, k, v)
    assert repr(part) == f"Part(o {tuple(part.o.shape)}, states m, r; for torch.float64)"
    with pytest.raises(WrongShape, match="of the same queries"):
        engine.merge([part, engine.partial(q[:, 1:], k, v)])
    with pytest.raises(BadInput, match="of another attention"):
        engine.merge([part, AttentionEngine(online_func=library.OnlineSigmoid()).partial(q, k, v)])
    neighbours = AttentionEngine(
        custom_io=CustomIO({"bias": ("seq_len_kv",)}),
        score_mod=lambda s, custom, b, h, q_idx, kv_idx: s + custom["bias"][kv_idx - 1],
    )
    with pytest.raises(WrongIndex, match=r"'bias' has the axis 'seq_len_kv'.*is\s+read at bias"):
        neighbours.partial(q, k, v, torch.zeros(KEYS, dtype=q.dtype))
    dropping = AttentionEngine(dropout_p=0.1)
    with pytest.raises(NotYetSupported, match=r"Call engine\.eval\(\)"):
        dropping.partial(q, k, v)
    dropping.eval().partial(q, k, v)
    blocked = AttentionEngine(block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    with pytest.raises(OptionsClash, match="Write it as a function"):
        blocked.partial(q, k, v)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_parts_without_keys_where_a_mask_asks_each_key(backend):
    """A read of a custom input that has no entries is no reason to stumble, in a call neither."""
    engine = AttentionEngine(
        custom_io=CustomIO({"keep": ("batch", "seq_len_kv")}),
        mask_mod=lambda b, h, q_idx, kv_idx, custom: custom["keep"] > 0, backend=backend,
    )  # fmt: skip
    q, k, v = drawn(dtype=torch.float32)
    keep = torch.rand(BATCH, KEYS) < 0.5
    o, _ = merged(engine, q, k, v, CUTS[2], lambda a, b: {"keep": keep[:, a:b].int()})
    torch.testing.assert_close(o, engine(q, k, v, keep.int()), rtol=1e-4, atol=1e-5)
    assert not engine(q, k[:, :0], v[:, :0], keep[:, :0].int()).any()
