"""Engines inside PyTorch: copies, pickles, vmap, torch.func, export, FLOPs, shapes alone, derivatives of any order."""

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from attention_engine import library
from attention_engine.errors import UnknownProgram
from attention_engine.library import OnlineSoftmax, alibi, and_masks, causal, or_masks, prefix_lm, scale, sliding_window
from attention_engine.runtime import attention_op, op
from tests import plain
from tests.runtime.engines import (
    BACKENDS,
    DIM,
    DIM_V,
    HEADS,
    build,
    close,
    exactly,
    graphs,
    qkv,
    results,
    same,
    weighted_sum,
)

ROOT = Path(__file__).parents[2]
both = pytest.mark.parametrize("backend", BACKENDS)


def sloped(backend, **options):
    return build({"slopes": ("heads",)}, score_mod=alibi(0.25), backend=backend, **options)


# ---- copies and pickles


def through_pickle(engine):
    return pickle.loads(pickle.dumps(engine))


def through_a_file(engine):
    file = io.BytesIO()
    torch.save(nn.Sequential(engine), file)
    file.seek(0)
    return torch.load(file, weights_only=False)[0]


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_a_file])
@both
def test_a_copy_of_an_engine_is_the_engine(backend, way):
    inputs = (*qkv(), torch.rand(HEADS, requires_grad=True))
    engine = sloped(backend, layout="bhsd", deterministic=True)
    inputs = (*(t.detach().transpose(1, 2).requires_grad_() for t in inputs[:3]), inputs[3])
    before = way(engine)  # never called
    want = results(engine, *inputs)
    for other in (before, way(engine)):
        same(results(other, *inputs), want)
        assert repr(other) == repr(engine)


def test_a_pickled_engine_runs_in_another_process(tmp_path):
    engine, inputs = sloped("reference"), [t.detach() for t in qkv()]
    slopes = torch.rand(HEADS)
    torch.save((engine, inputs, slopes, engine(*inputs, slopes)), tmp_path / "engine.pt")
    code = (
        "import sys, torch\nengine, inputs, slopes, o = torch.load(sys.argv[1], weights_only=False)\n"
        "print(torch.equal(engine(*inputs, slopes), o))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "engine.pt"], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(("made", "shown"), [
    (scale(0.25), "scale(0.25)"), (sliding_window(5, right=2), "sliding_window(5, right=2)"),
    (and_masks(causal, or_masks(sliding_window(5), prefix_lm(3))),
     "and_masks(causal, or_masks(sliding_window(5), prefix_lm(3)))"),
])  # fmt: skip
def test_what_the_library_makes_prints_and_pickles_as_its_call(made, shown):
    assert repr(made) == repr(through_pickle(made)) == shown


def test_whatever_makes_mods_remembers_its_call():
    factories = {
        name: f for name, f in vars(library).items()
        if callable(f) and getattr(f, "__module__", "") == library.__name__ and not name.startswith("_")
        and getattr(f, "__annotations__", {}).get("return") in ("Mask", "Callable[..., Any]")
    }  # fmt: skip
    assert len(factories) >= 8
    for name, factory in factories.items():
        assert getattr(factory, "makes_mods", False), name


def test_what_the_library_makes_is_the_function_itself():
    assert through_pickle(scale(0.25))(3.0, None, 0, 0, 0, 0) == 0.75
    mask = through_pickle(sliding_window(5, right=2))
    assert [mask(0, 0, 10, key) for key in (4, 5, 12, 13)] == [False, True, True, False]


class Block(nn.Module):
    """A layer with an engine inside."""

    def __init__(self, backend="reference"):
        super().__init__()
        torch.manual_seed(3)
        self.project = nn.Linear(8, HEADS * DIM + 2 * DIM + 2 * DIM_V)
        self.join = nn.Linear(HEADS * DIM_V, 8)
        self.slopes = nn.Parameter(torch.rand(HEADS))
        self.attend = sloped(backend, deterministic=True)

    def forward(self, x):
        q, k, v = self.project(x).split([HEADS * DIM, 2 * DIM, 2 * DIM_V], -1)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t, heads in ((q, HEADS), (k, 2), (v, 2)))
        return x + self.join(self.attend(q, k, v, self.slopes).flatten(2))


def test_a_state_dict_holds_the_layers_parameters_and_nothing_of_the_engine():
    block, other = Block(), Block()
    assert list(block.state_dict()) == ["slopes", "project.weight", "project.bias", "join.weight", "join.bias"]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(block.state_dict(), strict=True)
    x = torch.randn(2, 7, 8)
    same([other(x)], [block(x)])


# ---- transforms


