"""Brings expressions to a normal form, in which equal sums and products are the same node.

Every constructor here takes operands in normal form and returns a normal form, so one walk from the leaves up suffices
and nothing can loop. Sums and products are grouped by the axes they depend on, so that what belongs to a row stands
together and can be computed once a row. Values are taken as finite: 0 * x is 0, and -inf + x is -inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import assert_never

from attention_engine.ir.evaluate import CASTS, PYTHON
from attention_engine.ir.expr import (
    LEAVES,
    Axis,
    Expr,
    Number,
    Op,
    Reduction,
    Type,
    const,
    dtype_of,
    is_const,
    make,
    rebuild,
    topological,
)
from attention_engine.passes.index_ranges import Ranges

_ORDER = {op: i for i, op in enumerate(Op)}


def group_of(expr: Expr) -> int:
    """Where a term or factor stands: with the pair, the key, the row, or the block."""
    key, query = Axis.KEY in expr.axes or Axis.CHANNEL in expr.axes, Axis.QUERY in expr.axes
    return 0 if key and query else 1 if key else 2 if query else 3


def _rank(expr: Expr) -> tuple[int, str, str]:
    return _ORDER[expr.op], expr.name if expr.op in (Op.VAR, Op.LOAD) else "", expr.digest


def _grouped(op: Op, parts: Iterable[Expr]) -> Expr | None:
    """The parts as one tree: (pair parts) op ((key parts) op ((row parts) op (block parts)))."""
    groups: list[list[Expr]] = [[], [], [], []]
    for part in parts:
        groups[group_of(part)].append(part)
    tree: Expr | None = None
    for group in reversed(groups):
        side: Expr | None = None
        for part in group:
            side = part if side is None else make(op, side, part)
        if side is not None:
            tree = side if tree is None else make(op, side, tree)
    return tree


def split_coefficient(expr: Expr) -> tuple[Number, Expr | None]:
    """e as (number, rest): e = number * rest; a constant has no rest."""
    if expr.op is Op.CONST:
        return expr.value, None
    if expr.op is Op.MUL and expr.args[0].op is Op.CONST:
        return expr.args[0].value, expr.args[1]
    return 1, expr


def _operands(op: Op, expr: Expr) -> list[Expr]:
    """The leaves of a tree of one operation."""
    out: list[Expr] = []
    stack = [expr]
    while stack:
        node = stack.pop()
        if node.op is op:
            stack.extend(reversed(node.args))
        else:
            out.append(node)
    return out


def terms(expr: Expr) -> list[Expr]:
    """The terms of a sum."""
    return _operands(Op.ADD, expr)


def factors(expr: Expr) -> list[Expr]:
    """The factors of a product."""
    return _operands(Op.MUL, expr)


def add(*operands: Expr) -> Expr:
    """The sum: like terms together, the constant last."""
    dtype = operands[0].dtype
    weights: dict[Expr, Number] = {}
    constant: Number = 0
    for operand in operands:
        for term in terms(operand):
            number, rest = split_coefficient(term)
            if rest is None:
                constant += number
            else:
                weights[rest] = weights.get(rest, 0) + number
    if isinstance(constant, float) and not math.isfinite(constant):
        return const(constant, dtype)
    parts = [_scaled(weights[rest], rest) for rest in sorted(weights, key=_rank) if weights[rest] != 0]
    again = any(weights[rest] in (1, -1) for rest in weights if rest.op is Op.ADD)  # 3(x + y) - 2(x + y) is x + y
    parts, joined = _join_branches(parts)
    if again or joined:
        return add(*parts, const(constant, dtype))
    if constant != 0 or not parts:
        parts.append(const(constant, dtype))
    tree = _grouped(Op.ADD, parts)
    assert tree is not None
    return tree


def _join_branches(parts: list[Expr]) -> tuple[list[Expr], bool]:
    """where(c, a, 0) + where(c, b, 0) as where(c, a + b, 0); whether there were any."""
    branches: dict[Expr | None, list[Expr]] = {}
    for part in parts:
        branch = split_coefficient(part)[1]
        condition = branch.args[0] if branch is not None and _is_branch(branch) else None
        branches.setdefault(condition, []).append(part)
    left = branches.pop(None, [])
    doubled = {c: same for c, same in branches.items() if len(same) > 1}
    if not doubled:
        return parts, False
    left += [part for c, same in branches.items() if c not in doubled for part in same]
    zero = const(0, parts[0].dtype)
    return left + [where(c, add(*map(_inside, same)), zero) for c, same in doubled.items() if c is not None], True


def _is_branch(expr: Expr) -> bool:
    return expr.op is Op.WHERE and is_const(expr.args[2], 0)


def _inside(part: Expr) -> Expr:
    """n * a of n * where(c, a, 0)."""
    number, branch = split_coefficient(part)
    assert branch is not None
    value = branch.args[1]
    return value if number == 1 else add(*[mul(const(number, value.dtype), t) for t in terms(value)])


def _scaled(number: Number, rest: Expr) -> Expr:
    """number * rest, rest having no number of its own."""
    if number == 1:
        return rest
    if rest.op is Op.ADD and (number == -1 or rest.dtype is not Type.FLOAT):
        return add(*[mul(const(number, rest.dtype), t) for t in terms(rest)])
    return make(Op.MUL, const(number, rest.dtype), rest)


def mul(*operands: Expr) -> Expr:
    """The product: the number first; a choice against 0 outermost, so that what isn't chosen can't spoil it.

    where(c, a, 0) * b is where(c, a * b, 0): outside c, where b may be infinite (1 / sqrt(x), say), 0 * b would be NaN.
    """
    dtype = operands[0].dtype
    number: Number = 1
    rest: list[Expr] = []
    for operand in operands:
        for factor in factors(operand):
            if factor.op is Op.CONST:
                number *= factor.value
            else:
                rest.append(factor)
    if number == 0 or not rest:
        return const(number, dtype)
    choices = [f for f in rest if _chooses_zero(f)]
    if choices and len(rest) > 1:
        condition = min((f.args[0] for f in choices), key=_rank)
        same = [f for f in choices if f.args[0] is condition]
        others = [f for f in rest if f not in same]
        products = [mul(*(f.args[branch] for f in same), *others) for branch in (1, 2)]
        return mul(const(number, dtype), where(condition, *products))
    tree = _grouped(Op.MUL, sorted(rest, key=_rank))
    assert tree is not None
    return _scaled(number, tree)


def _chooses_zero(expr: Expr) -> bool:
    """Is it, for each pair, a choice of which one branch is 0?"""
    return expr.op is Op.WHERE and Axis.KEY in expr.args[0].axes and any(is_const(b, 0) for b in expr.args[1:])


def recip(a: Expr) -> Expr:
    """1 / a, opened over numbers and exponentials."""
    if a.op is Op.CONST:
        return const(PYTHON[Op.RECIP](float(a.value)))
    if a.op is Op.RECIP:
        return a.args[0]
    if a.op is Op.EXP:
        return make(Op.EXP, mul(const(-1.0), a.args[0]))
    number, rest = split_coefficient(a)
    if rest is not None and number != 1:
        return mul(const(1.0 / number), recip(rest))
    return make(Op.RECIP, a)


def power(a: Expr, b: Expr) -> Expr:
    """a ** b; small whole powers as products."""
    if b.op is Op.CONST:
        exponent = b.value
        if exponent in (1, 2, 3, 4):
            return mul(*[a] * int(exponent))
        if exponent in (-1, -2, -3, -4):
            return recip(mul(*[a] * int(-exponent)))
        if exponent == 0:
            return const(1.0)
        if exponent in (0.5, -0.5):
            return _plain(Op.SQRT if exponent > 0 else Op.RSQRT)(a)
    return _plain(Op.POW)(a, b)


def _extremum(op: Op, neutral: float, absorbing: float) -> Callable[..., Expr]:
    def build(a: Expr, b: Expr, share: float | None = None) -> Expr:
        """share: of a tie's gradient, to a."""
        if a is b or is_const(b, neutral):
            return a
        if is_const(a, neutral):
            return b
        if unknown := [e for e in (a, b) if e.op is Op.CONST and e.value != e.value]:
            return unknown[0]
        if is_const(a, absorbing) or is_const(b, absorbing):
            return const(absorbing)
        first, second = sorted((a, b), key=lambda e: (e.op is Op.CONST, *_rank(e)))
        if share is None or a.dtype is not Type.FLOAT or first.op is Op.CONST:
            return _plain(op)(first, second)
        return make(op, first, second, arg=share if first is a else 1.0 - share)

    return build


