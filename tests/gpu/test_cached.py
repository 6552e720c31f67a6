"""Attention to a cache on a GPU: thirty programs against float64, and other lengths in a graph that replays.

Most time goes into compiling. With `-n 16 -k "in_parts or graph"` a machine of 16 processors needs about a minute.
"""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, library
from tests import cached_cases
from tests.cached_cases import CASES, DRAFTS, Shape, errors, in_pages
from tests.plain import worst_ratio

pytestmark = pytest.mark.gpu

LENGTHS = (3000, 77, 6, 64, 1024, 0, 65)
DRAFTED = (3000, 77, 6, 64, 1025)


SHAPES = {"dense": (1, 0, 1), "in_pages": (1, 64, None), "in_parts": (2, 16, 7)}  # queries, page, parts


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_kernels_keep_the_rule(name, shape, record_property):
    queries, page, parts = SHAPES[shape]
    of_call = Shape(LENGTHS, queries, 16, 4, 128, page)
    if name == "tree":
        of_call = Shape(DRAFTED, DRAFTS, 16, 4, 128, page)
    found = errors(name, of_call, torch.bfloat16, "tilelang", parts, "cuda")
    record_property(*worst_ratio(found, f"{name} {shape}"))


@pytest.mark.parametrize("shape", [(1, 0, 5), (5, 0, 3), (3, 64, 20)], ids=["joined", "combined", "combined_pages"])
@pytest.mark.parametrize("name", ["softmax", "entropy", "sigmoid", "sink"])
def test_parts_joined_by_their_last_block_or_by_another_kernel_keep_the_rule(name, shape):
    queries, page, parts = shape
    assert errors(name, Shape(LENGTHS, queries, 16, 4, 128, page), torch.bfloat16, "tilelang", parts, "cuda")


@pytest.mark.parametrize("name", ["softmax", "alibi", "sink", "entropy"])
def test_packed_queries_keep_the_rule(name):
    shape = Shape(LENGTHS, 1, 16, 4, 128, 64, packed=(700, 1, 6, 0, 2, 0, 20))
    for parts in (1, 3):
        assert errors(name, shape, torch.bfloat16, "tilelang", parts, "cuda")


@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("name", ["softmax", "entropy", "sigmoid", "padded_on_the_left"])
def test_latent_attention_keeps_the_rule(name, page, monkeypatch):
    monkeypatch.setattr(cached_cases, "CASES", {name: replace(CASES[name], dim_v=512)})
    for queries, parts in ((1, 1), (3, 4)):
        assert errors(name, Shape(LENGTHS, queries, 64, 1, 576, page), torch.bfloat16, "tilelang", parts, "cuda")


@pytest.mark.parametrize("name", ["softmax", "entropy", "alibi"])
def test_parts_that_are_dealt_keep_the_rule(name):
    lengths = (*(37 * n % 500 for n in range(40)), 9000)  # a wide cache of many rows, one of them long
    assert errors(name, Shape(lengths, 1, 16, 4, 128, 64), torch.bfloat16, "tilelang", None, "cuda")


def test_calls_and_graphs_that_run_side_by_side_count_apart():
    """Blocks count their parts: each stream and each graph has counters of its own, which are 0 behind every launch."""
    torch.manual_seed(0)
    engine = AttentionEngine(mask_mod=library.causal)
    q, (k, v) = torch.randn(8, 1, 8, 128, device="cuda").half(), torch.randn(2, 8, 2000, 2, 128, device="cuda").half()
    lengths = torch.randint(1, 2000, (8,), device="cuda", dtype=torch.int32)

    def call() -> torch.Tensor:
        return engine.with_cache(q, k, v, kv_lengths=lengths, num_splits=9)

    with torch.no_grad():
        expected, graphs, outputs = call(), [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph in graphs:
            with torch.cuda.graph(graph):
                outputs.append(call())
        streams = [torch.cuda.Stream() for _ in range(4)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(100):
            for stream, graph in zip(streams, graphs, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
            for stream in streams[2:]:
                with torch.cuda.stream(stream):
                    outputs.append(call())
        torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("parts", [1, 5])
def test_a_graph_replays_with_other_lengths_and_tables(parts):
    torch.manual_seed(0)
    engine = AttentionEngine(mask_mod=library.causal)
    q, cache = torch.randn(3, 1, 8, 128, device="cuda").half(), torch.randn(3, 500, 2, 128).half()
    lengths = torch.tensor([500, 77, 1], dtype=torch.int32)
    pages, table = (t.cuda() for t in in_pages(cache, lengths.tolist(), 16))
    on_device = lengths.cuda()

    def call() -> torch.Tensor:
        return engine.with_cache(q, pages, pages, kv_lengths=on_device, page_table=table, num_splits=parts)

    with torch.no_grad():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = call()
        for lengths in ([3, 500, 0], [64, 65, 499]):
            on_device.copy_(torch.tensor(lengths, dtype=torch.int32))
            fresh, order = in_pages(cache, lengths, 16)
            pages.copy_(fresh)
            table.copy_(order)
            graph.replay()
            torch.cuda.synchronize()
            expected = AttentionEngine(mask_mod=library.causal, backend="reference").with_cache(
                q, cache.cuda(), cache.cuda(), kv_lengths=on_device
            )
            torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)
