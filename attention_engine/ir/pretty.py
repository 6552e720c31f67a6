"""Expressions and programs as people write them: numbered lines, each a valid Python formula."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from attention_engine.ir.expr import Expr, Op, Type, const, is_const, make, topological

# As Python binds them: comparisons least, then |, ^, &, shifts, sums, products, signs.
INFIX = {Op.LESS: ("<", 1), Op.LESS_EQUAL: ("<=", 1), Op.EQUAL: ("==", 1), Op.OR: ("|", 2), Op.BIT_OR: ("|", 2),
         Op.BIT_XOR: ("^", 3), Op.AND: ("&", 4), Op.BIT_AND: ("&", 4), Op.SHIFT_LEFT: ("<<", 5),
         Op.SHIFT_RIGHT: (">>", 5), Op.ADD: ("+", 6), Op.MUL: ("*", 7), Op.FLOORDIV: ("//", 7),
         Op.MOD: ("%", 7)}  # fmt: skip
COMPARISON, SUM, PRODUCT, SIGN, ATOM = 1, 6, 7, 8, 9
BOUNDS = {Op.MAXIMUM: "min", Op.MINIMUM: "max"}  # what clamp calls the second operand
PLAIN = re.compile(r"[A-Za-z_]\w*(\.\w+)*")  # names of results that formulas may say
LONGEST = 60  # nodes of one formula; what is larger is named in parts, or shortened


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) and value == value and abs(value) != float("inf") else str(value)


def _negated(expr: Expr, names: Mapping[Expr, str]) -> Expr | None:
    """e where expr is -1 * e and is spelled in place."""
    if expr in names or expr.op is not Op.MUL:
        return None
    return expr.args[1] if is_const(expr.args[0], -1) else None


def _with_a_minus(expr: Expr, names: Mapping[Expr, str]) -> Expr | None:
    """2 * e where expr is -2 * e and is spelled in place."""
    if expr in names or expr.op is not Op.MUL or expr.args[0].op is not Op.CONST:
        return None
    number = expr.args[0].value
    below = isinstance(number, float) and -float("inf") < number < 0
    return make(Op.MUL, const(-number), expr.args[1]) if below else None


def minus_of(expr: Expr, names: Mapping[Expr, str]) -> Expr | None:
    """e where a sum takes expr as a difference of e."""
    found = _negated(expr, names)
    return found if found is not None else _with_a_minus(expr, names)


def divisor_of(expr: Expr, names: Mapping[Expr, str]) -> Expr | None:
    """e where a product takes expr as a quotient by e."""
    return expr.args[0] if expr.op is Op.RECIP and expr not in names else None


def _spell(expr: Expr, names: Mapping[Expr, str]) -> tuple[str, int]:
    """The text of a node and how tightly it binds."""
    if expr in names:
        return names[expr], ATOM

    def inner(child: Expr, least: int) -> str:
        text, bind = _spell(child, names)
        return text if bind >= least else f"({text})"

    op, args = expr.op, expr.args
    if op is Op.CONST:
        text = _number(expr.value)
        return text, SIGN if text.startswith("-") else ATOM
    if op is Op.VAR:
        return expr.name, ATOM
    if op is Op.LOAD:
        return f"{expr.name}[{', '.join(inner(a, 0) for a in args) or '()'}]", ATOM
    if op is Op.NOT:
        return f"~{inner(args[0], ATOM)}", SIGN
    if (signed := _spell_signed(expr, names, inner)) is not None:
        return signed
    if op in INFIX:
        sign, bind = INFIX[op]
        left = bind + 1 if bind == COMPARISON else bind  # a < b < c would mean something else
        return f"{inner(args[0], left)} {sign} {inner(args[1], bind + 1)}", bind
    if op in BOUNDS and expr.arg is not None:
        return _spell_bound(expr, inner), ATOM
    called = expr.arg.value if isinstance(expr.arg, Type) else f"row_{expr.arg}" if op is Op.REDUCE else op.value
    return f"{called}({', '.join(inner(a, 0) for a in args)})", ATOM


def _spell_bound(expr: Expr, inner: Callable[[Expr, int], str]) -> str:
    """A maximum or minimum that gives all of a tie's gradient to one operand: a relu, or a clamp."""
    a, b = expr.args if expr.arg == 1.0 else expr.args[::-1]
    if expr.op is Op.MAXIMUM and is_const(a, 0):
        return f"relu({inner(b, 0)})"
    return f"clamp({inner(a, 0)}, {BOUNDS[expr.op]}={inner(b, 0)})"


