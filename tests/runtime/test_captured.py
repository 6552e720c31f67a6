"""Tensors that a user's functions capture: read anew at each call, with gradients, beside plain torch in float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from attention_engine import (
    AttentionEngine,
    CustomIO,
    LinearAttentionEngine,
    OnlineFunc,
    SymbolScalar,
    Var,
    arch,
    create_block_mask,
    create_mask,
    library,
    meta_tensor,
)
from attention_engine.codegen import compile as codegen_compile
from attention_engine.compiler import Kernel
from attention_engine.errors import (
    BadInitialValue,
    CustomInputMissing,
    DevicesDiffer,
    FunctionsChanged,
    NotATensor,
    TensorInMod,
    UnsupportedOperation,
    WrongCustomShape,
    WrongIndex,
)
from attention_engine.library import OnlineSoftmax
from attention_engine.runtime.captured import axes_now, sizes_of, specs_of, tensors_now
from attention_engine.runtime.linear_program_kernels import LinearProgramKernels
from tests.runtime.engines import BACKENDS, DIM, HEADS, build, close, qkv

both = pytest.mark.parametrize("backend", BACKENDS)
S = 21
PLACE = torch.arange(S)
BEHIND = PLACE[:, None] - PLACE  # query - key


def plain(inputs, score, keep=None, weigh=lambda x: x.softmax(-1)):
    """Attention in float64: score of the products (B, H, S, S), masked by keep, weighed by rows."""
    q, k, v = (t.double().transpose(1, 2) for t in inputs)
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    x = score(q @ k.mT)
    keep = (BEHIND >= 0) if keep is None else keep
    return (weigh(x.masked_fill(~keep, -torch.inf)) @ v).transpose(1, 2)


def agree(engine, inputs, expected, leaves, close_to=5e-5):
    """The output and the gradients of the inputs and the leaves, beside those of expected()."""
    o, want = engine(*inputs), expected()
    found = torch.autograd.grad(o.double().cos().sum(), (*inputs, *leaves))
    right = torch.autograd.grad(want.cos().sum(), (*inputs, *leaves))
    for a, b in zip((o, *found), (want, *right), strict=True):
        assert a.shape == b.shape
        assert (a.double() - b).abs().max() <= close_to * max(b.abs().max().item(), 1.0)


def number(shape=(), value=0.25, dtype=torch.float32):
    return nn.Parameter(torch.full(shape, value, dtype=dtype))


# ---- one number

SCORES = {  # score_mod of a captured t, and the same on tensors
    "score * t": (lambda t: lambda s, c, b, h, i, j: s * t, lambda x, t: x * t),
    "t * score": (lambda t: lambda s, c, b, h, i, j: t * s, lambda x, t: t * x),
    "score / t": (lambda t: lambda s, c, b, h, i, j: s / (4 * t), lambda x, t: x / (4 * t)),
    "t - score": (lambda t: lambda s, c, b, h, i, j: t - s * 0.1, lambda x, t: t - x * 0.1),
    "t ** 2 * score": (lambda t: lambda s, c, b, h, i, j: (t**2 + 0.1) * s, lambda x, t: (t**2 + 0.1) * x),
    "t.exp() * score": (lambda t: lambda s, c, b, h, i, j: t.exp() * s * 0.2, lambda x, t: t.exp() * x * 0.2),
    "softplus": (lambda t: lambda s, c, b, h, i, j: nn.functional.softplus(t) * s * 0.2,
                 lambda x, t: nn.functional.softplus(t) * x * 0.2),
    "torch.where": (lambda t: lambda s, c, b, h, i, j: torch.where(i - j > 3, s * 0.2, t),
                    lambda x, t: torch.where(BEHIND > 3, x * 0.2, t)),
    "torch.maximum": (lambda t: lambda s, c, b, h, i, j: torch.maximum(s * 0.2, t),
                      lambda x, t: torch.maximum(x * 0.2, t)),
    "scale(t)": (library.scale, lambda x, t: x * t),
    "softcap(t)": (lambda t: library.softcap(t, 0.2), lambda x, t: t * torch.tanh(x * 0.2 / t)),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", SCORES)
def test_a_number_in_a_score_has_its_gradient_and_is_read_anew(name, backend):
    mod, score = SCORES[name]
    t, inputs = number(), qkv(S)
    engine = build(score_mod=mod(t), backend=backend)
    for value in (0.25, 0.4):
        t.data.fill_(value)
        agree(engine, inputs, lambda: plain(inputs, lambda x: score(x, t.double())), [t])


@both
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_number_has_any_shape_and_floating_dtype(shape, dtype, backend):
    t, inputs = number(shape, dtype=dtype), qkv(S)
    engine = build(score_mod=lambda s, c, b, h, i, j: s * t, backend=backend)
    agree(engine, inputs, lambda: plain(inputs, lambda x: x * t.double().sum()), [t], 1e-2 if t.itemsize < 4 else 5e-5)


@both
def test_integers_and_bools_are_read_anew(backend):
    width, on, inputs = torch.tensor(3), torch.tensor(True), qkv(S)
    engine = build(
        score_mod=lambda s, c, b, h, i, j: torch.where(on, s * 0.25, s * 0.5),
        mask_mod=lambda b, h, i, j: (i - j <= width) & (i >= j), backend=backend,
    )  # fmt: skip
    for wide, factor in ((3, 0.25), (7, 0.5)):
        width.fill_(wide)
        on.fill_(factor == 0.25)
        keep = (BEHIND >= 0) & (wide >= BEHIND)
        agree(engine, inputs, lambda keep=keep, f=factor: plain(inputs, lambda x: x * f, keep), [])


# ---- read at indices


@both
def test_a_table_is_read_at_indices_with_its_gradient(backend):
    bias, inputs = nn.Parameter(torch.randn(HEADS, 2 * S)), qkv(S)
    engine = build(score_mod=lambda s, c, b, h, i, j: s * 0.25 + bias[h, i - j + S], backend=backend)
    assert [c.axes(bias.shape, {"batch": 2, "heads": HEADS, "seq_len": S, "seq_len_kv": S})
            for c in engine._captured] == [("heads", "size1")]  # fmt: skip
    for _ in range(2):
        agree(engine, inputs, lambda: plain(inputs, lambda x: x * 0.25 + bias.double()[:, BEHIND + S]), [bias])
        bias.data = torch.randn(HEADS, 2 * S)


READS = {
    "slopes[h]": ((HEADS,), lambda t, b, h, i, j: t[h], lambda t: t[:, None, None]),
    "t[h][i]": ((HEADS, S), lambda t, b, h, i, j: t[h][i], lambda t: t[:, :, None]),
    "t[h, i, j]": ((HEADS, S, S), lambda t, b, h, i, j: t[h, i, j], lambda t: t),
    "t[b, h, i, j]": ((2, HEADS, S, S), lambda t, b, h, i, j: t[b, h, i, j], lambda t: t),
    "t[0][j]": ((2, S), lambda t, b, h, i, j: t[0][j], lambda t: t[0]),
    "t[-1, j]": ((2, S), lambda t, b, h, i, j: t[-1, j], lambda t: t[-1]),
    "t[..., j]": ((1, S), lambda t, b, h, i, j: t[..., j], lambda t: t[0]),
    "t[1:][h]": ((HEADS + 1,), lambda t, b, h, i, j: t[1:][h], lambda t: t[1:, None, None]),
    "t.T[h, i]": ((S, HEADS), lambda t, b, h, i, j: t.T[h, i], lambda t: t.T[:, :, None]),
    "t.exp()[h]": ((HEADS,), lambda t, b, h, i, j: t.exp()[h], lambda t: t.exp()[:, None, None]),
    "t[h].exp()": ((HEADS,), lambda t, b, h, i, j: t[h].exp(), lambda t: t.exp()[:, None, None]),
    "torch.cat": ((HEADS - 1,), lambda t, b, h, i, j: torch.cat([t, t[:1]])[h],
                  lambda t: torch.cat([t, t[:1]])[:, None, None]),
    "t.unbind()": ((2, S), lambda t, b, h, i, j: t.unbind()[1][i], lambda t: t[1][:, None]),
    "one of the wide": ((HEADS + 3, S + 5), lambda t, b, h, i, j: t[h, j], lambda t: t[:HEADS, None, :S]),
    "out of range": ((5,), lambda t, b, h, i, j: t[j], lambda t: nn.functional.pad(t, (0, S - 5))),
}  # fmt: skip


@both
@pytest.mark.parametrize("name", READS)
def test_reads_at_indices_and_what_torch_makes_before(name, backend):
    shape, read, table = READS[name]
    t, inputs = nn.Parameter(torch.randn(shape)), qkv(S)
    engine = build(score_mod=lambda s, c, b, h, i, j: s * (0.25 + 0.1 * read(t, b, h, i, j)), backend=backend)
    agree(engine, inputs, lambda: plain(inputs, lambda x: x * (0.25 + 0.1 * table(t.double()))), [t])


@both
def test_a_view_that_is_not_contiguous_is_read(backend):
    whole, inputs = nn.Parameter(torch.randn(S, 2 * HEADS)), qkv(S)
    view = whole.detach().t()[::2].requires_grad_()
    engine = build(score_mod=lambda s, c, b, h, i, j: s * 0.25 + view[h, j], backend=backend)
    agree(engine, inputs, lambda: plain(inputs, lambda x: x * 0.25 + view.double()[:, None]), [view])


@both
def test_documents_in_a_mask_are_read_anew(backend):
    ids, inputs = torch.zeros(2, S, dtype=torch.int64), qkv(S)
    engine = build(mask_mod=lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), backend=backend)
    for seed in range(2):
        ids.copy_(torch.randint(0, 4, (2, S), generator=torch.Generator().manual_seed(seed)).sort(1).values)
        keep = ((ids[:, :, None] == ids[:, None]) & (BEHIND >= 0))[:, None]
        agree(engine, inputs, lambda keep=keep: plain(inputs, lambda x: x * 0.25, keep), [])
    other = [t[:1, :9].detach().requires_grad_() for t in inputs]  # a tensor longer than the call's lengths
    assert torch.equal(engine(*other), build(
        {"ids": (2, S)}, mask_mod=lambda b, h, i, j, c: (c["ids"][b, i] == c["ids"][b, j]) & (i >= j), backend=backend,
    )(*other, ids))  # fmt: skip


@both
def test_an_index_may_be_read_from_another_tensor(backend):
    kinds, table, inputs = torch.randint(0, 3, (S,)), nn.Parameter(torch.randn(3)), qkv(S)
    engine = build(score_mod=lambda s, c, b, h, i, j: s * 0.25 + table[kinds[j]], backend=backend)
    agree(engine, inputs, lambda: plain(inputs, lambda x: x * 0.25 + table.double()[kinds]), [table])


def test_a_tensor_that_is_captured_twice_is_one_input():
    t, inputs = number(), qkv(S)
    engine = build(
        score_mod=lambda s, c, b, h, i, j: s * t.exp() * 0.2 + t, mask_mod=lambda b, h, i, j: (i - j) * t.exp() < 13
    )
    assert [c.name for c in engine._captured] == ["t_exp", "t"]
    agree(engine, inputs, lambda: plain(inputs, lambda x: x * t.double().exp() * 0.2, BEHIND * t.exp() < 13), [t])


# ---- the other functions


class Sunk(OnlineSoftmax):
    """Softmax with a sink, as a number of its own, and a factor of the output."""

    def __init__(self, sink, factor):
        super().__init__()
        self.sink, self.factor = sink, factor

    def online_fwd_epilogue(self, o, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        total = r + (self.sink[h] - m).exp()
        return o * self.factor / total, {"lse": total.log() + m}


class Tempered(OnlineFunc):
    """exp(t x) without a normaliser: a captured number in online_fwd."""

    def __init__(self, t):
        super().__init__()
        self.t = t

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        return (scores * self.t).exp(), {}, 1.0


@both
def test_an_epilogue_reads_captured_tensors(backend):
    sink, factor, inputs = nn.Parameter(torch.randn(HEADS)), number(value=1.5), qkv(S)
    engine = build(online_func=Sunk(sink, factor), backend=backend)

    def weigh(x):
        e = x.exp()
        return factor.double() * e / (e.sum(-1, keepdim=True) + sink.double().exp()[:, None, None])

    agree(engine, inputs, lambda: plain(inputs, lambda x: x * 0.25, weigh=weigh), [sink, factor])


@both
def test_online_fwd_reads_captured_tensors(backend):
    t, inputs = number(value=0.7), qkv(S)
    engine = build(online_func=Tempered(t), backend=backend)
    weigh = lambda x: (x.clamp(-1e4) * t.double()).exp()  # noqa: E731
    agree(engine, inputs, lambda: plain(inputs, lambda x: x * 0.25, weigh=weigh), [t])


def test_a_row_state_starts_at_a_number():
    with pytest.raises(BadInitialValue, match="Var was given a tensor"):
        SymbolScalar("r", Var(number()))


# ---- beside custom inputs


@both
def test_custom_inputs_are_given_and_captured_ones_are_not(backend):
    t, slopes, inputs = number(), nn.Parameter(torch.rand(HEADS)), qkv(S)
    engine = build({"slopes": ("heads",)}, backend=backend,
                   score_mod=lambda s, c, b, h, i, j: s * t - c["slopes"] * (i - j))  # fmt: skip

    def right():
        return plain(inputs, lambda x: x * t.double() - slopes.double()[:, None, None] * BEHIND)

    agree(lambda *qkv: engine(*qkv, slopes), inputs, right, [t, slopes])
    agree(lambda *qkv: engine(*qkv, slopes=slopes), inputs, right, [t, slopes])
    for given in ((slopes, t), ()):
        with pytest.raises(CustomInputMissing):
            engine(*inputs, *given)


@both
def test_an_outside_block_mask_stands_beside_captured_tensors(backend):
    t, inputs = number(), qkv(S)
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.int8).tril()
    engine = build(score_mod=lambda s, c, b, h, i, j: s * t, mask_mod=None, block_size=(16, 16), backend=backend)
    keep = PLACE[:, None] // 16 >= PLACE // 16
    agree(lambda *qkv: engine(*qkv, block_mask=blocks), inputs,
          lambda: plain(inputs, lambda x: x * t.double(), keep), [t])  # fmt: skip
    assert engine.cost(*inputs, block_mask=blocks).pairs == int(keep.sum()) * 2 * HEADS


def test_a_tensor_called_as_a_custom_input_is_another():
    slopes, inputs = torch.tensor(0.25), qkv(S)
    engine = build({"slopes": ("heads",)}, score_mod=lambda s, c, b, h, i, j: s * slopes - c["slopes"])
    assert [c.name for c in engine._captured] == ["slopes_2"]
    close([engine(*inputs, torch.zeros(HEADS))], [build()(*inputs)], 1e-6)


# ---- modules


class Layer(nn.Module):
    """An attention whose functions read the module's own tensors."""

    def __init__(self, backend="interpret"):
        super().__init__()
        self.temperature = number()
        self.register_buffer("bias", torch.linspace(-1, 1, S))
        self.engine = build(score_mod=self.score, backend=backend)

    def score(self, score, custom, b, h, q_idx, kv_idx):
        return score * self.temperature + self.bias[kv_idx]

    def forward(self, q, k, v):
        return self.engine(q, k, v)


