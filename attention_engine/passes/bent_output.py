"""An epilogue that is not a factor of the output so far, in two parts: a program whose epilogue is one, which has a
backward pass, and what is made of that program's output and rows, entry by entry.

tanh(o / r) is tanh(z) with z = o / r. What arrives at z, dz = (1 - tanh(z)^2) dO, takes the place of dO; where rows are
read beside z, gradients arrive at these too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from attention_engine.ir.evaluate import Value, evaluate
from attention_engine.ir.expr import Axis, Expr, Op, Type, VarKind, const, is_const, make, substitute, topological, var
from attention_engine.ir.program import OUTPUT, ROW, Program, State, final_variable, state_variable
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.row_values import largest, name_product, unlike
from attention_engine.passes.simplify import factors, mul, recip, simplify

OUTPUT_GRADIENT = var("do", [*ROW, Axis.CHANNEL])  # what arrives at the bent output


@dataclass(frozen=True)
class Bend:
    """whole: the program. inner: the same with another epilogue, which multiplies, and with the rows that `output`
    reads among the returned ones. output: the whole's, of OUTPUT (the inner one's), final rows and custom inputs.

    gradients: those of OUTPUT, of final rows and of reads of custom inputs, of all these and OUTPUT_GRADIENT; all but
    the first are summed over the channels. kept: the final row that is above 0 where a row keeps a pair (None: the
    formulas are 0 by themselves where OUTPUT is).
    """

    inner: Program
    whole: Program
    output: Expr
    gradients: tuple[tuple[Expr, Expr], ...]
    kept: str | None

    @property
    def rows(self) -> list[str]:
        """The returned rows that get gradients."""
        return [target.bare_name for target, _ in self.gradients if target.kind is VarKind.FINAL]


def part_output(program: Program) -> Bend | None:
    """The two parts; None where the epilogue multiplies, or beside a backward pass of the user's own."""
    if program.forward is not None or program.backward is not None:
        return None
    (output,) = simplify(program.output)
    (slope,) = differentiate(output, [OUTPUT])
    (at_zero,) = simplify(substitute(output, {OUTPUT: const(0.0)}))
    if OUTPUT not in topological(slope) and is_const(at_zero, 0):
        return None
    states = {s.variable for s in program.states}
    factor = _factor(output, states)
    whole = mul(OUTPUT, factor)
    scaled = name_product(output, whole, (inner := var("z", OUTPUT.axes)))
    (bent,) = simplify(substitute(scaled, {OUTPUT: mul(inner, recip(factor))}))
    (bent,) = simplify(substitute(bent, {inner: OUTPUT}))

    def is_row(node: Expr) -> bool:
        return Axis.CHANNEL not in node.axes and any(n in states for n in topological(node))

    taken = {n for n, _ in program.finals}
    rows: dict[Expr, str] = {}
    for node in largest([bent], is_row):
        rows[node] = unlike(f"bent{len(rows)}", taken)
        taken.add(rows[node])
    (bent,) = simplify(substitute(bent, {node: final_variable(name) for node, name in rows.items()}))
    finals = [*program.finals, *((name, node) for node, name in rows.items())]
    inner_states, kept = program.states, None
    if rows or not _is_zero(bent):
        kept = unlike("kept", taken | {s.name for s in program.states})
        state = State(kept, 0.0, make(Op.MAXIMUM, state_variable(kept), make(Op.REDUCE, const(1.0), arg="max")))
        inner_states = (*inner_states, state)
        finals.append((kept, state.variable))
    read = {OUTPUT, *(final_variable(name) for name in rows.values())}
    targets = [n for n in topological(bent) if n in read or (n.op is Op.LOAD and n.dtype is Type.FLOAT)]
    found = zip(targets, differentiate(bent, targets, OUTPUT_GRADIENT), strict=True)
    gradients = tuple((target, gradient) for target, gradient in found if not is_const(gradient, 0))
    inner_program = dataclasses.replace(program, states=inner_states, output=whole, finals=tuple(finals))
    return Bend(inner_program, program, bent, gradients, kept)


def _factor(output: Expr, states: set[Expr]) -> Expr:
    """What of the row the output so far is multiplied with, or else what is made of it; 1 where nothing is."""
    for wanted in (lambda f: f is OUTPUT, lambda f: OUTPUT in topological(f)):
        for node in topological(output):
            have = factors(node) if node.op is Op.MUL else []
            if any(map(wanted, have)):
                others = [f for f in have if Axis.CHANNEL not in f.axes and any(n in states for n in topological(f))]
                if others:
                    return mul(*others)
    return const(1.0)


def _is_zero(bent: Expr) -> bool:
    """Is an output of 0 one of 0 still, whatever else is read?"""
    for number in (0.3, -1.7):
        values: dict[Expr, Value] = {
            n: number if n.dtype is Type.FLOAT else 1 for n in topological(bent) if n.op in (Op.VAR, Op.LOAD)
        }
        if evaluate(bent, {**values, OUTPUT: 0.0}) != 0:
            return False
    return True
