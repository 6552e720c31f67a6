"""Custom inputs of every shape and type, with their gradients, on the interpreter beside the reference in float64."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, meta_tensor
from attention_engine.errors import BadCustomInput, BadInput, UnsupportedOperation
from attention_engine.ir.expr import Type
from attention_engine.library import OnlineSoftmax
from tests import plain
from tests.programs import SinkSoftmax
from tests.runtime.engines import BACKENDS, HEADS, agrees, build, causal, close, exactly, qkv, results, same

Q_LEN, KV_LEN = 35, 70
SIZES = {"batch": 2, "heads": HEADS, "seq_len": Q_LEN, "seq_len_kv": KV_LEN}

NAMES = ("q", "k", "v", "t")


def biased(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 * (1 + 0.1 * custom["x"]) + custom["x"]


def tensor(axes, dtype=torch.float32):
    return torch.randn([SIZES.get(a, a) for a in axes]).to(dtype)


FEW = {
    "a number": (), "one entry": (1,), "of the head": ("heads",), "of the batch": ("batch",),
    "of the query": ("seq_len",), "of batch, head and query": ("batch", "heads", "seq_len"),
    "with an axis of 1": (1, "heads", 1),
}  # fmt: skip
MANY = {"of the key": ("seq_len_kv",), "of batch and key": ("batch", "seq_len_kv"),
        "of the pair": ("seq_len", "seq_len_kv"), "of every pair": (1, "heads", "seq_len", "seq_len_kv")}  # fmt: skip


@pytest.mark.parametrize("axes", [*FEW.values(), *MANY.values()], ids=[*FEW, *MANY])
def test_a_custom_input_has_its_gradient(axes):
    found = agrees({"x": axes}, *qkv(Q_LEN, KV_LEN), tensor(axes).requires_grad_(), score_mod=biased)
    assert found[-1].shape == tensor(axes).shape and found[-1].any()


@pytest.mark.parametrize("axes", FEW.values(), ids=FEW)
def test_gradients_of_rows_are_deterministic(axes):
    inputs = (*qkv(Q_LEN, KV_LEN), tensor(axes).requires_grad_())
    engine = build({"x": axes}, score_mod=biased, deterministic=True)
    first = results(engine, *inputs)
    same(results(engine, *inputs), first)
    close(first, results(build({"x": axes}, score_mod=biased), *inputs), 1e-4)


@pytest.mark.parametrize("axes", MANY.values(), ids=MANY)
def test_gradients_of_keys_and_pairs_are_deterministic(axes):
    agrees({"x": axes}, *qkv(Q_LEN, KV_LEN), tensor(axes).requires_grad_(), score_mod=biased, deterministic=True)


def moved(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 + custom["table"][h, (q_idx - kv_idx).clamp(-20, 20) + 20]


def crossed(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 * custom["table"][h, (q_idx // 3 + kv_idx) % 41]


@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "fixed order"])
@pytest.mark.parametrize("score_mod", [moved, crossed], ids=["along diagonals", "anywhere"])
def test_reads_at_indices_of_the_pair_have_their_gradient(score_mod, deterministic, monkeypatch):
    monkeypatch.setattr("attention_engine.runtime.custom_gradients.PAIRS_AT_ONCE", 1)  # several parts of rows
    table = torch.randn(HEADS, 41, requires_grad=True)
    inputs = (*qkv(Q_LEN, KV_LEN), table)
    agrees({"table": ("heads", 41)}, *inputs, score_mod=score_mod, deterministic=deterministic, mask_mod=None)


def test_a_tensor_read_in_many_places_has_one_gradient():
    def score(s, custom, b, h, q_idx, kv_idx):
        x = custom["x"]
        few = x[0, 3, kv_idx] + x[0, q_idx, 5] + x[0, q_idx - kv_idx, 2]
        return 0.1 * (s * x[0, q_idx, kv_idx] + x[0, kv_idx, q_idx] + few)

    for deterministic in (False, True):
        x = torch.randn(1, 40, 40, requires_grad=True)
        agrees({"x": (1, "seq_len", "seq_len_kv")}, *qkv(40), x, score_mod=score, deterministic=deterministic)


@pytest.mark.parametrize("kind", ["expanded", "turned", "every second"])
def test_any_strides_of_a_custom_input(kind):
    whole = torch.randn(HEADS, 2 * KV_LEN, 2 * Q_LEN)
    x = {"expanded": whole[:1, :Q_LEN, :KV_LEN].expand(HEADS, -1, -1), "turned": whole[:, :KV_LEN, :Q_LEN].mT,
         "every second": whole.mT[:, ::2, ::2]}[kind].detach().requires_grad_()  # fmt: skip
    assert x.shape == (HEADS, Q_LEN, KV_LEN) and not x.is_contiguous()
    agrees({"x": ("heads", "seq_len", "seq_len_kv")}, *qkv(Q_LEN, KV_LEN), x, score_mod=biased)


def test_gradients_that_nobody_asks_for_cost_no_kernel():
    from attention_engine.runtime import op

    axes = {"x": ("heads", "seq_len", "seq_len_kv"), "y": ("heads",)}

    def score(s, custom, b, h, q_idx, kv_idx):
        return s * custom["y"] + custom["x"]

    op.ATTENTIONS.clear()
    x, y = tensor(axes["x"]), tensor(axes["y"])
    engine = build(axes, score_mod=score)
    results(engine, *qkv(Q_LEN, KV_LEN), x, y)
    results(engine, *qkv(Q_LEN, KV_LEN), x.requires_grad_(), y)
    ((_, attention),) = op.ATTENTIONS.items()
    plain, with_x = (kernels.plan for kernels in attention.program_kernels._kernels.values())
    assert not (plain.over_queries or plain.custom_sums.pairs or plain.row_sums.sums)
    assert len(with_x.custom_sums.pairs) == 1 and not with_x.over_queries


def relative(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 + custom["table"][h, q_idx - kv_idx + 10]


def test_an_index_out_of_range_reads_0_and_gets_no_gradient():
    table = torch.randn(HEADS, 14, requires_grad=True)  # distances from -10 to 3; the rest is out of range
    inputs = (*qkv(Q_LEN, KV_LEN), table)
    found = agrees({"table": ("heads", 14)}, *inputs, score_mod=relative, mask_mod=None)
    wide = torch.nn.functional.pad(table.detach(), (60, 60)).requires_grad_()  # the same with every distance in range

    def shifted(score, custom, b, h, q_idx, kv_idx):
        return score * 0.25 + custom["table"][h, q_idx - kv_idx + 70]

    padded = results(build({"table": ("heads", 134)}, score_mod=shifted, mask_mod=None), *inputs[:3], wide)
    close(found[:-1], padded[:-1], 2e-5)
    close([found[-1]], [padded[-1][:, 60:74]], 2e-5)


def test_constant_indices_outside_read_0():
    def score(s, custom, b, h, q_idx, kv_idx):
        return s * custom["t"][1] + 3 * custom["t"][2] * kv_idx + custom["t"][-1] * kv_idx

    t = torch.tensor([5.0, 0.3], requires_grad=True)
    found = agrees({"t": (2,)}, *qkv(Q_LEN, KV_LEN), t, score_mod=score)
    assert found[-1][0] == 0 and found[-1][1] != 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16, torch.uint8], ids=str)
def test_a_mask_reads_document_ids(dtype):
    def document(b, h, q_idx, kv_idx, custom):
        return causal(b, h, q_idx, kv_idx) & (custom["ids"][b, q_idx] == custom["ids"][b, kv_idx])

    ids = torch.stack([torch.arange(40) // 7, torch.arange(40) // 16]).to(dtype)
    inputs = qkv(40)
    found = agrees({"ids": ("batch", "seq_len")}, *inputs, ids, mask_mod=document)
    alone = build()(*(t[:1, 7:14] for t in inputs))  # the second document of the first batch
    close([found[0][:1, 7:14]], [alone], 1e-6)


def test_a_bool_input_keeps_keys():
    def present(b, h, q_idx, kv_idx, custom):
        return custom["present"]

    kept = torch.arange(KV_LEN).expand(2, -1) % 3 != torch.tensor([[0], [1]])
    found = agrees({"present": ("batch", "seq_len_kv")}, *qkv(Q_LEN, KV_LEN), kept, mask_mod=present)
    assert not found[3][~kept].any() and not found[4][~kept].any()


def test_a_bool_input_is_a_condition():
    def score(s, custom, b, h, q_idx, kv_idx):
        from attention_engine import where

        return where(custom["local"], s * 0.25 - (q_idx - kv_idx), s * 0.25)

    agrees({"local": ("heads",)}, *qkv(Q_LEN, KV_LEN), torch.tensor([True, False, True, False]), score_mod=score)


def test_many_inputs_are_guessed_where_a_float_can_not_stand():
    flags, bits, floats = ([f"{kind}{n}" for n in range(6)] for kind in ("flag", "bits", "float"))

    def mask(b, h, q_idx, kv_idx, custom):
        kept = q_idx >= kv_idx
        for flag, bit, number in zip(flags, bits, floats, strict=True):
            kept = (kept ^ custom[flag]) & (custom[bit] & 3 != 1) & ~custom[flag] & (custom[number] < 1)
        return kept

    engine = AttentionEngine(None, CustomIO(dict.fromkeys([*floats, *flags, *bits], ("seq_len_kv",))), mask_mod=mask)
    assert engine._types == {**dict.fromkeys(flags, Type.BOOL), **dict.fromkeys(bits, Type.INT)}
    with pytest.raises(UnsupportedOperation, match=r"float5.* is a float"):
        AttentionEngine(None, engine.custom_io, mask_mod=lambda b, h, q, kv, c: (c["float5"] * 0.5) & (q > kv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_inputs_of_other_floating_dtypes_get_gradients_of_theirs(dtype):
    x = tensor(("heads", 1, "seq_len_kv"), dtype).requires_grad_()
    inputs = qkv(Q_LEN, KV_LEN)
    axes = {"x": ("heads", 1, "seq_len_kv")}
    found = results(build(axes, score_mod=biased), *inputs, x)
    assert found[-1].dtype is dtype
    exact = results(build(axes, score_mod=biased, backend="reference"), *exactly((*inputs, x)))
    close(found[:-1], exact[:-1], 1e-4)
    close(found[-1:], exact[-1:], {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-4}[dtype])


def test_an_expanded_input_is_one_tensor_seen_often():
    one = torch.randn(1, 1, requires_grad=True)
    inputs = qkv(Q_LEN, KV_LEN)
    for backend in BACKENDS:
        engine = build({"x": ("batch", "heads")}, score_mod=biased, backend=backend)
        (found,) = torch.autograd.grad((engine(*inputs, one.expand(2, HEADS)) ** 2).sum(), one)
        each = one.detach().expand(2, HEADS).clone().requires_grad_()
        (parts,) = torch.autograd.grad((engine(*inputs, each) ** 2).sum(), each)
        close([found], [parts.sum().view(1, 1)], 1e-5)


def test_a_sink_of_the_epilogue_has_its_gradient():
    sink = torch.randn(HEADS, requires_grad=True)
    for deterministic in (False, True):
        found = agrees(
            {"sink": ("heads",)}, *qkv(Q_LEN, KV_LEN), sink, online_func=SinkSoftmax(), deterministic=deterministic
        )
        assert found[-1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_that_nothing_reads_has_the_gradient_0(backend):
    inputs = (*qkv(), torch.ones(HEADS, requires_grad=True), torch.ones(3))
    o = build({"idle": ("heads",), "still": (3,)}, backend=backend)(*inputs)
    (found,) = torch.autograd.grad(o.sum(), inputs[3])
    assert found.shape == (HEADS,) and not found.any()


def test_a_number_may_stand_where_one_entry_is_declared():
    inputs = qkv()
    engine = build({"x": (1,)}, score_mod=biased)
    number = torch.tensor(0.5, requires_grad=True)
    found, entry = results(engine, *inputs, number), results(engine, *inputs, torch.tensor([0.5], requires_grad=True))
    assert found[-1].shape == ()
    same([*found[:-1], found[-1].view(1)], entry)


# ---- how they are given


def both(score, custom, b, h, q_idx, kv_idx):
    return score * custom["heat"] + custom["bias"]


AXES = {"heat": ("heads",), "bias": (1,)}
HEAT, BIAS = torch.linspace(0.1, 0.4, HEADS), torch.tensor([2.0])


def test_inputs_come_by_position_or_by_name():
    inputs = qkv()
    engine = build(AXES, score_mod=both)
    want = engine(*inputs, HEAT, BIAS)
    same([engine(*inputs, HEAT, bias=BIAS), engine(*inputs, bias=BIAS, heat=HEAT)], [want, want])
    assert not torch.equal(engine(*inputs, HEAT * 2, BIAS), want)


BEHIND = (
    "{} q, k and v, and the declared custom inputs are: {}. Masks and scales are the engine's: "
    "AttentionEngine(mask_mod=..., scale=...)."
)
REFUSED = {
    "too many": ((HEAT, BIAS, BIAS), {}, BEHIND.format("3 arguments follow", "'heat', 'bias'")),
    "one missing": (
        (HEAT,), {}, "custom input 'bias' is missing. Declared: 'heat', 'bias'; give them after q, k, v, or by name.",
    ),
    "a name that is none": (
        (HEAT, BIAS), {"slope": BIAS},
        "'slope' is no argument of a call and no custom input. Leave it out, or declare it. "
        "Declared custom inputs: 'heat', 'bias'.",
    ),
    "given twice": (
        (HEAT, BIAS), {"heat": HEAT}, "custom input 'heat' was given twice, by position and by name. Give it once.",
    ),
    "a plain number": ((HEAT, 2.0), {}, "custom input 'bias' is float. Give a tensor: torch.tensor(2.0)."),
    "a wrong shape": (
        (HEAT[:3], BIAS), {}, "custom input 'heat' has shape (3,). Its axes ('heads',) ask for (4,): give that shape.",
    ),
    "another rank": (
        (HEAT, BIAS[None]), {},
        "custom input 'bias' has shape (1, 1). Its axes (1,) ask for (1,): give that shape.",
    ),
    "a number for many": (
        (BIAS[0], BIAS), {},
        "custom input 'heat' has shape (). Its axes ('heads',) ask for (4,): give that shape.",
    ),
    "another device": (
        (HEAT, BIAS.to("meta")), {}, "custom input 'bias' is on 'meta' and q on 'cpu'. Put them on one device.",
    ),
    "complex": (
        (HEAT, BIAS.cfloat()), {}, "custom input 'bias' is torch.complex64. Give a floating, integer or bool tensor.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_that_do_not_fit_are_refused(backend, kind):
    given, named, message = REFUSED[kind]
    with pytest.raises(BadInput) as caught:
        build(AXES, score_mod=both, backend=backend)(*qkv(), *given, **named)
    assert str(caught.value) == message


def test_an_engine_without_custom_inputs_says_so():
    with pytest.raises(BadInput) as caught:
        build(online_func=OnlineSoftmax())(*qkv(), HEAT)
    assert str(caught.value) == BEHIND.format("1 argument follows", "none")


def test_a_float_tensor_as_an_index_is_refused_at_the_call():
    def score(s, custom, b, h, q_idx, kv_idx):
        return s + custom["bias"][custom["place"][q_idx]]

    engine, inputs, bias = build({"bias": (5,), "place": ("seq_len",)}, score_mod=score), qkv(), torch.randn(5)
    assert engine(*inputs, bias, torch.zeros(11, dtype=torch.int64)).isfinite().all()
    with pytest.raises(BadCustomInput) as caught:
        engine(*inputs, bias, torch.zeros(11))
    line = score.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"test_custom_inputs.py:{line}: custom input 'bias' is read at place[q_idx], which is a float. "
        "Write // instead of /, or x.to(int).\n  Indices are integers; so is what a custom input of integers holds."
    )


@pytest.mark.parametrize("axes", [(1, "heads", "seq_len", "seq_len_kv"), ("batch", "seq_len", "seq_len_kv")], ids=str)
def test_a_bias_of_whole_16_byte_rows_is_staged(axes):
    from attention_engine.runtime import op

    x = torch.randn([{**SIZES, "seq_len_kv": 72}.get(a, a) for a in axes]).half().requires_grad_()
    inputs = qkv(Q_LEN, 72, dtype=torch.float16)
    for deterministic in (False, True):
        op.ATTENTIONS.clear()
        agrees({"x": axes}, *inputs, x, score_mod=biased, deterministic=deterministic)
        found = [a.program_kernels for a in op.ATTENTIONS.values() if a.program_kernels is not None]
        assert [k.problem.staged for k in found[0]._kernels.values()] == [("x",)] * 2


class Exponentials(OnlineFunc):
    """exp(x / 2) over one more than its row sum: a sum that may be infinite, and whose gradient then is held at 0."""

    def __init__(self):
        super().__init__({"r": 0.0}, {"r": 0.0})

    @staticmethod
    def online_fwd(scores, rows, b, h, q_idx):
        weights = (0.5 * scores).exp()
        return weights, {"r": rows["r"] + weights.get_reduce("sum")}, 1.0

    @staticmethod
    def online_fwd_epilogue(o, rows, b, h, q_idx):
        return o / (rows["r"] + 1), {"r": rows["r"]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_rows_input_is_corrected_by_what_arrives_at_a_returned_row(backend):
    q, k, v = qkv(Q_LEN, KV_LEN)
    heat = torch.rand(2, HEADS, Q_LEN, requires_grad=True)
    d_o, d_r = torch.randn(*q.shape[:3], v.shape[3]), torch.randn(2, HEADS, Q_LEN)
    engine = build({"heat": ("batch", "heads", "seq_len")}, score_mod=lambda s, c, b, h, i, j: 0.25 * s * c["heat"],
                   online_func=Exponentials(), mask_mod=None, backend=backend)  # fmt: skip
    o, rows = engine(q, k, v, heat, return_rowscales=True)
    found = torch.autograd.grad([o, rows["r"]], [q, k, v, heat], [d_o, d_r])

    wide = [x.detach().double().requires_grad_() for x in (q, k, v, heat)]
    copies = HEADS // k.shape[2]
    of_k, of_v = (x.repeat_interleave(copies, 2) for x in wide[1:3])
    weights = (0.125 * torch.einsum("bqhd,bkhd->bhqk", wide[0], of_k) * wide[3][..., None]).exp()
    r = weights.sum(-1)
    straight = torch.einsum("bhqk,bkhd->bqhd", weights / (r[..., None] + 1), of_v)
    exact = torch.autograd.grad([straight, r], wide, [d_o.double(), d_r.double()])
    close([o, *found], [straight, *exact], 1e-4)


def test_a_learned_scale_of_scores_far_from_0_has_as_exact_a_gradient_as_eager_pytorch_in_fp32():
    torch.manual_seed(3)
    inputs = [torch.randn(1, 64, 8, 64, requires_grad=True) for _ in range(3)]
    scale, d_o = torch.full((8,), 2.0, requires_grad=True), torch.randn(1, 64, 8, 64)
    engine = AttentionEngine((meta_tensor(None, 8, None, 64, dtype=torch.float32),) * 3, CustomIO({"t": ("heads",)}),
                             lambda s, c, b, h, i, j: s * c["t"], backend="interpret")  # fmt: skip

    def plainly(attend, dtype):
        wide = [x.detach().to(dtype).requires_grad_() for x in (*inputs, scale)]
        found = attend(*wide[:3], "softmax", score=lambda s, b, h, i, j: s * wide[3][h])
        return dict(zip(NAMES, torch.autograd.grad(found, wide, d_o.to(dtype)), strict=True))

    found = torch.autograd.grad(engine(*inputs, scale), (*inputs, scale), d_o)
    exact, eager = plainly(plain.attention, torch.float64), plainly(plain.eager, torch.float32)
    plain.compare(dict(zip(NAMES, found, strict=True)), exact, eager, torch.float32)
