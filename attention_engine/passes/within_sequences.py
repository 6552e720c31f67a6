"""A program of packed sequences for blocks whose queries are all of one: tables of rows become numbers of the sequence.

`b` is then the block's sequence, and both places count from where a table of sequences says they start
(`program.start_of`, as for attentions in parts). No pair asks which sequence it is of. What is left of that is one
bound, the end of the sequence's keys: kernels walk from its first key on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attention_engine.ir.expr import Expr, Op, Type, const, make, rebuild, topological
from attention_engine.ir.packing import (
    AHEAD,
    FIRST,
    FIRST_K,
    KEYS_END,
    SEQUENCE_K,
    SEQUENCE_Q,
    number_of_sequence,
    of_key,
    of_query,
    start_in_sequence,
)
from attention_engine.ir.program import KV_IDX, Q_IDX, B, Program
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


def within_sequences(program: Program) -> Program:
    """The forward pass of the program in blocks of one sequence, without what the user wrote of the backward pass."""
    done: dict[Expr, Expr] = {}
    table = _of_block()
    same = {of_query(SEQUENCE_Q), of_key(SEQUENCE_K)}

    def change(root: Expr) -> Expr:
        for node in topological(root):
            if node in done:
                continue
            if node.op is Op.EQUAL and set(node.args) == same:
                done[node] = make(Op.LESS, KV_IDX, number_of_sequence(KEYS_END))
            else:
                done[node] = table.get(node) or rebuild(node, tuple(done[a] for a in node.args))
        return widen(*simplify(done[root]))[0]

    assert program.mask is not None, "a mask lets nobody out of its sequence"
    return replace(program, forward=None, backward=None).map(change)
