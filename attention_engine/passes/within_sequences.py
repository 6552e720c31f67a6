"""A program of packed sequences for blocks whose queries are all of one: tables of rows become numbers of the sequence.

`b` is then the block's sequence, and both places count from where a table of sequences says they start
(`program.start_of`, as for attentions in parts). No pair asks which sequence it is of. What is left of that is one
bound, the end of the sequence's keys: kernels walk from its first key on. Where a block has keys of one, tiles of
queries begin where they begin in memory, and bounds say which of their rows are the sequence's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from attention_engine.ir.expr import Expr, Op, Type, const, make, rebuild, topological
from attention_engine.ir.packing import (
    AHEAD,
    FIRST,
    FIRST_K,
    FIRST_QUERY,
    KEYS_END,
    QUERIES_END,
    SEQUENCE_K,
    SEQUENCE_Q,
    number_of_sequence,
    of_key,
    of_query,
    start_in_sequence,
)
from attention_engine.ir.program import KV_IDX, Q_IDX, B, Backward, Program
from attention_engine.passes.analyse_mask import analyse_mask
from attention_engine.passes.simplify import simplify
from attention_engine.passes.widths import widen

Saved = tuple[tuple[str, Expr], ...]


def _negative(expr: Expr) -> Expr:
    return make(Op.MUL, const(-1, Type.INT), expr)


def _of_block() -> Mapping[Expr, Expr]:
    """What the tables say of each row of a block."""
    first = _negative(start_in_sequence(KV_IDX))
    ahead = make(Op.ADD, start_in_sequence(Q_IDX), first)
    return {
        of_query(SEQUENCE_Q): B, of_key(SEQUENCE_K): B, of_query(FIRST): first, of_key(FIRST): first,
        of_key(FIRST_K): first, of_query(AHEAD): ahead,
    }  # fmt: skip


def is_packed(program: Program) -> bool:
    """Is it a program of packed sequences?"""
    return SEQUENCE_Q in program.custom


KEYS = make(Op.LESS, KV_IDX, number_of_sequence(KEYS_END))  # they begin where walks and blocks do
FIRST_ON = make(Op.LESS_EQUAL, number_of_sequence(FIRST_QUERY), Q_IDX)
BEFORE_END = make(Op.LESS, Q_IDX, number_of_sequence(QUERIES_END))


def _rewriting(same_sequence: Expr) -> Callable[[Expr], Expr]:
    """Changes an expression; same_sequence: what is left of that condition on a pair."""
    done: dict[Expr, Expr] = {}
    table = _of_block()
    same = {of_query(SEQUENCE_Q), of_key(SEQUENCE_K)}

    def change(root: Expr) -> Expr:
        for node in topological(root):
            if node in done:
                continue
            if node.op is Op.EQUAL and set(node.args) == same:
                done[node] = same_sequence
            else:
                done[node] = table.get(node) or rebuild(node, tuple(done[a] for a in node.args))
        return widen(*simplify(done[root]))[0]

    return change


def within_sequences(program: Program) -> Program:
    """The forward pass of the program in blocks of one sequence, without what the user wrote of the backward pass."""
    assert program.mask is not None, "a mask lets nobody out of its sequence"
    return replace(program, forward=None, backward=None).map(_rewriting(KEYS))


def keys_within_sequences(program: Program, backward: Backward) -> tuple[Program, Backward]:
    """The program, and its backward pass, in blocks whose keys are of one sequence; rows are made as they were."""
    forward = within_sequences(program)
    same = make(Op.AND, KEYS, BEFORE_END)
    if is_unlike(program) or not _sees_earlier_alone(forward.mask):
        same = make(Op.AND, same, FIRST_ON)
    change = _rewriting(same)
    found = replace(
        backward, weights=change(backward.weights), product_gradient=change(backward.product_gradient),
        score=None if backward.score is None else change(backward.score),
    )  # fmt: skip
    return replace(program, forward=None, backward=None).map(change), found


def is_unlike(program: Program) -> bool:
    """Have queries lengths of their own?"""
    return AHEAD in program.custom


def _sees_earlier_alone(mask: Expr | None) -> bool:
    """Does no query see a later key? Rows before the first key of a sequence, of queries too, then see none of it."""
    bounds = analyse_mask(mask).bounds
    return any(b.q == -b.kv and b.q > 0 and b.offset <= 0 and not b.starts for b in bounds)
