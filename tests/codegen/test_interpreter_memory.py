"""The interpreter's memory: what lies out of range, what nobody wrote, and where loops, masks and names lead."""

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: E402
from tilelang.language.eager.builder import Builder  # noqa: E402

from attention_engine.codegen.interpreter import Interpreter  # noqa: E402
from attention_engine.errors import NotInterpretable  # noqa: E402


def test_copies_fill_with_zeros_and_drop_what_lies_outside() -> None:
    length = T.dynamic("length")

    @T.prim_func
    def main(
        X: T.Tensor((length, 16), "float32"), Y: T.Tensor((length, 16), "float32"), Z: T.Tensor((64, 16), "float32")
    ):
        with T.Kernel(T.ceildiv(length, 32), threads=128) as block:
            tile = T.alloc_shared([32, 16], "float32")
            T.copy(X[block * 32 : (block + 1) * 32, :], tile)
            T.copy(tile, Z[block * 32 : (block + 1) * 32, :])
            T.copy(tile, Y[block * 32 : (block + 1) * 32, :])

    x, y, z = torch.randn(50, 16), torch.zeros(50, 16), torch.full((64, 16), 7.0)
    Interpreter(main)(x, y, z)
    assert torch.equal(y, x)
    assert torch.equal(z, torch.cat([x, torch.zeros(14, 16)]))


def test_elements_out_of_range_read_zero_and_are_not_stored() -> None:
    length = T.dynamic("length")

    @T.prim_func
    def main(
        X: T.Tensor((length,), "float32"),
        Index: T.Tensor((64,), "int32"),
        Y: T.Tensor((length,), "float32"),
        G: T.Tensor((64,), "float32"),
    ):
        with T.Kernel(1, threads=64):
            for i in T.Parallel(64):
                G[i] = X[Index[i]]
                Y[i - 3] = X[i - 3] * 2.0

    x, index, y, got = (
        torch.randn(40),
        torch.randint(-20, 60, (64,), dtype=torch.int32),
        torch.zeros(40),
        torch.zeros(64),
    )
    Interpreter(main)(x, index, y, got)
    inside = (index >= 0) & (index < 40)
    assert torch.equal(got, torch.where(inside, x[index.clamp(0, 39)], 0.0))
    assert torch.equal(y, x * 2)