def layer_right(layer, inputs):
    return plain(inputs, lambda x: x * layer.temperature.double() + layer.bias.double())


@both
def test_a_modules_own_tensors_are_read_and_may_be_replaced(backend):
    layer, inputs = Layer(backend), qkv(S)
    assert [n for n, _ in layer.named_parameters()] == ["temperature"]
    assert list(layer.state_dict()) == ["temperature", "bias"]
    agree(layer, inputs, lambda: layer_right(layer, inputs), [layer.temperature])
    layer.bias = torch.linspace(1, -1, S)
    layer.temperature = number(value=0.5)
    agree(layer, inputs, lambda: layer_right(layer, inputs), [layer.temperature])
    layer.double()  # replaces the buffer
    layer.load_state_dict({"temperature": torch.tensor(0.1), "bias": torch.zeros(S)})
    agree(layer, inputs, lambda: layer_right(layer, inputs), [layer.temperature])


def test_a_copy_of_a_module_reads_its_own():
    layer, inputs = Layer(), qkv(S)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        layer.temperature.fill_(3.0)
    agree(other, inputs, lambda: layer_right(other, inputs), [other.temperature])
    agree(pickle.loads(pickle.dumps(other)), inputs, lambda: layer_right(other, inputs), [])


def test_a_factorys_tensor_is_copied_with_the_engine():
    t, inputs = number(), qkv(S)
    engine = copy.deepcopy(build(score_mod=library.scale(t)))
    t.data.fill_(2.0)
    close([engine(*inputs)], [build()(*inputs)], 1e-6)
    assert "scale(Parameter())" in repr(engine)


