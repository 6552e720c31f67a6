"""Copies of tensors whose rows stand apart: the same bits, by wide elements where sizes and places allow it."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_engine.distributed.copies import WIDE, copy, packed
from attention_engine.distributed.exchange import Ranks, Tokens
from attention_engine.distributed.heads import Group, _ToHeads, _ToTokens
from attention_engine.distributed.layout import Layout


class Copies(TorchDispatchMode):
    """Notes the dtype of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.clone.default
        if func is torch.ops.aten.copy_.default:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows, start, dim, wide", [
    (6, 2, 8, True), (6, 2, 6, False), (6, 1, 8, True), (7, 3, 2, False), (5, 0, 16, True), (3, 1, 1, False),
])  # fmt: skip
def test_copies_have_the_same_bits(dtype, rows, start, dim, wide):
    numbers = torch.randn(4, rows, dim).to(dtype)
    numbers[0, start, 0] = float("nan")
    with Copies() as seen:
        found = packed(numbers[:, start:])
    into = numbers.new_zeros(4, rows + 1, dim)
    copy(numbers[:, start:], into[:, 1 : 1 + rows - start])
    for each in (found, into[:, 1 : 1 + rows - start]):
        assert each.contiguous().view(torch.uint8).equal(numbers[:, start:].contiguous().view(torch.uint8))
    assert not into[:, 0].any() and not into[:, 1 + rows - start :].any()
    if dtype is torch.bfloat16 and start:
        assert seen.dtypes == [WIDE if wide else dtype]
    assert packed(found) is found


def test_a_start_between_wide_elements():
    for turned in (torch.randn(8, 24)[:, 2:10], torch.randn(24, 8).T, torch.randn(8, 10)[:, :8]):
        assert torch.equal(packed(turned), turned)


def test_heads_are_copied_by_wide_elements():
    tokens = Tokens(Ranks(Mock(), 2, 0), Layout.zigzag(64, 2))
    mine = [torch.randn(1, 32, heads, 128).bfloat16() for heads in (4, 8)]
    wholes, group = [torch.zeros_like(t) for t in mine], Group(0, 1, 2)
    with Copies() as seen:
        way = _ToHeads(mine, tokens, group)
        way.keep()
        back = _ToTokens(way.found, [group, group], tokens)
        back.keep(wholes)
        back.finish(wholes)
    assert len(seen.dtypes) == 2 + 4 + 2 + 4 + 2 and {*seen.dtypes} == {WIDE}  # packed, kept, packed, kept, home
    assert len(way.sends) == 2 and len(back.sends) == 1  # a run each; all at once
    for whole, own in zip(wholes, mine, strict=True):
        assert torch.equal(whole[:, :, : own.shape[2] // 4], own[:, :, : own.shape[2] // 4])