def test_an_empty_tensor_reads_zero() -> None:
    length = T.dynamic("length")

    @T.prim_func
    def main(X: T.Tensor((length,), "float32"), Index: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[i] = X[Index[i]] + X[i]

    y = torch.ones(8)
    Interpreter(main)(torch.zeros(0), torch.zeros(8, dtype=torch.int32), y)
    assert torch.equal(y, torch.zeros(8))


def test_memory_nobody_wrote_is_nan() -> None:
    @T.prim_func
    def main(X: T.Tensor((4, 8), "float32")):
        with T.Kernel(2, threads=32) as block:
            tile = T.alloc_fragment([8], "float32")
            if block == 0:
                T.fill(tile, 1.0)
            T.copy(tile, X[block, :])

    x = torch.zeros(4, 8)
    Interpreter(main)(x)
    assert torch.equal(x[0], torch.ones(8))
    assert x[1].isnan().all()  # the first block's values are gone


def test_stores_outside_a_tile_on_chip_are_refused() -> None:
    @T.prim_func
    def main(X: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared([8], "float32")
            for i in T.Parallel(8):
                tile[i + 1] = X[i]

    with pytest.raises(NotInterpretable, match=r"a store outside the shared\.dyn buffer `tile`"):
        Interpreter(main)(torch.zeros(8))


def test_conditions_mask_lanes_within_a_parallel_nest() -> None:
    @T.prim_func
    def main(X: T.Tensor((8, 8), "float32"), n: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment([8, 8], "float32")
            T.fill(tile, 0.0)
            for i, j in T.Parallel(8, 8):
                row = i + 1
                if row > j:
                    if j >= n:
                        tile[i, j] = 1.0
                    else:
                        tile[i, j] = 2.0
                else:
                    tile[i, j] = T.cast(row, "float32") * 10.0
            if n > 5:
                T.fill(tile, 9.0)
            T.copy(tile, X)

    i, j = torch.arange(8)[:, None], torch.arange(8)[None]
    expected = torch.where(i + 1 > j, torch.where(j >= 3, 1.0, 2.0), (i + 1) * 10.0)
    x = torch.zeros(8, 8)
    Interpreter(main)(x, 3)
    assert torch.equal(x, expected)
    Interpreter(main)(x, 6)
    assert torch.equal(x, torch.full((8, 8), 9.0))


def test_broadcasts_transposes_and_inner_loops_keep_their_axes() -> None:
    @T.prim_func
    def main(
        X: T.Tensor((8, 4), "float32"),
        R: T.Tensor((8,), "float32"),
        Y: T.Tensor((4, 8), "float32"),
        Z: T.Tensor((8,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            x = T.alloc_shared([8, 4], "float32")
            row = T.alloc_fragment([8], "float32")
            T.copy(X, x)
            T.copy(R, row)
            for i, j in T.Parallel(8, 4):
                Y[j, i] = x[i, 3 - j] * row[i]
            for i in T.Parallel(8):
                total = T.alloc_var("float32")
                total = 0.0
                for j in T.serial(i // 2):
                    total = total + x[i, j]
                Z[i] = total

    x, row, y, z = torch.randn(8, 4), torch.randn(8), torch.zeros(4, 8), torch.zeros(8)
    Interpreter(main)(x, row, y, z)
    assert torch.equal(y, (x.flip(1) * row[:, None]).T)
    torch.testing.assert_close(z, torch.stack([x[i, : i // 2].sum() for i in range(8)]))


def test_variables_while_loops_breaks_and_early_ends() -> None:
    @T.prim_func
    def main(X: T.Tensor((4,), "int32")):
        with T.Kernel(4, threads=32) as block:
            steps = T.alloc_var("int32", init=0)
            number = T.alloc_var("int32", init=0)
            number = 27 + block
            while number != 1:
                if number % 2 == 0:  # noqa: SIM108 - TileLang traces statements
                    number = number // 2
                else:
                    number = number * 3 + 1
                steps = steps + 1
            for k in T.serial(100):
                if k == block:
                    T.loop_break()
                steps = steps + 1000
            X[block] = steps

    def steps(number: int) -> int:
        count = 0
        while number != 1:
            number, count = (number // 2 if number % 2 == 0 else number * 3 + 1), count + 1
        return count

    x = torch.zeros(4, dtype=torch.int32)
    Interpreter(main)(x)
    assert x.tolist() == [steps(27 + block) + 1000 * block for block in range(4)]


def test_a_name_keeps_the_value_it_was_given() -> None:
    @T.prim_func
    def main(X: T.Tensor((8,), "float32"), Y: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_fragment([8], "float32")
            T.copy(X, tile)
            for i in T.Parallel(8):
                before = tile[i]
                tile[i] = 0.0
                Y[i] = before

    x, y = torch.randn(8), torch.zeros(8)
    Interpreter(main)(x, y)
    assert torch.equal(y, x)


def test_atomics_add_by_element_and_by_tile() -> None:
    length = T.dynamic("length")

    @T.prim_func
    def main(
        X: T.Tensor((length, 16), "float32"),
        Index: T.Tensor((length,), "int32"),
        T_: T.Tensor((length, 16), "float32"),
        H: T.Tensor((4,), "float32"),
        N: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(T.ceildiv(length, 32), 2, threads=128) as (block, _):
            tile = T.alloc_shared([32, 16], "float32")
            T.copy(X[block * 32 : (block + 1) * 32, :], tile)
            T.atomic_add(T_[block * 32 : (block + 1) * 32, :], tile)
            for i, j in T.Parallel(32, 16):
                T.atomic_add(T_[block * 32 + i, j], tile[i, j])
                if block * 32 + i < length:
                    T.atomic_add(H[Index[block * 32 + i]], tile[i, j])
            T.atomic_add(N[0], 1)

    x, index = torch.randn(50, 16), torch.randint(0, 4, (50,), dtype=torch.int32)
    total, histogram, blocks = torch.ones(50, 16), torch.zeros(4), torch.zeros(1, dtype=torch.int32)
    Interpreter(main)(x, index, total, histogram, blocks)
    torch.testing.assert_close(total, 1 + 4 * x)
    torch.testing.assert_close(histogram, 2 * torch.zeros(4).index_add(0, index, x.sum(1)))
    assert blocks.item() == 4


def test_lengths_strides_and_scalars_come_from_the_call() -> None:
    batch, length, first, second, third = (T.dynamic(name) for name in ("batch", "length", "a", "b", "c"))
    builder = Builder()

    @T.macro
    def body(X, Y, factor) -> None:
        with T.Kernel(T.ceildiv(length, 16), 3, batch, threads=128) as (bx, by, bz):
            tile = T.alloc_fragment([16, 8], "float32")
            T.copy(X[bz, bx * 16 : (bx + 1) * 16, by, :], tile)
            for i, j in T.Parallel(16, 8):
                tile[i, j] = tile[i, j] * factor
            T.copy(tile, Y[bz, bx * 16 : (bx + 1) * 16, by, :])

    with builder.prim_func("main"):
        x = builder.prim_func_arg("X", T.StridedTensor((batch, length, 3, 8), (first, second, third, 1), "float16"))
        y = builder.prim_func_arg("Y", T.Tensor((batch, length, 3, 8), "float32"))
        body(x, y, builder.prim_func_arg("factor", T.float32()))
    run = Interpreter(builder.get())
    for batch_size, rows in ((1, 5), (2, 33), (3, 0), (0, 4)):
        values = torch.randn(batch_size, 3, rows, 10).half().transpose(1, 2)[..., 1:9]
        result = torch.zeros(batch_size, rows, 3, 8)
        run(values, result, 0.5)
        assert torch.equal(result, values.float() * 0.5)


def test_arguments_that_do_not_fit_are_named() -> None:
    length = T.dynamic("length")

    @T.prim_func
    def main(X: T.Tensor((length, 8), "float32"), Y: T.Tensor((length, 8), "float32")):
        with T.Kernel(1, threads=32):
            T.copy(X[0:4, :], Y[0:4, :])

    run, x = Interpreter(main), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="the kernel takes 2 arguments, 1 were given"):
        run(x)
    with pytest.raises(ValueError, match=r"argument 1 \(`Y`\) has shape \(5, 8\); the kernel takes \(4, 8\)"):
        run(x, torch.zeros(5, 8))
    with pytest.raises(
        ValueError, match=r"argument 1 \(`Y`\) is torch\.float16 on cpu; the interpreter takes torch\.float32"
    ):
        run(x, x.half())
    with pytest.raises(ValueError, match=r"argument 0 \(`X`\) has strides \(1, 4\); the kernel takes \(8, 1\)"):
        run(torch.zeros(8, 4).T, x)
    with pytest.raises(ValueError, match=r"argument 0 \(`X`\) has 1 dimensions; the kernel takes 2"):
        run(torch.zeros(8), x)


def test_what_has_no_meaning_is_named() -> None:
    @T.prim_func
    def calls_out(X: T.Tensor((8,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                X[i] = T.call_extern("float32", "__expf", X[i])

    @T.prim_func
    def splits_threads(X: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            X[thread] = 1.0

    with pytest.raises(NotInterpretable, match=r"the call tirx\.call_extern of __expf"):
        Interpreter(calls_out)
    with pytest.raises(NotInterpretable, match="the thread index `thread`"):
        Interpreter(splits_threads)


def test_a_reshaped_tile_is_the_same_memory() -> None:
    @T.prim_func
    def main(X: T.Tensor((4, 32), "float32"), Y: T.Tensor((32, 4), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared([4, 32], "float32")
            T.copy(X, tile)
            turned = T.reshape(tile, [32, 4])
            T.sync_threads()
            T.copy(turned, Y)

    x, y = torch.randn(4, 32), torch.zeros(32, 4)
    Interpreter(main)(x, y)
    assert torch.equal(y, x.view(32, 4))


def test_a_parameter_is_viewed_in_a_shape_that_the_call_gives() -> None:
    rows, columns = T.dynamic("rows"), T.dynamic("columns")

    @T.prim_func
    def main(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(1, threads=32):
            flat = T.view(Y, [rows * columns])
            for i in T.Parallel(32):
                T.atomic_add(flat[columns + i], X[0, i])

    x, y = torch.randn(3, 32), torch.ones(3, 32)
    Interpreter(main)(x, y)
    assert torch.equal(y[1], 1 + x[0])
    assert torch.equal(y[[0, 2]], torch.ones(2, 32))
    with pytest.raises(ValueError, match="has shape"):
        Interpreter(main)(x, torch.ones(2, 32))


def test_safe_values_stand_for_what_lies_outside() -> None:
    @T.prim_func
    def main(X: T.Tensor((10,), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared([16], "float32")
            T.annotate_safe_value({X: -7.0})
            T.copy(X[0:16], tile)
            T.copy(tile, Y)

    y = torch.zeros(16)
    Interpreter(main)(torch.ones(10), y)
    assert y.tolist() == [1.0] * 10 + [-7.0] * 6


def test_persistent_blocks_take_every_tile_once() -> None:
    @T.prim_func
    def main(X: T.Tensor((4, 8), "float32")):
        with T.Kernel(3, threads=32) as block:
            T.use_swizzle(10)
            for i, j in T.Persistent([4, 2], 3, block):
                for k in T.vectorized(4):
                    X[i, j * 4 + k] = X[i, j * 4 + k] + 1.0 * k

    x = torch.zeros(4, 8)
    Interpreter(main)(x)
    assert torch.equal(x, torch.arange(4.0).repeat(4, 2))


def test_private_arrays_hold_one_value_for_each_lane() -> None:
    @T.prim_func
    def main(X: T.Tensor((16, 4), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(16):
                mine = T.alloc_local([4], "float32")
                for k in T.unroll(4):
                    mine[k] = X[i, k] * 2.0
                if i > 3:
                    mine[1] = 0.0
                Y[i] = mine[0] + mine[1] + mine[2] + mine[3]

    x, y = torch.randn(16, 4), torch.zeros(16)
    Interpreter(main)(x, y)
    x[4:, 1] = 0
    torch.testing.assert_close(y, 2 * x.sum(1))


def test_kernels_of_one_program_run_one_after_the_other() -> None:
    length = T.dynamic("length")

    @T.prim_func
    def main(X: T.Tensor((length,), "float32"), Y: T.Tensor((length,), "float32"), N: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(length):
                Y[i] = X[i] + 1.0
        with T.Kernel(length, threads=32) as block:
            Y[block] = Y[block] * N[0]
            if Y[block] > 3.0:
                Y[block] = 3.0

    x, y = torch.randn(10), torch.zeros(10)
    Interpreter(main)(x, y, torch.tensor([2.0]))
    torch.testing.assert_close(y, ((x + 1) * 2).clamp_max(3))


def test_a_loop_beside_other_statements_opens_an_axis_of_its_own() -> None:
    @T.prim_func
    def main(X: T.Tensor((4, 8), "float32"), Y: T.Tensor((4,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = X[i, 0]
                for j in T.Parallel(8):
                    X[i, j] = X[i, j] + Y[i]

    x, y = torch.randn(4, 8), torch.zeros(4)
    expected = x + x[:, :1]
    Interpreter(main)(x, y)
    assert torch.equal(x, expected)


def test_one_thread_acts_once() -> None:
    @T.prim_func
    def main(X: T.Tensor((1,), "int32")):
        with T.Kernel(3, threads=32):
            if T.get_thread_binding() == 0:
                T.atomic_add(X[0], 1)

    x = torch.zeros(1, dtype=torch.int32)
    Interpreter(main)(x)
    assert x.item() == 3
