"""Which maths the kernels placed by hand for Hopper (kernels/*_hopper.py) can run; asked before anything is traced."""

from __future__ import annotations

from attention_engine.ir.expr import Op, topological
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX
from attention_engine.passes.analyse_mask import analyse_mask
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.row_values import proportion
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule, ReduceStep, TileStep

FORWARD_DIMS = frozenset({(64, 64), (128, 128), (192, 128), (128, 256), (256, 256)})
BACKWARD_DIMS = frozenset({64, 128})
LIGHT = frozenset({Op.CONST, Op.VAR, Op.DETACH, Op.ADD, Op.MUL, Op.EXP2, Op.MAXIMUM, Op.MINIMUM})


def forward_fits(problem: Problem, schedule: ForwardSchedule) -> bool:
    """Is there such a forward kernel? Head dims fill tiles; another tile of scores, or of a bias, finds no room."""
    another = any(isinstance(step, ReduceStep) and step.source is not None for step in schedule.steps)
    plain = problem.dtype != "float32" and not problem.staged
    return plain and not another and (problem.dim, problem.dim_v) in FORWARD_DIMS


def backward_fits(problem: Problem, schedule: BackwardSchedule, summed: CustomSums) -> bool:
    """Is there such a kernel over keys?

    Two warpgroups share dQ by its 64 rows, or 64 head dims, each. Sums for custom inputs are made of the gradients of
    products; others would need a tile of their own, and atomics a pair wait for too long. Sums of keys need registers
    that wider heads leave too few of (ptxas C7512).
    """
    dims = {problem.dim, problem.dim_v}
    if problem.dtype == "float32" or problem.staged or not dims <= BACKWARD_DIMS or summed.scattered:
        return False
    if summed.of_keys and max(dims) > min(BACKWARD_DIMS):
        return False
    summed_too = (*summed.of_keys, *summed.diagonals)
    return all(proportion(expr, schedule.product_gradient) is not None for _, expr in summed_too)


def scores_are_light(schedule: ForwardSchedule) -> bool:
    """Do its pairs need few registers? Scores that are products, weights of few operations, a mask of plain bounds."""
    values = [step.value for step in schedule.steps if isinstance(step, TileStep)]
    simple = all(node.op in LIGHT for node in topological(*values))
    return simple and schedule.score is PRODUCT and analyse_mask(schedule.mask).exact


def pairs_are_light(schedule: BackwardSchedule, summed: CustomSums) -> bool:
    """Do its pairs need few registers? No products kept, nothing that depends on places, a mask of plain bounds."""
    gradient = topological(schedule.product_gradient)
    nodes = [*gradient, *topological(schedule.weights)]
    places = {Q_IDX, KV_IDX} & set(nodes) or any(node.op is Op.LOAD for node in nodes)
    simple = analyse_mask(schedule.mask).exact and PRODUCT not in gradient
    return simple and not (places or summed.of_keys or summed.diagonals)
