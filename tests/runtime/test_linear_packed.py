"""Linear attentions of packed sequences: outputs, states and gradients beside the recurrence, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_engine import CustomIO, LinearAttentionEngine, meta_tensor
from attention_engine.errors import NotYetSupported, WrongIndex, WrongSequences, WrongShape
from attention_engine.reference.dense import compute_dtype
from tests.packed_cases import drawn, starts

HEADS, DIM, DIM_V = 2, 16, 24
LENGTHS = (0, 300, 5, 0, 256, 17, 0)
COUNT = len(LENGTHS)
FEW = (0, 260, 5, 0)  # for the interpreter
BACKENDS = ("reference", "interpret")


def lengths_for(backend):
    return FEW if backend == "interpret" else LENGTHS


def engine_of(backend="reference", heads=HEADS, q_heads=HEADS, **options):
    metas = (
        meta_tensor(None, q_heads, None, DIM, dtype=torch.float32),
        meta_tensor(None, q_heads, None, DIM, dtype=torch.float32),
        meta_tensor(None, heads, None, DIM_V, dtype=torch.float32),
    )
    return LinearAttentionEngine(metas, backend=backend, **options)


def tensors(rows, q_heads=HEADS, decay=True, channels=False, sequences=COUNT):
    q, k = (drawn(rows, q_heads, DIM, seed=n).mul(DIM**-0.5) for n in (1, 2))
    v = drawn(rows, HEADS, DIM_V, seed=3)
    shape = (rows, HEADS, DIM) if channels else (rows, HEADS)
    found = [q, k, v, -drawn(*shape, seed=4).abs() * 0.1 if decay else None]
    return [None if t is None else t.requires_grad_() for t in (*found, drawn(sequences, HEADS, DIM, DIM_V, seed=5))]


def recurrence(q, k, v, decay, state, lengths, q_mod=None, k_mod=None):
    """o and last states in float64, sequence by sequence, token by token."""
    q, k, v, state = (t.double() for t in (q, k, v, state))
    q, k = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (q, k))
    outputs, last, at = [], [], 0
    for n, length in enumerate(lengths):
        s = state[n]
        for t in range(at, at + length):
            if decay is not None:
                fade = decay[t].double().exp()
                s = s * (fade[..., None, None] if fade.ndim == 1 else fade[..., None])
            s = s + k[t][:, :, None] * v[t][:, None]
            outputs.append((q[t][:, None] @ s)[:, 0])
        last.append(s)
        at += length
    return torch.stack(outputs), torch.stack(last)


def agree(found, right, leaves, close=2e-5):
    arriving = [drawn(*t.shape, seed=7 + n) for n, t in enumerate(found)]
    leaves = [t for t in leaves if t is not None]
    ours = torch.autograd.grad(found, leaves, arriving)
    theirs = torch.autograd.grad(right, leaves, [a.double() for a in arriving])
    for n, (a, b) in enumerate(zip((*found, *ours), (*right, *theirs))):
        assert a.shape == b.shape
        assert (a.double() - b.double()).abs().max() <= close * b.abs().max().clamp(min=1.0), n


CALLS = {
    "plain": {"decay": False}, "decay": {}, "channels": {"channels": True}, "shared q and k": {"q_heads": 1},
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_states_begin_and_end_with_sequences(backend, call):
    lengths = lengths_for(backend)
    given = tensors(sum(lengths), sequences=len(lengths), **call)
    *inputs, state = given
    engine = engine_of(backend, q_heads=call.get("q_heads", HEADS))
    found = engine(*inputs, initial_state=state, output_final_state=True, cu_seqlens=starts(lengths))
    agree(found, recurrence(*given, lengths), given)


def test_without_initial_states_sequences_begin_with_nothing():
    *inputs, state = tensors(sum(LENGTHS))
    found = engine_of()(*inputs, cu_seqlens=starts(LENGTHS))
    right, _ = recurrence(*inputs, state.detach() * 0, LENGTHS)
    agree([found], [right], inputs)


def test_a_batch_of_one_and_the_other_layout_are_taken():
    *inputs, state = tensors(sum(LENGTHS))
    cu, wanted = starts(LENGTHS), recurrence(*inputs, state, LENGTHS)
    o, last = engine_of()(*(t[None] for t in inputs), initial_state=state, output_final_state=True, cu_seqlens=cu)
    assert o.shape == (1, *wanted[0].shape) and last.shape == (len(LENGTHS), HEADS, DIM, DIM_V)
    agree([o[0], last], wanted, [*inputs, state])
    turned = engine_of(layout="bhsd")(*(t[None].transpose(1, 2) for t in inputs), initial_state=state, cu_seqlens=cu)
    assert torch.allclose(turned.transpose(1, 2)[0].double(), wanted[0], atol=1e-4)
    flat = engine_of(layout="bhsd")(*inputs, initial_state=state, cu_seqlens=cu)
    assert torch.allclose(flat.double(), wanted[0], atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mods_and_custom_inputs_of_packed_calls(backend):
    io = CustomIO({"of_sequence": ("batch", "heads"), "of_row": ("seq_len",), "of_head": ("heads",)})
    engine = engine_of(
        backend, custom_io=io, q_mod=lambda x, c: x * c["of_row"], k_mod=lambda x, c: x.sigmoid() + c["of_head"],
        decay_mod=lambda a, c: a * c["of_sequence"],
    )  # fmt: skip
    lengths = lengths_for(backend)
    rows = sum(lengths)
    *inputs, state = tensors(rows, sequences=len(lengths))
    custom = [drawn(len(lengths), HEADS, seed=11).abs(), drawn(rows, seed=12), drawn(HEADS, seed=13)]
    custom = [t.requires_grad_() for t in custom]
    found = engine(*inputs, *custom, initial_state=state, output_final_state=True, cu_seqlens=starts(lengths))
    q, k, v, decay = (t.double() for t in inputs)
    of_sequence, of_row, of_head = (t.double() for t in custom)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k = q * of_row[:, None, None], k.sigmoid() + of_head[:, None]
    right = recurrence(q, k, v, decay * of_sequence[sequence], state, lengths)
    agree(found, right, [*inputs, state, *custom], 5e-5)


def test_rows_behind_the_last_sequence_are_0():
    *inputs, state = tensors(sum(LENGTHS) + 9)
    o, last = engine_of()(*inputs, initial_state=state, output_final_state=True, cu_seqlens=starts(LENGTHS))
    right, ends = recurrence(*inputs, state, LENGTHS)
    assert not o[-9:].any() and torch.allclose(o[:-9].double(), right, atol=1e-4)
    assert torch.allclose(last.double(), ends, atol=1e-4)
    assert all(not g[-9:].any() for g in torch.autograd.grad(o.sum() + last.sum(), inputs))


def test_no_sequences_and_only_empty_ones():
    *inputs, state = tensors(4, sequences=2)
    o, last = engine_of()(*inputs, output_final_state=True, cu_seqlens=torch.tensor([0]))
    assert not o.any() and last.shape == (0, HEADS, DIM, DIM_V)
    o, last = engine_of()(*inputs, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor([0, 0, 0]))
    assert not o.any() and torch.equal(last, state)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("reference", torch.float64), ("interpret", torch.float32), ("interpret", torch.float16)]
)
def test_without_a_row_states_stay_as_they_were(backend, dtype):
    given = [torch.zeros(0, 2, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    decay, first = torch.zeros(0, 2, requires_grad=True), torch.randn(3, 2, 16, 16, requires_grad=True)
    starts = torch.zeros(4, dtype=torch.int32)
    o, state = LinearAttentionEngine(backend=backend)(
        *given, decay, initial_state=first, output_final_state=True, cu_seqlens=starts
    )
    assert o.shape == (0, 2, 16) and o.dtype is dtype
    assert torch.equal(state, first.to(state.dtype)) and state.dtype is compute_dtype(given[0])
    gradients = torch.autograd.grad(o.sum() + state.sum(), [*given, decay, first])
    assert (gradients[-1] == 1).all() and all(g.numel() == 0 for g in gradients[:-1])


def test_mistakes_of_packed_linear_calls_are_named():
    *inputs, state = tensors(9)
    engine, cu = engine_of(), torch.tensor([0, 4, 9])
    with pytest.raises(WrongSequences, match="cu_seqlens ends at row 9, and there are 8 rows"):
        engine(*(t[:8] for t in inputs), cu_seqlens=cu)
    with pytest.raises(WrongSequences, match="q has a batch of 2"):
        engine(*(t.unflatten(0, (3, 3))[:2] for t in inputs), cu_seqlens=cu)
    with pytest.raises(WrongShape, match=r"With these q, k and v it must be \(2, 2, 16, 24\)"):
        engine(*inputs, initial_state=state, cu_seqlens=cu)
    both = engine_of(custom_io=CustomIO({"x": ("batch", "seq_len")}), q_mod=lambda x, c: x * c["x"])
    with pytest.raises(NotYetSupported, match="custom input 'x' has an axis for sequences"):
        both(*inputs, torch.ones(2, 9), cu_seqlens=cu)
    at = engine_of(custom_io=CustomIO({"x": ("seq_len",)}), q_mod=lambda x, c: x * c["x"][3])
    with pytest.raises(WrongIndex, match="counts packed rows"):
        at(*inputs, torch.ones(9), cu_seqlens=cu)


@pytest.mark.slow
def test_torch_compile_follows_a_packed_linear_call_whole_and_once():
    torch._dynamo.reset()
    engine, counter = engine_of(decay_mod=lambda a, c: a * 2), CompileCounterWithBackend("aot_eager")

    def whole(q, k, v, decay, state, cu):
        return engine(q, k, v, decay, initial_state=state, output_final_state=True, cu_seqlens=cu)

    compiled, first = torch.compile(whole, backend=counter, fullgraph=True, dynamic=True), 0
    for lengths in ((100, 30, 170, 0, 3, 20, 1), (20, 30, 5)):
        given = tensors(sum(lengths), sequences=len(lengths))
        found, wanted = compiled(*given, starts(lengths)), whole(*given, starts(lengths))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted))
        ours, theirs = (torch.autograd.grad(o.sum() + s.sum(), given) for o, s in (found, wanted))
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(ours, theirs))
        first = first or counter.frame_count
    assert counter.frame_count == first
