"""What a mask asks of a key alone: where it is false nobody sees the key, and what stands there takes no part."""

from __future__ import annotations

import functools

from attention_engine.ir.expr import Axis, Expr, Op, make

OF_A_KEY = frozenset({Axis.BATCH, Axis.KEY})


def key_condition(mask: Expr | None) -> Expr | None:
    """The conditions of a mask that read neither the query nor the head, joined; None where there is none.

    Every kept pair satisfies it: padding, lengths and `kv_idx < n[b]`, beside other conditions or in each of several
    alternatives.
    """
    found = None if mask is None else _implied(mask, True)
    return found if found is not None and Axis.KEY in found.axes else None


def _implied(condition: Expr, truth: bool) -> Expr | None:
    """What holds of the key wherever the condition is this truth; None where nothing is known."""
    if condition.axes <= OF_A_KEY:
        return condition if truth else make(Op.NOT, condition)
    if condition.op is Op.NOT:
        return _implied(condition.args[0], not truth)
    if condition.op not in (Op.AND, Op.OR):
        return None
    parts = [_implied(part, truth) for part in condition.args]
    known = [part for part in parts if part is not None]
    if (condition.op is Op.AND) is truth:  # all of them hold
        return functools.reduce(functools.partial(make, Op.AND), known) if known else None
    return functools.reduce(functools.partial(make, Op.OR), known) if len(known) == len(parts) else None
