"""Masks and custom inputs on a GPU: the pairs of tests/mask_cases.py at larger lengths, memory, graphs, bad indices.

Most of the time is compiling. `-n 9` fits 80 GB: plain PyTorch's pairs in float64 take up to 7 GB a process.
"""

import pytest
import torch

from attention_engine import AttentionEngine, BlockList, CustomIO, document_ids, library, meta_tensor
from tests.cases import Shape
from tests.kernels.test_block_lists import errors as errors_of_lists
from tests.mask_cases import PAIRS, errors
from tests.plain import worst_ratio
from tests.runtime.test_block_list import dense, draw
from tests.runtime.test_block_rows import found_by_loops, scores_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("score", "mask"), PAIRS, ids=map(", ".join, PAIRS))
def test_kernels_keep_the_rule(score, mask, record_property):
    found = []
    for batch, length in ((2, 1000), (1, 4096)):
        shape = Shape(batch, length, length, 4, 2, 64, 64)
        found += errors(score, mask, shape, torch.float16, "cuda", backend="tilelang")
    record_property(*worst_ratio(found, f"{score}, {mask}"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "two-sided window"])
def test_a_relative_bias_at_head_dim_128(mask, kv_heads, dtype, record_property):
    """Most tiles are past the reach of the table; sums over steps, where one head has its keys alone."""
    found = []
    for batch, length in ((2, 1000), (1, 4096)):
        shape = Shape(batch, length, length, 4, kv_heads, 128, 128)
        found += errors("relative", mask, shape, dtype, "cuda", backend="tilelang")
    record_property(*worst_ratio(found, f"relative, {mask}, {kv_heads} key heads, {dtype}"))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("score", "mask"), [
    ("scaled", "documents"), ("scaled", "padding"), ("scaled", "of the head"), ("alibi", "causal documents"),
])  # fmt: skip
def test_lists_of_tiles_at_head_dim_128(score, mask, kv_heads, record_property):
    """Whose blocks of keys are dealt, and store dQ; under padding those of a batch have no steps at all."""
    found = []
    for batch, length in ((8, 1000), (2, 4096)):
        shape = Shape(batch, length, length, 4, kv_heads, 128, 128)
        found += errors(score, mask, shape, torch.float16, "cuda", backend="tilelang")
    record_property(*worst_ratio(found, f"{score}, {mask}, {kv_heads} key heads"))