def _logic(op: Op, neutral: bool) -> Callable[[Expr, Expr], Expr]:
    def build(a: Expr, b: Expr) -> Expr:
        if a is b or is_const(b, neutral):
            return a
        if is_const(a, neutral):
            return b
        if is_const(a, not neutral) or is_const(b, not neutral):
            return const(not neutral)
        a, b = sorted((a, b), key=_rank)
        return make(op, a, b)

    return build


def negate(a: Expr) -> Expr:
    """Logical not."""
    if a.op is Op.NOT:
        return a.args[0]
    return const(not a.value) if a.op is Op.CONST else make(Op.NOT, a)


def where(condition: Expr, a: Expr, b: Expr) -> Expr:
    """a where the condition holds, else b."""
    if condition.op is Op.CONST:
        return a if condition.value else b
    if a is b:
        return a
    if condition.op is Op.NOT:
        return where(condition.args[0], b, a)
    return make(Op.WHERE, condition, a, b)


def cast(a: Expr, to: Type) -> Expr:
    """a as another type."""
    if a.dtype is to:
        return a
    return const(CASTS[to](a.value), to) if a.op is Op.CONST else make(Op.CAST, a, arg=to)


def reduce(kind: Reduction, a: Expr) -> Expr:
    """A row reduction: factors that don't depend on the key leave a sum, and terms and numbers leave an extreme."""
    match kind:
        case "sum":
            inside = [f for f in factors(a) if Axis.KEY in f.axes]
            outside = [f for f in factors(a) if Axis.KEY not in f.axes]
            if inside and outside:
                return mul(*outside, make(Op.REDUCE, mul(*inside), arg=kind))
        case "max" | "min":
            number, rest = split_coefficient(a)
            if rest is not None and number != 1 and number != 0:
                return mul(const(number), reduce(kind if number > 0 else "min" if kind == "max" else "max", rest))
            inside = [t for t in terms(a) if Axis.KEY in t.axes]
            outside = [t for t in terms(a) if Axis.KEY not in t.axes]
            if inside and outside:
                return add(*outside, reduce(kind, add(*inside)))
        case _:
            assert_never(kind)
    return make(Op.REDUCE, a, arg=kind)