@both
@pytest.mark.parametrize("by_batch", [False, True], ids=["folded into the batch", "entry by entry"])
def test_vmap_is_a_loop_over_its_entries(backend, by_batch):
    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & ((kv_idx != 2) | (b == 0) if by_batch else kv_idx != 2)

    engine = build(mask_mod=mask, backend=backend)
    q, k, v = (torch.randn(3, *t.shape) for t in qkv(9))
    want = torch.stack([engine(*each) for each in zip(q, k, v)])
    close([vmap(engine)(q, k, v)], [want], 1e-6)
    close([vmap(engine, (1, 0, 2), 1)(q.movedim(0, 1), k, v.movedim(0, 2))], [want.movedim(0, 1)], 1e-6)
    shared = torch.stack([engine(each, k[0], v[0]) for each in q])
    close([vmap(engine, (0, None, None))(q, k[0], v[0])], [shared], 1e-6)


@both
def test_vmap_over_a_custom_input_gives_each_entry_its_own(backend):
    engine, inputs = sloped(backend), [t.detach() for t in qkv(9)]
    slopes = torch.rand(3, HEADS)
    want = torch.stack([engine(*inputs, each) for each in slopes])
    close([vmap(lambda s: engine(*inputs, s))(slopes)], [want], 1e-6)


@both
@pytest.mark.parametrize("slopes", [False, True], ids=["plain", "with slopes"])
def test_gradients_of_each_sample_by_vmap_of_grad(backend, slopes):
    engine = sloped(backend) if slopes else build(backend=backend)
    custom = (torch.rand(HEADS),) if slopes else ()
    q, k, v = (torch.randn(3, *t.shape) for t in qkv(9))

    def loss(q, k, v, *custom):
        return (engine(q, k, v, *custom) ** 2).sum()

    numbers = tuple(range(3 + len(custom)))
    found = vmap(grad(loss, numbers), (0, 0, 0, *(None for _ in custom)))(q, k, v, *custom)
    for n in range(3):
        leaves = [t.clone().requires_grad_() for t in (q[n], k[n], v[n], *custom)]
        close([g[n] for g in found], list(torch.autograd.grad(loss(*leaves), leaves)), 1e-4)


@both
def test_torch_func_gives_what_autograd_gives(backend):
    inputs = qkv(5)
    engine = build(backend=backend)
    o, pull = vjp(engine, *(t.detach() for t in inputs))
    d_o = torch.randn_like(o)
    close(list(pull(d_o)), list(torch.autograd.grad(engine(*inputs), inputs, d_o)), 1e-6)
    rows = jacrev(lambda q: engine(q, *inputs[1:])[:, 2, 1, :3].sum(0))(inputs[0].detach())
    one = torch.autograd.grad(engine(*inputs)[:, 2, 1, 1].sum(), inputs[0])[0]
    close([rows[1]], [one], 1e-5)


def test_functional_call_swaps_the_layers_weights():
    block, x = Block(), torch.randn(2, 7, 8)
    twice = {n: 2 * p for n, p in block.named_parameters()}
    other = copy.deepcopy(block)
    other.load_state_dict(twice)
    same([functional_call(block, twice, (x,))], [other(x)])


@both
def test_gradients_of_any_order_do_not_count_a_path_twice(backend):
    """d_o depends on q here, so a graph that is walked from d_o to q in the third derivative shows at once."""
    inputs = qkv(4)
    exact = exactly(inputs)

    def third(attend, inputs):
        loss = (attend(*inputs) ** 3).sum()
        for _ in range(2):
            first = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = sum((g**2).sum() for g in first)
        return list(torch.autograd.grad(loss, inputs))

    def dense(q, k, v):
        return plain.attention(q, k, v, "softmax", causal=True, score=plain.scaled(0.25))

    for a, b in zip(third(build(backend=backend), inputs), third(dense, exact)):
        close([a / b.abs().max()], [b / b.abs().max()], 1e-4)


def test_create_graph_runs_the_kernels_and_makes_no_pairs_until_the_graph_is_used(monkeypatch):
    engine, inputs = build(), qkv()
    o = engine(*inputs)
    plain_gradients = torch.autograd.grad(weighted_sum(o, {}), inputs, retain_graph=True)
    with monkeypatch.context() as patched:
        patched.setattr(attention_op, "differentiable_gradients", None)
        found = torch.autograd.grad(weighted_sum(o, {}), inputs, create_graph=True)
    close([g.detach() for g in found], list(plain_gradients), 1e-6)


# ---- export, shapes alone, FLOPs


@both
def test_an_exported_engine_takes_other_lengths(backend):
    engine, inputs = build(backend=backend), [t.detach() for t in qkv(11)]
    length = torch.export.Dim("length")
    program = torch.export.export(engine, tuple(inputs), dynamic_shapes=({1: length},) * 3)
    assert next(n.target for n in program.graph.nodes if n.op == "call_function") is op.FORWARD
    for size in (11, 30):
        others = [t.detach() for t in qkv(size)]
        same([program.module()(*others)], [engine(*others)])


