"""Warp-specialised kernels on a CPU: a right one gives the result, and each way to get one wrong is found."""

import pytest
import tilelang.language as T
import torch

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.codegen.simulator.roles import Barrier
from attention_engine.errors import HazardInKernel

STEPS, STAGES = 5, 2


@T.macro
def give_back(thread, empty, step):
    if thread % 32 == 0:
        T.barrier_arrive(empty[step % STAGES])


def stream(defect: str = ""):
    """out = the sum over steps of X[step] @ W: one warp copies ahead, a warpgroup multiplies and stores by TMA."""

    @T.prim_func
    def main(
        X: T.Tensor((STEPS, 64, 32), "float16"), W: T.Tensor((32, 64), "float16"), O: T.Tensor((64, 64), "float16")
    ):
        with T.Kernel(1, threads=256):
            x = T.alloc_shared([STAGES, 64 if defect != "a stage begins askew" else 65, 32], "float16")
            w = T.alloc_shared([32, 64], "float16")
            out = T.alloc_shared([64, 64], "float16")
            total = T.alloc_fragment([64, 64], "float32")
            w_full = T.alloc_barrier(arrive_count=32)
            full = T.alloc_barrier(arrive_count=[16 if defect == "a count too small" else 32] * STAGES)
            empty = T.alloc_barrier(arrive_count=[5 if defect == "a count too large" else 4] * STAGES)
            thread = T.get_thread_binding()
            if thread < 128:
                if thread < 32:
                    T.tma_copy(W, w, barrier=w_full)
                    T.barrier_arrive(w_full)
                    for step in T.serial(STEPS):
                        if defect != "copies do not wait":
                            T.barrier_wait(empty[step % STAGES], (step // STAGES) % 2 ^ 1)
                        T.tma_copy(X[step, :, :], x[step % STAGES, :64, :], barrier=full[step % STAGES])
                        T.barrier_arrive(full[step % STAGES])
            else:
                T.fill(total, 0)
                T.barrier_wait(w_full, 0)
                for step in T.serial(STEPS):
                    if defect != "products do not wait":
                        T.barrier_wait(full[step % STAGES], (step // STAGES) % 2)
                    T.wgmma_gemm(x[step % STAGES, :64, :], w, total)
                    if defect == "a tile is given back too early":
                        give_back(thread, empty, step)
                    if defect != "nobody waits for products":
                        T.wait_wgmma(1 if defect == "a tile is given back too early" else 0)
                    if defect not in ("a tile is never given back", "a tile is given back too early"):
                        give_back(thread, empty, step)
                if defect != "a sum is read on its way":
                    T.wait_wgmma(0 if defect != "nobody waits for products" else STEPS)
                T.copy(total, out)
                if defect != "no fence":
                    T.fence_proxy_async()
                if defect != "threads do not meet":
                    T.sync_threads(1, 256 if defect == "threads wait for others" else 128)
                T.copy(out, O)

    return main


def run(defect: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    x, w, out = torch.randn(STEPS, 64, 32).half(), torch.randn(32, 64).half(), torch.zeros(64, 64).half()
    Interpreter(stream(defect))(x, w, out)
    return out, (x.float().sum(0) @ w.float()).half()


def test_a_right_kernel_gives_the_result():
    out, expected = run()
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=2e-2)


HAZARDS = {
    "a stage begins askew": "a TMA copy to byte 4160 of a buffer, which is no multiple of 128",
    "a count too small": r"32 threads arrive at full\[0\], which counts 16",
    "a count too large": r"a deadlock: threads 0\.\.\. wait for phase 0 of empty\[0\]; threads 128\.\.\. wait for",
    "a tile is never given back": r"a deadlock: threads 0\.\.\. wait for phase 0 of empty\[0\]",
    "a tile is given back too early": "an operand changed while a product was reading it",
    "copies do not wait": r"phase 0 of full\[1\] is waited for late: the next one is over too",
    "products do not wait": r"phase 0 of empty\[1\] is waited for late: the next one is over too",
    "nobody waits for products": "products that nobody waits for|an operand changed",
    "no fence": "a copy reads shared memory that threads stored, without a fence",
    "threads do not meet": "a copy reads shared memory that threads stored, before they met",
    "threads wait for others": "128 threads meet at a barrier of 256",
}


@pytest.mark.parametrize("defect", HAZARDS)
def test_a_defect_is_named(defect):
    with pytest.raises(HazardInKernel, match=HAZARDS[defect]):
        run(defect)


@pytest.mark.parametrize("out", [False, True])
def test_a_copy_that_would_convert_is_named(out):
    @T.prim_func
    def converting(A: T.Tensor((64, 32), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared([64, 32], "float16")
            full = T.alloc_barrier(arrive_count=128)
            if out:
                T.tma_copy(a, A)
            else:
                T.tma_copy(A, a, barrier=full)

    with pytest.raises(HazardInKernel, match=r"a TMA copy of float(16|32) to float(32|16), which converts nothing"):
        Interpreter(converting)(torch.zeros(64, 32))


def test_a_tile_on_its_way_is_nan():
    @T.prim_func
    def early(A: T.Tensor((64, 32), "float16"), O: T.Tensor((2, 64, 32), "float16")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared([64, 32], "float16")
            full = T.alloc_barrier(arrive_count=128)
            T.tma_copy(A, a, barrier=full)
            T.barrier_arrive(full)
            T.copy(a, O[0, :, :])
            T.barrier_wait(full, 0)
            T.copy(a, O[1, :, :])

    a, out = torch.randn(64, 32).half(), torch.zeros(2, 64, 32).half()
    Interpreter(early)(a, out)
    assert out[0].isnan().all()
    assert torch.equal(out[1], a)


def test_a_sum_on_its_way_is_nan():
    @T.prim_func
    def early(A: T.Tensor((64, 32), "float16"), O: T.Tensor((2, 64, 64), "float32")):
        with T.Kernel(1, threads=128):
            a = T.alloc_shared([64, 32], "float16")
            total = T.alloc_fragment([64, 64], "float32")
            T.copy(A, a)
            T.fill(total, 1)
            T.wgmma_gemm(a, a, total, transpose_B=True)
            T.wgmma_gemm(a, a, total, transpose_B=True)
            T.wait_wgmma(1)
            T.copy(total, O[0, :, :])
            T.wait_wgmma(0)
            T.copy(total, O[1, :, :])

    a, out = torch.randn(64, 32).half(), torch.zeros(2, 64, 64)
    Interpreter(early)(a, out)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], 2 * (a.float() @ a.float().T) + 1)


@pytest.mark.parametrize("missing", ["", "fence", "meeting"])
def test_entries_that_threads_store_are_seen_by_products_behind_a_fence_and_a_meeting(missing):
    @T.prim_func
    def cleared(A: T.Tensor((64, 64), "float16"), O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared([64, 64], "float16")
            total = T.alloc_fragment([64, 64], "float32")
            full = T.alloc_barrier(arrive_count=32)
            thread = T.get_thread_binding()
            if thread < 128:
                if thread < 32:
                    T.tma_copy(A, a, barrier=full)
                    T.barrier_arrive(full)
            else:
                T.barrier_wait(full, 0)
                for i, j in T.Parallel(64, 64):
                    if i < 10:
                        a[i, j] = T.cast(0, "float16")
                if missing != "fence":
                    T.fence_proxy_async()
                if missing != "meeting":
                    T.sync_threads(1, 128)
                T.wgmma_gemm(a, a, total, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                T.copy(total, O)

    a, out = torch.randn(64, 64).half(), torch.zeros(64, 64)
    if missing:
        wanted = {"fence": "stored, without a fence", "meeting": "stored, before they met"}[missing]
        with pytest.raises(HazardInKernel, match=f"a product reads shared memory that threads {wanted}"):
            Interpreter(cleared)(a, out)
    else:
        Interpreter(cleared)(a, out)
        a[:10] = 0
        torch.testing.assert_close(out, a.float() @ a.float().T)


def test_a_tile_is_not_stored_into_while_products_may_read_it():
    @T.prim_func
    def overwritten(A: T.Tensor((64, 64), "float16"), O: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared([64, 64], "float16")
            part = T.alloc_fragment([64, 64], "float16")
            total = T.alloc_fragment([64, 64], "float32")
            full = T.alloc_barrier(arrive_count=32)
            thread = T.get_thread_binding()
            if thread < 128:
                if thread < 32:
                    T.tma_copy(A, a, barrier=full)
                    T.barrier_arrive(full)
            else:
                T.barrier_wait(full, 0)
                T.fill(part, 0)
                T.wgmma_gemm(a, a, total, transpose_B=True, clear_accum=True)
                T.wait_wgmma(0)
                T.copy(part, a)
                T.copy(total, O)

    with pytest.raises(HazardInKernel, match="before the threads met after a product or copy that reads it"):
        Interpreter(overwritten)(torch.randn(64, 64).half(), torch.zeros(64, 64))


@pytest.mark.parametrize(("defect", "message"), [
    ("", None),
    ("nobody waits", "1 copies out of shared memory that nobody waits for"),
    ("another thread waits", "shared memory changed while a copy out of it was reading it"),
    ("a leader waits", None),
    ("another warp than the leader's waits", "shared memory changed while a copy out of it was reading it"),
    ("a copy is not awaited", "shared memory changed while a copy out of it was reading it"),
    ("threads do not meet", "shared memory is written before the threads met after a product or copy that reads it"),
])  # fmt: skip
def test_a_copy_out_reads_until_it_is_waited_for(defect, message):
    scope = 128 if "leader" in defect else None
    first_waiting = 160 if defect.startswith("another warp") else 128
    waiting = 32 if defect.startswith(("another", "a leader")) else 128

    @T.prim_func
    def leaves(A: T.Tensor((64, 64), "float16"), O: T.Tensor((2, 64, 64), "float16")):
        with T.Kernel(1, threads=256):
            a = T.alloc_shared([64, 64], "float16")
            part = T.alloc_fragment([64, 64], "float16")
            thread = T.get_thread_binding()
            if thread < 128:
                T.sync_warp()
            else:
                for turn in T.serial(2):
                    T.fill(part, turn)
                    if defect != "a copy is not awaited":  # noqa: SIM102 - Python's condition, then the kernel's
                        if first_waiting <= thread and thread < first_waiting + waiting:
                            T.tma_store_wait(0)
                    if defect != "threads do not meet":
                        T.sync_threads(1, 128)
                    T.copy(part, a)
                    T.fence_proxy_async()
                    T.sync_threads(1, 128)
                    T.tma_copy(a, O[turn, :, :], leader_scope_threads=scope)
                if defect != "nobody waits":
                    T.tma_store_wait(0)

    run = Interpreter(leaves)
    out = torch.zeros(2, 64, 64).half()
    if message is None:
        run(torch.zeros(64, 64).half(), out)
        assert [out[0].unique().tolist(), out[1].unique().tolist()] == [[0], [1]]
    else:
        with pytest.raises(HazardInKernel, match=message):
            run(torch.zeros(64, 64).half(), out)


def test_a_role_that_splits_again_runs_its_parts_one_after_another():
    @T.prim_func
    def splits_again(X: T.Tensor((2, 64), "float32")):
        with T.Kernel(1, threads=256):
            x = T.alloc_fragment([64], "float32")
            ready = T.alloc_barrier(arrive_count=32)
            thread = T.get_thread_binding()
            if thread < 128:
                T.barrier_wait(ready, 0)
            else:
                if thread < 160:
                    T.fill(x, 1)
                    T.copy(x, X[0, :])
                    T.barrier_arrive(ready)
                else:
                    T.copy(X[0, :], x)
                    T.copy(x, X[1, :])

    found = torch.zeros(2, 64)
    Interpreter(splits_again)(found)
    assert (found == 1).all()


@pytest.mark.parametrize("arrives", [True, False])
def test_parts_of_a_role_that_wait_for_each_other_run_beside_each_other(arrives):
    @T.prim_func
    def hands_over(X: T.Tensor((2, 64), "float32")):
        with T.Kernel(1, threads=256):
            x = T.alloc_fragment([64], "float32")
            there, back = T.alloc_barrier(arrive_count=32), T.alloc_barrier(arrive_count=32)
            thread = T.get_thread_binding()
            if thread < 128:
                if thread < 32:
                    T.barrier_wait(there, 0)
                    T.copy(X[0, :], x)
                    T.copy(x, X[1, :])
                    T.barrier_arrive(back)
                else:
                    if thread < 64:
                        T.fill(x, 1)
                        T.copy(x, X[0, :])
                        if arrives:
                            T.barrier_arrive(there)
                        T.barrier_wait(back, 0)
            else:
                T.sync_warp()

    found = torch.zeros(2, 64)
    if arrives:
        Interpreter(hands_over)(found)
        assert (found == 1).all()
    else:
        with pytest.raises(HazardInKernel, match="a deadlock: threads 0"):
            Interpreter(hands_over)(found)


def test_an_error_in_a_role_ends_the_others():
    @T.prim_func
    def copies_to_odd_bytes(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            x = T.alloc_shared([64], "float32")
            ready = T.alloc_barrier(arrive_count=128)
            if T.get_thread_binding() < 128:
                T.barrier_wait(ready, 0)
            else:
                T.tma_copy(X[0:32], x[1:33], barrier=ready)

    with pytest.raises(HazardInKernel, match="to byte 4 of a buffer"):
        Interpreter(copies_to_odd_bytes)(torch.zeros(64))


def test_a_hazard_that_another_role_finds_ends_all():
    @T.prim_func
    def misses_a_phase(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=256):
            late = T.alloc_barrier(arrive_count=128)
            other = T.alloc_barrier(arrive_count=128)
            if T.get_thread_binding() < 128:
                T.barrier_arrive(other)
                T.barrier_wait(late, 0)
            else:
                T.barrier_wait(other, 0)
                T.barrier_arrive(late)
                T.barrier_wait(late, 0)
                T.barrier_arrive(late)
                T.barrier_wait(other, 1)

    with pytest.raises(HazardInKernel, match=r"phase 0 of late.* is waited for late"):
        Interpreter(misses_a_phase)(torch.zeros(64))


def test_a_phase_that_a_late_wait_would_miss_is_named():
    barrier = Barrier("end", 1)
    barrier.arrive(1)
    assert barrier.passed(0) and barrier.passed(0), "it may be asked for again"
    barrier.arrive(1)
    assert barrier.passed(1)
    barrier.arrive(1)
    with pytest.raises(HazardInKernel, match="phase 1 of end is waited for late"):
        barrier.passed(1)
