"""Sequences that two processes share: what one process gives of the whole, to a rounding."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine
from attention_engine import library as lib
from attention_engine.distributed import ContextParallel, Layout, exchange, heads, methods, states
from attention_engine.distributed.block_gradients import OfRun
from attention_engine.distributed.exchange import Ranks, Tokens
from attention_engine.distributed.methods import Call
from attention_engine.distributed.ring import Ring, RingAttention
from attention_engine.errors import AttentionEngineError
from attention_engine.plan import linear
from tests.distributed.attentions import attentions
from tests.distributed.compared import (
    EXACT,
    compare_all,
    compare_kernels,
    compare_more,
    compare_needs,
    far,
    of_one,
    of_ranks,
    other_calls,
)
from tests.distributed.ranks import run_ranks


def mistakes(mesh) -> dict[str, str]:
    """What each mistake says, on this rank."""
    rank, causal = mesh.get_local_rank(), AttentionEngine(mask_mod=lib.causal, backend="reference")
    q, k, v = (torch.randn(1, 8, 3, 8) for _ in range(3))
    biased = AttentionEngine(
        None, CustomIO({"bias": ("seq_len",), "near": ("seq_len",)}),
        lambda s, c, b, h, q, k: s + c["bias"] + c["near"][k], backend="reference",
    )  # fmt: skip
    told = ContextParallel(causal, mesh)
    told.places(13)
    found: dict[str, str] = {}

    def said(name, call):
        with pytest.raises(AttentionEngineError) as error:
            call()
        found[name] = f"{type(error.value).__name__}: {error.value}"

    said("heads", lambda: ContextParallel(causal, mesh, "heads")(q, k, v))
    said("length", lambda: told(q, k, v))
    said("short", lambda: told.shard(torch.zeros(1, 1, 1, 1)))
    said("layout", lambda: ContextParallel(causal, mesh, balance=Layout.zigzag(24, 3)))
    said("whole", lambda: ContextParallel(biased, mesh)(q, k, v, torch.zeros(8), torch.zeros(8)))
    said("shard", lambda: ContextParallel(biased, mesh)(q, k, v, torch.zeros(16), torch.zeros(16)))
    other = AttentionEngine(mask_mod=lib.causal if rank else lib.prefix_lm(2), backend="reference")
    said("program", lambda: ContextParallel(other, mesh, balance="zigzag")(q, k, v))
    dims = torch.randn(1, 8, 3, 8 + 8 * rank)
    said("shape", lambda: ContextParallel(causal, mesh)(dims, dims, dims))
    said("method", lambda: ContextParallel(causal, mesh, "ulysses"))
    said("balance", lambda: ContextParallel(causal, mesh, balance="striped"))
    with pytest.warns(UserWarning) as warned:
        ContextParallel(LinearAttentionEngine(backend="reference"), mesh)(q, k, v, torch.ones(1, 8, 3))
    found["growth"] = str(warned[0].message)
    return found


def shared_linear(name: str, mesh, balance, dtype, backend: str, length: int = 37) -> float:
    """The error of a linear attention in float64, beside one process: o, the last state, and every gradient."""
    torch.manual_seed(4)
    axes, mods, channels = LINEAR[name]
    draw = {"q": (2, length, 2, 8), "v": (2, length, 4, 6), "decay": (2, length, 4), "s": (2, 4, 8, 6)}
    if channels:
        draw |= {"q": (2, length, 4, 8), "decay": (2, length, 4, 8)}
    sizes = {"batch": 2, "heads": 4, "seq_len": length}
    draw |= {"k": draw["q"], **{n: tuple(sizes[a] for a in each) for n, each in axes.items()}}
    whole = {n: torch.randn(size, dtype=torch.float64) for n, size in draw.items()}
    whole["decay"] = -whole["decay"].abs()
    d_o, d_last = torch.randn(2, length, 4, 6).double(), torch.randn(2, 4, 8, 6).double()
    if name == "no decay":
        del whole["decay"]

    def results(run, dtype, backend, own):
        engine = LinearAttentionEngine(None, **mods, custom_io=CustomIO(axes), backend=backend)
        leaves = {n: t.to(dtype).requires_grad_() for n, t in whole.items()}
        run = run(engine)
        tokens = {n: own(run, t, n) for n, t in leaves.items() if n != "s"}
        o, last = run(**tokens, initial_state=leaves["s"], output_final_state=True)
        d = own(run, d_o.to(dtype), "o")
        return o, last, run, torch.autograd.grad([o, last], list(leaves.values()), [d, d_last.to(last.dtype)])

    o, last, _, exact = results(lambda engine: engine, torch.float64, "reference", lambda run, t, n: t)
    dims = {**dict.fromkeys(("q", "k", "v", "decay", "o"), 1), "dt": 2}
    split = lambda run, t, n: run.shard(t, dims[n]) if n in dims else t  # noqa: E731
    mine = results(lambda e: ContextParallel(e, mesh, balance=balance), dtype, backend, split)
    found = [far(mine[2].unshard(mine[0].detach()), o), far(mine[1], last)]
    for gradient, of_whole in zip(mine[3], exact, strict=True):
        total = gradient.double()
        dist.all_reduce(total)
        found.append(far(total, of_whole))
    return max(found)


PER_TOKEN = ("batch", "heads", "seq_len")
LINEAR = {
    "retention": ({}, {}, False),
    "no decay": ({}, {}, False),
    "Mamba-2": (
        {"dt": PER_TOKEN, "A": ("heads",)},
        {"v_mod": lambda x, c: x * c["dt"], "decay_mod": lambda x, c: x * c["dt"].sigmoid() * c["A"].exp()}, False,
    ),
    "a decay for each channel": ({}, {}, True),
}  # fmt: skip


def compare_linear(mesh) -> dict[str, float]:
    found = {}
    for name in LINEAR:
        for balance in ("contiguous", "zigzag"):
            found[f"{name}, {balance}"] = shared_linear(name, mesh, balance, torch.float64, "reference")
    with patch.object(linear, "PIECE", 32):  # two pieces of each rank's tokens
        for name in ("Mamba-2", "a decay for each channel"):
            found[f"kernels, {name}"] = shared_linear(name, mesh, "auto", torch.float32, "interpret", 131)
    return found


def forgets_runs(_):
    """What a run before leaves is what the runs before it began with."""
    return lambda along: torch.ones_like(along.kept)


def backwards(walk):
    return lambda along, first=None: walk(replace(along, reverse=not along.reverse), first)


def linear_with_wrong_laws(mesh) -> dict[str, float]:
    """The errors of linear attention when a law is broken."""
    found = {}
    with patch.object(states.Along, "walk", backwards(states.Along.walk)):
        found["which way"] = shared_linear("retention", mesh, "zigzag", torch.float64, "reference")
    with patch.object(linear, "PIECE", 32), patch.object(states.Along, "faded", forgets_runs(None)):
        found["what pieces keep"] = shared_linear("retention", mesh, "auto", torch.float32, "interpret", 131)
    return found


def from_zero(attend):
    return lambda call, starts, *rest: attend(call, dict.fromkeys(starts, 0), *rest)


def alone(_):
    """In place of sums over ranks: this rank's part of its own tensor, there after a wait as those are."""
    return lambda ranks, mine: mine.unflatten(0, (ranks.size, -1))[ranks.rank] + 0.0