# ---- inside PyTorch


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


@both
def test_compiled_without_a_break_and_once(counter, backend):
    layer, inputs = Layer(backend), qkv(S)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for value in (0.25, 0.5, 0.75):
        with torch.no_grad():
            layer.temperature.fill_(value)
        agree(compiled, inputs, lambda: layer_right(layer, inputs), [layer.temperature])
    assert counter.frame_count == 1


def test_a_copy_that_was_not_called_compiles(counter):
    layer, inputs = copy.deepcopy(Layer("reference")), qkv(S)
    agree(torch.compile(layer, fullgraph=True, backend=counter), inputs, lambda: layer_right(layer, inputs),
          [layer.temperature])  # fmt: skip


def test_what_torch_makes_of_a_tensor_compiles_too(counter):
    t, table, inputs = number(), nn.Parameter(torch.randn(S, HEADS)), qkv(S)
    engine = build(score_mod=lambda s, c, b, h, i, j: s * t.exp() * 0.2 * table.T[h, i])
    compiled = torch.compile(engine, fullgraph=True, backend=counter)
    for value in (0.25, 0.5):
        t.data.fill_(value)
        agree(
            compiled,
            inputs,
            lambda: plain(inputs, lambda x: x * t.double().exp() * 0.2 * table.double().T[:, :, None]),
            [t, table],
        )
    assert counter.frame_count == 1


