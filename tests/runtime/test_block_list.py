"""Lists of key blocks: outputs and gradients beside a dense mask made of the lists, and what is refused."""

import pytest
import torch

from attention_engine import AttentionEngine, BlockList, arch, create_mask, meta_tensor
from attention_engine.errors import AttentionEngineError, DevicesDiffer, NotATensor, OptionsClash, WrongBlockMask
from attention_engine.library import OnlineSigmoid, sliding_window
from tests import plain
from tests.runtime.engines import BACKENDS, HEADS, KV_HEADS, agrees, build, close, exactly, qkv, results, same

SIZE = (16, 32)
Q_LEN, KV_LEN = 40, 70  # blocks: 3 by 3, the last of each cut short
ROWS, COLUMNS = 3, 3


def draw(batch=1, heads=1, rows=ROWS, columns=COLUMNS, seed=0, least=0):
    """Lists of unequal lengths in random order; behind their counts stand numbers of no block."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, heads, rows, columns, generator=generator).argsort(-1)
    counts = torch.randint(least, columns + 1, (batch, heads, rows), generator=generator)
    indices = torch.where(torch.arange(columns) < counts[..., None], order, -7)
    return indices.to(torch.int32), counts.to(torch.int32)


def dense(indices, counts, size=SIZE, q_len=Q_LEN, kv_len=KV_LEN, heads=HEADS):
    """The pairs that lists keep, (B or 1, heads or 1, queries, keys): by loops, as the words say it."""
    batch, lists, rows, _ = indices.shape
    keep = torch.zeros(batch, lists, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(lists):
            for row in range(rows):
                for n in range(int(counts[b, h, row])):
                    block = int(indices[b, h, row, n])
                    of_q, of_kv = (slice(at * s, (at + 1) * s) for at, s in zip((row, block), size))
                    keep[b, h, of_q, of_kv] = True
    return keep.repeat_interleave(heads // lists, 1) if 1 < lists < heads else keep


def exact(inputs, keep, loss, kind="softmax", is_causal=True, score=None):
    """Output and gradients in float64 of plain torch."""
    leaves = exactly(inputs)
    mask = lambda b, h, i, j: keep  # noqa: E731
    o = plain.attention(*leaves, kind, causal=is_causal, score=score or plain.scaled(0.25), mask=mask)
    return [o.detach(), *torch.autograd.grad(loss(o, {}), leaves)]


def weighted(o, rows):
    return (o.double() * torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, KV_HEADS), (2, HEADS)])
def test_each_block_of_queries_sees_the_keys_of_its_list_alone(batch, heads, backend):
    indices, counts = draw(batch, heads, seed=batch + heads)
    inputs = qkv(Q_LEN, KV_LEN)
    lists = BlockList(indices, counts, SIZE)
    o, _, *gradients = results(build(backend=backend), *inputs, loss=weighted, block_mask=lists)
    close([o, *gradients], exact(inputs, dense(indices, counts), weighted), 2e-5)


@pytest.mark.parametrize(("size", "deterministic"), [
    ((64, 64), False), ((128, 64), True), *(
        pytest.param(size, how, marks=pytest.mark.slow)
        for size in [(16, 16), (64, 64), (128, 64), (64, 128), (128, 128), (24, 40)] for how in (False, True)
        if (size, how) not in [((64, 64), False), ((128, 64), True)]
    ),
], ids=str)  # fmt: skip
def test_blocks_of_every_size(size, deterministic):
    q_len, kv_len = 150, 200
    rows, columns = -(-q_len // size[0]), -(-kv_len // size[1])
    indices, counts = draw(1, KV_HEADS, rows, columns, seed=size[0])
    inputs = qkv(q_len, kv_len, batch=1)
    lists = BlockList(indices, counts, size)
    engine = build(mask_mod=None, deterministic=deterministic)
    o, _, *gradients = results(engine, *inputs, loss=weighted, block_mask=lists)
    keep = dense(indices, counts, size, q_len, kv_len)
    close([o, *gradients], exact(inputs, keep, weighted, is_causal=False), 2e-5)


def test_lists_are_read_anew_in_each_call():
    inputs, engine = qkv(Q_LEN, KV_LEN), build()
    indices, counts = draw(1, 1, seed=1)
    lists = BlockList(indices, counts, SIZE)
    for seed in (2, 3):
        other, of_other = draw(1, 1, seed=seed)
        indices.copy_(other)
        counts.copy_(of_other)
        o, _, *gradients = results(engine, *inputs, loss=weighted, block_mask=lists)
        close([o, *gradients], exact(inputs, dense(indices, counts), weighted), 2e-5)
    plainly = results(engine, *inputs, loss=weighted)
    keep = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool)
    close([plainly[0], *plainly[2:]], exact(inputs, keep, weighted), 2e-5)


def test_an_empty_list_gives_0_and_a_key_in_no_list_gets_no_gradient():
    indices = torch.zeros(1, 1, ROWS, 1, dtype=torch.int32)
    counts = torch.tensor([[[1, 0, 1]]], dtype=torch.int32)
    lists = BlockList(indices, counts, SIZE)
    o, lse, dq, dk, dv = agrees({}, *qkv(Q_LEN, KV_LEN), block_mask=lists, mask_mod=None)
    for tensor in (o, dq):
        assert not tensor[:, 16:32].any() and tensor[:, :16].any() and tensor[:, 32:].any()
    assert (lse[..., 16:32] == -torch.inf).all()
    for tensor in (dk, dv):
        assert tensor[:, :32].any() and not tensor[:, 32:].any()


def test_without_counts_all_entries_count():
    indices = torch.tensor([[[[2, 0], [1, 2], [0, 1]]]], dtype=torch.int32)
    counts = torch.full((1, 1, 3), 2, dtype=torch.int32)
    inputs, engine = qkv(Q_LEN, KV_LEN), build()
    same(results(engine, *inputs, block_mask=BlockList(indices, None, SIZE)),
         results(engine, *inputs, block_mask=BlockList(indices, counts, SIZE)))  # fmt: skip
    assert repr(BlockList(indices, None, SIZE)) == "BlockList(lists of 2 for (1, 1, 3), blocks of 16 x 32)"


def test_lists_join_other_maths():
    """A normaliser, a mask and a bias of the user's own, whose gradient is right too."""
    indices, counts = draw(2, KV_HEADS, seed=4)
    inputs = (*qkv(Q_LEN, KV_LEN), torch.randn(HEADS, Q_LEN, KV_LEN).requires_grad_())

    def biased(score, custom, b, h, q_idx, kv_idx):
        return score * 0.25 + custom["bias"]

    found = agrees({"bias": ("heads", "seq_len", "seq_len_kv")}, *inputs, score_mod=biased, online_func=OnlineSigmoid(),
                   mask_mod=sliding_window(20), block_mask=BlockList(indices, counts, SIZE))  # fmt: skip
    keep = dense(indices, counts) & create_mask(sliding_window(20), None, None, Q_LEN, KV_LEN)
    leaves = exactly(inputs)
    o = plain.attention(*leaves[:3], "sigmoid", score=plain.biased(0.25, leaves[3]), mask=lambda b, h, i, j: keep)
    close(found[:1], [o.detach()], 2e-5)


