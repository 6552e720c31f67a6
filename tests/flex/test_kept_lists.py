"""Lists of tiles that a BlockMask keeps: made for many calls at once, and anew when a captured tensor says something
else."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.testing import assert_close

from attention_engine import compiler
from attention_engine.flex import again, create_block_mask, flex_attention
from attention_engine.runtime import kept_lists

pytest.importorskip("tilelang")
S = 150
MADE: list[str] = []  # by kernels that list tiles


@pytest.fixture(autouse=True, scope="module")
def _told():
    """Kernels say that they list tiles."""
    kept = compiler.Kernel.__dict__["run"]

    def run(kernel):
        runs = kept.func(kernel)
        if kernel.builder != "tile_map.tile_map":
            return runs
        return lambda *given: MADE.append(kernel.builder) or runs(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.Kernel, "run", property(run))
        yield


@pytest.fixture(autouse=True)
def _fresh():
    again.KNOWN.clear()
    MADE.clear()


def qkv(grad=False):
    make = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, S, 16, generator=make).half().requires_grad_(grad) for _ in range(3)]


def mask_of(ids):
    return create_block_mask(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j), None, None, S, S)


def attend(given, mask, **more):
    return flex_attention(*given, None, mask, kernel_options={"backend": "interpret"}, **more)


def is_right(found, given, ids):
    q, k, v = (t.detach().double() for t in given)
    index = torch.arange(S)
    keep = (ids[:, None] == ids) & (index[:, None] >= index)
    want = (q @ k.mT / 4).masked_fill(~keep, -torch.inf).softmax(-1) @ v
    assert_close(found.detach().double(), want, rtol=1e-2, atol=5e-3)


def documents(length=40):
    return (torch.arange(S) // length).int()


def test_the_second_call_of_a_mask_keeps_its_lists():
    ids, given = documents(), qkv()
    mask = mask_of(ids)
    for n in range(4):
        is_right(attend(given, mask), given, ids)
        assert len(MADE) == min(n + 1, 2)
    is_right(attend(given, mask, return_lse=True)[0], given, ids)
    assert len(MADE) == 2


def test_gradients_use_lists_of_their_own():
    ids, given = documents(), qkv(grad=True)
    mask, found = mask_of(ids), []
    for n in range(4):
        o = attend(given, mask)
        found.append(torch.autograd.grad(o.float().square().sum(), given))
        assert len(MADE) == min(4, 2 * (n + 1))  # one each way, in the first call and in the second, which keeps them
    for gradients in found[1:]:
        assert_close(gradients, found[0], rtol=1e-2, atol=1e-2)


def test_a_tensor_that_torch_writes_makes_new_lists():
    ids, given = documents(), qkv()
    mask = mask_of(ids)
    attend(given, mask)
    for n, length in enumerate((40, 25, 70, 70)):
        ids.copy_(documents(length))
        is_right(attend(given, mask), given, ids)
        is_right(attend(given, mask), given, ids)
        assert len(MADE) == n + 2
    ids.data = documents(30)  # other memory, and no other version
    is_right(attend(given, mask), given, ids)


def test_masks_made_anew_keep_nothing():
    ids, given = documents(), qkv()
    for n in range(3):
        is_right(attend(given, mask_of(ids)), given, ids)
        assert len(MADE) == n + 1
    assert not len(kept_lists.HELD)


def test_masks_share_lists_of_one_tensor_and_let_go():
    ids, other, given = documents(), documents(33), qkv()
    first, second, third = mask_of(ids), mask_of(ids), mask_of(other)
    for mask, of in [(first, ids), (second, ids), (third, other)] * 3:
        is_right(attend(given, mask), given, of)
    del first, second, third, mask
    gc.collect()
    assert not len(kept_lists.HELD)


def test_lists_are_bounded(monkeypatch):
    ids, given = documents(), qkv()
    monkeypatch.setattr(kept_lists, "MOST_BYTES", 8)
    mask = mask_of(ids)
    for n in range(3):
        is_right(attend(given, mask), given, ids)
        assert len(MADE) == n + 1
    monkeypatch.setattr(kept_lists, "MOST_BYTES", 1 << 20)
    for _ in range(3):
        attend(given, mask)
    assert len(MADE) == 4
    monkeypatch.setattr(kept_lists, "MOST", 1)
    for dtype in (torch.bfloat16, torch.float16):  # other tiles need not be, but other keys are
        attend([t.to(dtype) for t in given], mask)
    assert all(len(lists.made) == 1 for lists in kept_lists.HELD.values())


@pytest.mark.parametrize("why", ["a graph", "compiled"])
def test_graphs_and_compiled_code_make_their_own(monkeypatch, why):
    ids, given = documents(), qkv()
    mask = mask_of(ids)
    for _ in range(3):
        attend(given, mask)
    MADE.clear()
    name = {"a graph": "is_capturing", "compiled": "is_compiling"}[why]
    with monkeypatch.context() as patch:
        patch.setattr(kept_lists, name, lambda *_: True)
        for n in range(2):
            is_right(attend(given, mask), given, ids)
            assert len(MADE) == n + 1
    attend(given, mask)
    assert len(MADE) == 2  # what was kept before


def test_parts_and_copies_of_a_mask_hold_their_own():
    ids, given = documents(), qkv()
    mask = mask_of(ids)
    for _ in range(2):
        attend(given, mask)
    assert mask._lists is not None
    assert mask.to("cpu")._lists is None and mask[:, :, :1]._lists is None


def test_tensors_whose_writes_do_not_show_are_not_held():
    with torch.inference_mode():
        ids = documents()
    mask = mask_of(ids)
    for _ in range(3):
        is_right(attend(qkv(), mask), qkv(), ids)
    assert len(MADE) == 3