@both
def test_checkpointed(backend):
    layer, inputs = Layer(backend), qkv(S)
    agree(lambda *t: checkpoint(layer, *t, use_reentrant=False), inputs, lambda: layer_right(layer, inputs),
          [layer.temperature])  # fmt: skip


@both
def test_functional_calls_gradients_and_ensembles(backend):
    layer, inputs = Layer(backend), [t.detach() for t in qkv(S)]

    def loss(temperature):
        return functional_call(layer, {"temperature": temperature}, tuple(inputs)).cos().sum()

    found = grad(loss)(torch.tensor(0.4))
    layer.temperature.data.fill_(0.4)
    (right,) = torch.autograd.grad(layer_right(layer, inputs).cos().sum(), layer.temperature)
    close([found], [right], 1e-3)
    many = torch.tensor([0.1, 0.4])
    each = torch.stack([loss(t) for t in many])
    close([vmap(loss)(many)], [each], 1e-4)
    close([vmap(grad(loss))(many)[1]], [right], 1e-3)


@both
def test_a_seen_call_is_no_other_with_other_values(backend):
    """Calls that need no check again look at captured tensors as at all others."""
    t, inputs = torch.tensor(0.25), [x.detach() for x in qkv(S, dtype=torch.float16)]
    engine = build(score_mod=lambda s, c, b, h, i, j: s * t, backend=backend, dtype=torch.float16)
    for value in (0.25, 0.25, 0.25, 0.5):
        t.fill_(value)
        close([engine(*inputs)], [plain(inputs, lambda x, f=value: x * f)], 1e-2)
    t.requires_grad_()
    assert engine(*inputs).requires_grad


