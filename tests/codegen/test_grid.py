"""Blocks in the interpreter: their order, and waits of one for another."""

import pytest
import torch

from attention_engine.errors import HazardInKernel

pytest.importorskip("tilelang")
import tilelang.language as T

from attention_engine.codegen.interpreter import Interpreter


def test_the_first_index_of_a_grid_runs_fastest():
    @T.prim_func
    def number(found: T.Tensor((2, 3, 4), "int32"), count: T.Tensor((1,), "int32")):
        with T.Kernel(4, 3, 2, threads=32) as (x, y, z):
            found[z, y, x] = count[0]
            count[0] = count[0] + 1

    found = torch.zeros(2, 3, 4, dtype=torch.int32)
    Interpreter(number)(found, torch.zeros(1, dtype=torch.int32))
    assert found.flatten().tolist() == list(range(24))


def waiting(for_before):
    step = -1 if for_before else 1

    @T.prim_func
    def wait(done: T.Tensor((6,), "int32")):
        with T.Kernel(4, threads=32) as x:
            while T.atomic_load(done[1 + x + step], memory_order="acquire") == 0:
                T.call_extern("void", "__nanosleep", 10)
            T.evaluate(T.atomic_add(done[1 + x], 1, memory_order="release", return_prev=True))

    done = torch.tensor([1, 0, 0, 0, 0, 1], dtype=torch.int32)
    Interpreter(wait)(done)
    return done.tolist()


def test_a_block_may_wait_for_one_before_it_and_for_no_other():
    assert waiting(for_before=True) == [1] * 6
    with pytest.raises(HazardInKernel, match="no block before it has done"):
        waiting(for_before=False)
