"""The interpreter agrees with torch on every construct a kernel may use."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

tilelang = pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: E402

from attention_engine.codegen.interpreter import Interpreter  # noqa: E402
from attention_engine.codegen.tiles.scalar_ops import truncate_to_tf32  # noqa: E402
from attention_engine.errors import HazardInKernel  # noqa: E402
from attention_engine.kernels.splice import take_for_granted  # noqa: E402
from tests.codegen import flash  # noqa: E402

ROWS, COLUMNS = 8, 16
TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}


def elementwise(op, dtype: str, out_dtype: str | None = None):
    """Z[i, j] = op(X[i, j], Y[i, j], i, j) by way of registers."""
    out_dtype = out_dtype or dtype

    @T.prim_func
    def main(
        X: T.Tensor((ROWS, COLUMNS), dtype),
        Y: T.Tensor((ROWS, COLUMNS), dtype),
        Z: T.Tensor((ROWS, COLUMNS), out_dtype),
    ):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment([ROWS, COLUMNS], dtype)
            y = T.alloc_fragment([ROWS, COLUMNS], dtype)
            z = T.alloc_fragment([ROWS, COLUMNS], out_dtype)
            T.copy(X, x)
            T.copy(Y, y)
            for i, j in T.Parallel(ROWS, COLUMNS):
                z[i, j] = op(x[i, j], y[i, j], i, j)
            T.copy(z, Z)

    return main


def run_elementwise(op, x: torch.Tensor, y: torch.Tensor, out_dtype: str | None = None) -> torch.Tensor:
    dtype = str(x.dtype).removeprefix("torch.")
    z = torch.zeros(ROWS, COLUMNS, dtype=TORCH[out_dtype or dtype])
    Interpreter(elementwise(op, dtype, out_dtype))(x, y, z)
    return z


@pytest.mark.parametrize("bound", [3, 2])
def test_what_a_kernel_takes_for_granted_has_to_hold(bound):
    @T.prim_func
    def main(x: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=128):
            for n in T.serial(3):
                take_for_granted(n < bound)
                x[n] = 1.0

    x = torch.zeros(3)
    if bound == 3:
        Interpreter(main)(x)
        assert x.tolist() == [1, 1, 1]
    else:
        with pytest.raises(HazardInKernel, match="takes for granted what does not hold: n < 2"):
            Interpreter(main)(x)


i, j = torch.arange(ROWS, dtype=torch.int32)[:, None], torch.arange(COLUMNS, dtype=torch.int32)[None]

FLOAT_OPS = {
    "add": (lambda x, y, i, j: x + y, lambda x, y: x + y),
    "sub": (lambda x, y, i, j: 1.5 - x, lambda x, y: 1.5 - x),
    "mul": (lambda x, y, i, j: x * y * 0.3, lambda x, y: x * y * 0.3),
    "div": (lambda x, y, i, j: x / y, lambda x, y: x / y),
    "negative": (lambda x, y, i, j: -x, lambda x, y: -x),
    "exp": (lambda x, y, i, j: T.exp(y), lambda x, y: y.exp()),
    "exp2": (lambda x, y, i, j: T.exp2(y), lambda x, y: y.exp2()),
    "log": (lambda x, y, i, j: T.log(y), lambda x, y: y.log()),
    "log2": (lambda x, y, i, j: T.log2(y), lambda x, y: y.log2()),
    "log1p": (lambda x, y, i, j: T.log1p(y), lambda x, y: y.log1p()),
    "sqrt": (lambda x, y, i, j: T.sqrt(y), lambda x, y: y.sqrt()),
    "rsqrt": (lambda x, y, i, j: T.rsqrt(y), lambda x, y: y.rsqrt()),
    "tanh": (lambda x, y, i, j: T.tanh(x), lambda x, y: x.tanh()),
    "sigmoid": (lambda x, y, i, j: T.sigmoid(x), lambda x, y: x.sigmoid()),
    "erf": (lambda x, y, i, j: T.erf(x), lambda x, y: x.erf()),
    "sin": (lambda x, y, i, j: T.sin(x), lambda x, y: x.sin()),
    "cos": (lambda x, y, i, j: T.cos(x), lambda x, y: x.cos()),
    "abs": (lambda x, y, i, j: T.abs(x), lambda x, y: x.abs()),
    "floor": (lambda x, y, i, j: T.floor(x), lambda x, y: x.floor()),
    "ceil": (lambda x, y, i, j: T.ceil(x), lambda x, y: x.ceil()),
    "pow": (lambda x, y, i, j: T.pow(y, x), lambda x, y: y**x),
    "max": (lambda x, y, i, j: T.max(x, y), lambda x, y: torch.maximum(x, y)),
    "max with a number": (lambda x, y, i, j: T.max(x, T.float32(0.25)), lambda x, y: x.clamp_min(0.25)),
    "min": (lambda x, y, i, j: T.min(T.float32(0.25), x), lambda x, y: x.clamp_max(0.25)),
    "if_then_else": (lambda x, y, i, j: T.if_then_else(x > y, x, 0.0), lambda x, y: torch.where(x > y, x, 0.0)),
    "two numbers": (lambda x, y, i, j: T.if_then_else(i < j, 1.0, -2.0), lambda x, y: torch.where(i < j, 1.0, -2.0)),
    "select": (lambda x, y, i, j: T.Select(x <= 0.0, y, x * y), lambda x, y: torch.where(x <= 0, y, x * y)),
    "and": (
        lambda x, y, i, j: T.if_then_else(T.And(i > 2, j < 5), x, y),
        lambda x, y: torch.where((i > 2) & (j < 5), x, y),
    ),
    "or": (
        lambda x, y, i, j: T.if_then_else(T.Or(i > 2, j < 5), x, y),
        lambda x, y: torch.where((i > 2) | (j < 5), x, y),
    ),
    "not": (lambda x, y, i, j: T.if_then_else(T.Not(i == j), x, y), lambda x, y: torch.where(i != j, x, y)),
    "infinity": (
        lambda x, y, i, j: T.if_then_else(i == j, x, -T.infinity("float32")),
        lambda x, y: x.masked_fill(i != j, -math.inf),
    ),
    "reinterpret": (
        lambda x, y, i, j: T.reinterpret(T.reinterpret(x, "int32") & 0x7FFFFFFF, "float32"),
        lambda x, y: x.abs(),
    ),
    "cast of an index": (lambda x, y, i, j: x * T.cast(i - j, "float32"), lambda x, y: x * (i - j)),
    "cast to half": (lambda x, y, i, j: T.cast(T.cast(x, "float16"), "float32"), lambda x, y: x.half().float()),
    "cast to int": (lambda x, y, i, j: T.cast(T.cast(x * 9.0, "int32"), "float32"), lambda x, y: (x * 9).trunc()),
}

INTEGER_OPS = {
    "add": (lambda x, y, i, j: x + y * i, lambda x, y: x + y * i),
    "floordiv": (lambda x, y, i, j: T.floordiv(x, y), lambda x, y: x // y),
    "floormod": (lambda x, y, i, j: T.floormod(x, y), lambda x, y: x % y),
    "truncdiv": (lambda x, y, i, j: T.truncdiv(x, y), lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    "truncmod": (lambda x, y, i, j: T.truncmod(x, 7), lambda x, y: torch.fmod(x, 7)),
    "number over lanes": (lambda x, y, i, j: T.floordiv(100, y), lambda x, y: 100 // y),
    "bitwise_and": (lambda x, y, i, j: x & y, lambda x, y: x & y),
    "bitwise_or": (lambda x, y, i, j: x | 6, lambda x, y: x | 6),
    "bitwise_xor": (lambda x, y, i, j: T.bitwise_xor(x, y), lambda x, y: x ^ y),
    "bitwise_not": (lambda x, y, i, j: T.bitwise_not(x), lambda x, y: ~x),
    "shift_left": (lambda x, y, i, j: T.shift_left(x, 3), lambda x, y: x << 3),
    "shift_right": (lambda x, y, i, j: T.shift_right(x, i), lambda x, y: x >> i),
    "max": (lambda x, y, i, j: T.max(x, y), lambda x, y: torch.maximum(x, y)),
    "min with a number": (lambda x, y, i, j: T.min(3, x), lambda x, y: x.clamp_max(3)),
    "abs": (lambda x, y, i, j: T.abs(x), lambda x, y: x.abs()),
    "wraps": (lambda x, y, i, j: x * 1103515245 + 12345, lambda x, y: x * 1103515245 + 12345),
}


@pytest.mark.parametrize("name", FLOAT_OPS)
def test_float_ops_agree_with_torch(name: str) -> None:
    op, expected = FLOAT_OPS[name]
    x, y = torch.randn(ROWS, COLUMNS), torch.rand(ROWS, COLUMNS) + 0.1
    torch.testing.assert_close(run_elementwise(op, x, y), expected(x, y).float())


@pytest.mark.parametrize("name", INTEGER_OPS)
def test_integer_ops_agree_with_torch(name: str) -> None:
    op, expected = INTEGER_OPS[name]
    x = torch.randint(-50, 50, (ROWS, COLUMNS), dtype=torch.int32)
    y = torch.randint(1, 9, (ROWS, COLUMNS), dtype=torch.int32)
    assert torch.equal(run_elementwise(op, x, y), expected(x, y))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_store_rounds_to_nearest_even(dtype: str) -> None:
    x, y = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
    got = run_elementwise(lambda x, y, i, j: x * y, x, y, dtype)
    assert torch.equal(got, (x * y).to(TORCH[dtype]))


def test_unsigned_arithmetic_wraps_at_32_bits() -> None:
    def op(x, y, i, j):
        a = T.cast(x, "uint32") * T.uint32(0xD2511F53) + T.cast(y, "uint32")
        return T.cast(T.shift_right(a, T.uint32(16)) ^ (a & T.uint32(0xFFFF)), "int32")

    x = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS), dtype=torch.int32)
    y = torch.randint(-(2**31), 2**31 - 1, (ROWS, COLUMNS), dtype=torch.int32)
    a = [(int(p) * 0xD2511F53 + int(q)) & 0xFFFFFFFF for p, q in zip(x.flatten(), y.flatten())]
    expected = torch.tensor([(n >> 16) ^ (n & 0xFFFF) for n in a], dtype=torch.int32).view(ROWS, COLUMNS)
    assert torch.equal(run_elementwise(op, x, y), expected)


class CountMultiplications(TorchDispatchMode):
    """Counts what the interpreter asks of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == "aten::mul"
        return func(*args, **(kwargs or {}))


