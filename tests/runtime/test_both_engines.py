"""What AttentionEngine offers beside the maths, LinearAttentionEngine offers too: calls that are remembered, costs,
kernels' resources and tiles, classes of errors."""

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, arch, errors, meta_tensor
from attention_engine.compiler import Kernel
from attention_engine.runtime import op
from attention_engine.runtime.cost import LinearCost
from attention_engine.tuner.entries import Entry
from attention_engine.tuner.store import TuneFile
from tests import plain_linear

HEADS, LENGTH, DIM, DIM_V = 2, 20, 16, 24
HALF = torch.float16
BACKENDS = ("reference", "interpret")


def gained(x, custom):
    return x * custom["gain"]


def build(dtype=HALF, backend="interpret", **options):
    metas = [meta_tensor(None, HEADS, None, d, dtype=dtype) for d in (DIM, DIM, DIM_V)]
    io = CustomIO({"gain": ("heads",)})
    return LinearAttentionEngine(metas, v_mod=gained, custom_io=io, backend=backend, **options)


def inputs(dtype=HALF, length=LENGTH, batch=2):
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, length, HEADS, d, generator=make).to(dtype) for d in (DIM, DIM, DIM_V))
    return [q, k, v, -torch.rand(batch, length, HEADS, generator=make), torch.rand(HEADS, generator=make) + 0.5]


def state(batch=2):
    return torch.randn(batch, HEADS, DIM, DIM_V, generator=torch.Generator().manual_seed(1))