def as_sent(_):
    return lambda tokens, gathered: gathered[: tokens.layout.length]


def not_added(_):
    """What other ranks send is forgotten."""
    return lambda parts, into: into.copy_(parts[0])


def by_rank(_):
    """Each rank's tokens behind those of the rank before."""

    def of_rank(tokens, rank, to=None):
        before, found = sum(map(tokens.layout.count, range(rank))), []
        for run in tokens.layout.runs[rank]:
            found.append((slice(before + run.at, before + run.at + run.count), run.here))
        return found

    return of_rank


def of_last(finish):
    return lambda attention, parts, *rest: finish(attention, parts[-1:], *rest)


def own_alone(added):
    """What comes is waited for, as its memory is in use till then, and forgotten."""
    return lambda ring, mine, sums: added(ring, mine, None if sums is None else sums.wait() and None)


def nearby(_):
    """As if all queries followed the first one."""
    return lambda _, runs, q: torch.arange(q.shape[1], dtype=torch.int32) + runs[0].start if runs else None


def group_by_group(_):
    """As if the first groups of all ranks' heads came first."""

    def part(group, tensor, rank, ranks):
        each = tensor.shape[-2] // (ranks * group.of)
        return tensor.narrow(-2, (group.first * ranks + rank * group.count) * each, group.count * each)

    return part