def test_values_are_in_no_key():
    engines = [build(score_mod=library.scale(torch.tensor(n))) for n in (0.25, 0.5)]
    assert engines[0]._program.fingerprint == engines[1]._program.fingerprint


# ---- looking at the engine


def test_the_engine_shows_what_it_captured():
    t, table, inputs = number(), nn.Parameter(torch.randn(HEADS, 2 * S)), qkv(S)
    engine = build(score_mod=lambda s, c, b, h, i, j: s * t + table[h, i - j + S], backend="reference")
    assert "t[()]" in engine.program() and "table[h, " in engine.program()
    report = engine.check(*inputs)
    assert report.ok and {"dt", "dtable"} <= {row.name for row in report.rows}
    assert engine.cost(*inputs).pairs == 2 * HEADS * S * (S + 1) // 2
    assert "forward: " in engine.explain()
    assert "custom_table" in engine.source()


@pytest.mark.slow  # as a tile program they are read above
def test_kernels_that_read_captured_tensors_are_lowered_for_a_gpu():
    """Registers and spills are those of the same program through CustomIO: none, on an H100."""
    t, table = number(), nn.Parameter(torch.randn(4, 65))
    engine = AttentionEngine(
        (meta_tensor(2, 4, 128, 64),) * 3, None, lambda s, c, b, h, i, j: s * t + table[h, (i - j).clamp(-32, 32) + 32],
        lambda b, h, i, j: i >= j, device=arch.H100(),
    )  # fmt: skip
    kernel = engine._source_kernel("forward", "cuda")
    text = codegen_compile.lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
    assert "custom_t[" in text and "custom_table[" in text