@pytest.mark.parametrize("size", [(128, 64), (64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize(("lists", "key_heads"), [(1, 2), (2, 2), (4, 2), (4, 4)])
def test_blocks_that_a_call_lists(lists, key_heads, size):
    """Lists of unequal lengths, some empty; numbers of no block and repeated ones, which a GPU leaves out."""
    length = 2000
    rows, columns = -(-length // size[0]), -(-length // size[1])
    indices, counts = draw(1, lists, rows, columns, seed=lists)
    counts[:, :, ::3] = 0
    keep = dense(indices, counts, size, length, length, 4).cuda()
    indices = torch.cat([torch.full_like(indices[..., :1], columns + 3), indices[..., :1], indices], -1).cuda()
    counts = torch.where(counts > 0, counts + 2, 0).cuda()
    heads = (4, key_heads, key_heads)
    q, k, v = (torch.randn(1, length, h, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in heads)
    found = errors_of_lists(AttentionEngine(), (q, k, v), BlockList(indices, counts, size), keep)
    assert max(found) <= 1.1, found


@pytest.mark.parametrize(("size", "dtype"), [
    ((128, 64), torch.bfloat16), ((64, 64), torch.float16), ((128, 128), torch.bfloat16), ((16, 16), torch.float16),
    ((128, 64), torch.float32),
], ids=str)  # fmt: skip
def test_rows_of_blocks(size, dtype):
    """Of 2000 queries and keys; a number of no block has no pair."""
    length = 2000
    rows, columns = -(-length // size[0]), -(-length // size[1])
    indices, counts = draw(1, 2, rows, min(columns, 9), seed=1)
    indices[:, :, ::4, 0] = columns + 3
    lists = BlockList(indices.cuda(), counts.cuda(), size)
    q, k = (torch.randn(1, length, h, 128, device="cuda", dtype=dtype) for h in (4, 2))
    found = AttentionEngine(mask_mod=library.causal).block_rows(q, k, block_mask=lists)
    within = BlockList(indices.clamp(max=columns - 1), counts.masked_fill(indices[..., 0] >= columns, 0), size)
    maxima, sums = found_by_loops(scores_of(q.cpu(), k.cpu(), 128**-0.5), within)
    skipped = (indices[..., 0] >= columns).repeat_interleave(size[0], 2)[:, :, :length].repeat_interleave(2, 1)
    for ours, theirs in zip(found, (maxima, sums)):
        ours = ours.cpu().double()
        torch.testing.assert_close(ours[~skipped], theirs[~skipped], rtol=1e-4, atol=1e-4)
    assert bool(found.maxima.cpu()[skipped][:, 0].isneginf().all())


def few_keys_of_early_heads(b, h, q_idx, kv_idx):
    return (q_idx % 5 != kv_idx % 3) & (kv_idx < 150 * h)


def test_blocks_of_keys_without_a_step_end_at_once_in_any_number():
    """Faster than the warps that prepare and store beside them: nobody may miss an end, and wait for ever."""
    engine = build({}, few_keys_of_early_heads, heads=16, dim=128)
    reference = build({}, few_keys_of_early_heads, heads=16, dim=128, backend="reference")
    for length in (500, 2048):
        tensors = [x.requires_grad_() for x in qkv(2, length, 16, 128)]
        do = torch.randn_like(tensors[0])
        right = torch.autograd.grad(reference(*tensors), tensors, do)
        for _ in range(20):
            found = torch.autograd.grad(engine(*tensors), tensors, do)
        for mine, exact in zip(found, right, strict=True):
            assert (mine - exact).float().norm() <= 2e-3 * exact.float().norm()


def build(axes, mask, score=None, heads=4, dim=64, **options):
    meta = meta_tensor(None, heads, None, dim, dtype=torch.float16)
    score = score or library.scale(dim**-0.5)
    return AttentionEngine((meta,) * 3, CustomIO(axes), score, mask, library.OnlineSoftmax(), **options)


def qkv(batch, length, heads=4, dim=64):
    return [torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.float16) for _ in range(3)]


def test_a_document_mask_takes_no_memory_of_the_size_of_pairs():
    length = 131072
    engine = build({"documents": (1, "seq_len")}, lambda b, h, q, k, custom: custom["documents"][0, q] ==
                   custom["documents"][0, k], heads=1)  # fmt: skip
    ids = document_ids([length // 16] * 16, device="cuda")
    tensors = qkv(1, 256, heads=1)
    engine(*tensors, ids[:, :256])  # compiles
    tensors = qkv(1, length, heads=1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        o = engine(*tensors, ids)
    torch.cuda.synchronize()
    beyond = torch.cuda.max_memory_allocated() - before - o.numel() * o.element_size()
    print(f"mask analysis and forward at {length}: {beyond / 2**20:.1f} MiB beyond inputs and output")
    assert beyond < 100e6


def test_a_captured_graph_follows_its_documents():
    engine = build({"documents": ("batch", "seq_len")}, library.document())
    tensors, ids = qkv(1, 1000), document_ids([300, 500, 200], device="cuda")
    other = document_ids([10, 1, 900, 89], device="cuda")
    with torch.no_grad():
        engine(*tensors, ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = engine(*tensors, ids)
        for fresh in (other, ids.clone()):
            ids.copy_(fresh)
            graph.replay()
            assert torch.equal(o, engine(*tensors, fresh.clone()))
    late = engine(*tensors, other)
    ids.data.copy_(other)  # which no version number tells of
    assert torch.equal(engine(*tensors, ids), late)


@pytest.mark.parametrize("axes", [("heads", "seq_len_kv"), ("seq_len", "seq_len_kv")], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_keys_and_pairs_are_the_same_in_every_run(axes, deterministic):
    engine = build(
        {"x": axes}, library.causal, lambda s, c, b, h, q, k: s * 0.125 + c["x"], deterministic=deterministic
    )
    sizes = {"heads": 4, "seq_len": 1000, "seq_len_kv": 1000}
    x = torch.randn([sizes[a] for a in axes], device="cuda", requires_grad=True)
    tensors = qkv(2, 1000)
    found = [torch.autograd.grad(engine(*tensors, x).sum(), x)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].any()


def relative(s, custom, b, h, q, k):
    return s * 0.125 + custom["x"][h, (q - k).clamp(-50, 50) + 50]


def test_deterministic_gradients_of_a_relative_bias():
    engine = build({"x": ("heads", 101)}, library.causal, relative, deterministic=True)
    x, tensors = torch.randn(4, 101, device="cuda", requires_grad=True), qkv(2, 1000)
    found = [torch.autograd.grad(engine(*tensors, x).sum(), x)[0] for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].any()


def test_an_index_out_of_range_touches_no_foreign_memory():
    """Run it under compute-sanitizer --tool memcheck too, which then sees each tensor's end, and no caching allocator's
    error: PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False."""

    def far(s, custom, b, h, q, k):
        return s * 0.125 + custom["x"][q - k + 5] + custom["x"][1000 * q] + custom["x"][-3 - k]

    engine = build({"x": (11,)}, library.causal, far)
    x, tensors = torch.randn(11, device="cuda", requires_grad=True), qkv(1, 200)
    o = engine(*tensors, x)
    (found,) = torch.autograd.grad(o.sum(), x)
    reference = build({"x": (11,)}, library.causal, far, backend="reference")
    exact = reference(*(t.double() for t in tensors), x)
    torch.testing.assert_close(o.double(), exact.double(), atol=2e-2, rtol=2e-2)
    assert found.isfinite().all() and found[:5].any()
