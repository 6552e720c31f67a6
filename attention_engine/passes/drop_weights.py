"""Dropout: some weights meet no value, by chance, and the others count for more; rows know all of them.

o = factor * sum over j of m_j w_j v_j / (1 - p), where m_j is 0 for a dropped pair and 1 for another. So 1 / (1 - p) is
a factor of the output, and joins the final weight, while m stands where a weight meets its value. The backward pass has
it there too: dV is made of m w, and the gradient that arrives at a weight is m (dO . v). Everything else holds as it
is: delta = dO . o is the row sum of weights times what arrives at them, with m and without.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from attention_engine.ir.chance import threshold
from attention_engine.ir.expr import Expr, Op, Type, VarKind, const, make, substitute, topological, var
from attention_engine.ir.packing import Packing
from attention_engine.ir.program import KV_IDX, OUTPUT, Q_IDX, WEIGHT, WEIGHT_GRADIENT, B, H, Program
from attention_engine.ir.verify import checked, verify_program
from attention_engine.passes.pack_documents import PackDocuments
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule
from attention_engine.passes.simplify import mul, simplify
from attention_engine.passes.starts import starts_read

SEED = "_dropout_seed"  # the custom input, one int64
SEED_OF_BLOCK = var("seed", (), Type.LONG, VarKind.BLOCK)

Schedule = TypeVar("Schedule", ForwardSchedule, BackwardSchedule)


def drop_weights(program: Program, probability: float, packing: Packing | None = None) -> Program:
    """The program with weights dropped, each with this probability, kept to 2^-23. packing: of the program's sequences,
    of which a pair's sequence and its places there say whether it is dropped."""
    seed = make(Op.LOAD, const(0), arg=SEED, dtype=Type.LONG)
    number = make(Op.CHANCE, seed, B, H, Q_IDX, KV_IDX)
    dropped = make(Op.LESS, number, const(threshold(probability), Type.LONG))
    if packing is not None:
        (dropped,) = simplify(PackDocuments(packing, {})(dropped))
    factor = 1.0 / (1.0 - probability)
    (output,) = simplify(substitute(program.output, {OUTPUT: mul(const(factor), OUTPUT)}))
    forward, backward = program.forward, program.backward
    if forward is not None:
        (forward,) = simplify(mul(const(factor), forward))
    if backward is not None:  # of the user's weight, and of what arrives at it
        users = {WEIGHT: mul(const(1.0 - probability), WEIGHT), WEIGHT_GRADIENT: mul(const(factor), WEIGHT_GRADIENT)}
        (backward,) = simplify(substitute(backward, users))
    dropping = dataclasses.replace(program, output=output, forward=forward, backward=backward, dropped=dropped)
    return checked(verify_program, dropping)


def drop_in(schedule: Schedule, program: Program) -> Schedule:
    """The schedule with the program's dropped pairs. A block reads the seed, and where indices start, once."""
    if program.dropped is None:
        return schedule
    seeds: list[Expr] = [n for n in topological(program.dropped) if n.op is Op.LOAD and n.name == SEED]
    dropped = substitute(program.dropped, dict.fromkeys(seeds, SEED_OF_BLOCK))
    known = {variable for variable, _ in schedule.block}
    starts: list[tuple[Expr, Expr]] = [both for both in starts_read(dropped) if both[0] not in known]
    block = (*schedule.block, *starts, *((SEED_OF_BLOCK, seed) for seed in seeds))
    return dataclasses.replace(schedule, block=block, dropped=dropped)


def drops_by_places(schedule: ForwardSchedule | BackwardSchedule) -> bool:
    """Are weights dropped, and do a pair's own places decide which? Not where places are read (packed sequences)."""
    dropped = schedule.dropped
    if dropped is None or dropped.op is not Op.LESS or dropped.args[0].op is not Op.CHANCE:
        return False
    number, bound = dropped.args
    return number.args == (SEED_OF_BLOCK, B, H, Q_IDX, KV_IDX) and bound.op is Op.CONST


def dropped_below(schedule: ForwardSchedule | BackwardSchedule) -> int:
    """Below which number a pair's own says so, where its places decide."""
    assert schedule.dropped is not None and drops_by_places(schedule), "who asks knows that"
    return int(schedule.dropped.args[1].value)
