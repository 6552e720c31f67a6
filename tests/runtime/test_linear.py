"""LinearAttentionEngine as users meet it: states, steps, layouts, autograd, torch.compile, and words for mistakes."""

import pytest
import torch

from attention_engine import CustomIO, LinearAttentionEngine, arch, meta_tensor
from attention_engine.compiler import Kernel
from attention_engine.errors import BadInput, BadMeta, HeadsDoNotGroup, NoDevice, UnknownOption
from attention_engine.runtime.linear_program_kernels import LinearProgramKernels
from tests.linear_cases import CASES, Shape, engine_for, engine_results

FP32 = torch.float32
SHAPE = Shape(2, 70, 1, 2, 4, 32, 32)
BACKENDS = ["interpret", "reference"]
LATER = ("q", "k", "v", "decay", "d_o")


def inputs_of(name, shape=SHAPE):
    return CASES[name], shape.inputs(CASES[name], FP32)


def call(engine, inputs, **options):
    custom = {n: inputs[n] for n in engine.custom_io.specs}
    return engine(inputs["q"], inputs["k"], inputs["v"], inputs.get("decay"), **custom, **options)


def slice_tokens(inputs, start, stop):
    """The inputs of tokens start..stop; customs of (batch, heads, length) too."""
    return {
        n: x[:, start:stop] if n in LATER else x[:, :, start:stop] if x.ndim == 3 and n in ("dt", "c") else x
        for n, x in inputs.items()
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mamba2", "gla_mods"])
def test_two_halves_with_the_state_handed_over_are_the_whole(name, backend):
    case, inputs = inputs_of(name)
    engine = engine_for(case, SHAPE, FP32, backend=backend)
    whole, last = call(engine, inputs, initial_state=inputs["initial_state"], output_final_state=True)
    first, state = call(
        engine, slice_tokens(inputs, 0, 37), initial_state=inputs["initial_state"], output_final_state=True
    )
    second, end = call(engine, slice_tokens(inputs, 37, 70), initial_state=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["plain", "gla"])
def test_gradients_cross_the_handed_over_state(name, backend):
    case, inputs = inputs_of(name)
    engine = engine_for(case, SHAPE, FP32, backend=backend)
    expected = engine_results(engine, inputs)

    def halves(q, k, v, decay, initial_state):
        cut = [(t[:, :29], t[:, 29:]) for t in (q, k, v, decay)]
        first, state = engine(*(a for a, _ in cut), initial_state=initial_state, output_final_state=True)
        second, end = engine(*(b for _, b in cut), initial_state=state, output_final_state=True)
        return torch.cat([first, second], 1), end

    leaves = {n: inputs[n].clone().requires_grad_() for n in ("q", "k", "v", "decay", "initial_state")}
    found = torch.autograd.grad(halves(**leaves), list(leaves.values()), [inputs["d_o"], inputs["d_last"]])
    for name, gradient in zip(leaves, found):
        torch.testing.assert_close(gradient, expected[f"d_{name}"], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mamba2", "shifted", "gla_mods"])
def test_step_by_step_is_the_chunked_form(name, backend):
    case, inputs = inputs_of(name)
    engine = engine_for(case, SHAPE, FP32, backend=backend)
    whole = call(engine, slice_tokens(inputs, 0, 6))
    state, outputs = None, []
    for t in range(6):
        one = slice_tokens(inputs, t, t + 1)
        if t % 2:  # without the length dim
            one |= {n: one[n][:, 0] for n in ("q", "k", "v", "decay")}
        kept = None if state is None else state.clone()
        custom = {n: one[n] for n in case.axes}
        o, after = engine.step(one["q"], one["k"], one["v"], one["decay"], **custom, state=state)
        assert kept is None or torch.equal(state, kept)  # the given state is left as it is
        state = after
        outputs.append(o if o.ndim == 4 else o[:, None])
    assert state.dtype is FP32
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-5)


def test_steps_are_differentiable():
    case, inputs = inputs_of("plain")
    engine = engine_for(case, SHAPE, FP32, backend="interpret")
    one = slice_tokens(inputs, 0, 1)
    k = one["k"].requires_grad_()
    o, state = engine.step(one["q"], k, one["v"], one["decay"], state=inputs["initial_state"])
    (o.sum() + state.sum()).backward()
    assert k.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["plain", "gla"])
