"""Engines without metas: heads, dims and dtype are those of each call, and what needs them before one says so."""

import copy
import pickle

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, arch, create_block_mask, errors
from attention_engine import meta_tensor as meta
from attention_engine.library import OnlineSigmoid, OnlineSoftmax, causal
from attention_engine.runtime import op
from attention_engine.runtime.attentions import ATTENTIONS
from tests import plain_linear
from tests.runtime.engines import graphs

HALF = torch.float16
SIZES = {"small": (2, 2, 2, 16, 16), "grouped": (1, 4, 2, 32, 24), "one": (3, 1, 1, 8, 8)}  # batch, heads, dims


def tensors(batch=2, heads=2, kv_heads=2, dim=16, dim_v=16, length=9, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, dim_v))
    return [torch.randn(batch, length, *s, generator=make, dtype=torch.float64).to(dtype).requires_grad_()
            for s in sizes]  # fmt: skip


def right(q, k, v, scale):
    """Causal softmax in float64, by plain torch."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    kept = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return (scores.masked_fill(~kept, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def close(found, want, tolerance):
    assert (found.double() - want.double()).abs().max() <= tolerance


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_one_engine_serves_every_signature_with_its_own_scale(backend):
    engine = AttentionEngine(mask_mod=causal, backend=backend)
    assert engine.qkv_meta is None and engine.scale is None
    for _ in range(2):
        for sizes in SIZES.values():
            given = tensors(*sizes, dtype=torch.float32)
            o = engine(*given)
            want = right(*given, sizes[3] ** -0.5)
            close(o, want, 1e-5)
            found = torch.autograd.grad(o.square().sum(), given)
            for a, b in zip(found, torch.autograd.grad(want.square().sum(), given), strict=True):
                close(a, b, 1e-4)


def test_other_dtypes_and_given_scales():
    engine = AttentionEngine(mask_mod=causal, scale=0.3, backend="interpret")
    for dtype, tolerance in ((HALF, 5e-3), (torch.bfloat16, 5e-2), (torch.float32, 1e-5)):
        given = tensors(dtype=dtype)
        close(engine(*given), right(*given, 0.3), tolerance)


def test_a_score_mod_scales_itself():
    engine = AttentionEngine(score_mod=lambda score, custom, b, h, i, j: score * 0.25, mask_mod=causal)
    assert engine.scale == 1.0
    given = tensors()
    close(engine(*given), right(*given, 0.25), 1e-12)


def test_it_is_the_very_kernel_of_an_engine_with_metas():
    given = tensors(dtype=HALF)
    engines = (
        AttentionEngine(mask_mod=causal, backend="interpret"),
        AttentionEngine((meta(None, 2, None, 16),) * 3, mask_mod=causal, backend="interpret"),
    )
    outputs = [engine(*given) for engine in engines]
    assert torch.equal(*outputs)
    (mine,), (theirs,) = ([*engine._keys.values()] for engine in engines)
    assert mine == theirs and mine in ATTENTIONS


def test_custom_inputs_blocks_rows_and_the_other_layout():
    def score_mod(score, custom, b, h, q_idx, kv_idx):
        return score * custom["slopes"]

    slopes, given = torch.tensor([0.2, 0.4], dtype=torch.float64), tensors()
    engine = AttentionEngine(custom_io=CustomIO({"slopes": ("heads",)}), score_mod=score_mod, mask_mod=causal)
    close(engine(*given, slopes=slopes), right(*given, slopes.view(1, 2, 1, 1)), 1e-12)
    turned = AttentionEngine(block_mask=causal, layout="bhsd")
    o, rows = turned(*(t.transpose(1, 2) for t in given), return_rowscales=True)
    close(o.transpose(1, 2), right(*given, 0.25), 1e-12)
    assert rows["lse"].shape == (2, 2, 9)
    blocks = create_block_mask(causal, None, None, 9, 9, Q_BLOCK_SIZE=4, KV_BLOCK_SIZE=4)
    held = AttentionEngine(mask_mod=causal, block_mask=blocks, block_size=(4, 4))
    close(held(*given), right(*given, 0.25), 1e-12)


def test_tensors_that_do_not_fit_each_other_are_refused():
    engine = AttentionEngine(mask_mod=causal)
    q, k, v = tensors()
    for given, words in (
        ((q[..., :8], k, v), "q has head dim 8 and k has 16. They must be equal: the score is q . k."),
        ((q, k, v[:, :, :1]), "k has 2 heads and v has 1. They must be equal."),
        ((tensors(heads=3)[0], k, v), "3 query heads cannot share 2 key heads evenly. Choose key heads that divide 3: "
                                      "1, 3."),
    ):  # fmt: skip
        with pytest.raises(errors.WrongHeads) as caught:
            engine(*given)
        place = '\n  Shapes must be (batch, length, heads, dim), layout="bshd".'
        assert str(caught.value) == words + place
    with pytest.raises(errors.WrongDtype) as caught:
        AttentionEngine(backend="interpret")(q, k, v)
    assert str(caught.value) == (
        "q, k and v are torch.float64, and kernels take float16, bfloat16 or float32.\n"
        '  Convert them, or use backend="reference".'
    )
    with pytest.raises(errors.DtypesDiffer):
        engine(q, k.float(), v)
    with pytest.raises(errors.LengthsDiffer):
        engine(q, k[:, :4], v)


def test_with_metas_an_engine_stays_strict():
    engine = AttentionEngine((meta(None, 2, None, 16, dtype=torch.float32),) * 3)
    with pytest.raises(errors.WrongHeads):
        engine(*tensors(heads=4, kv_heads=4))


@pytest.mark.parametrize(("engine", "name", "ask"), [
    (AttentionEngine, "AttentionEngine", lambda e: e.source()),
    (AttentionEngine, "AttentionEngine", lambda e: e.explain()),
    (AttentionEngine, "AttentionEngine", lambda e: e.compile_for(arch.H100())),
    (AttentionEngine, "AttentionEngine", lambda e: e.resources(arch.H100())),
    (LinearAttentionEngine, "LinearAttentionEngine", lambda e: e.source()),
    (LinearAttentionEngine, "LinearAttentionEngine", lambda e: e.explain()),
    (LinearAttentionEngine, "LinearAttentionEngine", lambda e: e.compile_for(arch.H100())),
])  # fmt: skip
def test_what_needs_sizes_asks_for_a_call_or_for_metas(engine, name, ask):
    with pytest.raises(errors.SizesUnknown) as caught:
        ask(engine())
    assert str(caught.value) == (
        "heads, dims and dtype are those of the first call, and there was none. Call the engine once, or give metas: "
        f"{name}((meta_tensor(batch, heads, length, dim),) * 3, ...)."
    )


def test_after_a_call_kernels_are_shown_for_the_newest_kind_of_call():
    engine = AttentionEngine(mask_mod=causal, backend="interpret")
    for dim in (16, 32):
        engine(*tensors(dim=dim, dim_v=dim, dtype=HALF))
        with_metas = AttentionEngine((meta(None, 2, None, dim),) * 3, mask_mod=causal, backend="interpret")
        assert engine.source() == with_metas.source()
        assert engine.explain() == with_metas.explain()
        assert copy.deepcopy(engine).source() == with_metas.source()
    linear = LinearAttentionEngine(backend="interpret")
    linear(*tensors(dtype=HALF))
    assert linear.source() == LinearAttentionEngine((meta(None, 2, None, 16),) * 3, backend="interpret").source()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_check_says_the_sizes_too(layout):
    q, k, v = (t.detach() for t in tensors(heads=4, dim_v=24, dtype=HALF))
    given = [t.transpose(1, 2) if layout == "bhsd" else t for t in (q, k, v)]
    metas = (meta(None, 4, None, 16), meta(None, 2, None, 16), meta(None, 2, None, 24))
    engine = AttentionEngine(backend="interpret", layout=layout)
    assert engine.check(*given).ok
    assert engine.source() == AttentionEngine(metas, backend="interpret", layout=layout).source()
    packed = AttentionEngine(backend="interpret", layout=layout)
    assert packed.check(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 4, 9], dtype=torch.int32)).ok
    assert packed.source() == engine.source()
    linear = LinearAttentionEngine(layout=layout)
    assert linear.check(given[0][:, :, :, :8], *(t[..., :8] for t in (given[0], given[0]))).ok
    assert "forward" in linear.explain()


def test_the_program_needs_no_sizes_and_says_what_scales():
    engine = AttentionEngine(mask_mod=causal)
    assert engine.program().startswith("# q . k is scaled by dim ** -0.5, of the tensors in a call; below it stands ")
    assert "dim ** -0.5" in str(engine) and "scale" not in repr(engine)
    engine(*tensors())
    assert engine.program() == AttentionEngine((meta(None, 2, None, 16),) * 3, mask_mod=causal).program()
    assert AttentionEngine(score_mod=lambda s, c, b, h, i, j: s).program().startswith("# q . k comes unscaled")
    LinearAttentionEngine().program()


def test_check_and_cost_take_the_sizes_of_their_tensors(capsys):
    engine = AttentionEngine(mask_mod=causal, backend="interpret")
    for sizes in SIZES.values():
        assert engine.check(*tensors(*sizes, dtype=torch.float32)).ok
    assert engine.cost(*tensors()).forward_flops > 0


def test_copies_pickles_and_state_dicts():
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    engine, given = AttentionEngine(mask_mod=causal, block_mask=blocks), tensors()
    want = engine(*given)
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert torch.equal(other(*given), want) and other.block_mask is not None
    assert [*engine.state_dict()] == [] and engine.to("meta").block_mask.is_meta


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_torch_compile_without_a_break(backend, dynamic):
    engine = AttentionEngine(mask_mod=causal, backend=backend)
    compiled = torch.compile(engine, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sizes in (SIZES["small"], SIZES["grouped"]):
        given = tensors(*sizes, dtype=torch.float32)
        o = compiled(*given)
        close(o, right(*given, sizes[3] ** -0.5), 1e-5)
        assert all(g is not None for g in torch.autograd.grad(o.sum(), given))


def test_other_lengths_do_not_compile_again():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(AttentionEngine(mask_mod=causal), fullgraph=True, backend=counter, dynamic=True)
    for length in (9, 12, 31):
        compiled(*tensors(length=length, dtype=torch.float32))
    assert graphs(counter) == 1


def test_export_vmap_checkpoint_and_autocast():
    engine = AttentionEngine(mask_mod=causal)
    given = tensors(dtype=torch.float32)
    program = torch.export.export(engine, tuple(t.detach() for t in given))
    assert torch.equal(program.module()(*given), engine(*given))
    stacked = [torch.stack([t, t + 1]).detach() for t in given]
    found = torch.func.vmap(engine)(*stacked)
    close(found[1], engine(*(t[1] for t in stacked)), 1e-6)
    again = torch.autograd.grad(checkpoint(engine, *given, use_reentrant=False).sum(), given)
    for a, b in zip(again, torch.autograd.grad(engine(*given).sum(), given), strict=True):
        assert torch.equal(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert engine(*given).dtype is torch.bfloat16


def test_a_seen_call_is_not_checked_again(monkeypatch):
    engine, given = AttentionEngine(mask_mod=causal, backend="interpret"), tensors(dtype=HALF)
    engine(*given)
    engine(*given)
    monkeypatch.setattr("attention_engine.runtime.module.check_qkv", None)
    engine(*given)
    assert op.ATTENTIONS


def test_what_a_constructor_takes_alone():
    assert AttentionEngine(online_func=OnlineSigmoid())(*tensors()).shape == (2, 9, 2, 16)
    assert AttentionEngine(None, None, None, causal, OnlineSoftmax())(*tensors()).shape == (2, 9, 2, 16)
    with pytest.raises(errors.BadMeta) as caught:
        AttentionEngine(causal)
    assert str(caught.value) == "qkv_meta is causal, a function. Give functions by name: score_mod=..., mask_mod=..."


# ---- linear attention


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_linear_engine_serves_every_signature(backend):
    engine = LinearAttentionEngine(backend=backend)
    for heads, kv, dim, dim_v in ((2, 2, 16, 16), (1, 2, 32, 24)):
        q, k, v = tensors(2, heads, kv, dim, dim_v, dtype=torch.float32)
        decay = -torch.rand(2, 9, kv)
        o, last = engine(q, k, v, decay, output_final_state=True)
        zeros = torch.zeros(2, kv, dim, dim_v, dtype=torch.float64)
        want, state = plain_linear.recurrence(*(t.double() for t in (q, k, v, decay)), zeros)
        close(o, want, 1e-4)
        close(last, state, 1e-4)
        token = [t[:, :1] for t in (q, k, v, decay)]
        close(engine.step(*token)[0], want[:, :1], 1e-4)
    with pytest.raises(errors.WrongHeads, match=r"2 value heads cannot share 3 query heads evenly"):
        engine(tensors(heads=3)[0], k[..., :16], v)