def test_a_list_in_half_precision_and_the_other_layout():
    indices, counts = draw(2, HEADS, seed=5)
    inputs = qkv(Q_LEN, KV_LEN, dtype=torch.float16)
    lists = BlockList(indices, counts, SIZE)
    found = agrees({}, *inputs, block_mask=lists)
    turned = [t.detach().transpose(1, 2) for t in inputs]
    o = build(dtype=torch.float16, layout="bhsd")(*turned, block_mask=lists)
    same([o.transpose(1, 2)], found[:1])


def test_a_list_is_checked_shown_and_counted():
    indices, counts = draw(1, KV_HEADS, rows=3, columns=2, seed=6, least=1)
    lists = BlockList(indices, counts, (64, 128))
    q, k, v = qkv(130, 200)
    report = build(backend="auto").check(q.detach(), k.detach(), v.detach(), block_mask=lists)
    assert report.ok and "interpret" in str(report), report
    engine = build(mask_mod=None)
    pairs = dense(indices, counts, (64, 128), 130, 200).sum() * 2
    assert engine.cost(q, k, v, block_mask=lists).pairs == pairs
    picture = engine.show_mask(block_mask=lists, Sq=130, Skv=200, H=HEADS)
    assert "130 queries" in str(picture), str(picture)


def test_kernels_of_lists_are_compiled_ahead_and_explained():
    metas = tuple(meta_tensor(1, heads, 4096, 128, dtype=torch.float16) for heads in (4, 2, 2))
    engine = AttentionEngine(metas, device=arch.H100())
    lists = BlockList(torch.zeros(1, 2, 1, 1, dtype=torch.int32), None, (128, 64))
    text = engine.explain(block_mask=lists)
    assert "128 queries x 64 keys, 256 threads, 4 stages" in text and "a call lists blocks of 64 keys" in text
    kernels = engine._all_kernels(arch.H100(), block_mask=lists)
    assert kernels.keys() >= {"tile map of forward", "tile map of backward", "forward", "backward", "map of blocks"}
    assert kernels["tile map of forward"].builder == "block_map.block_map"