def test_a_shared_expression_is_evaluated_once() -> None:
    def op(x, y, i, j):
        for _ in range(8):  # 2^8 evaluations, were each use its own
            x = x * 0.5 + x * 0.5
        return x

    x = torch.randn(ROWS, COLUMNS)
    with CountMultiplications() as counter:
        result = run_elementwise(op, x, x)
    torch.testing.assert_close(result, x)
    assert counter.count == 16


def test_float32_products_see_ten_bits_of_mantissa() -> None:
    x = torch.tensor([1.0 + 2**-10, 1.0 + 2**-11, -(1.0 + 2**-10 + 2**-11), math.nan, math.inf])
    expected = torch.tensor([1.0 + 2**-10, 1.0, -(1.0 + 2**-10), math.nan, math.inf])
    torch.testing.assert_close(truncate_to_tf32(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("clear", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gemm_sums_in_fp32(dtype: str, transpose_a: bool, transpose_b: bool, clear: bool) -> None:
    shape_a, shape_b = (48, 32) if transpose_a else (32, 48), (16, 48) if transpose_b else (48, 16)

    @T.prim_func
    def main(A: T.Tensor(shape_a, dtype), B: T.Tensor(shape_b, dtype), C: T.Tensor((32, 16), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared(shape_a, dtype)
            b = T.alloc_shared(shape_b, dtype)
            c = T.alloc_fragment([32, 16], "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.fill(c, 2.0)
            T.gemm(a, b, c, transpose_A=transpose_a, transpose_B=transpose_b, clear_accum=clear)
            T.copy(c, C)

    a, b, c = torch.randn(shape_a).to(TORCH[dtype]), torch.randn(shape_b).to(TORCH[dtype]), torch.zeros(32, 16)
    Interpreter(main)(a, b, c)
    a, b = (truncate_to_tf32(x).double() if dtype == "float32" else x.double() for x in (a, b))
    expected = (a.T if transpose_a else a) @ (b.T if transpose_b else b) + (0 if clear else 2)
    torch.testing.assert_close(c.double(), expected, rtol=1e-5, atol=1e-5)


def test_wgmma_gemm_is_a_product_and_its_waits_are_silent() -> None:
    @T.prim_func
    def main(A: T.Tensor((64, 32), "float16"), B: T.Tensor((16, 32), "float16"), C: T.Tensor((64, 16), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared([64, 32], "float16")
            b = T.alloc_shared([2, 16, 32], "float16")
            c = T.alloc_fragment([64, 16], "float32")
            T.copy(A, a)
            T.copy(B, b[1, :, :])
            T.wgmma_gemm(a, b[1, :, :], c, transpose_B=True, clear_accum=True)
            T.wait_wgmma(0)
            T.copy(c, C)

    a, b, c = torch.randn(64, 32).half(), torch.randn(16, 32).half(), torch.zeros(64, 16)
    Interpreter(main)(a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T)


REDUCTIONS = {
    "sum": lambda x, axis: x.sum(axis),
    "max": lambda x, axis: x.amax(axis),
    "min": lambda x, axis: x.amin(axis),
    "abssum": lambda x, axis: x.abs().sum(axis),
    "absmax": lambda x, axis: x.abs().amax(axis),
}


# T.reduce_abssum always clears its target, the others may keep it.
REDUCTION_CASES = [(kind, clear) for kind in REDUCTIONS for clear in (True, False) if clear or kind != "abssum"]


@pytest.mark.parametrize("scope", [T.alloc_fragment, T.alloc_shared])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("kind", "clear"), REDUCTION_CASES)
def test_reductions_agree_with_torch(kind: str, clear: bool, axis: int, scope) -> None:
    length = COLUMNS if axis == 0 else ROWS
    options = {} if kind == "abssum" else {"clear": clear}
    reduce = functools.partial(getattr(T, f"reduce_{kind}"), dim=axis, **options)

    @T.prim_func
    def main(X: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((length,), "float32")):
        with T.Kernel(1, threads=128):
            x = scope([ROWS, COLUMNS], "float32")
            y = T.alloc_fragment([length], "float32")
            T.copy(X, x)
            T.fill(y, 0.5)
            reduce(x, y)
            T.copy(y, Y)

    x, y = torch.randn(ROWS, COLUMNS), torch.zeros(length)
    Interpreter(main)(x, y)
    expected = REDUCTIONS[kind](x, axis)
    half = torch.full_like(expected, 0.5)
    joined = {"max": torch.maximum, "absmax": torch.maximum, "min": torch.minimum}.get(kind, torch.add)(expected, half)
    torch.testing.assert_close(y, expected if clear else joined)


@pytest.mark.parametrize("reverse", [False, True])
def test_cumsum_runs_either_way(reverse: bool) -> None:
    @T.prim_func
    def main(X: T.Tensor((ROWS, COLUMNS), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment([ROWS, COLUMNS], "float32")
            y = T.alloc_fragment([ROWS, COLUMNS], "float32")
            T.copy(X, x)
            T.cumsum(x, y, dim=1, reverse=reverse)
            T.copy(y, Y)

    x, y = torch.randn(ROWS, COLUMNS), torch.zeros(ROWS, COLUMNS)
    Interpreter(main)(x, y)
    torch.testing.assert_close(y, x.flip(1).cumsum(1).flip(1) if reverse else x.cumsum(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_flash_attention_of_odd_length_agrees_with_torch(dtype: str) -> None:
    run = Interpreter(flash.forward(heads=2, dim=32, dtype=dtype))
    for batch, length in ((2, 200), (1, 1), (1, 64), (1, 129)):
        q, k, v = torch.randn(3, batch, length, 2, 32).to(TORCH[dtype])
        out, lse = torch.full_like(q, math.nan), torch.full((batch, 2, length), math.nan)
        run(q, k, v, out, lse)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 32**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())
        tolerance = 2e-3 if dtype == "float16" else 2e-2
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_three_tf32_products_reach_float32_accuracy() -> None:
    @T.prim_func
    def main(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32"), C: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared([2, 64, 64], "float32")
            b = T.alloc_shared([2, 64, 64], "float32")
            c = T.alloc_fragment([64, 64], "float32")
            T.copy(A, a[0, :, :])
            T.copy(B, b[0, :, :])
            T.gemm(a[0, :, :], b[0, :, :], c, clear_accum=True)
            T.copy(c, C[0, :, :])
            for i, j in T.Parallel(64, 64):
                a[1, i, j] = a[0, i, j] - T.reinterpret(T.reinterpret(a[0, i, j], "int32") & -8192, "float32")
                b[1, i, j] = b[0, i, j] - T.reinterpret(T.reinterpret(b[0, i, j], "int32") & -8192, "float32")
            T.gemm(a[1, :, :], b[0, :, :], c)
            T.gemm(a[0, :, :], b[1, :, :], c)
            T.copy(c, C[1, :, :])

    a, b, c = torch.randn(64, 64), torch.randn(64, 64), torch.zeros(2, 64, 64)
    Interpreter(main)(a, b, c)
    once, thrice = (c.double() - a.double() @ b.double()).abs().amax(dim=(1, 2))
    assert once > 1e-3
    assert thrice < 3e-5


def test_a_vote_asks_all_threads_that_run_together() -> None:
    @T.prim_func
    def main(X: T.Tensor((3, 64), "float32"), O: T.Tensor((3,), "int32")):
        with T.Kernel(3, threads=128) as row:
            x = T.alloc_fragment([64], "float32")
            found = T.alloc_var("bool")
            T.copy(X[row, :], x)
            found = False
            for i in T.Parallel(64):
                found = T.Or(found, x[i] != 1)
            if T.any_sync(found) != 0:
                O[row] = 1

    x, out = torch.ones(3, 64), torch.zeros(3, dtype=torch.int32)
    x[1, 17], x[2, 63] = 2.0, torch.nan
    Interpreter(main)(x, out)
    assert out.tolist() == [0, 1, 1]
