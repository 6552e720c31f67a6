"""Expressions and programs as people write them: numbered lines, each a valid Python formula."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from attention_engine.ir.expr import Expr, Op, Type, count_uses, is_const, topological

# As Python binds them: comparisons least, then |, ^, &, shifts, sums, products, signs.
INFIX = {Op.LESS: ("<", 1), Op.LESS_EQUAL: ("<=", 1), Op.EQUAL: ("==", 1), Op.OR: ("|", 2), Op.BIT_OR: ("|", 2),
         Op.BIT_XOR: ("^", 3), Op.AND: ("&", 4), Op.BIT_AND: ("&", 4), Op.SHIFT_LEFT: ("<<", 5),
         Op.SHIFT_RIGHT: (">>", 5), Op.ADD: ("+", 6), Op.MUL: ("*", 7), Op.FLOORDIV: ("//", 7),
         Op.MOD: ("%", 7)}  # fmt: skip
COMPARISON, SUM, PRODUCT, SIGN, ATOM = 1, 6, 7, 8, 9
BOUNDS = {Op.MAXIMUM: "min", Op.MINIMUM: "max"}  # what clamp calls the second operand
LONGEST = 60  # nodes of one formula; what is larger is named in parts, or shortened


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) and value == value and abs(value) != float("inf") else str(value)


def _negated(expr: Expr, names: Mapping[Expr, str]) -> Expr | None:
    """e where expr is -1 * e and is spelled in place."""
    if expr in names or expr.op is not Op.MUL:
        return None
    return expr.args[1] if is_const(expr.args[0], -1) else None


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
            if (minus := _negated(b, names)) is not None:
                return f"{inner(a, SUM)} - {inner(minus, PRODUCT)}", SUM
    if (minus := _negated(expr, names)) is not None:
        return f"-{inner(minus, SIGN)}", SIGN
    if op is Op.MUL:
        for a, b in (args, args[::-1]):
            if b.op is Op.RECIP and b not in names:
                return f"{inner(a, PRODUCT)} / {inner(b.args[0], SIGN)}", PRODUCT
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
    """Assignments, in order, that compute the results; what is used twice, or is long, gets a name of its own."""
    results = list(results)
    roots = [e for _, e in results]
    uses = count_uses(*roots)
    names: dict[Expr, str] = {}
    sizes: dict[Expr, int] = {}
    out: list[str] = []
    for node in topological(*roots):
        sizes[node] = 1 + sum(1 if a in names else sizes[a] for a in node.args)
        if node.args and node.op is not Op.LOAD and (uses[node] > 1 or sizes[node] > LONGEST // 2):
            text = _spell(node, names)[0]
            names[node] = f"{prefix}{len(names)}"
            out.append(f"{names[node]} = {text}")
    for name, expr in results:
        out.append(f"{name} = {_spell(expr, names)[0]}")
    return out