def test_masks_as_tensors_read_captured_tensors():
    ids = torch.tensor([[0, 0, 1, 1]])
    mask = lambda b, h, i, j: ids[b, i] == ids[b, j]  # noqa: E731
    assert torch.equal(create_mask(mask, 1, None, 4, 4)[0, 0], ids[0][:, None] == ids[0])
    assert create_block_mask(mask, 1, None, 4, 4, Q_BLOCK_SIZE=2, KV_BLOCK_SIZE=2)[0, 0].tolist() == [[1, 0], [0, 1]]


# ---- mistakes


def test_a_tensor_on_another_device_is_refused():
    t = torch.tensor(0.25, device="meta")
    engine = build(score_mod=lambda s, c, b, h, i, j: s * t)
    with pytest.raises(DevicesDiffer, match="captured tensor 't' is on 'meta' and q on 'cpu'"):
        engine(*qkv(S))


def test_what_took_a_tensors_place_must_fit():
    layer, inputs = Layer(), qkv(S)
    layer.bias = torch.zeros(1, S)
    with pytest.raises(WrongCustomShape, match="has become one of shape"):
        layer(*inputs)
    layer.bias = None
    with pytest.raises(NotATensor, match="captured tensor 'bias' has become NoneType"):
        layer(*inputs)


@pytest.mark.parametrize("read, error, message", [
    (lambda t, h, i: t, TensorInMod, r"a Tensor of shape \(4, 21\) meets a symbolic value"),
    (lambda t, h, i: t[h], WrongIndex, "read at some of its dimensions, and one of length 21 is left"),
    (lambda t, h, i: t[h, i, i], WrongIndex, r"has 2 dimensions \(4, 21\), and is read with 3"),
    (lambda t, h, i: t[h][i, i], WrongIndex, r"has 2 dimensions \(4, 21\), and is read with 3"),
    (lambda t, h, i: t[None, h], WrongIndex, "Read it at integers and symbols alone"),
])  # fmt: skip
def test_a_read_that_does_not_fit_is_refused(read, error, message):
    t = torch.zeros(HEADS, S)
    with pytest.raises(error, match=message):
        build(score_mod=lambda s, c, b, h, i, j: s + read(t, h, i))


class Windowed(torch.nn.Module):
    """A module whose score and mask read a number, a flag and a weight of it."""

    def __init__(self):
        super().__init__()
        self.window, self.weighs, self.weight = 3, False, torch.nn.Parameter(torch.ones(HEADS))
        self.engine = AttentionEngine(score_mod=self.score, mask_mod=self.mask)

    def score(self, score, custom, b, h, q_idx, kv_idx):
        return score * self.weight[h] if self.weighs else score

    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < self.window)