def _spell_signed(expr: Expr, names: Mapping[Expr, str], inner: Callable[[Expr, int], str]) -> tuple[str, int] | None:
    """Differences, negations and quotients, which are sums and products inside."""
    op, args = expr.op, expr.args
    if op is Op.ADD:
        for a, b in (args, args[::-1]):
            if (minus := minus_of(b, names)) is not None:
                return f"{inner(a, SUM)} - {inner(minus, PRODUCT)}", SUM
    if (minus := _negated(expr, names)) is not None:
        return f"-{inner(minus, SIGN)}", SIGN
    if op is Op.MUL:
        for a, b in (args, args[::-1]):
            if (below := divisor_of(b, names)) is not None:
                return f"{inner(a, PRODUCT)} / {inner(below, SIGN)}", PRODUCT
    return (f"1 / {inner(args[0], SIGN)}", PRODUCT) if op is Op.RECIP else None


def formula(expr: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """One expression as one formula; `names` replaces nodes by names, and what is too deep by "..."."""
    names = names or {}
    return _spell(expr, {**names, **_too_deep(expr, names)})[0]


def _too_deep(expr: Expr, names: Mapping[Expr, str]) -> dict[Expr, str]:
    """The nodes at which a formula ends that would be longer than LONGEST nodes: what stands highest is kept."""
    level, spelled = [expr], 0
    while level:
        if spelled + len(level) > LONGEST:
            return {node: "..." for node in level if node.args and node is not expr}
        spelled += len(level)
        level = [a for node in level if node not in names for a in node.args]
    return {}


def lines(results: Iterable[tuple[str, Expr]], prefix: str = "v") -> list[str]:
    """Assignments that compute the results, each after what it uses. What is used twice, or is long, gets a name: the
    result's that it is, or one of its own."""
    return [
        f"{name} = {text}" for name, text in definitions(results, prefix, spell=lambda e, names: _spell(e, names)[0])
    ]


def definitions(
    results: Iterable[tuple[str, Expr]], prefix: str, spell: Callable[[Expr, Mapping[Expr, str]], str]
) -> list[tuple[str, str]]:
    """The same as pairs of a name and a text, spelled in another way."""
    results = list(results)
    uses = _spellings([e for _, e in results])
    named = {e: name for name, e in reversed(results) if PLAIN.fullmatch(name)}  # the first of equal ones
    names: dict[Expr, str] = {}
    sizes: dict[Expr, int] = {}
    out: list[tuple[str, str]] = []
    own = 0
    for result, expr in results:
        for node in topological(expr):
            if node in sizes:
                continue
            sizes[node] = 1 + sum(1 if a in names else sizes[a] for a in node.args)
            shared = (uses[node] > 1 and not _is_spelled_again(node)) or sizes[node] > LONGEST // 2
            if node.args and node.op is not Op.LOAD and (shared or node in named):
                text = spell(node, names)
                if node not in named:
                    named[node], own = f"{prefix}{own}", own + 1
                names[node] = named[node]
                out.append((names[node], text))
        if names.get(expr) != result:
            out.append((result, spell(expr, names)))
    return out


def _is_spelled_again(node: Expr) -> bool:
    """Is a name no shorter? A sign, a divisor, an index as a float: they are spelled at each use."""
    negated = node.op is Op.MUL and is_const(node.args[0], -1)
    return negated or node.op is Op.RECIP or (node.op is Op.CAST and not node.args[0].args)


def _spellings(roots: Sequence[Expr]) -> dict[Expr, int]:
    """How often each node would be spelled, were nothing named but what is used twice."""
    uses: dict[Expr, int] = {}
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    for node in reversed(topological(*roots)):
        times = uses[node] if _is_spelled_again(node) else 1
        for child in node.args:
            uses[child] = uses.get(child, 0) + times
    return uses
