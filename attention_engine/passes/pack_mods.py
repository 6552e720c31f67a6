"""Rewrites the mods of a linear attention for packed sequences, which are cut into chunks: each chunk is a batch.

A chunk's rows behind its sequence's end keep the state as it is: their k is 0 after its mod, and their log decay too.
What has a number for each packed row has one for each row of each chunk then.
"""

from __future__ import annotations

from collections.abc import Collection

from attention_engine.ir.expr import Expr, Op, Type, const, make, transform
from attention_engine.ir.linear import LinearProgram
from attention_engine.ir.program import Q_IDX, B
from attention_engine.passes.simplify import simplify

VALID = "_packed_valid"  # of each row of each chunk, fp32: 1, and 0 behind the end of its sequence


def pack_mods(program: LinearProgram, of_rows: Collection[str]) -> LinearProgram:
    """The program of chunks. of_rows: the custom inputs that have a number for each packed row."""

    def change(node: Expr) -> Expr:
        if node.op is Op.LOAD and node.name in of_rows:
            return make(Op.LOAD, B, *node.args, arg=node.arg, dtype=node.dtype)
        return node

    valid = make(Op.LOAD, B, Q_IDX, arg=VALID, dtype=Type.FLOAT)
    q, k, v, decay = transform([program.q, program.k, program.v, program.decay], change)
    k = make(Op.MUL, k, valid)
    if program.decays:
        decay = make(Op.WHERE, make(Op.LESS, const(0.0), valid), decay, const(0.0))
    q, k, v, decay = simplify(q, k, v, decay)
    return LinearProgram(q, k, v, decay, program.custom)
