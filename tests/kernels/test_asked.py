"""A kernel's program holds what the kernel asks for, or it is none."""

import re

import pytest

pytest.importorskip("tilelang")

import tilelang.language as T

from attention_engine.codegen.patches import patched
from attention_engine.ir.verify import InvalidIR
from attention_engine.kernels.asked import OPERATIONS, PREFIX, held
from attention_engine.kernels.common import build
from tests.kernels.test_golden import engine

SIDE = 64


@T.macro
def product_of_a_macro(a, b, c):
    T.gemm(a, b, c)


def product_of_a_function(a, b, c):
    T.gemm(a, b, c)


def two_products(second):
    """A kernel of two products, the second by this function."""

    @T.macro
    def body(buffers):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared((SIDE, SIDE), "float16")
            c = T.alloc_fragment((SIDE, SIDE), "float32")
            T.copy(buffers["a"], a)
            T.clear(c)
            product_of_a_macro(a, a, c)
            second(a, a, c)
            T.copy(c, buffers["c"])

    shape = (SIDE, SIDE)
    with patched():
        return build("two_products", {"a": T.Tensor(shape, "float16"), "c": T.Tensor(shape, "float32")}, body)


def test_what_a_macro_says_is_held():
    assert held(two_products(product_of_a_macro)) == {"copy": 2, "fill": 1, "gemm": 2}


def test_a_product_outside_a_macro_is_missed(monkeypatch):
    """TileLang says nothing of it."""
    said = "the kernel two_products asks for 2 gemm, and its program holds 1."
    with pytest.raises(InvalidIR, match=re.escape(said)):
        two_products(product_of_a_function)
    monkeypatch.setenv("ATTENTION_ENGINE_VERIFY", "0")
    assert held(two_products(product_of_a_function))["gemm"] == 1


@pytest.mark.parametrize(("dims", "kernel", "products"), [
    ((64, 64), "forward", 5), ((64, 64), "backward", 5), ((32, 64), "forward", 2), ((32, 64), "backward", 5),
])  # fmt: skip
def test_kernels_hold_the_products_of_attention(dims, kernel, products):
    """Two a step forward and five backward; a forward kernel for Hopper says its first, later and last step apart."""
    found = held(engine(*dims)._source_kernel(kernel, "tilelang").prim_func)
    assert found["gemm"] + found["wgmma_gemm"] == products


def test_every_operation_that_is_counted_is_tilelangs():
    from tvm import ir

    assert all(ir.Op.get(PREFIX + operation).name == PREFIX + operation for operation in OPERATIONS.values())
    assert all(callable(getattr(T, name)) for name in OPERATIONS)
