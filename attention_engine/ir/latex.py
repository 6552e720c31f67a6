"""Expressions and assignments as LaTeX, for notebooks: the same lines that `pretty` prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from attention_engine.ir.expr import Expr, Op, Type, is_const
from attention_engine.ir.pretty import ATOM, INFIX, PRODUCT, SIGN, SUM, definitions, divisor_of, minus_of

SIGNS = {Op.LESS: "<", Op.LESS_EQUAL: r"\le", Op.EQUAL: "=", Op.OR: r"\lor", Op.AND: r"\land", Op.ADD: "+",
         Op.MUL: r"\,", Op.MOD: r"\bmod", Op.BIT_OR: r"\mid", Op.BIT_XOR: r"\oplus", Op.BIT_AND: r"\mathbin{\&}",
         Op.SHIFT_LEFT: r"\ll", Op.SHIFT_RIGHT: r"\gg"}  # fmt: skip
AROUND = {Op.ABS: (r"\left|", r"\right|"), Op.FLOOR: (r"\lfloor ", r"\rfloor "), Op.SQRT: (r"\sqrt{", "}")}
NAMED = {Op.EXP: r"\exp", Op.LOG: r"\log", Op.TANH: r"\tanh", Op.SIN: r"\sin", Op.COS: r"\cos", Op.MAXIMUM: r"\max",
         Op.MINIMUM: r"\min", Op.ATAN: r"\arctan", Op.LOG2: r"\log_2"}  # fmt: skip
WORDS = {
    "qk": r"q \cdot k", "score": "s", "weights": "w", "weight": "w", "rescale": r"\rho", "q_idx": "i", "kv_idx": "j",
    "delta": r"\delta", "dweight": r"\partial w", "d_qk": r"\partial (q \cdot k)",
}  # fmt: skip


def name(text: str) -> str:
    """A name of a line: state.m is m, next.m is m', final.lse is lse."""
    if text in WORDS:
        return WORDS[text]
    if loaded := re.fullmatch(r"d_(\w+)\[.*\]", text):
        return rf"\partial {name(loaded[1])}"
    group, _, last = text.rpartition(".")
    spelled = last if len(last) == 1 else rf"\mathrm{{{last}}}"
    if numbered := re.fullmatch(r"([A-Za-z]+?)_?(\d+)", last):
        spelled = (
            f"{numbered[1]}_{{{numbered[2]}}}"
            if len(numbered[1]) == 1
            else rf"\mathrm{{{numbered[1]}}}_{{{numbered[2]}}}"
        )
    elif last.startswith("_"):
        spelled = rf"c_{{{last[1:]}}}"
    spelled = spelled.replace("_", r"\_") if not numbered and not last.startswith("_") else spelled
    return {"next": f"{spelled}'", "dfinal": rf"\partial {spelled}"}.get(group, spelled)


def formula(expr: Expr, names: Mapping[Expr, str]) -> str:
    """An expression, with names in place of nodes."""
    return _spell(expr, names)[0]


def aligned(results: Iterable[tuple[str, Expr]], prefix: str = "v") -> list[str]:
    """The lines of `pretty.lines`, each as one of an `aligned` environment."""
    return [f"{name(left)} &= {right}" for left, right in definitions(results, prefix, formula)]


def _number(expr: Expr) -> str:
    value = expr.value
    if isinstance(value, float) and abs(value) == float("inf"):
        return r"-\infty" if value < 0 else r"\infty"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    mantissa, _, power = text.partition("e")
    return rf"{mantissa} \cdot 10^{{{int(power)}}}" if power else text


def _spell(expr: Expr, names: Mapping[Expr, str]) -> tuple[str, int]:
    """The text of a node and how tightly it binds."""
    if expr in names:
        return name(names[expr]), ATOM

    def inner(child: Expr, least: int) -> str:
        text, bind = _spell(child, names)
        return text if bind >= least else rf"\left({text}\right)"

    op, args = expr.op, expr.args
    if op is Op.CONST:
        text = _number(expr)
        return text, SIGN if text.startswith("-") else ATOM
    if op is Op.VAR:
        return name(expr.name), PRODUCT + 1 if expr.name == "qk" else ATOM
    if op is Op.LOAD:
        below = ", ".join(inner(a, 0) for a in args)
        return rf"\mathrm{{{expr.name.replace('_', chr(92) + '_')}}}" + (f"_{{{below}}}" if below else ""), ATOM
    if (signed := _spell_signed(expr, names, inner)) is not None:
        return signed
    if op in SIGNS:
        bind = INFIX[op][1]
        right = bind if op in (Op.ADD, Op.MUL) else bind + 1
        return f"{inner(args[0], bind)} {SIGNS[op]} {inner(args[1], right)}", bind
    return _spell_call(expr, inner), ATOM


def _spell_signed(expr: Expr, names: Mapping[Expr, str], inner: Callable[[Expr, int], str]) -> tuple[str, int] | None:
    """Differences, signs and fractions, which are sums and products inside."""
    op, args = expr.op, expr.args
    if op is Op.ADD:
        for a, b in (args, args[::-1]):
            if (minus := minus_of(b, names)) is not None:
                return f"{inner(a, SUM)} - {inner(minus, PRODUCT)}", SUM
    if op is Op.MUL and is_const(args[0], -1):
        return f"-{inner(args[1], SIGN)}", SIGN
    if op is Op.MUL:
        for a, b in (args, args[::-1]):
            if (below := divisor_of(b, names)) is not None:
                return rf"\frac{{{inner(a, 0)}}}{{{inner(below, 0)}}}", ATOM
    return (rf"\frac{{1}}{{{inner(args[0], 0)}}}", ATOM) if op is Op.RECIP else None


def _spell_call(expr: Expr, inner: Callable[[Expr, int], str]) -> str:
    op, args = expr.op, expr.args
    if op in AROUND:
        left, right = AROUND[op]
        return f"{left}{inner(args[0], 0)}{right}"
    match op:
        case Op.NOT:
            return rf"\lnot {inner(args[0], ATOM)}"
        case Op.CAST | Op.DETACH if expr.arg is not Type.INT:
            return inner(args[0], ATOM)
        case Op.EXP2:
            return f"2^{{{inner(args[0], 0)}}}"
        case Op.POW:
            return f"{{{inner(args[0], ATOM)}}}^{{{inner(args[1], 0)}}}"
        case Op.FLOORDIV:
            return rf"\lfloor {inner(args[0], PRODUCT)} / {inner(args[1], SIGN)} \rfloor "
        case Op.REDUCE:
            return rf"\{expr.arg}_j {inner(args[0], PRODUCT)}"
        case Op.WHERE:
            condition, yes, no = (inner(a, 0) for a in args)
            return rf"\begin{{cases}} {yes} & {condition} \\ {no} & \text{{else}} \end{{cases}}"
        case _:
            called = NAMED.get(op) or rf"\mathrm{{{op.value.replace('_', chr(92) + '_')}}}"
            return rf"{called}\left({', '.join(inner(a, 0) for a in args)}\right)"
