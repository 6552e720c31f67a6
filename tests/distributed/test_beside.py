"""Beside sequences that two processes share: FSDP, DDP, checkpoints, autocast, torch.compile; time limits."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from attention_engine import AttentionEngine, CustomIO
from attention_engine import library as lib
from attention_engine.distributed import ContextParallel
from tests.distributed.ranks import run_ranks

HEADS, DIM, LENGTH = 4, 8, 48
METHODS = ("gather", "ring", "heads")
EXACT = 1e-12  # of float64
LIMIT = 3  # seconds


class Block(nn.Module):
    """Projections, and an attention whose slopes are learned."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.qkv = attention, nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.slopes, self.out = nn.Parameter(torch.rand(HEADS)), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        return x + self.out(self.attention(q, k, v, slopes=self.slopes).flatten(-2))


def engine_of(backend: str = "reference") -> AttentionEngine:
    return AttentionEngine(None, CustomIO({"slopes": ("heads",)}), lib.alibi(0.35), lib.causal, backend=backend)


def far(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model(x).square().mean().backward()
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def beside_weights(mesh) -> dict[str, float]:
    """Errors of averaged gradients beside those of one process that has the whole sequence."""
    found = {}
    x = torch.randn(2, LENGTH, HEADS * DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = gradients(Block(engine_of()), x)
    for method in METHODS:
        for name in ("FSDP", "DDP"):
            attention = ContextParallel(engine_of(), mesh, method)
            block = Block(attention)
            if name == "FSDP":
                fully_shard(block, mesh=mesh)
            else:
                block = DistributedDataParallel(block, process_group=mesh.get_group())
            mine = gradients(block, attention.shard(x))
            assert mine.keys() == exact.keys()
            found[f"{name}, {method}"] = max(far(mine[n], g) for n, g in exact.items())
    return found


def averaged_in_16_bits(mesh) -> dict[str, float]:
    """Under autocast, the error of averaged gradients beside float64, over that of one process with all tokens."""
    x = torch.randn(2, 256, HEADS * DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    exact = gradients(Block(engine_of()), x)

    def error(model: nn.Module, x: Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            mine = gradients(model, x.float())
        return sum((mine[n].double() - g).square().sum().item() for n, g in exact.items()) ** 0.5

    one, found = error(Block(engine_of()).float(), x), {}
    for method in METHODS:
        attention = ContextParallel(engine_of(), mesh, method)
        block = DistributedDataParallel(Block(attention).float(), process_group=mesh.get_group())
        found[method] = error(block, attention.shard(x)) / one
    return found


def draw(seed: int = 2, length: int = LENGTH // 2) -> list[Tensor]:
    torch.manual_seed(seed)
    made = [torch.randn(1, length, h, DIM) for h in (HEADS, 2, 2)]
    return [t.requires_grad_() for t in (*made, torch.rand(HEADS))]


def results(call, given: list[Tensor]) -> list[Tensor]:
    o = call(*given)
    return [o.detach(), *torch.autograd.grad(o.square().sum(), given)]


def run_again(mesh) -> dict[str, bool]:
    """Is a call that is checkpointed, or run under autocast, the same bit for bit?"""
    found = {}
    for method in METHODS:
        attention = ContextParallel(engine_of("interpret"), mesh, method)
        given = draw()
        once = results(attention, given)
        again = results(lambda *t, call=attention: checkpoint(call, *t, use_reentrant=False), given)
        found[f"checkpoint, {method}"] = all(map(torch.equal, once, again))
        with torch.autocast("cpu", torch.bfloat16):
            cast = attention(*given)
        low = attention(*(t.bfloat16() for t in given[:3]), given[3])
        found[f"autocast, {method}"] = cast.dtype is torch.bfloat16 and torch.equal(cast, low)
    return found


def compiled(mesh, methods: tuple[str, ...] = METHODS) -> dict[str, object]:
    """How many graphs three lengths are, each way, and whether their results are those of calls outside of them."""
    found: dict[str, object] = {}
    for method in methods:
        torch._dynamo.reset()
        graphs = {"forward": 0, "backward": 0}

        def count(way, graphs=graphs):
            def take(graph, _):
                graphs[way] += 1
                return graph

            return take

        backend = aot_autograd(fw_compiler=count("forward"), bw_compiler=count("backward"))
        attention = ContextParallel(engine_of("interpret"), mesh, method)
        run = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
        same = []
        for length in (48, 64, 80):
            attention.places(length)
            given = draw(length, length // 2)
            same.append(all(map(torch.equal, results(run, given), results(attention, given))))
        found[method] = graphs, same
    return found


def refused(mesh) -> dict[str, str]:
    """What a gradient of keys' gradients says, whose sums over ranks have none."""
    found = {}
    for method in METHODS:
        given = draw()
        o = ContextParallel(engine_of(), mesh, method)(*given)
        (first,) = torch.autograd.grad(o.square().sum(), given[1:2], create_graph=True)
        with pytest.raises(RuntimeError) as error:
            first.sum().backward()
        found[method] = str(error.value)
    return found


def in_16_bits(mesh) -> dict[str, list[float]]:
    """Errors of o, dq, dk, dv in bf16 over those of one process, beside float64."""
    found = {}
    torch.manual_seed(4)
    whole = [torch.randn(1, 256, h, 16).bfloat16() for h in (4, 2, 2, 4)]

    def made(run, dtype, own=lambda t: t):
        leaves = [own(t.to(dtype)).clone().requires_grad_() for t in whole[:3]]
        o = run(*leaves)
        return [t.double() for t in (o.detach(), *torch.autograd.grad(o, leaves, own(whole[3].to(dtype))))]

    exact = made(AttentionEngine(None, None, None, lib.causal, backend="reference"), torch.float64)
    engine = AttentionEngine(None, None, None, lib.causal, backend="interpret")
    one = [(a - b).norm() for a, b in zip(made(engine, torch.bfloat16), exact, strict=True)]
    for method in METHODS:
        attention = ContextParallel(engine, mesh, method)
        mine = [attention.unshard(t) for t in made(attention, torch.bfloat16, attention.shard)]
        found[method] = [((a - b).norm() / e).item() for a, b, e in zip(mine, exact, one, strict=True)]
    return found


def waits_for_nobody(mesh) -> tuple[str, float]:
    """What a call says, and after how long, whose other ranks don't come."""
    group = dist.new_group(list(range(mesh.size())), timeout=timedelta(seconds=LIMIT))
    attention = ContextParallel(AttentionEngine(), DeviceMesh.from_group(group, "cpu"))
    began, said = time.monotonic(), ""
    if mesh.get_local_rank() == 0:
        with pytest.raises(RuntimeError) as error:
            attention(*torch.randn(3, 1, 8, 2, 8))
        said = str(error.value)
    took = time.monotonic() - began
    dist.barrier()
    return said, took


def compiled_once(mesh) -> dict[str, object]:
    return compiled(mesh, ("ring",))


CASES = beside_weights, run_again, in_16_bits, averaged_in_16_bits, compiled_once, refused, waits_for_nobody


def everything(mesh):
    return (*(f(mesh) for f in CASES),)


@pytest.fixture(scope="module")
def found():
    """Of both processes, which start once."""
    return run_ranks(2, everything)


def test_fsdp_and_ddp_average_gradients_to_those_of_one_process(found):
    for errors, *_ in found:
        assert len(errors) == 6 and max(errors.values()) <= EXACT, errors


def test_checkpoints_and_autocast_change_no_bit(found):
    for _, same, *_ in found:
        assert len(same) == 6 and all(same.values()), same


def test_sums_over_runs_and_ranks_are_rounded_once(found):
    for _, _, errors, *_ in found:
        assert len(errors) == 3 and max(max(each) for each in errors.values()) <= 1.05, errors


def test_averaged_gradients_are_as_exact_in_16_bits_as_those_of_one_process(found):
    for _, _, _, errors, *_ in found:
        assert len(errors) == 3 and max(errors.values()) <= 1.05, errors


ONE_GRAPH = {"forward": 1, "backward": 1}, [True] * 3


def test_three_lengths_are_one_graph_each_way(found):
    for *_, graphs, _, _ in found:
        assert graphs == {"ring": ONE_GRAPH}


@pytest.mark.slow
def test_three_lengths_are_one_graph_each_way_by_every_method():
    for graphs in run_ranks(2, compiled):
        assert graphs == dict.fromkeys(METHODS, ONE_GRAPH)


def test_gradients_of_gradients_are_refused(found):
    for *_, said, _ in found:
        assert said.keys() == set(METHODS) and all("once_differentiable" in text for text in said.values()), said


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says(found):
    said, took = found[0][-1]
    assert "imed out" in said and took < LIMIT + 5, (said, took)
