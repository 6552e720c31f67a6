"""Expressions and programs as people write them: numbered lines, each a valid Python formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attention_engine.ir.expr import Expr, Op, Type, count_uses, is_const, topological

INFIX = {Op.ADD: ("+", 4), Op.MUL: ("*", 5), Op.FLOORDIV: ("//", 5), Op.MOD: ("%", 5), Op.LESS: ("<", 3),
         Op.LESS_EQUAL: ("<=", 3), Op.EQUAL: ("==", 3), Op.AND: ("&", 2), Op.OR: ("|", 1)}  # fmt: skip
ATOM = 9


def _number(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) and value == value and abs(value) != float("inf") else str(value)


def _negated(expr: Expr, names: Mapping[Expr, str]) -> Expr | None:
    """e where expr is -1 * e or a negative constant, and is spelled in place."""
    if expr in names:
        return None
    if expr.op is Op.MUL and is_const(expr.args[0], -1):
        return expr.args[1]
    return None


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
        return text, ATOM if not text.startswith("-") else 6
    if op is Op.VAR:
        return expr.name, ATOM
    if op is Op.LOAD:
        return f"{expr.name}[{', '.join(inner(a, 0) for a in args)}]", ATOM
    if op is Op.ADD and (minus := _negated(args[1], names)) is not None:
        return f"{inner(args[0], 4)} - {inner(minus, 5)}", 4
    if op is Op.ADD and (minus := _negated(args[0], names)) is not None:
        return f"{inner(args[1], 4)} - {inner(minus, 5)}", 4
    if op is Op.MUL and (minus := _negated(expr, names)) is not None:
        return f"-{inner(minus, 6)}", 6
    if op is Op.MUL and args[1].op is Op.RECIP and args[1] not in names:
        return f"{inner(args[0], 5)} / {inner(args[1].args[0], 6)}", 5
    if op is Op.MUL and args[0].op is Op.RECIP and args[0] not in names:
        return f"{inner(args[1], 5)} / {inner(args[0].args[0], 6)}", 5
    if op is Op.RECIP:
        return f"1 / {inner(args[0], 6)}", 5
    if op in INFIX:
        sign, bind = INFIX[op]
        return f"{inner(args[0], bind)} {sign} {inner(args[1], bind + 1)}", bind
    if op is Op.NOT:
        return f"~{inner(args[0], ATOM)}", 6
    called = expr.arg.value if isinstance(expr.arg, Type) else f"row_{expr.arg}" if op is Op.REDUCE else op.value
    return f"{called}({', '.join(inner(a, 0) for a in args)})", ATOM


def formula(expr: Expr, names: Mapping[Expr, str] | None = None) -> str:
    """One expression as one formula; `names` replaces nodes by names."""
    return _spell(expr, names or {})[0]


def lines(results: Iterable[tuple[str, Expr]], prefix: str = "v") -> list[str]:
    """Assignments, in order, that compute the results; what is used twice gets a name of its own."""
    results = list(results)
    roots = [e for _, e in results]
    uses = count_uses(*roots)
    wanted = {e for e in topological(*roots) if uses[e] > 1 and e.args and e.op is not Op.LOAD}
    names: dict[Expr, str] = {}
    out: list[str] = []
    for node in topological(*roots):
        if node in wanted:
            text = formula(node, names)
            names[node] = f"{prefix}{len(names)}"
            out.append(f"{names[node]} = {text}")
    for name, expr in results:
        out.append(f"{name} = {formula(expr, names)}")
    return out
