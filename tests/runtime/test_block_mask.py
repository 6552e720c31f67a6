"""Block masks as tensors, at construction and for one call, and masks made of functions."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from attention_engine import create_block_mask, create_mask
from attention_engine.errors import BadInput, OptionsClash, UnknownOption, WrongBlockMask
from attention_engine.library import sliding_window
from tests import plain
from tests.runtime.engines import BACKENDS, HEADS, agrees, build, causal, close, exactly, qkv, results, same

SIZE = (16, 32)
Q_LEN, KV_LEN = 40, 70  # blocks: 3 by 3, the last of each cut short
SHAPES = [(1, 1, 3, 3), (2, 1, 3, 3), (1, HEADS, 3, 3), (2, HEADS, 3, 3)]


def dense(blocks):
    """The pairs that blocks keep."""
    return blocks.bool().repeat_interleave(SIZE[0], 2).repeat_interleave(SIZE[1], 3)[:, :, :Q_LEN, :KV_LEN]


@pytest.mark.parametrize(("shape", "dtype"), [
    *((shape, torch.int8) for shape in (SHAPES[0], SHAPES[-1])), (SHAPES[1], torch.bool),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (SHAPES[1], torch.int8), (SHAPES[2], torch.int8), *((shape, torch.bool) for shape in (SHAPES[0], *SHAPES[2:]))
    ]),
], ids=str)  # fmt: skip
def test_absent_blocks_are_masked_whole(shape, dtype):
    blocks = (torch.rand(shape) < 0.6).to(dtype)
    blocks[..., 0] = True  # no row is empty
    inputs = qkv(Q_LEN, KV_LEN)
    found = agrees({}, *inputs, block_mask=blocks, block_size=SIZE)
    keep = dense(blocks)
    want = plain.attention(
        *exactly(inputs),
        "softmax",
        causal=True,
        score=plain.scaled(0.25),
        mask=lambda b, h, i, j: keep,
    )
    close(found[:1], [want], 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_mask_of_one_call_is_for_that_call(backend):
    inputs = qkv(Q_LEN, KV_LEN)
    ones, first = torch.ones(1, 1, 3, 3, dtype=torch.int8), torch.zeros(1, 1, 3, 3, dtype=torch.int8)
    first[..., 0] = 1
    engine = build(block_size=SIZE, backend=backend)
    before = results(engine, *inputs)
    masked = results(engine, *inputs, block_mask=first)
    assert (masked[0] - before[0]).abs().max() > 0.01
    same(results(engine, *inputs), before)
    close(results(engine, *inputs, block_mask=ones), before, 1e-6)
    built = build(block_size=SIZE, backend=backend, block_mask=first)
    same(results(built, *inputs), masked)
    close(results(built, *inputs, block_mask=ones), before, 1e-6)  # the call's own goes first
    same(results(built, *inputs), masked)


def test_a_row_of_absent_blocks_is_empty():
    blocks = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    blocks[:, :, 1] = False
    o, lse, dq, _, _ = agrees({}, *qkv(Q_LEN, KV_LEN), block_mask=blocks, block_size=SIZE, mask_mod=None)
    for tensor in (o, dq):
        assert not tensor[:, 16:32].any() and tensor[:, :16].any() and tensor[:, 32:].any()
    assert (lse[..., 16:32] == -torch.inf).all()


def test_a_block_mask_joins_a_mask_and_custom_inputs():
    def mask(b, h, q_idx, kv_idx, custom):
        return causal(b, h, q_idx, kv_idx) & (kv_idx >= custom["start"])

    blocks = (torch.rand(1, 1, 3, 3) < 0.6).to(torch.int8)
    inputs = (*qkv(Q_LEN, KV_LEN), torch.tensor([3, 20], dtype=torch.int32))
    agrees({"start": ("batch",)}, *inputs, block_mask=blocks, block_size=SIZE, mask_mod=mask)


def test_blocks_follow_the_layout():
    blocks = torch.ones(1, 1, 3, 3, dtype=torch.int8).tril()
    inputs = qkv(Q_LEN, KV_LEN)
    turned = [t.transpose(1, 2) for t in inputs]
    o = build(layout="bhsd", block_size=SIZE)(*turned, block_mask=blocks)
    same([o.transpose(1, 2)], [build(block_size=SIZE)(*inputs, block_mask=blocks)])


def test_a_function_as_block_mask_is_a_mask():
    inputs = qkv(20)
    same(results(build(mask_mod=None, block_mask=causal), *inputs), results(build(), *inputs))
    with pytest.raises(UnknownOption) as caught:
        build(block_mask=causal)
    assert str(caught.value) == (
        "block_mask is a function and mask_mod is given too. A function is a mask_mod: join them with\n"
        "  attention_engine.library.and_masks."
    )


def test_blocks_made_of_a_mask_change_nothing_beside_it():
    mask = sliding_window(9)
    inputs = qkv(Q_LEN, KV_LEN)
    blocks = create_block_mask(mask, None, None, Q_LEN, KV_LEN, Q_BLOCK_SIZE=SIZE[0], KV_BLOCK_SIZE=SIZE[1])
    assert blocks.tolist() == [[[[1, 0, 0], [1, 0, 0], [1, 1, 0]]]]
    engine = build(mask_mod=mask, block_size=SIZE)
    close(results(engine, *inputs, block_mask=blocks), results(engine, *inputs), 1e-6)
    kept = create_mask(mask, None, None, Q_LEN, KV_LEN)
    assert kept.shape == (1, 1, Q_LEN, KV_LEN) and not (kept & ~dense(blocks)).any()


def per_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx >= 3 * h + b)


def test_masks_as_tensors_have_the_dims_that_they_depend_on():
    assert create_mask(causal, 5, 6, 3, 4).shape == (1, 1, 3, 4)
    mask = create_mask(per_head, 2, 3, 10, 11)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 3, 10, 11)), indexing="ij")
    assert mask.dtype is torch.bool and torch.equal(mask, (i >= j) & (j >= 3 * h + b))
    blocks = create_block_mask(per_head, 2, 3, 10, 11, Q_BLOCK_SIZE=4, KV_BLOCK_SIZE=3)
    want = torch.nn.functional.pad(mask, (0, 1, 0, 2)).unfold(2, 4, 4).unfold(3, 3, 3).any(-1).any(-1)
    assert blocks.dtype is torch.int8 and torch.equal(blocks, want.to(torch.int8))
    assert create_block_mask(causal, None, None, 0, 5).shape == (1, 1, 0, 1)


REFUSED = {
    "a wrong shape": (
        torch.ones(1, 1, 3, 4, dtype=torch.int8),
        "block_mask has shape (1, 1, 3, 4). With block_size=(16, 32) and lengths 40, 70 give (2 or 1, 4 or 1, 3, 3).",
    ),
    "other heads": (
        torch.ones(1, 2, 3, 3, dtype=torch.int8),
        "block_mask has shape (1, 2, 3, 3). With block_size=(16, 32) and lengths 40, 70 give (2 or 1, 4 or 1, 3, 3).",
    ),
    "too few dims": (
        torch.ones(3, 3, dtype=torch.int8),
        "block_mask has shape (3, 3). With block_size=(16, 32) and lengths 40, 70 give (2 or 1, 4 or 1, 3, 3).",
    ),
    "floats": (
        torch.ones(1, 1, 3, 3),
        "block_mask is torch.float32. Give int8 or bool, 1 (True) where a block exists.",
    ),
    "another device": (
        torch.ones(1, 1, 3, 3, dtype=torch.int8, device="meta"),
        "block_mask is on 'meta' and q on 'cpu'. Put them on one device.",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("when", ["for the call", "for the engine"])
def test_a_block_mask_that_does_not_fit_is_refused(when, kind):
    blocks, message = REFUSED[kind]
    engine = build(block_size=SIZE, block_mask=blocks if when == "for the engine" else None)
    with pytest.raises(BadInput) as caught:
        engine(*qkv(Q_LEN, KV_LEN), block_mask=blocks if when == "for the call" else None)
    assert str(caught.value) == message


# ---- FlexAttention's


def of_flex(mask_mod=None, kept=None):
    """A BlockMask: made of a function, of blocks (rows, columns), or of both."""
    if kept is None:
        return flex.create_block_mask(mask_mod, None, None, Q_LEN, KV_LEN, device="cpu", BLOCK_SIZE=SIZE)
    counts, indices = kept.sum(-1).int(), torch.sort(kept.int(), dim=-1, descending=True, stable=True)[1].int()
    given = {} if mask_mod is None else {"mask_mod": mask_mod}
    return flex.BlockMask.from_kv_blocks(
        counts[None, None], indices[None, None], BLOCK_SIZE=SIZE, seq_lengths=(Q_LEN, KV_LEN), **given
    )


def banded(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() <= 20


KEPT = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])


@pytest.mark.parametrize("place", ["mask_mod", "block_mask"])
@pytest.mark.parametrize(("mask_mod", "kept"), [(banded, None), (None, KEPT), (banded, KEPT)],
                         ids=["a function", "blocks", "both"])  # fmt: skip
def test_a_block_mask_of_flex_attention_keeps_its_pairs(mask_mod, kept, place):
    keep = create_mask(mask_mod or (lambda b, h, q_idx, kv_idx: q_idx >= 0), 1, 1, Q_LEN, KV_LEN)
    keep = keep & (True if kept is None else dense(kept[None, None]))
    inputs = qkv(Q_LEN, KV_LEN)
    options = {"mask_mod": None, "score_mod": None, "backend": "reference", place: of_flex(mask_mod, kept)}
    engine = build(**options)
    want = plain.attention(*exactly(inputs), "softmax", score=plain.scaled(0.25), mask=lambda b, h, i, j: keep)
    close([engine(*inputs)], [want], 2e-5)
    assert (engine.block_mask is None) == (kept is None)  # where the function says it all, lengths are any


def test_a_block_mask_of_flex_attention_is_the_engines_alone():
    with pytest.raises(WrongBlockMask, match="block_mask is BlockMask"):
        build()(*qkv(Q_LEN, KV_LEN), block_mask=of_flex(banded))
    with pytest.raises(OptionsClash, match="Give one: a BlockMask holds its own mask_mod"):
        build(mask_mod=causal, block_mask=of_flex(banded))
