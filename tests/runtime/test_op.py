"""The torch.library ops: what torch asks of an op, and torch.compile through whole engines."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_engine.runtime import attention_op, op, program_kernels
from attention_engine.runtime.attentions import ATTENTIONS
from tests.runtime.engines import BACKENDS, HEADS, build, close, graphs, qkv, results, same, weighted_sum


def biased(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 + custom["slopes"] * (q_idx - kv_idx)


def with_slopes(backend, **options):
    return build({"slopes": ("heads",)}, score_mod=biased, backend=backend, **options)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(backend, dtype=torch.float32, permuted=False, number=0):
    """What the forward and the backward op are called with."""
    seen: list[tuple] = []
    engine = with_slopes(backend, dtype=dtype)
    inputs = [t.detach() for t in qkv(9, 12, dtype=dtype)]
    if permuted:
        inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    slopes = torch.rand(HEADS)
    engine(*inputs, slopes)
    key = next(reversed(engine._keys.values()))
    o, rows = op.FORWARD(*inputs, [slopes], key)
    seen.append((*inputs, [slopes], key))
    d_rows = [torch.randn_like(rows[0])]
    seen.append((*inputs, [slopes], o, rows, torch.randn_like(o), d_rows, [0], [0], key))
    return seen[number]


OPS = {"forward": (op.FORWARD, 0), "backward": (op.BACKWARD, 1)}


@pytest.mark.parametrize(("dtype", "permuted"), [
    (torch.float32, False), (torch.float32, True), (torch.float16, False),
    *(pytest.param(dtype, permuted, marks=pytest.mark.slow)
      for dtype, permuted in [(torch.float16, True), (torch.bfloat16, False), (torch.bfloat16, True)]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("name", "backend"), [
    ("forward", "reference"), ("forward", "interpret"),
    ("backward", "interpret"),  # the reference's differentiates by autograd, above which opcheck's modes stand
])  # fmt: skip
def test_an_op_keeps_the_rules_of_torch(name, backend, permuted, dtype):
    run, number = OPS[name]
    torch.library.opcheck(run, arguments(backend, dtype, permuted, number))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("permuted", [False, True], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPS)
def test_a_fake_has_the_shape_dtype_and_strides_of_the_result(name, backend, permuted, dtype):
    run, number = OPS[name]
    given = arguments(backend, dtype, permuted, number)
    real = torch.utils._pytree.tree_leaves(run(*given))
    mode = torch._subclasses.FakeTensorMode()
    to_fake = lambda t: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t  # noqa: E731
    with mode:
        fake = torch.utils._pytree.tree_leaves(run(*torch.utils._pytree.tree_map(to_fake, given)))
    assert len(real) == len(fake) >= 2
    for a, b in zip(real, fake):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_runs_under_a_mode_that_watches_ops(backend):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    inputs = (*qkv(9, 12), torch.rand(HEADS, requires_grad=True))
    want = results(with_slopes(backend, deterministic=True), *inputs)
    with Watch():
        same(results(with_slopes(backend, deterministic=True), *inputs), want)


@pytest.mark.filterwarnings("default:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_engine_compiles_without_a_break(backend, compiler):
    inputs = (*qkv(9, 12), torch.rand(HEADS, requires_grad=True))
    engine = with_slopes(backend, deterministic=True)
    found = results(torch.compile(engine, fullgraph=True, backend=compiler), *inputs)  # before any eager call
    close(found, results(engine, *inputs), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_arrive_through_the_rows_of_a_compiled_engine(backend):
    def loss(o, rows):
        return weighted_sum(o, rows) + (rows["lse"] ** 2).sum()

    inputs = (*qkv(9, 12), torch.rand(HEADS, requires_grad=True))
    engine = with_slopes(backend)
    compiled = torch.compile(engine, fullgraph=True, backend="aot_eager")
    close(results(compiled, *inputs, loss=loss), results(engine, *inputs, loss=loss), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_maths_around_an_engine_joins_its_graph(backend):
    engine = build(backend=backend, layout="bhsd")

    def block(x, weight):
        q, k, v = (x @ weight).view(2, 9, 8, 17)[..., :16].split([4, 2, 2], 2)
        v = torch.cat([v, v[..., :8]], -1)
        return (engine(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) ** 2).sum()

    x, weight = torch.randn(2, 9, 32, requires_grad=True), torch.randn(32, 136, requires_grad=True)
    counter = CompileCounterWithBackend("aot_eager")
    found = torch.autograd.grad(torch.compile(block, fullgraph=True, backend=counter)(x, weight), (x, weight))
    close(list(found), list(torch.autograd.grad(block(x, weight), (x, weight))), 1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_and_batches_compile_once(backend):
    engine = with_slopes(backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(engine, fullgraph=True, dynamic=True, backend=counter)
    # the first sizes differ from one another and from the heads and dims: torch takes equal ones for the same number
    for batch, q_len, kv_len in ((3, 9, 12), (2, 17, 10), (5, 70, 33), (4, 12, 130)):
        inputs = (*qkv(q_len, kv_len, batch=batch), torch.rand(HEADS, requires_grad=True))
        close(results(compiled, *inputs), results(engine, *inputs), 1e-5)
    assert graphs(counter) == 1


def test_another_engine_makes_no_compiled_one_compile_again():
    engine, inputs = build(), qkv()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(engine, fullgraph=True, backend=counter)
    first = results(compiled, *inputs)
    results(build(mask_mod=None), *inputs)
    same(results(compiled, *inputs), first)
    assert counter.frame_count == 1


def test_two_programs_of_one_shape_are_two_keys():
    inputs = qkv()
    one, other, again = build(), build(mask_mod=None), build()
    for engine in (one, other, again):
        engine(*inputs)
    keys = [next(iter(e._keys.values())) for e in (one, other, again)]
    assert keys[0] == keys[2] != keys[1]
    kinds = [build(backend="reference"), build(deterministic=True)]
    for engine in kinds:
        engine(*inputs)
    assert len({keys[0], *(next(iter(e._keys.values())) for e in kinds)}) == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_input_whose_gradient_nobody_wants_gets_an_empty_tensor(backend):
    *given, wanted, key = arguments(backend, torch.float32, False, 1)
    assert wanted == [0]
    *qkv_wanted, (d_slopes,) = op.BACKWARD(*given, wanted, key)
    *qkv_alone, (nothing,) = op.BACKWARD(*given, [], key)
    assert d_slopes.any() and nothing.shape == (0,)
    for a, b in zip(qkv_wanted, qkv_alone):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_go_into_a_run_of_a_longer_tensor(backend, batch, monkeypatch):
    """Of one batch that run is contiguous, and kernels write there."""
    copied, placed = [], program_kernels.placed

    def noted(found, into):
        copied.append(into is not None and found is not into)
        return placed(found, into)

    monkeypatch.setattr(program_kernels, "placed", noted)
    engine = with_slopes(backend, dtype=torch.float32)
    q, k, v = (t.detach()[:batch] for t in qkv(9, 12))
    custom = [torch.rand(HEADS)]
    engine(q, k, v, *custom)
    key = next(reversed(engine._keys.values()))
    o, rows = op.FORWARD(q, k, v, custom, key)
    longer = q.new_zeros(batch, 20, HEADS, v.shape[3])
    found, again = attention_op.forward(q, k, v, custom, key, longer[:, 5:14])
    assert found.data_ptr() == longer[:, 5:].data_ptr() and torch.equal(longer[:, 5:14], o)
    assert all(map(torch.equal, rows, again)) and not longer[:, :5].any() and not longer[:, 14:].any()
    kernels = ATTENTIONS[key].program_kernels
    if kernels is not None:
        given = q, k, v, custom, o, rows, torch.randn_like(o), {}, ()
        wanted, longer = kernels.backward(*given)[0], q.new_zeros(batch, 20, *q.shape[2:])
        dq, *_ = kernels.backward(*given, longer[:, 5:14])
        assert dq.data_ptr() == longer[:, 5:].data_ptr() and torch.equal(longer[:, 5:14], wanted)
        assert not longer[:, :5].any() and not longer[:, 14:].any()
        assert any(copied) == (batch == 2)
