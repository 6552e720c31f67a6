"""Lanes of simulated warps: what one may do while others of its warp are late, and what they must have met for."""

import pytest
import tilelang.language as T
import torch

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.errors import HazardInKernel, NotInterpretable

WARP, ITEMS, SLOTS = 32, 4, 2


@T.macro
def speak(thread, barriers, number, defect):
    """A lane arrives for its warp."""
    if defect != "a record is given back too early":
        T.sync_warp()
    if thread % WARP == 0:
        T.barrier_arrive(barriers[number])


@T.macro
def wait_alone(thread, barrier):
    """Parts lane 0 from the others."""
    if thread % WARP == 0:
        T.barrier_wait(barrier, 0)


@T.macro
def take(thread, record, noted, read, found, item, defect):
    """One warp's numbers of an item, which another notes."""
    slot = item % SLOTS
    T.barrier_wait(noted[slot], item // SLOTS % 2)
    found[0] = found[0] + record[slot]
    speak(thread, read, slot, defect)


@T.macro
def walk(at, defect):
    """All lanes of a warp note where they are, and read it anew in each step."""
    if defect != "a walk begins too early":
        T.sync_warp()
    at[0] = 0
    T.sync_warp()
    while at[0] < 2:
        step_on(at, defect)


@T.macro
def step_on(at, defect):
    then = T.alloc_var("int32")
    then = at[0] + 1
    if defect != "a step is written too early":
        T.sync_warp()
    at[0] = then
    T.sync_warp()


@T.macro
def draw(thread, counter, mine, defect):
    """A lane draws a number for its warp, and tells it."""
    if thread % WARP == 0:
        mine[0] = T.atomic_add(counter, 1, return_prev=True)
        if defect == "a lane shuffles alone":
            mine[0] = T.shfl_sync(mine[0], 0)
    if defect == "each lane reads a counter":
        mine[0] = T.atomic_load(counter)
    elif defect not in ("a number is not told", "a lane shuffles alone"):
        mine[0] = T.shfl_sync(mine[0], 0)
    mine[0] = mine[0] + 1


def hand_over(defect: str = ""):
    """One warp notes ITEMS numbers in SLOTS records, the next sums them, lane 0 waits alone, and both walk twice."""

    @T.prim_func
    def main(counters: T.Tensor((2,), "int32"), sums: T.Tensor((2,), "int32")):
        with T.Kernel(1, threads=256):
            record, at = T.alloc_shared([SLOTS], "int32"), T.alloc_shared([1], "int32")
            noted = T.alloc_barrier(arrive_count=[WARP] * SLOTS)
            read = T.alloc_barrier(arrive_count=[1] * SLOTS)
            other = T.alloc_barrier(arrive_count=WARP)
            found, mine = T.alloc_local([1], "int32"), T.alloc_local([1], "int32")
            thread = T.get_thread_binding()
            if thread < WARP:
                for item in T.serial(ITEMS):
                    draw(thread, counters[0], mine, defect)
                    T.barrier_wait(read[item % SLOTS], item // SLOTS % 2 ^ 1)
                    if thread % WARP == 0:
                        record[item % SLOTS] = mine[0]
                    T.barrier_arrive(noted[item % SLOTS])
                T.barrier_arrive(other)
            else:
                if thread < 2 * WARP:
                    found[0] = 0
                    for item in T.serial(ITEMS):
                        take(thread, record, noted, read, found, item, defect)
                    walk(at, defect)
                    wait_alone(thread, other)
                    walk(at, defect)
                    if thread % WARP == 0:
                        sums[0] = found[0]
                        sums[1] = at[0]

    return main


def test_a_lane_that_waits_alone_and_speaks_for_its_warp_is_right_behind_meetings():
    counters, sums = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    Interpreter(hand_over())(counters, sums)
    assert counters.tolist() == [ITEMS, 0] and sums.tolist() == [sum(range(ITEMS + 1)), 2]


UNORDERED = "neither a sync_warp nor a barrier orders them"
HAZARDS = {
    "a record is given back too early":
        r"record\[0\] may be written by lane 0 of threads 0 to 31 before it is read by the other lanes of "
        rf"threads 32 to 255, or after: {UNORDERED}",
    "a walk begins too early": r"at\[0\] may be written by .* before it is read by .* of threads 32 to 255, or after",
    "a step is written too early": r"at\[0\] may be written by .* before it is read by .* of threads 32 to 255",
    "a number is not told":
        "the variable mine is read by the other lanes of threads 0 to 31, and was set by lane 0 of .* alone",
    "each lane reads a counter":
        "lane 0 of threads 0 to 31 and the other lanes of threads 0 to 31 read a counter each for itself",
    "a lane shuffles alone": "lane 0 of threads 0 to 31 come to a shuffle without all lanes of their warps",
}  # fmt: skip


@pytest.mark.parametrize("defect", HAZARDS)
def test_a_hazard_names_both_sides(defect):
    zeroes = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(HazardInKernel, match=HAZARDS[defect]):
        Interpreter(hand_over(defect))(zeroes, zeroes.clone())


@pytest.mark.parametrize("meets", [True, False])
def test_a_place_is_free_when_the_lane_that_waited_for_its_copy_has_met_the_others(meets):
    """A lane waits for the copies that it has begun, and which lane that is the hardware chooses."""

    @T.prim_func
    def leaves(O: T.Tensor((2, 32), "float32")):
        with T.Kernel(1, threads=256):
            row = T.alloc_shared([32], "float32")
            if T.get_thread_binding() < WARP:
                for turn in T.serial(2):
                    for i in T.Parallel(32):
                        row[i] = turn + 1
                    T.fence_proxy_async()
                    T.sync_warp()
                    T.tma_copy(row, O[turn, :])
                    T.tma_store_wait(0)
                    if meets:
                        T.sync_warp()
            else:
                T.sync_warp()

    out = torch.zeros(2, 32)
    if meets:
        Interpreter(leaves)(out)
        assert out.mean(1).tolist() == [1, 2]
    else:
        message = "row .some of it. may be written by .* before it is read by .* of threads 0 to 31, or after"
        with pytest.raises(HazardInKernel, match=message):
            Interpreter(leaves)(out)


def test_what_lanes_store_is_there_for_a_copy_when_they_have_met():
    """An election makes lanes meet, and orders no memory."""

    @T.prim_func
    def leaves(O: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=256):
            row = T.alloc_shared([32], "float32")
            if T.get_thread_binding() < WARP:
                for i in T.Parallel(32):
                    row[i] = 1
                T.fence_proxy_async()
                T.tma_copy(row, O)
                T.tma_store_wait(0)
            else:
                T.sync_warp()

    with pytest.raises(HazardInKernel, match=r"row .some of it. may be read by .* before it is written by"):
        Interpreter(leaves)(torch.zeros(32))


def test_a_jump_of_some_threads_is_refused():
    @T.prim_func
    def jumps(O: T.Tensor((1,), "float32")):
        with T.Kernel(1, threads=64):
            for _step in T.serial(2):
                if T.get_thread_binding() < WARP:
                    T.loop_break()
            O[0] = 1

    with pytest.raises(NotInterpretable, match="a jump that only some threads take"):
        Interpreter(jumps)(torch.zeros(1))
