"""Makes the tables of packed sequences (ir/packing.py) from where they begin, all in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tilelang.language as T

from attention_engine.ir.packing import AHEAD, FIRST, FIRST_K, NUMBERS, SEQUENCE_K, SEQUENCE_Q, TABLES, Packing
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import PLACES
from attention_engine.kernels.common import Buffers, build
from attention_engine.passes.index_ranges import LONGEST

ROWS = 256  # of a block, one a thread
STARTS_Q, STARTS_K = "starts_q", "starts_k"


def packed_tables(problem: Problem, packing: Packing) -> Any:
    """The PrimFunc: (starts of queries, and of keys where those are others, tables in order)."""
    unlike = packing is Packing.UNLIKE
    queries, keys, begins = (T.dynamic(name) for name in ("queries", "keys", "begins"))
    lengths = {"seq_len": queries, "seq_len_kv": keys if unlike else queries}
    parameters = {name: T.Tensor([begins], "int32") for name in (STARTS_Q, STARTS_K)[: 1 + unlike]}
    for name, axes in TABLES[packing].items():
        shape = [begins, len(NUMBERS)] if name == PLACES else [lengths[str(axes[0])]]
        parameters[name] = T.Tensor(shape, "int32")

    @T.macro
    def body(buffers: Buffers) -> None:
        rows = T.max(T.max(queries, lengths["seq_len_kv"]), begins)
        with T.Kernel(T.ceildiv(rows, ROWS), threads=ROWS) as block:
            for n in T.Parallel(ROWS):
                row = block * ROWS + n
                if row < queries:
                    say_of_query(buffers, row, begins - 1, unlike)
                if unlike:  # noqa: SIM102 - Python's condition, then the kernel's
                    if row < keys:
                        say_of_key(buffers, row, begins - 1)
                if row < begins:
                    say_of_sequence(buffers, row, begins - 1, queries, unlike)

    return build("packed_tables", parameters, body)


@T.macro
def last_that(holds: Callable[[Any], Any], last: Any) -> Any:
    """The last number up to `last` of which it holds, by bisection: it holds of 0, and of none after one of which it
    doesn't."""
    found = T.alloc_var("int32")
    found = 0
    for halving in T.serial(LONGEST.bit_length()):
        further = found + T.shift_right(LONGEST, halving)
        if further <= last:  # noqa: SIM102 - the second reads memory
            if holds(further):
                found = further
    return found


@T.macro
def say_of_query(buffers: Buffers, row: Any, last: Any, unlike: bool) -> None:
    """Fills the tables of a query."""
    of_q = buffers[STARTS_Q]
    of_k = buffers[STARTS_K if unlike else STARTS_Q]
    sequence = last_that(lambda n: of_q[n] <= row, last)
    buffers[SEQUENCE_Q][row] = T.if_then_else(sequence < last, sequence, -1)
    buffers[FIRST][row] = of_k[sequence]
    if unlike:
        after = T.min(sequence + 1, last)
        buffers[AHEAD][row] = of_k[after] - of_q[after]
    else:
        buffers[SEQUENCE_K][row] = sequence


@T.macro
def say_of_key(buffers: Buffers, row: Any, last: Any) -> None:
    """Fills those of a key."""
    starts = buffers[STARTS_K]
    sequence = last_that(lambda n: starts[n] <= row, last)
    buffers[SEQUENCE_K][row] = sequence
    buffers[FIRST_K][row] = starts[sequence]


@T.macro
def say_of_sequence(buffers: Buffers, sequence: Any, last: Any, queries: Any, unlike: bool) -> None:
    """Fills the numbers of a sequence."""
    of_q = buffers[STARTS_Q]
    of_k = buffers[STARTS_K if unlike else STARTS_Q]
    after = T.min(sequence + 1, last)
    end_q = T.if_then_else(sequence < last, of_q[after], queries)
    numbers = [of_k[after] - end_q - of_k[sequence], 0 - of_k[sequence], of_k[after], of_q[sequence], end_q]
    for number, value in enumerate(numbers):
        buffers[PLACES][sequence, number] = value
