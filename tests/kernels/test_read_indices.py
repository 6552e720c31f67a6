"""Indices that are read from memory: each stands once in a kernel's text, however many guards ask for it.

TileLang's time grows with a formula's text, and by guards inside guards far faster. So this counts reads, not seconds.
"""

import re

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.ir.expr import Op, Type, make
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.library import OnlineSoftmax

pytest.importorskip("tilelang")
import tilelang.language as T

from attention_engine.kernels.common import Place, Sizes, build, over_pairs, reader, store
from attention_engine.plan import attention_buffers


def text_of(expr, name, axes):
    """A kernel that stores a formula of each pair."""
    problem = Problem(2, 2, 32, 32, "float16", custom=((name, "int32", axes),))
    sizes = Sizes(problem)
    custom = sizes.declare(attention_buffers.custom_inputs(problem))
    parameters = {"q": T.Tensor([sizes.batch, sizes.q], "float16"), **custom, "out": T.Tensor([16, 16], "int32")}

    @T.macro
    def body(buffers):
        with T.Kernel(1, threads=32):
            place = Place(0, 0, {}, reader(buffers))
            over_pairs(16, 16, lambda i, j: store(buffers["out"], place.splice(i, j, {})(expr)[0], i, j))

    return build("reads", parameters, body).script()


def read(*indices):
    return make(Op.LOAD, *indices, arg="x", dtype=Type.INT)


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_a_chain_of_reads_grows_by_a_line_a_read(depth):
    chain = Q_IDX
    for _ in range(depth):
        chain = read(chain)
    assert text_of(chain, "x", (9,)).count("custom_x[") == depth


def test_both_indices_of_a_table_are_held():
    text = text_of(read(read(Q_IDX, KV_IDX), read(KV_IDX, Q_IDX)), "x", (9, 9))
    assert text.count("custom_x[") == 3


def test_an_index_that_is_no_read_stays_in_place():
    assert "local.var" not in text_of(read(Q_IDX), "x", (9,))


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_ask_for_a_kind_of_a_token_once_a_formula(deterministic):
    """Scores, masks and atomics of a table that is read at kinds of tokens."""

    def score_mod(score, custom, b, h, q_idx, kv_idx):
        kinds = custom["kind"]
        return score * 0.125 + custom["match"][kinds[b, q_idx], kinds[b, kv_idx]]

    custom = CustomIO({"match": (5, 5), "kind": ("batch", "seq_len")})
    metas = [meta_tensor(1, 2, 256, 32, dtype=torch.float16)] * 3
    engine = AttentionEngine(
        metas, custom, score_mod, None, OnlineSoftmax(), device=arch.H100(), deterministic=deterministic
    )
    made = engine._kernels("cuda")
    for kernel in (made.of_forward | made.of_backward).values():
        for line in kernel.source("tilelang").splitlines():
            assert len(re.findall(r"custom_kind\[", line)) <= 1, line
