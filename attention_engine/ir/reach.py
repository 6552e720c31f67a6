"""How far from 0 scores may be, for all that is known before a call: asked of a program's score.

A row's maximum m and the logarithm of its sum r are one number, lse = m + log r, where m is moderate. In fp32 that
loses log r below half a unit in the last place of m. Where m comes from products q . k this is no loss: such a score
is itself a sum of rounded products and off by as much. But a number that is added to them (a bias, a padding of -1e9,
a place) is exact, may be the same for all pairs of a row, and then differences of scores are exact though m is large.
So scores are far where a custom input, or a constant above MODERATE, is added to them; indices are not, nor numbers of
a head, nor tables of distances, which give near pairs and far ones of each row different entries.
"""

from __future__ import annotations

import math

from attention_engine.ir.evaluate import LOWEST
from attention_engine.ir.expr import Axis, Expr, Op, Type, is_const, topological
from attention_engine.ir.packing import OF_PLACES
from attention_engine.ir.program import PRODUCT

MODERATE = 1e3  # up to it lse keeps log r to 3e-5
HIGHEST = 3.4028234663852886e38  # of fp32
OF_HEAD = frozenset({Axis.BATCH, Axis.HEAD})
BOUNDED = frozenset({Op.TANH, Op.SIGMOID, Op.ERF, Op.SIN, Op.COS})
# What is finite where its operands are; that products, or exponentials, may overflow is left aside.
FINITE = frozenset(
    {Op.CONST, Op.VAR, Op.ADD, Op.MUL, Op.FLOORDIV, Op.MOD, Op.MAXIMUM, Op.MINIMUM, Op.EXP, Op.EXP2, Op.ABS, Op.FLOOR,
     Op.CAST, Op.WHERE, Op.DETACH}
)  # fmt: skip


def may_be_infinite(score: Expr) -> bool:
    """Could a score be -inf? Products, indices and numbers of a head are finite."""
    if score.op is Op.CONST:
        return is_const(score, -math.inf) or is_const(score, math.inf)
    if score.op in BOUNDED or score.dtype is not Type.FLOAT or score.axes <= OF_HEAD:
        return False
    return score.op not in FINITE or any(may_be_infinite(a) for a in score.args)


def may_be_far(score: Expr) -> bool:
    """Could a score be far from 0, and exact?"""
    match score.op:
        case Op.CONST:
            return MODERATE < abs(score.value) < math.inf
        case Op.LOAD:
            of_distance = any({Axis.QUERY, Axis.KEY} <= index.axes for index in score.args)
            return not (score.axes <= OF_HEAD or of_distance)
        case Op.MUL if PRODUCT in topological(score):
            number, rest = score.args
            return number.op is Op.CONST and may_be_far(rest)
        case Op.CAST:
            loads = [n for n in topological(score) if n.op is Op.LOAD and n.name not in OF_PLACES]
            return any(not n.axes <= OF_HEAD for n in loads)
        case Op.WHERE:
            return any(map(may_be_far, score.args[1:]))
        case _:
            return score.op not in BOUNDED and any(map(may_be_far, score.args))


def least_of(score: Expr) -> float:
    """The finite number that stands for -inf where a row starts: below every score."""
    return -HIGHEST if may_be_far(score) else LOWEST
