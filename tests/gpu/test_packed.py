"""Packed sequences on a GPU: the programs of tests/packed_cases.py against float64, forward and backward.

Most time goes into compiling. With `-n 16` a machine of 16 processors needs some minutes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, compiler, library
from attention_engine.plan.few_key_heads import may_have_a_head_each
from attention_engine.plan.long_sequences import are_long
from attention_engine.runtime.attentions import ATTENTIONS
from tests import packed_cases, plain
from tests.packed_cases import CASES, Case, io_of, sequence_by_sequence, starts, tensors, with_gradients

pytestmark = pytest.mark.gpu

LONG = (700, 1, 0, 129, 1024, 17, 2300, 5)
LONG_KEYS = (700, 40, 12, 100, 1300, 0, 2500, 5)
by_name = {case.name: case for case in CASES}


@pytest.fixture(params=[128, 64])
def dim(request, monkeypatch):
    """Head dims of kernels placed by hand; the tables that functions capture lie on the GPU, too."""
    monkeypatch.setattr(packed_cases, "DIM", request.param)
    monkeypatch.setattr(packed_cases, "DIM_V", request.param)
    for name in ("TABLE", "OF_SEQUENCE"):
        monkeypatch.setattr(packed_cases, name, getattr(packed_cases, name).cuda())
    return request.param


@pytest.fixture(autouse=True, params=[False, True], ids=["all heads", "a head each"])
def a_head_each(request, monkeypatch):
    """Has a block over keys one query head, or all of a group? So few blocks as these tests have would have one."""
    ATTENTIONS.clear()
    may = may_have_a_head_each if request.param else lambda plan: False
    monkeypatch.setattr(compiler, "suits_a_head_each", lambda plan, *sizes: may(plan))
    yield
    ATTENTIONS.clear()


def call(case, engine, qkv, custom):
    of_keys = {} if case.key_lengths is None else {"cu_seqlens_k": starts(case.key_lengths, "cuda")}
    return engine(*qkv, cu_seqlens_q=starts(case.lengths, "cuda"), **of_keys, **custom)


def engine_of(case, **options):
    scale = {} if "score_mod" in case.options else {"scale": packed_cases.SCALE}
    return AttentionEngine(custom_io=io_of(case), **{**scale, **case.options, **options})


def check(case, dtype, more=0, **options):
    """The worst error over eager's; the results."""
    qkv, custom = tensors(case, dtype, more, "cuda")
    found = with_gradients(call(case, engine_of(case, **options), qkv, custom), qkv, custom)
    exact, eager = (
        with_gradients(sequence_by_sequence(case, qkv, custom, of), qkv, custom) for of in (torch.float64, dtype)
    )
    return plain.compare(found, exact, eager, dtype, floor=1e-8), found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_packed_programs_keep_the_rule(case, dim, record_property):
    errors, _ = check(case, torch.bfloat16)
    record_property(*plain.worst_ratio(errors, f"{case.name} {dim}"))


@pytest.mark.parametrize("name", ["causal", "sigmoid in a window", "full, unlike lengths", "causal, unlike lengths"])
def test_sequences_of_many_tiles_keep_the_rule(name, dim):
    case = by_name[name]
    keys = None if case.key_lengths is None else LONG_KEYS
    _, found = check(replace(case, lengths=LONG, key_lengths=keys), torch.float16, more=40)
    assert not any(found[n][-40:].any() for n in ("o", "dq", "dk", "dv"))


@pytest.mark.parametrize("name", ["causal", "sigmoid in a window", "ALiBi", "causal, unlike lengths"])
def test_sequences_that_are_long_in_the_mean_keep_the_rule(name, dim):
    if dim == 64:
        pytest.skip("the kernel of their own is of head dim 128 alone")
    case, lengths, of_keys = by_name[name], (3700, 2900, 17, 5800), (3900, 2900, 40, 5600)
    assert are_long(sum(lengths) // len(lengths))
    check(replace(case, lengths=lengths, key_lengths=of_keys if case.key_lengths else None), torch.bfloat16, more=40)


@pytest.mark.parametrize("name", ["causal", "causal, unlike lengths"])
def test_deterministic_gradients_are_the_same_bits_in_each_run(name, dim):
    case = by_name[name]
    case = replace(case, lengths=LONG, key_lengths=None if case.key_lengths is None else LONG_KEYS)
    qkv, custom = tensors(case, torch.bfloat16, device="cuda")
    engine = engine_of(case, deterministic=True)
    first, again = (with_gradients(call(case, engine, qkv, custom), qkv, custom) for _ in range(2))
    assert all(torch.equal(first[n], again[n]) for n in first)
    check(case, torch.bfloat16, deterministic=True)


@pytest.mark.parametrize("deterministic", [False, True])
def test_keys_that_one_query_sees_in_a_window_get_their_gradients(dim, deterministic):
    """Their map of tiles is made of extremes of places, in which ptxas lost a minus (codegen/patches/extremes.py)."""
    case = Case(
        "one query", {"mask_mod": library.sliding_window(333)}, packed_cases.scaled,
        lambda c, at: (at.q - at.kv <= 333) & (at.q >= at.kv),
        lengths=(500, 1, 0, 900), key_lengths=(700, 300, 20, 400),
    )  # fmt: skip
    _, found = check(case, torch.bfloat16, deterministic=deterministic)
    assert all(found[n][700:1000].any(-1).all() for n in ("dk", "dv"))


def test_what_a_neighbour_holds_reaches_nobody(dim):
    if dim == 64:
        pytest.skip("blocks of keys lie in one sequence at head dim 128 alone")
    case = replace(by_name["causal"], lengths=(300, 200, 450))
    qkv, custom = tensors(case, torch.bfloat16, device="cuda")
    engine = engine_of(case)
    wanted = with_gradients(call(case, engine, qkv, custom), qkv, custom)
    with torch.no_grad():
        for t in qkv:
            t[300:500] = torch.nan
    found = with_gradients(call(case, engine, qkv, custom), qkv, custom)
    for n in ("o", "dq", "dk", "dv"):
        for of in (slice(0, 300), slice(500, None)):
            torch.testing.assert_close(found[n][of], wanted[n][of], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("times", [1, 10])
def test_a_graph_replays_with_other_lengths(times):
    """times: ten times as long, all are long in the mean. A graph keeps the kernel that its sizes chose."""
    torch.manual_seed(0)
    engine = AttentionEngine(mask_mod=library.causal)

    def scaled(lengths):
        return starts([n * times for n in lengths], "cuda")

    qkv = [torch.randn(1000 * times, heads, 128, device="cuda").half().requires_grad_() for heads in (8, 2, 2)]
    d_o, cu = torch.randn(1000 * times, 8, 128, device="cuda").half(), scaled((400, 0, 600))

    def step(cu):
        o = engine(*qkv, cu_seqlens_q=cu)
        return [o.detach(), *torch.autograd.grad(o, qkv, d_o)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(cu)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(cu)
    for lengths in ((1, 700, 299), (333, 333, 300)):
        cu.copy_(scaled(lengths))
        graph.replay()
        torch.cuda.synchronize()
        for replayed, eager in zip(captured, step(scaled(lengths))):
            torch.testing.assert_close(replayed, eager, rtol=1e-2, atol=1e-2)
