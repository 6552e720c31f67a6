"""Parts that are dealt to requests by their lengths, on the device."""

import random

import pytest
import torch

from attention_engine import AttentionEngine, library
from attention_engine.codegen.interpreter import Interpreter
from attention_engine.compiler import Kernel
from attention_engine.ir.problem import Problem
from attention_engine.plan import cached as plan
from tests.cached_cases import Shape, errors

LENGTHS = (700, 77, 6, 64, 129, 0, 65, 1500)
KEYS, LEAST, MOST = 64, 2, 9
PROBLEM = Problem(4, 2, 64, 64, "float16", False, 8, ())


def dealt(lengths, places):
    """What the kernel makes of these lengths, where there is room for so many parts."""
    kernel = Kernel("cached.deal.deal", (PROBLEM, KEYS, LEAST, MOST), "interpret", PROBLEM, {})
    given = torch.tensor(lengths, dtype=torch.int32)
    starts, requests = torch.full((len(lengths) + 1,), -7).int(), torch.full((places,), -7).int()
    Interpreter(kernel.prim_func)(given, starts, requests)
    return starts.tolist(), requests.tolist()


@pytest.mark.parametrize("requests", [1, 33, 1024])
def test_parts_are_dealt_by_lengths(requests):
    draw = random.Random(requests)
    for most in (10, 100_000):
        lengths = [draw.choice([0, draw.randrange(most), most]) for _ in range(requests)]
        places = requests + draw.choice([1, 7, 700])
        starts, owners = dealt(lengths, places)
        tiles = [-(-n // KEYS) for n in lengths]
        each = max(-(-sum(tiles) // (places - requests)), LEAST)
        counts = [min(max(-(-n // each), 1), MOST) for n in tiles]
        assert starts == [sum(counts[:n]) for n in range(requests + 1)]
        of_all = [n for n, count in enumerate(counts) for _ in range(count)]
        assert owners == of_all + [-1] * (places - len(of_all))


def test_lengths_that_say_nonsense_do_no_harm():
    starts, owners = dealt([-5, 2**31 - 1, 100], 12)
    assert starts == [0, 1, 10, 11] and owners == [0, *[1] * 9, 2, -1]


@pytest.fixture
def _dealing(monkeypatch):
    """Small calls are dealt, too."""
    for name, value in {"WIDE": 1, "BUSY": 0, "LEAST_DEALT": 2, "DEALT": 3}.items():
        monkeypatch.setattr(plan, name, value)


@pytest.mark.parametrize("name", ["softmax", "entropy", "sigmoid", "alibi", "sink", "gated", "shared_entropy"])
def test_kernels_keep_the_rule(name, _dealing):
    assert errors(name, Shape(LENGTHS), torch.float16, "interpret")
    assert errors(name, Shape(LENGTHS, 5, page=16), torch.bfloat16, "interpret")


def test_what_is_dealt(_dealing):
    engine = AttentionEngine(mask_mod=library.causal, backend="interpret")
    q, k = torch.randn(3, 1, 4, 64).half(), torch.randn(3, 500, 2, 64).half()
    for lengths in ((500, 3, 0), (20, 20, 499)):
        engine.with_cache(q, k, k, kv_lengths=torch.tensor(lengths, dtype=torch.int32))
    (attention,) = engine._cached.values()
    (kernels,) = attention._kernels.values()
    assert [name for name, _ in kernels._made] == ["cached.deal.deal", "cached.decode.decode", "cached.combine.combine"]
    of = kernels.plan
    assert of.dealt_parts(3, 1, 500, None) == 3 + 9  # three SMs, two key heads
    assert of.dealt_parts(3, 1, 500, 4) == 0  # a number that was asked for makes bits that no neighbour changes
    assert of.dealt_parts(3, 40, 500, None) == 0  # more rows than a tile has
    assert of.dealt_parts(2000, 1, 500, None) == 0


@pytest.mark.parametrize(
    ("mask", "is_dealt"), [(library.causal, True), (None, True), (library.sliding_window(8), False)]
)
def test_rows_of_which_a_window_is_read_are_not_dealt(mask, is_dealt, _dealing):
    engine = AttentionEngine(mask_mod=mask, backend="interpret")
    q, k = torch.randn(2, 1, 4, 64).half(), torch.randn(2, 500, 2, 64).half()
    engine.with_cache(q, k, k, kv_lengths=torch.tensor([500, 3], dtype=torch.int32))
    (attention,) = engine._cached.values()
    (kernels,) = attention._kernels.values()
    assert ("cached.deal.deal" in [name for name, _ in kernels._made]) == is_dealt