def _inverse(op: Op, of: Op) -> Callable[[Expr], Expr]:
    def build(a: Expr) -> Expr:
        return a.args[0] if a.op is of else _plain(op)(a)

    return build


def _plain(op: Op) -> Callable[..., Expr]:
    """The operation as it is, folded where all operands are constants."""

    def build(*args: Expr) -> Expr:
        if args and all(a.op is Op.CONST for a in args):
            return const(PYTHON[op](*(a.value for a in args)), dtype_of(op, args))
        return make(op, *args)

    return build


def _same(op: Op, truth: bool) -> Callable[[Expr, Expr], Expr]:
    def build(a: Expr, b: Expr) -> Expr:
        return const(truth) if a is b and a.dtype is not Type.FLOAT else _plain(op)(a, b)

    return build


def absolute(a: Expr) -> Expr:
    """|a|; a number comes out, and squares and exponentials are positive already."""
    number, rest = split_coefficient(a)
    if rest is not None and number != 1 and (a.dtype is Type.FLOAT or number == -1 or _never_wraps(a)):
        return mul(const(abs(number), a.dtype), absolute(rest))
    return a if a.op in (Op.EXP, Op.EXP2, Op.SIGMOID, Op.ABS) else _plain(Op.ABS)(a)


def _never_wraps(a: Expr) -> bool:
    """Does an integer stay within 64 bits, whatever the custom inputs hold?"""
    return Ranges({n.name for n in topological(a) if n.op is Op.LOAD}).never_wrap(a)


CONSTRUCTORS: dict[Op, Callable[..., Expr]] = {
    **{op: _plain(op) for op in Op if op not in LEAVES},
    Op.ADD: add,
    Op.MUL: mul,
    Op.RECIP: recip,
    Op.POW: power,
    Op.MAXIMUM: _extremum(Op.MAXIMUM, -math.inf, math.inf),
    Op.MINIMUM: _extremum(Op.MINIMUM, math.inf, -math.inf),
    Op.AND: _logic(Op.AND, True),
    Op.OR: _logic(Op.OR, False),
    Op.NOT: negate,
    Op.WHERE: where,
    Op.ABS: absolute,
    Op.LOG: _inverse(Op.LOG, Op.EXP),
    Op.LOG2: _inverse(Op.LOG2, Op.EXP2),
    Op.EQUAL: _same(Op.EQUAL, True),
    Op.LESS: _same(Op.LESS, False),
    Op.LESS_EQUAL: _same(Op.LESS_EQUAL, True),
}


def construct(node: Expr) -> Expr:
    """The node in normal form, its operands being so."""
    match node.op:
        case Op.CONST | Op.VAR | Op.LOAD:
            return node
        case Op.CAST:
            return cast(node.args[0], node.dtype)
        case Op.MAXIMUM | Op.MINIMUM:
            return CONSTRUCTORS[node.op](*node.args, node.arg)
        case Op.REDUCE:
            return reduce(node.reduction, node.args[0])
        case _:
            return CONSTRUCTORS[node.op](*node.args)


def simplify(*roots: Expr) -> tuple[Expr, ...]:
    """The roots in normal form (they share what they shared)."""
    done: dict[Expr, Expr] = {}
    for node in topological(*roots):
        done[node] = construct(rebuild(node, tuple(done[a] for a in node.args)))
    return tuple(done[r] for r in roots)


def factor_out(expr: Expr) -> Expr:
    """a*f + b*f as f * (a + b): a sum whose terms all share factors becomes a product, and so inside factors."""
    if expr.op is Op.WHERE and is_const(expr.args[2], 0):
        return where(expr.args[0], factor_out(expr.args[1]), expr.args[2])
    if expr.op is Op.MUL:
        return mul(*[factor_out(f) if f.op in (Op.ADD, Op.WHERE) else f for f in factors(expr)])
    parts = terms(expr)
    if len(parts) < 2:
        return expr
    shared = list(dict.fromkeys(factors(parts[0])))
    for part in parts[1:]:
        theirs = factors(part)
        shared = [f for f in shared if f in theirs and f.op is not Op.CONST]
    if not shared:
        return expr
    return mul(*shared, add(*[_without(part, shared) for part in parts]))


def _without(term: Expr, shared: list[Expr]) -> Expr:
    left = factors(term)
    for factor in shared:
        left.remove(factor)
    return mul(const(1.0), *left)