def leaves(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def results(engine, tensors, **options):
    """The output, the last state and the gradients of all tensors."""
    o, last = engine(*tensors, output_final_state=True, **options)
    loss = (o.double() * torch.linspace(-1, 1, DIM_V).double()).sum() + last.double().square().sum()
    return [o.detach(), last.detach(), *torch.autograd.grad(loss, tensors)]


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


# ---- calls that are remembered


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_seen_call_runs_no_check_and_gives_the_same(backend, layout, dtype, monkeypatch):
    engine, tensors = build(dtype, backend, layout=layout), inputs(dtype)
    if layout == "bhsd":
        tensors = [t.transpose(1, 2) if t.ndim > 1 else t for t in tensors]
    first, tokens = (
        leaves(tensors),
        [t if t.ndim == 1 else t.narrow(1 if layout == "bshd" else 2, 0, 1) for t in tensors],
    )
    ways = {
        "a call": lambda: [engine(*tensors)],
        "with states": lambda: [*engine(*tensors, initial_state=state(), output_final_state=True)],
        "with gradients": lambda: results(engine, first, initial_state=state()),
        "a step": lambda: [*engine.step(*tokens, state=state())],
        "a first step": lambda: [*engine.step(*tokens)],
    }
    exact = {name: way() for name, way in ways.items()}
    for name in ("check_qkv", "check_custom", "check_ranks"):
        monkeypatch.setattr(f"attention_engine.runtime.linear.{name}", None)
    for _ in range(2):
        for name, way in ways.items():
            same(way(), exact[name])
            same(way(), exact[name])
    with pytest.raises(TypeError):
        engine(*[t[:, 1:] if t.ndim > 1 else t for t in tensors])  # another length has not been seen


def test_a_seen_call_looks_nothing_up(monkeypatch):
    """Not even where gradients are asked for, or one of two modes took a turn."""
    engine, tensors = build(), inputs()
    for _ in range(2):
        exact = results(engine, leaves(tensors))
        o = engine(*tensors)
    token = [t if t.ndim == 1 else t[:, :1] for t in tensors]
    stepped = engine.step(*token, state=state())
    for name in ("forward", "step", "kernels"):
        monkeypatch.setattr(f"attention_engine.runtime.linear_program_kernels.LinearProgramKernels.{name}", None)
    assert torch.equal(engine(*tensors), o)
    same(list(engine.step(*token, state=state())), list(stepped))
    found, last = engine(*leaves(tensors), output_final_state=True)
    same([found.detach(), last.detach()], exact[:2])
    with torch.no_grad():
        assert not engine(*leaves(tensors)).requires_grad
    with torch.inference_mode():
        assert engine(*tensors).is_inference()


def test_calls_of_other_forms_are_other_calls():
    """A decay or a state that is left out, and one more result, don't pass for the call before."""
    engine, (q, k, v, decay, gain) = build(), inputs()
    for _ in range(3):
        plain = engine(q, k, v, decay, gain)
        without = engine(q, k, v, None, gain)
        begun = engine(q, k, v, decay, gain, initial_state=state())
        o, last = engine(q, k, v, decay, gain, output_final_state=True)
        assert torch.equal(o, plain) and last.shape == (2, HEADS, DIM, DIM_V)
        assert not torch.equal(plain, without) and not torch.equal(plain, begun)


def test_a_known_launch_copies_what_lies_askew():
    engine, tensors = build(), inputs()
    exact = [engine(*tensors) for _ in range(3)][-1]
    shifted = [torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in tensors]
    assert any(t.data_ptr() % 16 for t in shifted)
    assert torch.equal(engine(*shifted), exact)
    spread = [torch.stack([t] * 2, -1)[..., 0] for t in tensors]
    for _ in range(2):
        assert torch.equal(engine(*spread), exact)


def test_where_a_call_must_look_at_more_it_does():
    """The switch for tf32, strides that don't fit, no entries."""
    single, empty, strided = build(torch.float32), build(), build()
    single(*inputs(torch.float32))
    empty(*inputs(length=0))
    q, *others = inputs()
    strided(torch.stack([q] * 2, -1)[..., 0], *others)
    for engine in (single, empty, strided):
        assert [seen.direct for seen in engine._seen.values()] == [None]


def test_what_a_first_call_only_pretends_is_not_kept():
    engine, tensors = build(), inputs()
    with FakeTensorMode() as fakes:
        assert engine(*(fakes.from_tensor(t) for t in tensors)).shape == (2, LENGTH, HEADS, DIM_V)
    grad(lambda q: engine(q, *tensors[1:]).float().sum())(tensors[0])
    assert engine._seen == {}
    engine(*tensors)
    assert len(engine._seen) == 1


def test_dispatch_modes_and_profilers_see_the_ops_of_seen_calls():
    engine, tensors, found = build(), inputs(), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found.append(str(function))
            return function(*args, **(kwargs or {}))

    exact = results(engine, leaves(tensors))
    token = [t if t.ndim == 1 else t[:, :1] for t in tensors]
    engine.step(*token)
    with Watch():
        same(results(engine, leaves(tensors)), exact)
        engine.step(*token)
    assert {f"attention_engine.linear_{n}.default" for n in ("forward", "backward", "step")} <= set(found)
    with torch.profiler.profile() as profile:
        engine(*tensors)
    assert "attention_engine::linear_forward" in {event.name for event in profile.events()}
    found.clear()
    results(engine, leaves(tensors))
    assert found == []


def test_autocast_is_followed_after_calls_without_it_and_the_reverse():
    engine, tensors = build(torch.float32, "reference"), inputs(torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            assert engine(*tensors).dtype is dtype


def test_keys_of_one_batch_are_shared_by_calls_like_the_last():
    engine, (q, k, v, decay, gain) = build(), inputs()
    exact = engine(q, k[:1].expand_as(k), v[:1].expand_as(v), decay, gain)
    for _ in range(3):
        assert torch.equal(engine(q, k[:1], v[:1], decay, gain), exact)


def test_too_many_signatures_are_forgotten_not_kept(monkeypatch):
    monkeypatch.setattr("attention_engine.runtime.engine.MOST_SEEN", 3)
    engine = build(backend="reference")
    for length in range(1, 9):
        tensors = inputs(length=length)
        assert torch.equal(engine(*tensors), engine(*tensors))
    assert len(engine._seen) <= 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
def test_a_copy_begins_anew(copied):
    engine, tensors = build(), inputs()
    exact = engine(*tensors)
    engine(*tensors)
    other = copied(engine)
    assert other._seen == {} and other._again is None
    assert torch.equal(other(*tensors), exact)


# ---- errors

Q, K, V, DECAY, GAIN = inputs(torch.float32)
ORDER = "(batch, length, heads, dim)"
WRONG = {
    "a list": (errors.NotATensor, ([1], K, V), f"q is list. Give a tensor {ORDER}."),
    "nothing": (errors.NotATensor, (Q, None, V), f"k is NoneType. Give a tensor {ORDER}."),
    "three dims": (errors.WrongRank, (Q, K[0], V), f"k has 3 dimensions, (20, 2, 16). Give {ORDER}."),
    "other heads": (
        errors.WrongHeads, (Q[:, :, :1], K, V),
        'q has 1 heads of dim 16, and the engine was built for 2 of 16. Give 2, or build another.\n'
        f'  Its shape must be {ORDER}, layout="bshd".',
    ),
    "two devices": (
        errors.DevicesDiffer, (Q, K, V.to("meta")), "q is on 'cpu' and v on 'meta'. Put them on one device: "
        "v.to(q.device)."),
    "two dtypes": (
        errors.DtypesDiffer, (Q, K.half(), V), "q is torch.float32 and k is torch.float16. Give one dtype: "
        "k.to(q.dtype)."),
    "two lengths": (
        errors.LengthsDiffer, (Q, K[:, :7], V),
        "q has batch 2 and length 20, k has 2 and 7. They must be equal, but k and v may have one batch for all.",
    ),
    "integers": (
        errors.NotFloating, (Q.int(), K.int(), V.int()), "q, k and v are torch.int32. Give floating tensors."),
    "a number for a decay": (
        errors.NotATensor, (Q, K, V, 0.5),
        "decay is float. Give a tensor (batch, length, heads) or (batch, length, heads, dim), or None."),
    "a flat decay": (
        errors.WrongRank, (Q, K, V, DECAY[..., 0]),
        "decay has 2 dimensions, (2, 20). Give (batch, length, heads) or (batch, length, heads, dim)."),
    "another decay": (
        errors.WrongShape, (Q, K, V, DECAY[:, :7]),
        "decay has shape (2, 7, 2). With these q, k and v it must be (2, 20, 2)."),
    "an integer decay": (errors.NotFloating, (Q, K, V, DECAY.int()), "decay is torch.int32. Give a floating tensor."),
    "a decay elsewhere": (
        errors.DevicesDiffer, (Q, K, V, DECAY.to("meta")),
        "decay is on 'meta' and q on 'cpu'. Put them on one device."),
}  # fmt: skip


@pytest.mark.parametrize("seen", [False, True], ids=["first", "after good calls"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_has_its_class_of_error(kind, backend, seen):
    engine = build(torch.float32, backend)
    for _ in range(3 if seen else 0):
        engine(Q, K, V, DECAY, GAIN)
    mistake, (q, k, v, *decay), message = WRONG[kind]
    with pytest.raises(mistake) as caught:
        engine(q, k, v, *(decay or [None]), GAIN)
    assert type(caught.value) is mistake and str(caught.value) == message


@pytest.mark.parametrize("gain", [torch.zeros(HEADS + 1), torch.zeros(HEADS, device="meta"), [1.0, 1.0], None])
def test_custom_inputs_of_another_kind_are_checked_again(gain):
    engine = build(torch.float32)
    for _ in range(3):
        engine(Q, K, V, DECAY, GAIN)
    with pytest.raises(errors.BadInput, match="custom input 'gain'"):
        engine(Q, K, V, DECAY, *([] if gain is None else [gain]))


def test_a_graph_from_another_process_says_what_to_do(monkeypatch):
    engine, tensors = build(backend="reference"), inputs()
    engine(*tensors)
    (key,) = engine._keys.values()
    monkeypatch.delitem(op.ATTENTIONS, key)
    q, k, v, decay, gain = tensors
    with pytest.raises(
        errors.UnknownProgram, match=f"key {key} .*\n  Build the same LinearAttentionEngine and call it"
    ):
        torch.ops.attention_engine.linear_forward(q, k, v, decay, None, [gain], True, key)


# ---- what an engine shows


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_cost_is_of_products_with_the_state_and_of_each_tensor_once(layout):
    q, k, v, decay, gain = inputs()
    turned = [t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v, decay)]
    tokens, product = 2 * LENGTH * HEADS, 2 * DIM * DIM_V
    moved = 2 * tokens * (2 * DIM + 2 * DIM_V) + 4 * tokens
    of_state = 4 * 2 * HEADS * DIM * DIM_V
    engine = build(layout=layout)
    exact = LinearCost(tokens, 2 * tokens * product, 5 * tokens * product, moved, 2 * moved)
    assert engine.cost(*turned, gain) == exact
    with_states = engine.cost(*turned, gain, initial_state=state(), output_final_state=True)
    assert with_states.forward_bytes == moved + 2 * of_state
    with pytest.raises(errors.CustomInputMissing):
        engine.cost(*turned)


def test_flops_of_a_cost_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    engine, tensors = build(), leaves(inputs())
    with FlopCounterMode(display=False) as counter:
        engine(*tensors).float().sum().backward()
    cost = engine.cost(*tensors)
    assert counter.get_total_flops() == cost.forward_flops + cost.backward_flops


def test_resources_are_of_all_kernels(monkeypatch):
    compiled, engine = [], build(device=arch.H100())
    monkeypatch.setattr("attention_engine.runtime.linear_shown.compile_all", compiled.extend)
    monkeypatch.setattr(Kernel, "resources", property(lambda kernel: kernel.builder))
    found = engine.resources()
    assert list(found) == list(engine._planned(arch.H100(), "token", starts=True))
    assert [kernel.builder for kernel in compiled] == list(found.values())
    by_channel = engine.resources(arch.A100(), decay="channel")
    assert "linear.channels.gradients.channel_gradients" in by_channel.values()


@pytest.mark.parametrize(("decay", "kernels"), [
    ("token", {"forward output", "backward dq", "backward dk"}), (None, {"forward output", "backward dv"}),
    ("channel", {"scores", "forward output", "backward gradients"}),
])  # fmt: skip
def test_tiles_are_explained_for_each_kind_of_decay(decay, kernels):
    metas = [meta_tensor(8, HEADS, 2048, 64, dtype=torch.bfloat16)] * 3
    engine = LinearAttentionEngine(metas, device=arch.H100())
    told = engine.explain(decay=decay)
    assert all(f"linear {name}: chunks of " in told for name in kernels)
    with pytest.raises(errors.UnknownOption, match="decay is 'head'"):
        engine.explain(decay="head")


def test_what_is_compiled_ahead_has_the_tiles_that_a_file_holds(tmp_path, monkeypatch):
    """As a call that finds the file has."""
    asked = []
    monkeypatch.setattr(Kernel, "compiled", property(lambda kernel: asked.append(kernel) or (lambda *_: None)))
    metas = [meta_tensor(1, HEADS, 512, 64, dtype=torch.bfloat16)] * 3
    file, gpu = tmp_path / "tiles.json", arch.H100()
    of_problem = LinearAttentionEngine(metas, device=gpu)._asked()
    tiles = of_problem.default_tiles
    (kernel,) = [n for n in of_problem.kernels(False, tiles) if "walk" in n]
    tile = next(t for t in of_problem.space(kernel, tiles).tiles if t != of_problem.tile(tiles, kernel))
    TuneFile(file).add([Entry(of_problem.key(kernel, tiles), tile, 1.0, 1, "2026-01-01T00:00:00Z")])
    LinearAttentionEngine(metas, device=gpu, tune_file=str(file)).compile_for(gpu)
    held = {k.builder: {g for g in k.given if isinstance(g, type(tile))} for k in asked}
    assert held["linear.token.walk.walk"] == {tile}


def test_custom_inputs_say_what_is_compiled_ahead(monkeypatch):
    asked = []
    monkeypatch.setattr(Kernel, "compiled", property(lambda kernel: asked.append(kernel) or (lambda *_: None)))
    engine = build(torch.bfloat16)
    engine.compile_for(arch.H100(), gain=torch.ones(HEADS, dtype=torch.bfloat16))
    assert {dict((n, d) for n, d, _ in k.problem.custom)["gain"] for k in asked} == {"bfloat16"}
    with pytest.raises(errors.CustomInputMissing):
        engine.compile_for(arch.H100(), other=torch.ones(HEADS))


@pytest.fixture
def switch():
    before = torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("allowed", [False, True])
def test_check_compares_tf32_with_tf32(switch, allowed, capsys):
    switch.allow_tf32 = allowed
    q, k, v, decay, gain = inputs(torch.float32)
    assert build(torch.float32).check(q, k, v, decay, gain).ok, capsys.readouterr().out


def test_both_engines_offer_the_same():
    """But for what only one kind of attention has."""
    ours = lambda kind: [c for c in kind.__mro__ if c.__module__.startswith("attention_engine")]  # noqa: E731
    public = lambda kind: {n for c in ours(kind) for n in vars(c) if not n.startswith("_")}  # noqa: E731
    assert public(LinearAttentionEngine) - public(AttentionEngine) == {"step"}
    of_pairs = {"show_mask", "show_scores", "partial", "merge", "with_cache", "block_rows"}
    assert public(AttentionEngine) - public(LinearAttentionEngine) == of_pairs


def test_a_remembered_call_is_right():
    engine = build()
    tensors = inputs()
    for _ in range(3):
        o, last = engine(*tensors, initial_state=state(), output_final_state=True)
    q, k, v, decay, gain = (t.double() for t in tensors)
    exact, exact_last = plain_linear.recurrence(q, k, v * gain[:, None], decay, state().double())
    torch.testing.assert_close(o.double(), exact, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(last.double(), exact_last, rtol=2e-2, atol=2e-2)
