"""On a GPU: graphs of training steps, vmap, checkpoints, autocast, compiled layers, and a Hugging Face model."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from attention_engine import AttentionEngine, meta_tensor
from attention_engine.library import OnlineSoftmax
from tests.gpu.test_runtime import BATCH, HEADS, KV_HEADS, build, close, qkv, results, same

pytestmark = pytest.mark.gpu


def test_a_captured_training_step_replays_on_new_numbers():
    engine = build(deterministic=True)
    fixed = qkv(length=500)
    d_o = torch.randn_like(engine(*fixed))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(engine, fixed, d_o)  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(engine, fixed, d_o)
    for _ in range(2):
        fresh = qkv(length=500)
        with torch.no_grad():
            for a, b in zip(fixed, fresh, strict=True):
                a.copy_(b)
        graph.replay()
        torch.cuda.synchronize()
        same(found, results(engine, fresh, d_o))


def test_a_captured_training_step_reads_the_tensors_of_its_functions_anew():
    """A parameter and ids that functions capture: a replay reads what they hold by then, and gives the gradient."""
    temperature = torch.nn.Parameter(torch.tensor(0.1, device="cuda"))
    ids = torch.zeros(500, dtype=torch.int32, device="cuda")
    metas = [meta_tensor(BATCH, heads, 500, 64, dtype=torch.float16) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    engine = AttentionEngine(
        metas,
        score_mod=lambda s, custom, b, h, i, j: s * temperature,
        mask_mod=lambda b, h, i, j: ids[i] == ids[j],
        online_func=OnlineSoftmax(),
        deterministic=True,
    )
    fixed = [t.detach().requires_grad_() for t in qkv(length=500)]
    d_o = torch.randn_like(engine(*fixed))

    def step():
        o = engine(*fixed)
        return [o.detach(), *torch.autograd.grad(o, [*fixed, temperature], d_o)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for documents in (3, 7):
        with torch.no_grad():
            temperature.mul_(0.7)
            ids.copy_(torch.arange(500, device="cuda") * documents // 500)
        graph.replay()
        torch.cuda.synchronize()
        eager = step()
        same(found[:4], eager[:4])
        close(found[4:], eager[4:], 1e-3)


def test_vmap_is_a_loop_over_its_entries():
    engine = build()
    q, k, v = (torch.stack([t.detach(), t.detach().roll(1, 1)]) for t in qkv(length=333))
    same([torch.func.vmap(engine)(q, k, v)], [torch.stack([engine(*each) for each in zip(q, k, v, strict=True)])])


def test_gradients_of_each_sample_by_vmap_of_grad():
    engine = build(deterministic=True)
    q, k, v = (torch.stack([t.detach(), t.detach().roll(1, 1)]) for t in qkv(length=333))
    found = torch.func.vmap(torch.func.grad(lambda *t: (engine(*t).float() ** 2).sum(), (0, 1, 2)))(q, k, v)
    for n in range(2):
        leaves = [t[n].clone().requires_grad_() for t in (q, k, v)]
        close([g[n] for g in found], torch.autograd.grad((engine(*leaves).float() ** 2).sum(), leaves), 1e-3)


def test_checkpoints_copies_and_autocast_change_nothing():
    engine, inputs = build(deterministic=True), qkv(length=333)
    d_o = torch.randn_like(engine(*inputs))
    want = results(engine, inputs, d_o)
    again = checkpoint(engine, *inputs, use_reentrant=False)
    same([again.detach(), *torch.autograd.grad(again, inputs, d_o)], want)
    same(results(copy.deepcopy(engine), inputs, d_o), want)
    with torch.autocast("cuda", torch.float16):
        same([engine(*(t.detach().float() for t in inputs))], want[:1])


def test_create_graph_needs_no_pairs_for_the_first_gradient():
    inputs = qkv(length=4096)
    engine = build()
    o = engine(*inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(o.sum(), inputs, create_graph=True)
    one_matrix = 4 * 2 * 8 * 4096 * 4096  # bytes of fp32 scores
    assert torch.cuda.max_memory_allocated() - before < one_matrix / 8


def test_flops_are_counted():
    inputs = qkv(length=333)
    with FlopCounterMode(display=False) as counter:
        build()(*inputs).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 8 * 333 * 333 * (2 * 64 + 5 * 64)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_transformers_model_runs_on_the_kernels(name):
    pytest.importorskip("transformers")
    from tests.integrations import test_transformers as models

    make, torchs = models.BESIDE[name]
    ids, real, labels = (t.cuda() for t in models.batch(True))
    logits = {}
    for attention in ("eager", torchs, "attention_engine"):
        model = models.build(make, attention, torch.bfloat16).cuda()
        out = model(ids, attention_mask=real, labels=labels)
        out.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        logits[attention] = out.logits[real.bool()].detach().float()
    found = (logits["attention_engine"] - logits["eager"]).abs().max()
    assert found <= 2 * (logits[torchs] - logits["eager"]).abs().max()
