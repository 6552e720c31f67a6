"""The backward kernel for Hopper whose blocks of keys lie in one of the packed sequences, in the warp simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("tilelang")
import tilelang.language as T

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.compiler import Kernel
from attention_engine.ir.packing import PLACES, TABLES, Packing
from attention_engine.ir.problem import Problem
from attention_engine.kernels.bounds import NO_NUMBERS
from attention_engine.kernels.common import Sizes, build
from attention_engine.kernels.sequence_tiles import CLASSES, FEW_BLOCKS, LATE
from attention_engine.kernels.tiles import PIECE, HandedQueries, SequenceQueryWalk, Walks
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import long_sequences
from attention_engine.plan.forms import HopperKeys, Tile
from attention_engine.runtime import op
from attention_engine.runtime.packed import make_tables
from tests import packed_cases, plain
from tests.kernels.test_hopper_interpret import kernels, ran  # noqa: F401 - a fixture
from tests.kernels.test_within_sequences import ALIKE, OF_UNLIKE, TILES, UNLIKE, by_name, call, engine_of
from tests.packed_cases import sequence_by_sequence, starts, tensors, with_gradients

DIM = 128
NAMES = ("causal", "ALiBi", "sigmoid in a window", "a number of each sequence")


TILE = Tile(64, 128, 256, 2, HopperKeys(persistent=True, within_sequences=True))


@pytest.fixture
def within(kernels, monkeypatch):  # noqa: F811
    kernels["forward"] = TILES[DIM]
    kernels["backward"] = TILE
    monkeypatch.setattr(packed_cases, "DIM", DIM)
    monkeypatch.setattr(packed_cases, "DIM_V", DIM)


def check(case, more=0, long=False):
    qkv, custom = tensors(case, torch.float16, more=more)
    custom = {n: t.detach() for n, t in custom.items()}
    found = with_gradients(call(case, engine_of(case, DIM), qkv, custom), qkv, custom)
    exact, eager = (
        with_gradients(sequence_by_sequence(case, qkv, custom, of), qkv, custom)
        for of in (torch.float64, torch.float16)
    )
    plain.compare(found, exact, eager, torch.float16, floor=1e-8)
    assert ran(lambda made: (made.of_long_sequences if long else made).backward)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_keys_of_one_sequence_keep_the_rule(name, within):
    found = check(replace(by_name[name], lengths=ALIKE), more=7)
    assert not found["dk"][-7:].any() and not found["dv"][-7:].any() and not found["dq"][-7:].any()


@pytest.mark.parametrize("name", OF_UNLIKE)
def test_lengths_of_keys_of_their_own_keep_the_rule(name, within):
    check(replace(by_name[name], lengths=UNLIKE[0], key_lengths=UNLIKE[1]))


@pytest.mark.parametrize("name", ["causal", "full, unlike lengths"])
def test_what_a_neighbour_holds_reaches_no_gradient(name, within):
    lengths = (70, 60, 130)
    case = replace(by_name[name], lengths=lengths, key_lengths=None if name == "causal" else lengths)
    qkv, custom = tensors(case, torch.float16)
    engine = engine_of(case, DIM)
    wanted = with_gradients(call(case, engine, qkv, custom), qkv, custom)
    with torch.no_grad():
        for t in qkv:
            t[70:130] = torch.nan
    found = with_gradients(call(case, engine, qkv, custom), qkv, custom)
    for n in ("dq", "dk", "dv"):
        assert found[n][70:130].isnan().all()
        for of in (slice(0, 70), slice(130, None)):
            assert torch.allclose(found[n][of], wanted[n][of], atol=1e-4), n


@pytest.mark.parametrize("lengths", [(40, 1, 90, 3, 60), (300, 0), (0, 0, 17)])
def test_short_and_empty_sequences_keep_the_rule(lengths, within):
    check(replace(by_name["causal"], lengths=lengths))


def launched():
    """The kernels over keys that calls have run, by their names."""
    made = [each for a in op.ATTENTIONS.values() for each in a.program_kernels._kernels.values()]
    which = [("others", each) for each in made] + [("long", each.of_long_sequences) for each in made]
    return {name for name, each in which if "compiled" in vars(each.backward)}


@pytest.mark.parametrize("name", ["causal", "ALiBi, unlike lengths"])
def test_long_sequences_have_a_kernel_of_their_own_that_keeps_the_rule(name, within, monkeypatch):
    """Rows and the number of sequences say whether they are long: 140 queries in the mean here."""
    lengths, of_keys = ((40, 300, 90), None) if name == "causal" else ((40, 300, 0, 250), (70, 200, 9, 301))
    monkeypatch.setattr(long_sequences, "LONG", 140)
    check(replace(by_name[name], lengths=lengths, key_lengths=of_keys), more=5, long=True)
    assert launched() == {"long"}


def test_calls_of_short_and_of_long_sequences_launch_their_kernels(within, monkeypatch):
    """The same rows, in one process: as one sequence, as two, as one again."""
    monkeypatch.setattr(long_sequences, "LONG", 100)
    case = replace(by_name["causal"], lengths=(130,))
    qkv, custom = tensors(case, torch.float16)
    engine, found = engine_of(case, DIM), []
    for lengths in ((130,), (60, 70), (130,)):
        called = call(replace(case, lengths=lengths), engine, qkv, custom)
        found.append((with_gradients(called, qkv, custom), launched()))
    assert [of for _, of in found] == [{"long"}, {"long", "others"}, {"long", "others"}]
    (first, _), _, (again, _) = found
    assert all(torch.equal(first[n], again[n]) for n in ("dk", "dv"))


def test_one_compiled_call_launches_either_kernel(within, monkeypatch):
    """torch.compile follows it once, for any lengths: sizes are looked at when it runs."""
    torch._dynamo.reset()
    monkeypatch.setattr(long_sequences, "LONG", 30)
    case = by_name["causal"]
    engine, counter = engine_of(case, DIM), CompileCounterWithBackend("aot_eager")

    def whole(q, k, v, cu):
        return engine(q, k, v, cu_seqlens_q=cu)

    compiled, first, seen = torch.compile(whole, backend=counter, fullgraph=True, dynamic=True), 0, []
    for lengths in ((5, 3, 20, 7, 9), (51, 42, 60)):  # no count is one of heads or dims
        qkv, _ = tensors(replace(case, lengths=lengths), torch.float16)
        found = torch.autograd.grad(compiled(*qkv, starts(lengths)).sum(), qkv)
        seen.append(launched())
        wanted = torch.autograd.grad(whole(*qkv, starts(lengths)).sum(), qkv)
        assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(found, wanted))
        first = first or counter.frame_count
    assert seen == [{"others"}, {"long", "others"}] and counter.frame_count == first


@pytest.mark.parametrize("group, of_head", [(2, 1), (4, 5), (3, 46), (7, 33), (8, 3)])
@pytest.mark.parametrize("by_heads", [False, True])
def test_a_walk_goes_down_by_tiles_or_by_heads(group, of_head, by_heads):
    steps, tile = group * of_head, TILE.in_form(by_heads=by_heads)
    found = torch.zeros(steps, 2, dtype=torch.int32)
    problem = Problem(3 * group, 3, DIM, DIM, "float16")

    @T.macro
    def body(buffers):
        with T.Kernel(1, threads=32):
            count = buffers["count"][0]
            of = Walks(plan_tiles(None), problem, Sizes(problem), tile)
            handed = HandedQueries(count, lambda step: None, 2)
            walk = SequenceQueryWalk(of, buffers, 0, 1, 0, handed, NO_NUMBERS)
            for step in T.serial(count):
                visit = walk.at(step)
                buffers["found"][step, 0] = visit.head
                buffers["found"][step, 1] = visit.start

    parameters = {"count": T.Tensor([1], "int32"), "found": T.Tensor([steps, 2], "int32")}
    Interpreter(build("walk", parameters, body))(torch.tensor([steps], dtype=torch.int32), found)
    heads, places = range(group, 2 * group), [2 * PIECE + n * TILE.q for n in range(of_head)]
    turns = [(h, at) for h in heads for at in places] if by_heads else [(h, at) for at in places for h in heads]
    assert found.tolist() == [list(step) for step in reversed(turns)]


LONG = tuple(7 + 90 * (n * n % 23) for n in range(60))  # of more slots than are looked at together


@pytest.mark.parametrize("kv_heads", [2, 64])
@pytest.mark.parametrize(
    "lengths, more", [((5, 300, 0, 128, 1000, 1000, 129), 40), ((700,), 0), (LONG, 3), ((90, 2600, 2100, 2300), 5)]
)
def test_tiles_of_keys_are_listed_whole_sequences_together_and_long_ones_first(lengths, more, kv_heads):
    """Where they are few, those of a sequence's last keys come behind all others."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    rows, tile = int(starts[-1]) + more, TILE
    places = make_tables(Packing.ALIKE, starts, starts, rows, rows)[-1]
    custom = ((PLACES, "int32", TABLES[Packing.ALIKE][PLACES]),)
    problem = Problem(2 * kv_heads, kv_heads, DIM, DIM, "float16", custom=custom)
    listed = torch.full((rows // tile.kv + len(lengths) + 2, 3), -7, dtype=torch.int32)
    Kernel("sequence_tiles.key_tiles", (problem, tile), "interpret", problem, {}).run(rows, places, listed)
    count, found = int(listed[0, 0]), listed[1:].tolist()
    ends = [*zip(starts.tolist(), starts.tolist()[1:]), (int(starts[-1]), rows)]
    wanted = [[n, at, end] for n, (begin, end) in enumerate(ends) for at in range(begin, end, tile.kv)]
    few = -(-rows // tile.kv) * kv_heads <= FEW_BLOCKS

    def place(listed):
        n, at, end = listed
        return few and end - at <= LATE, -((end - ends[n][0]) * (CLASSES // 2 - 1) // rows)

    assert found[:count] == sorted(wanted, key=place)
