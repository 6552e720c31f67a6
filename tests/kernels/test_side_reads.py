"""Reads of custom inputs by a query alone, or by a key alone: once a row and once a key, and no longer at each pair."""

import re

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, library, meta_tensor
from attention_engine.ir.expr import Op, Type, const, make
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.passes.simplify import add

pytest.importorskip("tilelang")

from attention_engine.kernels.common import build
from attention_engine.kernels.side_reads import side_reads


def read(name, *indices, dtype=Type.INT):
    return make(Op.LOAD, *indices, arg=name, dtype=dtype)


def test_the_largest_reads_of_one_side_have_tiles():
    of_key, of_row, of_pair = read("sequence", KV_IDX), read("ahead", B, Q_IDX), read("bias", Q_IDX, KV_IDX)
    of_block, prefix = read("slopes", H, dtype=Type.FLOAT), read("prefix", of_key)
    condition = make(Op.LESS, add(prefix, of_row), add(of_pair, add(of_key, const(3, Type.INT))))
    found = []
    build("held", {}, lambda _: found.append(side_reads([condition, None, of_block], 64, 32)))
    (sides,) = found
    tiles = {**sides.of_queries, **sides.of_keys}
    shapes = {read: ([int(n) for n in tile.shape], tile.scope(), tile.dtype) for read, tile in tiles.items()}
    assert shapes == {
        of_row: ([64], "local.fragment", "int32"), prefix: ([32], "shared.dyn", "int32"),
        of_key: ([32], "shared.dyn", "int32"),
    }  # fmt: skip


@pytest.mark.parametrize("packed", ["alike", "unlike"])
def test_a_kernel_over_queries_reads_each_table_of_packed_sequences_once(packed):
    """Where slopes have gradients, its pairs are masked four times, and nowhere is it asked whether a tile ends."""
    meta = meta_tensor(1, 2, 256, 64, dtype=torch.float16)
    io, score = CustomIO({"slopes": ("heads",)}), library.alibi(0.125)
    engine = AttentionEngine((meta,) * 3, io, score, library.causal, device=arch.H100())
    kernels = engine._all_kernels(arch.H100(), [torch.zeros(2, requires_grad=True)], packed=packed)
    text = kernels["queries"].prim_func.script()
    tables = set(re.findall(r"custom__packed_(?!places)\w+ = T.match_buffer", text))
    reads = re.findall(r"(custom__packed_(?!places)\w+)\[", text)
    assert tables and len(reads) == len(set(reads)) <= len(tables)
    assert "condition" not in text