def test_heads_first_tensors(name):
    case, inputs = inputs_of(name)
    expected = call(engine_for(case, SHAPE, FP32, backend="reference"), inputs)
    turned = {n: x.transpose(1, 2) if n in LATER else x for n, x in inputs.items()}
    engine = engine_for(case, SHAPE, FP32, backend="reference", layout="bhsd")
    torch.testing.assert_close(call(engine, turned).transpose(1, 2), expected)
    one = {n: turned[n][:, :, 0] for n in ("q", "k", "v", "decay")}
    assert engine.step(**one)[0].shape == (2, 4, 32)
    torch.testing.assert_close(engine.step(**one)[0], expected[:, 0])


@pytest.mark.parametrize("name", ["plain", "gla"])
def test_tensors_of_any_strides_and_expanded_decay(name):
    case, inputs = inputs_of(name)
    decay = torch.tensor([-0.1, -0.2, -0.3, -0.4])
    inputs["decay"] = (decay[:, None] if case.channels else decay).expand(inputs["decay"].shape)
    inputs["v"] = inputs["v"].transpose(1, 3).contiguous().transpose(1, 3)
    results = [call(engine_for(case, SHAPE, FP32, backend=b), inputs) for b in BACKENDS]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mamba2", "gla_mods"])
def test_only_what_is_asked_for_gets_a_gradient(name):
    case, inputs = inputs_of(name)
    engine = engine_for(case, SHAPE, FP32, backend="interpret")
    expected = engine_results(engine, {**inputs, "d_last": torch.zeros_like(inputs["d_last"])})
    inputs["v"].requires_grad_()
    (gradient,) = torch.autograd.grad(
        call(engine, inputs, initial_state=inputs["initial_state"]), inputs["v"], inputs["d_o"]
    )
    torch.testing.assert_close(gradient, expected["d_v"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "gla"])
def test_a_gradient_of_a_gradient(name):
    case, inputs = inputs_of(name, Shape(1, 5, 1, 1, 1, 4, 4))
    shape = Shape(1, 5, 1, 1, 1, 4, 4)
    engine = engine_for(case, shape, FP32, backend="reference")
    leaves = [inputs[n].double().requires_grad_() for n in ("q", "k", "v", "decay")]
    assert torch.autograd.gradgradcheck(lambda *x: engine(*x), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)])
@pytest.mark.parametrize("channels", [(), (32,)])
def test_empty_batches_and_lengths(backend, channels, sizes):
    engine = engine_for(CASES["plain"], SHAPE, FP32, backend=backend)
    q, k, v = (torch.zeros(*sizes, h, 32, requires_grad=True) for h in (1, 2, 4))
    o, state = engine(q, k, v, torch.zeros(*sizes, 4, *channels), output_final_state=True)
    o.sum().backward()
    assert o.shape == v.shape and state.shape == (sizes[0], 4, 32, 32) and not state.any() and q.grad.shape == q.shape