@pytest.mark.parametrize("call", ["plain", "partial", "with_cache", "packed"])
@pytest.mark.parametrize("name, value", [("window", 9), ("weighs", True)])
def test_functions_that_say_something_else_than_when_the_engine_was_built_are_refused(name, value, call):
    inputs = [t.detach() for t in qkv(S, batch=1)]
    calls = {
        "plain": lambda engine: engine(*inputs),
        "partial": lambda engine: engine.partial(*inputs),
        "with_cache": lambda engine: engine.with_cache(*inputs, kv_lengths=torch.tensor([S]).int()),
        "packed": lambda engine: engine(*(t[0] for t in inputs), cu_seqlens_q=torch.tensor([0, S]).int()),
    }
    module = Windowed()
    setattr(module, name, value)
    with pytest.raises(FunctionsChanged, match=r"has changed since. Build the engine anew"):
        calls[call](module.engine)
    copy.deepcopy(module).engine(*inputs)  # a copy is built anew


def test_mods_that_say_something_else_than_when_a_linear_engine_was_built_are_refused():
    factor, (q, k, v) = 1.0, torch.randn(3, 1, S, 2, 8)
    engine = LinearAttentionEngine(k_mod=lambda x, custom: x * factor)
    factor = 2.0
    with pytest.raises(FunctionsChanged):
        engine(q, k, v, -torch.rand(1, S, 2))


def test_weights_that_are_moved_or_replaced_are_no_change_of_functions():
    module = Windowed()
    module.weighs = True
    module.engine = AttentionEngine(score_mod=module.score, mask_mod=module.mask)
    module.half().weight = torch.nn.Parameter(2 * module.weight.detach())
    found = module.engine(*[t.detach().half() for t in qkv(S, batch=1)])
    assert found.isfinite().all() and found.dtype is torch.float16


def test_a_weight_that_is_parametrized_after_the_engine_was_built_is_refused_until_a_call_has_met_it():
    inputs, after, before = [t.detach() for t in qkv(S, batch=1)], Windowed(), Windowed()
    for module in (after, before):
        module.weighs = True
        module.engine = AttentionEngine(score_mod=module.score, mask_mod=module.mask)
    with pytest.raises(FunctionsChanged):
        register_parametrization(after, "weight", torch.nn.Softplus()).engine(*inputs)
    first = before.engine(*inputs)
    register_parametrization(before, "weight", torch.nn.Softplus())
    assert not torch.allclose(before.engine(*inputs), first)  # an attribute is looked up in each call


def test_numbers_drawn_in_a_mod_are_refused():
    """They would be the same in every call, and for every pair."""
    with pytest.raises(
        UnsupportedOperation, match=r"torch.rand in a mod draws once, when it is traced. Draw numbers out"
    ):
        build(score_mod=lambda s, c, b, h, i, j: s + torch.rand(HEADS)[h])


def test_two_draws_like_one_tensor_are_two():
    like = torch.zeros(HEADS)
    engine = build(score_mod=lambda s, c, b, h, i, j: s + (torch.rand_like(like)[h] - torch.rand_like(like)[h]) * j)
    inputs = qkv(S)
    drawn = engine(*inputs)
    assert not torch.allclose(drawn, build(score_mod=lambda s, c, b, h, i, j: s)(*inputs))
    assert not torch.allclose(drawn, engine(*inputs))


# ---- linear attention


def recurrence(q, k, v, a):
    state, found = torch.zeros(*q.shape[::2][:1], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64), []
    for n in range(q.shape[1]):
        state = a[:, n].exp()[..., None, None] * state + k[:, n][..., None] * v[:, n][..., None, :]
        found.append((q[:, n][..., None, :] @ state)[..., 0, :])
    return torch.stack(found, 1)


@both
def test_linear_mods_read_captured_tensors(backend):
    t, g, table = number((1, 1)), number(value=0.1), nn.Parameter(torch.tensor([0.5, 1.5]))
    kinds = torch.randint(0, 2, (2, S))
    engine = LinearAttentionEngine(
        (meta_tensor(None, HEADS, None, DIM, dtype=torch.float32),) * 3, lambda x, c: x * t,
        lambda x, c: x.exp() * t.exp(), lambda x, c: x * table[c["kinds"]], lambda x, c: x * g,
        CustomIO({"kinds": ("batch", "seq_len")}), backend=backend,
    )  # fmt: skip
    q, k, v = (torch.randn(2, S, HEADS, DIM, requires_grad=True) for _ in range(3))
    decay = (-torch.rand(2, S, HEADS)).requires_grad_()

    def right():
        by_kind = table.double()[kinds][..., None, None]
        return recurrence(q.double() * t.double(), k.double().exp() * t.double().exp(), v.double() * by_kind,
                          decay.double() * g.double())  # fmt: skip

    for value in (0.25, 0.5):
        t.data.fill_(value)
        agree(lambda *given: engine(*given, kinds), (q, k, v, decay), right, [t, g, table], 2e-4)
    assert engine.check(q, k, v, decay, kinds).ok
    state, found = None, []
    for n in range(S):
        o, state = engine.step(q[:, n], k[:, n], v[:, n], decay[:, n], kinds[:, n : n + 1], state=state)
        found.append(o)
    close([torch.stack(found, 1)], [right()], 1e-3)
    assert "t[()]" in engine.program() and "table[long(kinds" in engine.program() and engine.source()
    assert "chunks" in engine.explain()