def test_an_exported_engine_in_a_process_without_the_engine_says_what_to_do(monkeypatch):
    engine, inputs = build(), [t.detach() for t in qkv(11)]
    program = torch.export.export(engine, tuple(inputs)).module()
    (key,) = (n.args[-1] for n in program.graph.nodes if n.target is op.FORWARD)
    monkeypatch.delitem(op.ATTENTIONS, key)
    with pytest.raises(UnknownProgram) as caught:
        program(*inputs)
    assert str(caught.value) == (
        f"no attention with the key {key} has been built in this process.\n"
        "  Build the same AttentionEngine and call it once before an exported or loaded graph runs."
    )


@both
def test_meta_tensors_give_shapes(backend):
    there = [t.detach().to("meta").requires_grad_() for t in qkv(11, 13)]
    o, rows = build(backend=backend)(*there, return_rowscales=True)
    assert (o.shape, o.device.type, rows["lse"].shape) == ((2, 11, HEADS, DIM_V), "meta", (2, HEADS, 11))
    assert [g.shape for g in torch.autograd.grad(o.sum(), there)] == [t.shape for t in there]


def test_flops_are_counted_as_torch_counts_its_own_attention():
    inputs = qkv(11, 13)
    pairs = 2 * HEADS * 11 * 13
    with FlopCounterMode(display=False) as counter:
        build()(*inputs).sum().backward()
    found = {str(k).rpartition(".")[2]: n for k, n in counter.get_flop_counts()["Global"].items()}
    assert found == {"forward": 2 * pairs * (DIM + DIM_V), "backward": 2 * pairs * (3 * DIM + 2 * DIM_V)}
    counted = sdpa_flop_count((2, HEADS, 11, DIM), (2, HEADS, 13, DIM), (2, HEADS, 13, DIM_V))
    assert found["forward"] == counted  # all pairs there too


# ---- torch.compile, where lengths meet other sizes


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def test_a_length_equal_to_the_heads_compiles_once_more_and_not_again(counter):
    """torch takes equal sizes of the first call for one number; mark_dynamic says that they aren't."""
    compiled = torch.compile(build(), fullgraph=True, dynamic=True, backend=counter)
    for batch, q_len, kv_len in ((3, HEADS, 12), (5, 17, 10), (3, 9, 14), (6, 33, 20)):
        compiled(*qkv(q_len, kv_len, batch=batch))
    assert graphs(counter) == 2


def test_a_marked_length_may_equal_the_heads_and_compiles_once(counter):
    compiled = torch.compile(build(), fullgraph=True, backend=counter)
    for batch, q_len, kv_len in ((3, HEADS, 12), (3, 17, 10), (3, DIM, 14), (3, 33, 20)):
        inputs = qkv(q_len, kv_len, batch=batch)
        for tensor in inputs:
            torch._dynamo.mark_dynamic(tensor, 1)
        close([compiled(*inputs)], [build()(*inputs)], 1e-6)
    assert counter.frame_count == 1


def test_a_layer_trains_the_same_compiled_and_checkpointed(counter):
    from torch.utils.checkpoint import checkpoint

    def losses(step):
        block = Block()
        optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
        found = []
        for n in range(3):
            torch.manual_seed(n)
            optimizer.zero_grad()
            loss = (step(block)(torch.randn(2, 7, 8)) ** 2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return torch.stack(found)

    want = losses(lambda block: block)
    assert (want[1:] != want[:-1]).all()
    close([losses(lambda block: torch.compile(block, fullgraph=True, backend=counter))], [want], 1e-6)
    close([losses(lambda block: lambda x: checkpoint(block, x, use_reentrant=False))], [want], 1e-6)


# ---- one process, and two


def test_a_process_alone_has_the_gradients_of_the_block(tmp_path):
    """DistributedDataParallel's hooks stand on parameters, and ask for each gradient."""
    block, x = Block(), torch.randn(4, 7, 8)
    want = torch.autograd.grad((block(x) ** 2).mean(), list(block.parameters()))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        (DistributedDataParallel(block)(x) ** 2).mean().backward()
    finally:
        dist.destroy_process_group()
    same([p.grad for p in block.parameters()], want)


DDP = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.runtime.test_integration import Block

rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
block = DistributedDataParallel(Block())
torch.manual_seed(0)
x = torch.randn(4, 7, 8)
(block(x[2 * rank : 2 * rank + 2]) ** 2).mean().backward()
torch.save([p.grad for p in block.module.parameters()], f"{path}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_share_their_gradients(tmp_path):
    (tmp_path / "ddp.py").write_text(DDP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen([sys.executable, tmp_path / "ddp.py", str(n), str(tmp_path)], env=environment,
                         stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    block = Block()
    torch.manual_seed(0)
    (block(torch.randn(4, 7, 8)) ** 2).mean().backward()
    for n in range(2):
        close(torch.load(tmp_path / f"{n}.pt"), [p.grad for p in block.parameters()], 1e-6)


def test_online_functions_of_the_library_pickle():
    assert type(through_pickle(OnlineSoftmax())) is OnlineSoftmax