def nearly_all(needed):
    """All keys but the first ones of what a rank needs."""
    return lambda *given: tuple(tuple((a + 5, b) for a, b in each) for each in needed(*given))


def with_rows(of_block):
    return lambda run, *rest: of_block(run, *rest[:-1], True)


def with_wrong_laws(mesh) -> dict[str, float]:
    """The errors when a law is broken: a comparison that doesn't see it would be none."""
    broken = {
        "starts of queries": (Call, "portion", from_zero, "ALiBi, causal documents", "gather"),
        "starts of heads": (Call, "attend", from_zero, "retention", "heads"),
        "sums of gradients": (exchange, "add_up", not_added, "causal, grouped heads", "gather"),
        "sums between nodes": (Ranks, "begin_sum", alone, "causal, grouped heads", "gather"),
        "order of keys": (Tokens, "of_rank", by_rank, "causal, grouped heads", "gather"),
        "order between nodes": (Tokens, "in_order", as_sent, "causal, grouped heads", "gather"),
        "order of tokens": (Tokens, "of_rank", by_rank, "sinks, window", "heads"),
        "starts of keys": (Call, "portion", from_zero, "causal, grouped heads", "ring"),
        "a row of all parts": (RingAttention, "finish", of_last, "full, one key head", "ring"),
        "sums that go round": (Ring, "added", own_alone, "full, one key head", "ring"),
        "places of queries": (Call, "_places", nearby, "causal, grouped heads", "gather"),
        "groups of heads": (heads.Group, "part", group_by_group, "retention", "heads"),
        "keys that are needed": (methods, "needed_by", nearly_all, "causal, grouped heads", "gather"),
        "rows once": (OfRun, "of_block", with_rows, "sinks, window", "ring"),
    }
    found = {}
    for law, (owner, name, wrong, attention, method) in broken.items():
        shared = attentions()[attention]
        o, _, grads, d_o, d_rows = of_one(shared, torch.float64, "reference")
        with (
            patch.object(owner, name, wrong(getattr(owner, name))),
            patch.object(methods, "WORTH", 0),
            patch.object(methods, "FEW_RUNS", 1 if law == "places of queries" else 2),
            patch.object(Ranks, "nodes", 2 if law.endswith("nodes") else 1),
        ):
            mine = of_ranks(shared, mesh, method, "zigzag", torch.float64, "reference", d_o, d_rows)
        found[law] = max([far(mine[0], o), *(far(a, b) for a, b in zip(mine[2], grads, strict=True))])
    return found