@pytest.mark.parametrize("per", ["token", "channel"])
def test_kernels_of_captured_tensors_are_compiled_ahead_as_calls_launch_them(per, monkeypatch):
    asked = []
    monkeypatch.setattr(Kernel, "compiled", property(lambda kernel: asked.append(kernel) or (lambda *_: None)))
    rate, table = number((1, 1)), nn.Parameter(torch.tensor([0.5, 1.5]))
    engine = LinearAttentionEngine(
        (meta_tensor(2, 2, 128, 64, dtype=torch.bfloat16),) * 3, lambda x, c: x * rate,
        v_mod=lambda x, c: x * table[1], decay_mod=lambda a, c: a * rate)  # fmt: skip
    names = engine.compile_for(arch.H100(), decay=per)
    ahead = {(k.builder, k.given, tuple(k.configs.items())) for k in asked}
    assert "step" in names
    asked.clear()
    q, k, v = (torch.randn(2, 128, 2, 64).bfloat16() for _ in range(3))
    decay, captured = -torch.rand(2, 128, 2, *([64] if per == "channel" else [])), engine._captured
    held = [t.detach() for t in tensors_now(captured)]
    learned = frozenset(["decay", *(c.name for c in captured)])
    assert len(learned) == 3
    program = engine._trace(engine._types, True)
    specs = specs_of(captured, axes_now(captured, held, sizes_of(v, v)))
    program_kernels = LinearProgramKernels(program, specs, False, arch.H100(), per_channel=per == "channel")
    program_kernels.forward(q, k, v, decay, None, held, False)
    program_kernels.backward(q, k, v, decay, None, held, v, None, learned)
    assert asked and {(k.builder, k.given, tuple(k.configs.items())) for k in asked} <= ahead


def test_captured_tensors_of_a_linear_engine_compile(counter):
    t = number()
    engine = LinearAttentionEngine(
        (meta_tensor(None, 2, None, DIM, dtype=torch.float32),) * 3, lambda x, c: x * t, backend="reference"
    )
    compiled = torch.compile(engine, fullgraph=True, backend=counter)
    q, k, v = (torch.randn(2, S, 2, DIM, requires_grad=True) for _ in range(3))
    for value in (0.25, 0.5):
        t.data.fill_(value)
        agree(
            compiled,
            (q, k, v),
            lambda: recurrence(q.double() * t.double(), k.double(), v.double(), torch.zeros(2, S, 2)),
            [t],
            2e-4,
        )
    assert counter.frame_count == 1


def test_an_exported_linear_engine_repeats_what_torch_makes_of_captured_tensors():
    rate = nn.Parameter(torch.tensor([0.1, 0.3]))
    engine = LinearAttentionEngine(
        [meta_tensor(1, 2, 9, 16, dtype=torch.float32)] * 3, decay_mod=lambda a, c: -rate.exp()[0] * a.sigmoid(),
        backend="interpret",
    )  # fmt: skip
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    decay = torch.randn(1, 9, 2)
    exported = torch.export.export(engine, (q, k, v, decay)).module()
    want = engine(q, k, v, decay)
    assert torch.equal(exported(q, k, v, decay), want)
    rate.data.add_(1.0)
    assert not torch.allclose(engine(q, k, v, decay), want)
    assert torch.equal(exported(q, k, v, decay), engine(q, k, v, decay))  # what was exported reads it anew too
