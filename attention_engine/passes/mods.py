"""What is known of a mod: its derivative, and whether it merely multiplies a row by a factor."""

from __future__ import annotations

from collections.abc import Collection

from attention_engine.ir.expr import Expr, Op, topological
from attention_engine.ir.linear import GRADIENT, LinearProgram, ModGradient, X
from attention_engine.ir.verify import checked, verify_mod_gradient
from attention_engine.passes.differentiate import ONE, differentiate
from attention_engine.passes.simplify import factors, mul, simplify


def differentiate_mod(program: LinearProgram, name: str) -> ModGradient:
    """The gradients of the tensor's entry and of the custom inputs that its mod reads."""
    loads = program.loads(name)
    x, *reads = differentiate(program.mod(name), [X, *loads], GRADIENT)
    return checked(verify_mod_gradient, ModGradient(x, tuple(zip(loads, reads, strict=True))), program, name)


def reads_own(program: LinearProgram, name: str, reads: Collection[Expr]) -> bool:
    """Must a kernel that makes the gradient of a tensor load it? For these reads' gradients, or where the mod bends."""
    bends = row_factor(program.mod(name)) is None and X in topological(differentiate_mod(program, name).x)
    return bool(reads) or bends


def row_factor(mod: Expr) -> Expr | None:
    """The factor f, the same for a whole row, where the mod is f * x; None where it is anything else.

    Only what stands as a product qualifies; a factor joins the weights of a row in fp32, and the tensor's tiles go to
    the tensor cores as they came.
    """
    (mod,) = simplify(mod)
    if mod is X:
        return ONE
    if mod.op is not Op.MUL:
        return None
    parts = factors(mod)
    rest = [p for p in parts if p is not X]
    if len(parts) - len(rest) != 1 or X in topological(*rest):
        return None
    return mul(*rest)
