"""The derivative of an expression with respect to nodes inside it, in reverse mode: a table row for each operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from attention_engine.ir.expr import LEAVES, Expr, Op, Type, const, is_const, substitute, topological
from attention_engine.passes.simplify import CONSTRUCTORS, add, mul, recip, simplify, where

ONE, ZERO = const(1.0), const(0.0)
Gradient = Callable[[Expr, Expr], tuple["Expr | None", ...]]


def _minus(a: Expr) -> Expr:
    return mul(const(-1.0), a)


def _call(op: Op, *args: Expr) -> Expr:
    return CONSTRUCTORS[op](*args)


def _below(a: Expr, b: Expr) -> Expr:
    return _call(Op.LESS, a, b)


def _share(e: Expr, g: Expr) -> tuple[Expr | None, Expr | None]:
    """max and min: to the one that won; where both did, half to each, as torch does, or all to one of them."""
    a, b = e.args
    a_won, b_won = (_below(b, a), _below(a, b)) if e.op is Op.MAXIMUM else (_below(a, b), _below(b, a))
    if e.arg is None:
        tie = where(_call(Op.EQUAL, a, b), mul(const(0.5), g), ZERO)
        return where(a_won, g, tie), None if b.op is Op.CONST else where(b_won, g, tie)
    if e.arg == 1.0:
        return where(b_won, ZERO, g), where(b_won, g, ZERO)
    return where(a_won, g, ZERO), where(a_won, ZERO, g)


def _sign(a: Expr) -> Expr:
    return where(_below(ZERO, a), ONE, where(_below(a, ZERO), const(-1.0), ZERO))


def _power(e: Expr, g: Expr) -> tuple[Expr | None, Expr | None]:
    """0 for an exponent of 0 ** b, and for the base of 0 ** 0, as torch has it: the logarithm of 0, and 1 / 0, are
    never taken, so that no other order of derivatives meets them."""
    a, b = e.args
    if b.op is Op.CONST:
        return mul(g, b, _call(Op.POW, a, add(b, const(-1.0)))), None
    zero = _call(Op.EQUAL, a, ZERO)
    lower = where(_call(Op.AND, zero, _call(Op.EQUAL, b, ZERO)), ZERO, add(b, const(-1.0)))
    return mul(g, b, _call(Op.POW, a, lower)), mul(g, e, _call(Op.LOG, where(zero, ONE, a)))


# Each row: (node e, gradient g of e) -> gradients of e's operands, None where there is none.
GRADIENTS: dict[Op, Gradient] = {
    Op.ADD: lambda e, g: (g, g),
    Op.MUL: lambda e, g: (mul(g, e.args[1]), mul(g, e.args[0])),
    Op.RECIP: lambda e, g: (_minus(mul(g, e, e)),),
    Op.FLOORDIV: lambda e, g: (None, None),
    Op.MOD: lambda e, g: (None, None),
    Op.POW: _power,
    Op.MAXIMUM: _share,
    Op.MINIMUM: _share,
    Op.EXP: lambda e, g: (mul(g, e),),
    Op.EXP2: lambda e, g: (mul(const(math.log(2.0)), g, e),),
    Op.EXPM1: lambda e, g: (mul(g, _call(Op.EXP, e.args[0])),),
    Op.LOG: lambda e, g: (mul(g, recip(e.args[0])),),
    Op.LOG2: lambda e, g: (mul(const(1.0 / math.log(2.0)), g, recip(e.args[0])),),
    Op.LOG1P: lambda e, g: (mul(g, recip(add(e.args[0], ONE))),),
    Op.SOFTPLUS: lambda e, g: (mul(g, _call(Op.SIGMOID, e.args[0])),),
    Op.SQRT: lambda e, g: (mul(const(0.5), g, recip(e)),),
    Op.RSQRT: lambda e, g: (mul(const(-0.5), g, e, e, e),),
    Op.TANH: lambda e, g: (mul(g, add(ONE, _minus(mul(e, e)))),),
    Op.SIGMOID: lambda e, g: (mul(g, e, add(ONE, _minus(e))),),
    Op.ERF: lambda e, g: (mul(const(2.0 / math.sqrt(math.pi)), g, _call(Op.EXP, _minus(mul(e.args[0], e.args[0])))),),
    Op.SIN: lambda e, g: (mul(g, _call(Op.COS, e.args[0])),),
    Op.COS: lambda e, g: (_minus(mul(g, _call(Op.SIN, e.args[0]))),),
    Op.ATAN: lambda e, g: (mul(g, recip(add(mul(e.args[0], e.args[0]), ONE))),),
    Op.ABS: lambda e, g: (mul(g, _sign(e.args[0])),),
    Op.FLOOR: lambda e, g: (None,),
    Op.ROUND: lambda e, g: (None,),
    Op.LESS: lambda e, g: (None, None),
    Op.LESS_EQUAL: lambda e, g: (None, None),
    Op.EQUAL: lambda e, g: (None, None),
    Op.AND: lambda e, g: (None, None),
    Op.OR: lambda e, g: (None, None),
    Op.NOT: lambda e, g: (None,),
    Op.BIT_AND: lambda e, g: (None, None),
    Op.BIT_OR: lambda e, g: (None, None),
    Op.BIT_XOR: lambda e, g: (None, None),
    Op.SHIFT_LEFT: lambda e, g: (None, None),
    Op.SHIFT_RIGHT: lambda e, g: (None, None),
    Op.CHANCE: lambda e, g: (None,) * len(e.args),
    Op.WHERE: lambda e, g: (None, where(e.args[0], g, ZERO), where(e.args[0], ZERO, g)),
    Op.CAST: lambda e, g: (g if e.args[0].dtype is Type.FLOAT and e.dtype is Type.FLOAT else None,),
    Op.DETACH: lambda e, g: (None,),
    Op.LOAD: lambda e, g: (None,) * len(e.args),
    Op.REDUCE: lambda e, g: (None,),  # reductions are variables here: derive_backward has the law for them
}


def differentiate(root: Expr, targets: Sequence[Expr], seed: Expr = ONE) -> list[Expr]:
    """d root / d target times the seed, for each target (a node of root), in normal form; 0 where there is none."""
    (root,) = simplify(root)
    waiting: dict[Expr, list[Expr]] = {root: [seed]}
    found: dict[Expr, Expr] = {}
    reached = _reaches(root, targets)
    for node in reversed(topological(root)):
        if node not in waiting:
            continue
        gradient = add(*waiting.pop(node))
        if node in targets:
            found[node] = gradient
        if node.op in LEAVES or is_const(gradient, 0):
            continue
        for child, part in zip(node.args, GRADIENTS[node.op](node, gradient), strict=True):
            if part is not None and child in reached:
                waiting.setdefault(child, []).append(part)
    return [found.get(t, ZERO) for t in targets]


def _reaches(root: Expr, targets: Sequence[Expr]) -> set[Expr]:
    """The nodes that hold a target."""
    reached = set(targets)
    for node in topological(root):
        if any(a in reached for a in node.args):
            reached.add(node)
    return reached


def log_derivative(expr: Expr, target: Expr, over: Expr) -> Expr | None:
    """d log(expr) / d target, free of `over`; None where it can't be had (the law of derive_backward then fails).

    Products, quotients and exponentials are opened first, so nothing is divided that could be zero.
    """
    if target not in outside_reductions(expr):
        return ZERO
    match expr.op:
        case Op.MUL:
            parts = [log_derivative(a, target, over) for a in expr.args]
            return None if any(p is None for p in parts) else add(*[p for p in parts if p is not None])
        case Op.RECIP:
            part = log_derivative(expr.args[0], target, over)
            return None if part is None else _minus(part)
        case Op.EXP:
            (result,) = differentiate(expr.args[0], [target])
        case Op.WHERE if any(is_const(a, 0) for a in expr.args[1:]):
            kept = expr.args[2] if is_const(expr.args[1], 0) else expr.args[1]
            part = log_derivative(kept, target, over)
            if part is None:
                return None
            result = part
        case _:
            (slope,) = differentiate(expr, [target])
            result = mul(slope, recip(expr))
    return result if over not in outside_reductions(result) else _proved_free(result, over)


def outside_reductions(expr: Expr) -> list[Expr]:
    """The nodes of an expression that don't stand inside a row reduction."""
    return topological(expr, closed=frozenset({Op.REDUCE}))


def _proved_free(expr: Expr, over: Expr) -> Expr | None:
    """The expression without `over`, where setting it to a number changes nothing that sympy could tell."""
    from attention_engine.passes.symbolic import is_independent

    if not is_independent(expr, over):
        return None
    inside = {n: n for n in outside_reductions(expr) if n.op is Op.REDUCE}
    (result,) = simplify(substitute(expr, {**inside, over: ONE}))
    return result
