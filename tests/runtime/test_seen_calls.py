"""Calls whose signature was seen skip the checks: nothing that a check would refuse or change may slip through."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attention_engine import compiler
from attention_engine.errors import BadInput
from attention_engine.runtime import inputs, op
from attention_engine.runtime.arguments import template, with_strides
from tests.runtime.engines import BACKENDS, DIM_V, HEADS, build, close, qkv, results, same
from tests.runtime.test_errors import WRONG, K, Q, V

WITH_BIAS = {"score_mod": lambda score, custom, b, h, q_idx, kv_idx: score * 0.25 + custom["bias"]}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_refused_before_a_good_call_is_refused_after_it(backend, kind):
    engine = build(backend=backend)
    for _ in range(2):
        engine(Q, K, V)
    mistake, given, message = WRONG[kind]
    with pytest.raises(mistake) as caught:
        engine(*given)
    assert str(caught.value) == message


OTHER_BIAS = [torch.zeros(HEADS + 1), torch.zeros(HEADS, device="meta"), torch.zeros(HEADS).cfloat()]


@pytest.mark.parametrize("bias", OTHER_BIAS, ids=["shape", "device", "dtype"])
def test_custom_inputs_of_another_kind_are_checked_again(bias):
    engine = build({"bias": ("heads",)}, **WITH_BIAS)
    for _ in range(2):
        engine(Q, K, V, torch.zeros(HEADS))
    with pytest.raises(BadInput, match="custom input 'bias'"):
        engine(Q, K, V, bias)
    with pytest.raises(BadInput, match="custom input 'bias' is missing"):
        engine(Q, K, V)
    with pytest.raises(BadInput, match="custom input 'bias' is list"):
        engine(Q, K, V, [0.0] * HEADS)


def test_a_seen_call_runs_no_check_and_gives_the_same(monkeypatch):
    engine = build()
    first = results(engine, *qkv())
    for name in ("check_qkv", "check_custom", "check_ranks", "order_custom"):
        monkeypatch.setattr(f"attention_engine.runtime.module.{name}", None)
    same(results(engine, *qkv()), first)
    same(results(engine, *[t.detach().clone().requires_grad_() for t in qkv()]), first)
    with pytest.raises(TypeError):
        engine(*qkv(12))  # another length has not been seen


def test_a_seen_call_launches_without_a_look_at_its_problem(monkeypatch):
    engine, given = build(dtype=torch.float16), qkv(dtype=torch.float16)
    first = results(engine, *given)
    monkeypatch.setattr("attention_engine.runtime.program_kernels.ProgramKernels.forward", None)
    same(results(engine, *given), first)
    with torch.no_grad():
        assert torch.equal(engine(*given), first[0])
        shifted = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in given]
        assert torch.equal(engine(*shifted), first[0])


def test_a_call_like_the_last_is_not_looked_up(monkeypatch):
    engine, given = build(dtype=torch.float16), qkv(dtype=torch.float16)
    results(engine, *given)
    with torch.no_grad():
        engine(*given)
    monkeypatch.setattr("attention_engine.runtime.engine.signature", None)
    first = results(engine, *given)  # with gradients: that autograd was off in the last call is not taken over
    with torch.no_grad():
        o, rows = engine(*given, return_rowscales=True)
        assert torch.equal(o, first[0]) and not o.requires_grad and list(rows) == ["lse"]
    kinds = {
        "another length": [t[:, 1:] for t in given],
        "another dtype": [t.float() for t in given],
        "another order": [t.transpose(1, 2) for t in given],
        "no gradients": [t.detach() for t in given],
    }
    for other in kinds.values():
        with pytest.raises(TypeError):
            engine(*other)


def test_modes_of_autograd_may_take_turns():
    engine, given = build(dtype=torch.float16), qkv(dtype=torch.float16)
    exact = results(engine, *given)
    for _ in range(3):
        same(results(engine, *given), exact)
        with torch.no_grad():
            o = engine(*given)
        with torch.inference_mode():
            inferred = engine(*given)
        assert not o.requires_grad and not o.is_inference() and inferred.is_inference()
        assert torch.equal(o, exact[0]) and torch.equal(inferred, exact[0])
        plain = engine(*(t.detach() for t in given))
        assert not plain.requires_grad and torch.equal(plain, exact[0])


def test_a_block_mask_that_comes_later_counts():
    engine, given = build(dtype=torch.float16), [t.detach() for t in qkv(dtype=torch.float16)]
    for _ in range(3):
        engine(*given)
    engine.block_mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    assert engine(*given).abs().sum() == 0


def test_without_torch_s_guards_calls_are_looked_up(monkeypatch):
    monkeypatch.setattr("attention_engine.runtime.seen.TensorGuards", None)
    engine, given = build(dtype=torch.float16), qkv(dtype=torch.float16)
    exact = results(engine, *given)
    for _ in range(2):
        same(results(engine, *given), exact)
    assert engine._again is None


def test_where_a_call_must_look_at_more_it_does():
    """The switch for tf32, an address that decides what is staged, no entries."""
    q, k, v = (t.detach() for t in qkv(dtype=torch.float16))
    bias = build({"bias": ("heads", "seq_len", "seq_len_kv")}, dtype=torch.float16, **WITH_BIAS)
    bias(q, k, v, torch.zeros(q.shape[2], q.shape[1], k.shape[1]))
    single, empty = build(), build(dtype=torch.float16)
    single(q.float(), k.float(), v.float())
    empty(q[:0], k[:0], v[:0])
    for engine in (bias, single, empty):
        assert [seen.direct for seen in engine._seen.values()] == [None]


def test_launches_that_list_tiles_are_known_too():
    """By lengths alone, which are listed once, and by a tensor, which are listed in each call."""
    q, k, v = (t.detach() for t in qkv(150, dtype=torch.float16))
    ends = torch.tensor(60)
    by_lengths = build(dtype=torch.float16, mask_mod=lambda b, h, i, j: (i * 7 + j) % 3 == 0)
    by_tensor = build(dtype=torch.float16, mask_mod=lambda b, h, i, j: (j < ends) & (i >= j))
    for engine in (by_lengths, by_tensor):
        plain = copy.copy(engine)
        plain.backend = "reference"
        for end in (60, 60, 10, 140):
            ends.fill_(end)
            torch.testing.assert_close(engine(q, k, v), plain(q, k, v), rtol=1e-2, atol=2e-3)
        assert all(seen.direct is not None for seen in engine._seen.values())


def test_what_a_first_call_only_pretends_is_not_kept():
    """Fake tensors, and those of a transform, may come first; what is remembered is for real ones."""
    given = [t.detach() for t in qkv(13, dtype=torch.float16)]
    engine = build(dtype=torch.float16)
    with FakeTensorMode() as fakes:
        assert engine(*(fakes.from_tensor(t) for t in given)).shape == (2, 13, HEADS, DIM_V)
    torch.func.grad(lambda *t: engine(*t).float().sum())(*given)
    assert engine._seen == {}
    again = engine(*given)
    assert type(again) is torch.Tensor and torch.equal(again, build(dtype=torch.float16)(*given))
    assert len(engine._seen) == 1


@pytest.fixture
def switch():
    before = torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = before


def test_the_switch_for_tf32_is_followed_after_calls_without_it_and_the_reverse(switch):
    engine, given = build(), [t.detach() for t in qkv()]
    for allowed in (False, True, False):
        switch.allow_tf32 = allowed
        engine(*given)
        engine(*given)
        program_kernels = op.ATTENTIONS[next(iter(engine._keys.values()))].program_kernels
        assert program_kernels.bound(*given, []).kernels.problem.tf32 is allowed
        assert program_kernels.kernels(*given, []).problem.tf32 is allowed
    assert {kernels.problem.tf32 for kernels in program_kernels._kernels.values()} == {False, True}


def test_autocast_is_followed_after_calls_without_it_and_the_reverse():
    engine = build(backend="reference")
    tensors = [t.detach() for t in qkv()]
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            assert engine(*tensors).dtype is dtype


@pytest.mark.parametrize("strided", [False, True])
def test_one_signature_may_come_with_many_strides(strided):
    """Checks don't look at strides; launches do."""
    engine = build()
    exact = results(engine, *qkv())
    q, k, v = qkv()
    if strided:
        q, k, v = (torch.stack([t.detach()] * 2, -1)[..., 0].requires_grad_() for t in (q, k, v))
        assert q.stride(3) == 2
    same(results(engine, q, k, v), exact)
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in qkv())
    same(results(engine, q, k, v), exact)