@pytest.mark.parametrize("name", ["mamba2", "gla"])
def test_torch_compile_sees_one_graph(name):
    case, inputs = inputs_of(name, Shape(1, 20, 1, 1, 2, 16, 16))
    engine = engine_for(case, Shape(1, 20, 1, 1, 2, 16, 16), FP32, backend="interpret")
    expected = engine_results(engine, inputs)
    compiled = torch.compile(engine, fullgraph=True, backend="aot_eager")
    found = engine_results(compiled, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("name", ["plain", "gla"])
def test_the_ops_hold_torchs_contract(name):
    case, inputs = inputs_of(name, Shape(1, 20, 1, 1, 2, 16, 16))
    engine = engine_for(case, Shape(1, 20, 1, 1, 2, 16, 16), FP32, backend="interpret")
    tensors = [inputs[n] for n in ("q", "k", "v", "decay", "initial_state")]
    key = engine._check(*tensors, [])
    ops = torch.ops.attention_engine
    torch.library.opcheck(ops.linear_forward, (*tensors, [], True, key))
    torch.library.opcheck(ops.linear_backward, (*tensors, [], inputs["d_o"], inputs["d_last"], [True], key))
    torch.library.opcheck(ops.linear_step, (*(t[:, :1] for t in tensors[:4]), tensors[4], [], key))


def test_the_program_and_the_engine_can_be_read():
    engine = engine_for(CASES["mamba2"], SHAPE, FP32)
    assert "x * dt[b, h, q_idx]" in engine.program() and "exp(decay) h" in engine.program()
    line = repr(engine)
    assert (
        line.startswith("LinearAttentionEngine(1 heads of 32, 2 key heads, 4 value heads, float32, ")
        and "\n" not in line
    )
    said = " ".join(str(engine).split())
    assert "recurrence h = exp(decay) h + k^T v, o = q h, for each head" in said and "inputs dt (" in said
    assert "q as given: there is no q_mod" in said and "backend" in said and "kernels" in said


# ---- mistakes


def good(**changes):
    engine = changes.pop("engine", None) or engine_for(CASES["plain"], SHAPE, FP32)
    inputs = {**inputs_of("plain")[1], **changes}
    return call(engine, inputs, initial_state=inputs["initial_state"])


WRONG = {
    "q has 3 heads of dim 32, and the engine was built for 1 of 32": lambda: good(q=torch.zeros(2, 70, 3, 32)),
    "q has batch 2 and length 70, k has 2 and 71": lambda: good(k=torch.zeros(2, 71, 2, 32)),
    "Give one dtype": lambda: good(v=torch.zeros(2, 70, 4, 32, dtype=torch.float16)),
    "decay has shape \\(2, 70, 1\\)": lambda: good(decay=torch.zeros(2, 70, 1)),
    "decay has shape \\(2, 70, 4, 31\\). With these q, k and v it must be \\(2, 70, 4, 32\\)": lambda: good(
        decay=torch.zeros(2, 70, 4, 31)
    ),
    "decay has 2 dimensions, .* or \\(batch, length, heads, dim\\)": lambda: good(decay=torch.zeros(2, 70)),
    "decay is torch.int64": lambda: good(decay=torch.zeros(2, 70, 4, dtype=torch.int64)),
    "decay is float": lambda: good(decay=0.5),
    "the state has shape \\(2, 4, 32, 31\\)": lambda: good(initial_state=torch.zeros(2, 4, 32, 31)),
    "q has 3 dimensions": lambda: good(q=torch.zeros(2, 70, 32)),
    "step takes one token": lambda: engine_for(CASES["plain"], SHAPE, FP32).step(
        *(inputs_of("plain")[1][n] for n in ("q", "k", "v", "decay"))
    ),
    "custom input 'dt' is missing": lambda: engine_for(CASES["scaled_keys"], SHAPE, FP32)(
        *(inputs_of("plain")[1][n] for n in ("q", "k", "v"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_said(words):
    with pytest.raises(BadInput, match=words):
        WRONG[words]()


def test_one_engine_takes_both_kinds_of_decay():
    engine = engine_for(CASES["plain"], SHAPE, FP32, backend="interpret")
    _, inputs = inputs_of("plain")
    spread = {**inputs, "decay": inputs["decay"][..., None].expand(2, 70, 4, 32)}
    torch.testing.assert_close(call(engine, spread), call(engine, inputs), rtol=1e-4, atol=1e-5)


def test_kernels_take_the_dtype_they_were_built_for():
    engine = engine_for(CASES["plain"], SHAPE, torch.float16, backend="interpret")
    with pytest.raises(BadInput, match=r"built for torch\.float16"):
        good(engine=engine)


@pytest.mark.parametrize(
    ("error", "words", "options"),
    [
        (UnknownOption, "backend is 'cuda'", {"backend": "cuda"}),
        (UnknownOption, "layout is 'sbhd'", {"layout": "sbhd"}),
        (UnknownOption, "device is 'H100'", {"device": "H100"}),
        (UnknownOption, "custom_io is {}", {"custom_io": {}}),
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused(error, words, options):
    with pytest.raises(error, match=words):
        LinearAttentionEngine(SHAPE.meta(FP32), **options)


def test_heads_must_group():
    metas = [meta_tensor(1, heads, 64, 32) for heads in (3, 1, 4)]
    with pytest.raises(HeadsDoNotGroup, match=r"4 value heads cannot share 3 query heads evenly.*: 1, 2, 4"):
        LinearAttentionEngine(metas)
    with pytest.raises(BadMeta, match="q has head dim 16 and k has 32"):
        LinearAttentionEngine([meta_tensor(1, 1, 64, dim) for dim in (16, 32, 32)])


def test_tilelang_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(NoDevice, match="needs CUDA tensors"):
        good(engine=engine_for(CASES["plain"], SHAPE, FP32, backend="tilelang", device=arch.H100()))


def test_bool_custom_inputs_are_conditions():
    io = CustomIO({"keep": ("batch", "seq_len")})
    results = []
    for backend in BACKENDS:
        engine = LinearAttentionEngine(
            SHAPE.meta(FP32), v_mod=lambda x, c: x * c["keep"].float(), custom_io=io, backend=backend
        )
        _, inputs = inputs_of("plain")
        results.append(engine(*(inputs[n] for n in ("q", "k", "v", "decay")), torch.arange(140).view(2, 70) % 3 > 0))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


# ---- check


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("name", ["mamba2", "gla_mods"])
def test_check_holds_every_result_against_float64(name, layout):
    case, inputs = inputs_of(name)
    engine = engine_for(case, SHAPE, FP32, backend="interpret", layout=layout)
    if layout == "bhsd":
        inputs = {n: x.transpose(1, 2) if n in LATER else x for n, x in inputs.items()}
    tensors = {n: x for n, x in inputs.items() if n not in ("d_o", "d_last")}
    report = engine.check(**tensors)
    assert report.ok and {row.name for row in report.rows} == {"o", "last state", *(f"d{n}" for n in tensors)}
    assert "ok: the limit is 10 x the error of eager PyTorch" in str(report)


def test_check_sees_what_is_wrong(monkeypatch):
    case, inputs = inputs_of("gla")
    engine = engine_for(case, SHAPE, FP32, backend="reference")
    honest = LinearAttentionEngine._call

    def late(self, q, k, v, decay, *rest):
        return honest(self, q, k, v, decay * 1.001, *rest)

    monkeypatch.setattr(LinearAttentionEngine, "_call", late)
    assert not engine.check(inputs["q"], inputs["k"], inputs["v"], inputs["decay"]).ok


# ---- kernels as text, and compiled ahead


@pytest.mark.parametrize(
    ("name", "decay", "names"),
    [
        ("mamba2", "token", {"forward": "forward", "states": "states", "backward dq": "chunk_dq",
                             "decay gradients": "decay_gradients", "step": "step"}),
        ("gla_mods", "channel", {"scores": "channel_scores", "forward": "channel_output",
                                 "backward gradients": "channel_gradients", "step": "step"}),
        ("no_decay", None, {"forward": "forward", "backward dv": "chunk_dv", "step": "step"}),
    ],
)  # fmt: skip
def test_kernels_can_be_read_before_any_call(name, decay, names):
    engine = engine_for(CASES[name], SHAPE, FP32)
    for kernel, function in names.items():
        assert f"def {function}(" in engine.source(kernel, decay=decay)
    assert all("@T.prim_func" in engine.source(kernel, decay=decay) for kernel in engine._planned(None, decay, True))


def test_kernels_that_nobody_has_are_named():
    engine = engine_for(CASES["plain"], SHAPE, FP32)
    with pytest.raises(UnknownOption, match=r"no kernel is called 'backward'\. Choose 'forward', 'sums of 32', "):
        engine.source("backward")
    with pytest.raises(UnknownOption, match=r"form is 'ptx'\. Choose"):
        engine.source(form="ptx")
    with pytest.raises(UnknownOption, match=r"decay is 'head'\. Choose 'token', 'channel' or None"):
        engine.source(decay="head")
    if not torch.cuda.is_available():
        with pytest.raises(NoDevice, match=r"device=attention_engine\.arch\.H100"):
            engine.source(form="cuda")


@pytest.mark.parametrize(("name", "decay"), [("mamba2", "token"), ("gla_mods", "channel")])
def test_compiling_ahead_compiles_what_calls_launch(name, decay, monkeypatch):
    """By all that kernels are made of."""
    asked = []
    monkeypatch.setattr(Kernel, "compiled", property(lambda kernel: asked.append(kernel) or (lambda *_: None)))
    engine = engine_for(CASES[name], SHAPE, torch.bfloat16)
    names = engine.compile_for(arch.H100(), decay=decay)
    ahead = {(k.builder, k.given, tuple(k.configs.items())) for k in asked}
    assert "step" in names and len(ahead) > len(names)
    asked.clear()
    case, inputs = CASES[name], SHAPE.inputs(CASES[name], torch.bfloat16)
    tensors, custom = [inputs[n] for n in ("q", "k", "v", "decay")], [inputs[n] for n in case.axes]
    program, specs = engine._trace(engine._types, True), list(engine.custom_io.specs.values())
    program_kernels = LinearProgramKernels(program, specs, False, arch.H100(), per_channel=decay == "channel")
    program_kernels.forward(*tensors, None, custom, False)
    program_kernels.backward(*tensors, None, custom, inputs["d_o"], None, frozenset(["decay", *case.axes]))
    program_kernels.forward(*tensors, inputs["initial_state"], custom, True)
    assert {(k.builder, k.given, tuple(k.configs.items())) for k in asked} <= ahead