def copies(mesh) -> dict[str, float]:
    """How far copies are from what was copied, which knows a length that ranks hold unlike parts of."""
    q, k, v = torch.randn(3, 1, 13, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    shared = ContextParallel(AttentionEngine(mask_mod=lib.causal, backend="reference"), mesh, "ring")
    mine = [shared.shard(t) for t in (q, k, v)]
    exact, module = shared(*mine), torch.nn.ModuleList([shared])
    made = {"deepcopy": copy.deepcopy(module)[0], "pickle": pickle.loads(pickle.dumps(shared))}
    return {f"copies, {name}": far(other(*mine), exact) for name, other in made.items()}


def everything(mesh):
    return (
        compare_all(mesh, every=False),
        compare_kernels(mesh, every=False),
        {**other_calls(mesh), **compare_more(mesh), **copies(mesh)},
        mistakes(mesh),
        compare_linear(mesh),
        {**with_wrong_laws(mesh), **linear_with_wrong_laws(mesh)},
        compare_needs(mesh),
    )


@pytest.fixture(scope="module")
def found():
    """Of both processes: they start once, which takes longer than most of what they run."""
    return run_ranks(2, everything)


@pytest.mark.slow
def test_any_attention_in_every_layout_by_every_method():
    for errors in run_ranks(2, compare_all):
        assert len(errors) == 90 and max(errors.values()) <= EXACT, errors


def test_any_attention_in_any_layout_by_any_method(found):
    for errors, *_ in found:
        assert len(errors) == 30
        assert max(errors.values()) <= EXACT, {n: e for n, e in errors.items() if e > EXACT}


def test_kernels_are_as_exact_as_in_one_process(found):
    for _, errors, *_ in found:
        assert len(errors) == 4 * 5
        assert all(mine <= 1.5 * one for mine, one in errors.values()), errors


@pytest.mark.slow
def test_kernels_of_three_attentions_are_as_exact_as_in_one_process():
    for errors in run_ranks(2, compare_kernels):
        assert len(errors) == 2 * (5 + 5 + 7) + 5 + 5
        assert all(mine <= 1.5 * one for mine, one in errors.values()), errors


def test_other_lengths_layouts_captured_tensors_meshes_dropout_and_copies(found):
    for _, _, errors, *_ in found:
        assert len(errors) == 6 + 8 + 4 + 2 and max(errors.values()) <= EXACT, errors


def test_mistakes_are_told_on_every_rank(found):
    for rank, (_, _, _, said, *_) in enumerate(found):
        assert said["heads"] == (
            'HeadsDoNotDivide: 3 query heads can\'t be shared evenly among 2 ranks, as method="heads" does.\n'
            '  Use method="gather", or a multiple of 2 heads.'
        )
        assert said["length"] == (
            f"LengthNotInLayout: q has 8 tokens, and rank {rank} of 2 holds {(7, 6)[rank]} of 13.\n"
            "  Split tensors by `shard`, or tell a length first: `places(length)`."
        )
        assert "a sequence of 1 leaves one of 2 ranks without tokens" in said["short"]
        assert "LengthNotInLayout" in said["layout"]
        assert "near' has shape (8,). Its axes ('seq_len',) ask for (16,): it comes whole." in said["whole"]
        assert "bias' has shape (16,). Its axes ('seq_len',) ask for (8,): it comes with this rank's" in said["shard"]
        assert said["program"].startswith(
            "RanksDisagree: ranks that share a sequence differ in their attention: rank 0 has"
        )
        assert said["shape"].startswith(
            "RanksDisagree: ranks that share a sequence differ in shapes, lengths aside: rank 0 has"
        )
        assert "Choose 'auto', 'gather', 'ring', 'heads' for AttentionEngine on a mesh of 1." in said["method"]
        assert "Choose 'auto', 'contiguous', 'zigzag', or give a Layout." in said["balance"]
        assert "decay" in said["growth"]


def test_linear_attention_by_states(found):
    for *_, errors, _, _ in found:
        assert max(errors.pop(f"kernels, {name}") for name in ("Mamba-2", "a decay for each channel")) <= 5e-6
        assert len(errors) == 8 and max(errors.values()) <= EXACT, errors


def test_a_broken_law_is_seen(found):
    for *_, errors, _ in found:
        assert len(errors) == 14 + 2 and min(errors.values()) > 1e-3, errors


def test_ranks_send_the_keys_alone_that_others_need(found):
    for *_, of_cases in found:
        assert max(error for error, *_ in of_cases.values()) <= EXACT
        assert all(of_cases[name][1] < 0.8 * of_cases[name][2] for name in ("window", "documents"))
        assert of_cases["written"][1] > of_cases["documents"][1]  # only bounds are known then