def test_dispatch_modes_see_the_ops_of_seen_calls():
    engine, found = build(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found.append(function)
            return function(*args, **(kwargs or {}))

    q, k, v = qkv()
    exact = results(engine, q, k, v)
    with Watch():
        again = results(engine, q, k, v)
    same(again, exact)
    assert op.FORWARD in found and op.BACKWARD in found
    found.clear()
    results(engine, q, k, v)
    assert found == []


def test_a_profiler_sees_the_ops_of_seen_calls():
    engine = build()
    q, k, v = qkv()
    engine(q, k, v)
    with torch.profiler.profile() as profile:
        engine(q, k, v)
    assert "attention_engine::forward" in {event.name for event in profile.events()}


def test_rows_are_returned_where_they_are_asked_for_only():
    engine = build()
    q, k, v = qkv()
    o = engine(q, k, v)
    again, rows = engine(q, k, v, return_rowscales=True)
    assert torch.equal(o, again) and list(rows) == ["lse"]
    (dq,) = torch.autograd.grad(rows["lse"].sum(), q, retain_graph=True)
    assert dq.abs().sum() > 0
    close(list(torch.autograd.grad(o.sum(), (q, k, v))), list(torch.autograd.grad(again.sum(), (q, k, v))), 1e-6)


def test_too_many_signatures_are_forgotten_not_kept(monkeypatch):
    monkeypatch.setattr("attention_engine.runtime.engine.MOST_SEEN", 3)
    monkeypatch.setattr("attention_engine.runtime.program_kernels.MOST_PLANS", 3)
    engine = build()
    for length in range(1, 9):
        q, k, v = (t.detach() for t in qkv(length))
        assert torch.equal(engine(q, k, v), engine(q, k, v))
    assert len(engine._seen) <= 3
    (key,) = engine._keys.values()
    assert len(op.ATTENTIONS[key].program_kernels._bound) <= 3


def test_a_template_allocates_what_it_shows():
    shown = template((2, 3, 5), torch.float32, torch.device("cpu"))
    made = torch.empty_like(shown)
    assert made.shape == (2, 3, 5) and made.is_contiguous() and made.dtype is torch.float32
    assert shown.untyped_storage().nbytes() == 4


def test_a_plan_copies_only_what_does_not_fit():
    engine = build(dtype=torch.float16)
    q, k, v = (t.detach() for t in qkv(dtype=torch.float16))
    engine(q, k, v)
    (key,) = engine._keys.values()
    bound = op.ATTENTIONS[key].program_kernels.bound(q, k, v, [])
    assert [bound.memory(q, k, v, [])[name][3] for name in "qkv"] == [q, k, v]
    storage = torch.zeros(q.numel() + 1, dtype=torch.float16)
    shifted = storage[1:].view(q.shape)
    shifted.copy_(q)
    found = bound.memory(shifted, k, v, [])
    *strides, copied = found["q"]
    assert strides == list(with_strides(q, bound.unit)[:3])
    assert copied is not shifted and torch.equal(copied, q) and copied.data_ptr() % 16 == 0
    assert found["k"][3] is k


def test_a_known_launch_copies_what_lies_askew(monkeypatch):
    launched = []
    monkeypatch.setattr(compiler.Kernel, "run", property(lambda kernel: lambda *given: launched.append(given)))
    engine, given = build(dtype=torch.float16), [t.detach() for t in qkv(dtype=torch.float16)]
    shifted = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in given]
    for _ in range(3):
        engine(*given)
    engine(*shifted)
    assert len(launched) == 4 and all(t.data_ptr() % 16 for t in shifted)
    tensors = [[t for t in call if isinstance(t, torch.Tensor)][:3] for call in launched]
    assert all(a is b for call in tensors[:3] for a, b in zip(call, given, strict=True))
    assert all(torch.equal(a, b) and a.data_ptr() % 16 == 0 for a, b in zip(tensors[3], given, strict=True))


def test_signatures_are_of_tensors_only():
    assert inputs.signature(Q, K, V) == inputs.signature(Q.clone(), K.clone(), V.clone())
    assert inputs.signature(Q, K, V) != inputs.signature(Q.double(), K, V)
    assert inputs.signature(Q, None, V) is None
