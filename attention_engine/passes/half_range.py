"""Weights in fp16's range: which programs keep theirs there, and what is done to those that don't.

fp16 ends at 65504. exp(x - max), a sigmoid or a score itself stay below it (a score wherever products of q and k in
fp16 do). Powers of scores, or exp less a constant, need not, and where scores are small they vanish. Such weights
are divided by a bound of their row, which is carried along as a state, and which the output is multiplied with at the
end: o = bound * sum of (weight / bound) v.
"""

from __future__ import annotations

import dataclasses
import random

from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.evaluate import Value, evaluate, evaluate_all
from attention_engine.ir.expr import Axis, Expr, Op, Type, const, make, substitute, topological
from attention_engine.ir.program import OUTPUT, SCORE, Program, State, state_variable
from attention_engine.ir.verify import checked, verify_program
from attention_engine.passes.derive_backward import close
from attention_engine.passes.empty_rows import finite
from attention_engine.passes.row_values import unlike
from attention_engine.passes.simplify import mul, recip, simplify

LARGEST = 65504.0  # of fp16
ROOM = 2.0**14  # how large the row's largest weight is then: far from the end above, and from the smallest below
LEAST = 2.0**-100  # a bound that a row begins with: fp32 holds its inverse times ROOM
SIZES = (1.0, 20.0, 300.0, 5e3, LARGEST)  # of scores that are tried
KEYS = 6


def weights_fit(program: Program) -> bool:
    """Does no weight of a tile leave fp16's range? Tried on rows of scores of all sizes."""
    return all(_fits(weight) for score in _rows() for weight in _weights_of(program, score))


def final_weights_fit(program: Program) -> bool:
    """The same of the final weights, which the backward pass multiplies with gradients."""
    try:
        weight = close(program).weight
    except BackwardNotDerived:
        return True  # there is no such pass, or its weights are the user's own
    return all(_fits(evaluate(weight, {**_drawn(weight), SCORE: score}, KEYS)) for score in _rows())


def _rows() -> list[list[float]]:
    draw = random.Random(0)
    shapes = [[draw.uniform(-1.0, 1.0) for _ in range(KEYS - 1)] for _ in range(2)]
    rows = [[sign, *shape] for shape in shapes for sign in (1.0, -1.0)] + [[1.0] * KEYS, [-1.0] * KEYS]
    return [[size * x for x in row] for size in SIZES for row in rows]


def _drawn(*roots: Expr, seed: int = 0) -> dict[Expr, Value]:
    """A value for all else that the roots read."""
    draw, found = random.Random(seed), {}
    for node in topological(*roots):
        if node.op in (Op.VAR, Op.LOAD) and node is not SCORE:
            number = draw.gauss(0.0, 3.0) if node.dtype is Type.FLOAT else draw.randrange(1, 9)
            found[node] = [number] * KEYS if Axis.KEY in node.axes else number
    return found


def _weights_of(program: Program, score: list[float]) -> list[Value]:
    """The weights of a row's tiles: the same scores twice, the second time after states that have moved."""
    states: dict[Expr, Value] = {s.variable: finite(s.initial) for s in program.states}
    roots, found = [program.weights, *(s.update for s in program.states)], []
    for _ in range(2):
        weights, *updates = evaluate_all(roots, {**_drawn(*roots), **states, SCORE: score}, KEYS)
        found.append(weights)
        states = dict(zip(states, updates, strict=True))
    return found


def _fits(weights: Value) -> bool:
    row = weights if isinstance(weights, list) else [weights]
    return not any(abs(w) > LARGEST for w in row)  # a NaN is none of a range's


def bound_weights(program: Program) -> Program:
    """The program with its weights divided by the row's bound so far, a state that ends as the output's factor."""
    name = unlike("bound", {s.name for s in program.states})
    bound = state_variable(name)
    so_far = mul(bound, make(Op.ABS, program.rescale))
    here = mul(const(1 / ROOM), _largest(program.weights))
    update = make(Op.MAXIMUM, make(Op.MAXIMUM, so_far, here), const(LEAST))
    rescale, weights, update = simplify(
        mul(program.rescale, bound, recip(update)), mul(program.weights, recip(update)), update
    )
    bounded = dataclasses.replace(
        program, states=(*program.states, State(name, LEAST, update)), weights=weights, rescale=rescale,
        output=simplify(substitute(program.output, {OUTPUT: mul(OUTPUT, bound)}))[0],
    )  # fmt: skip
    return checked(verify_program, bounded)


def _largest(weights: Expr) -> Expr:
    """The largest absolute value of a tile's weights, or no less.

    Where it is that of the largest score (relu(x) ** 2), or of the largest absolute score (x ** 4), the scores are
    reduced, as they stand in a kernel's tile; else the weights, which then stand in another beside it.
    """
    nodes = topological(weights)
    of_score = all(n is SCORE or Axis.KEY not in n.axes or SCORE in topological(n) for n in nodes)
    if of_score and not any(n.op is Op.REDUCE for n in nodes):
        up, down = ([_sizes_of(weights, sign, draw) for draw in range(3)] for sign in (1.0, -1.0))
        highest = make(Op.REDUCE, SCORE, arg="max")
        if all([*below[::-1], *above] == sorted([*below, *above]) for below, above in zip(down, up, strict=True)):
            return make(Op.ABS, substitute(weights, {SCORE: highest}))
        if up == down and all(above == sorted(above) for above in up):
            farthest = make(Op.REDUCE, make(Op.ABS, SCORE), arg="max")
            kept = make(Op.MAXIMUM, farthest, const(0.0))  # a tile of which a row keeps nothing has the lowest number
            return make(Op.ABS, substitute(weights, {SCORE: kept}))
    return make(Op.REDUCE, make(Op.ABS, weights), arg="max")


def _sizes_of(weights: Expr, sign: float, seed: int) -> list[float]:
    """The absolute weights of growing absolute scores of one sign; all else that they read is drawn."""
    drawn = _drawn(weights, seed=seed)
    return [abs(evaluate(weights, {**drawn, SCORE: sign * 1.25**n})) for n in range(-40, 50)]