def test_lists_in_a_compiled_call():
    engine = build(backend="reference", mask_mod=None)

    def step(q, k, v, indices, counts):
        return engine(q, k, v, block_mask=BlockList(indices, counts, SIZE))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    inputs = qkv(Q_LEN, KV_LEN)
    for seed in (1, 2):
        indices, counts = draw(1, KV_HEADS, seed=seed)
        o = compiled(*inputs, indices, counts)
        gradients = torch.autograd.grad(weighted(o, {}), inputs)
        close([o.detach(), *gradients], exact(inputs, dense(indices, counts), weighted, is_causal=False), 2e-5)


def test_numbers_of_no_block_and_repeated_ones_do_no_harm_where_nobody_looks():
    """On a GPU nobody looks: the map that lists become leaves them out."""
    indices = torch.tensor([[[[2, 2, 9, -3], [0, 1, 1, 0]]]], dtype=torch.int32)
    counts = torch.tensor([[[7, 3]]], dtype=torch.int32)
    assert BlockList(indices, counts, SIZE).to_map(3).tolist() == [[[[0, 0, 1], [1, 1, 0]]]]


WRONG = {
    "dtype": (lambda i, c: BlockList(i.long(), c, SIZE), WrongBlockMask,
              "indices of a BlockList is torch.int64. Give int32: indices.to(torch.int32), of what topk gives."),
    "counts' dtype": (lambda i, c: BlockList(i, c.float(), SIZE), WrongBlockMask,
                      "counts of a BlockList is torch.float32. Give int32"),
    "no tensor": (lambda i, c: BlockList([[0]], c, SIZE), NotATensor,
                  "indices of a BlockList is list. Give an int32 tensor."),
    "dimensions": (lambda i, c: BlockList(i[0], c, SIZE), WrongBlockMask,
                   "indices of a BlockList has shape (1, 3, 3). Give (batch or 1, heads or key heads or 1, "),
    "counts": (lambda i, c: BlockList(i, c[..., None], SIZE), WrongBlockMask,
               "counts of a BlockList has shape (1, 1, 3, 1), and indices (1, 1, 3, 3). Give counts of (1, 1, 3): "),
    "size": (lambda i, c: BlockList(i, c, 64), WrongBlockMask,
             "block_size of a BlockList is 64. Give (queries, keys) of a block: (128, 64)."),
    "places": (lambda i, c: BlockList(i, c.to("meta"), SIZE), DevicesDiffer,
               "counts of a BlockList is on 'meta' and indices on 'cpu'. Put them on one device."),
    "rows": (lambda i, c: BlockList(i[:, :, :2], c[:, :, :2], SIZE), WrongBlockMask,
             "indices of the BlockList has shape (1, 1, 2, 3). With block_size=(16, 32) and 40 queries give "
             "(2 or 1, 4, 2 or 1, 3, any)."),
    "heads": (lambda i, c: BlockList(i.expand(1, 3, 3, 3), c.expand(1, 3, 3), SIZE), WrongBlockMask,
              "indices of the BlockList has shape (1, 3, 3, 3). With block_size=(16, 32) and 40 queries give "),
    "device": (lambda i, c: BlockList(i.to("meta"), c.to("meta"), SIZE), DevicesDiffer,
               "the BlockList is on 'meta' and q on 'cpu'. Put them on one device."),
    "count": (lambda i, c: BlockList(i, c + 4, SIZE), WrongBlockMask,
              "a count of the BlockList is 5, and lists have 0 to 3 entries."),
    "index": (lambda i, c: BlockList(i + 2, c, SIZE), WrongBlockMask,
              "indices[0, 0, 0, 0] of the BlockList is 4, and there are 3 blocks of keys, from 0 on."),
    "twice": (lambda i, c: BlockList(i * 0, c + 1, SIZE), WrongBlockMask,
              "the list [0, 0, 0] (batch, head, block of queries) of the BlockList holds block 0 twice."),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_list_is_refused(kind):
    make, error, message = WRONG[kind]
    indices = torch.tensor([2, 0, 1], dtype=torch.int32).expand(1, 1, ROWS, 3)
    counts = torch.ones(1, 1, ROWS, dtype=torch.int32)
    with pytest.raises(error) as caught:
        build()(*qkv(Q_LEN, KV_LEN), block_mask=make(indices, counts))
    assert message in str(caught.value)


def test_where_lists_are_not_taken():
    indices, counts = draw()
    lists = BlockList(indices, counts, SIZE)
    with pytest.raises(AttentionEngineError, match="BlockList"):
        AttentionEngine(block_mask=lists)
    q, k, v = (t[0] for t in qkv(40))
    starts = torch.tensor([0, 40], dtype=torch.int32)
    with pytest.raises(OptionsClash, match="packed sequences have no such blocks"):
        build()(q, k, v, cu_seqlens_q=starts, block_mask=lists)
