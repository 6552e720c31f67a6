"""Which programs the kernels for Hopper (kernels/hopper/) can run, and which suit them; asked before tracing."""

from __future__ import annotations

import itertools

from attention_engine.ir.expr import Axis, Expr, Op, VarKind, const, substitute, topological
from attention_engine.ir.key_condition import key_condition
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import (
    DELTA,
    KV_IDX,
    PRODUCT,
    Q_IDX,
    WEIGHT,
    Backward,
    is_start,
    row_variable,
)
from attention_engine.passes.analyse_mask import analyse_mask
from attention_engine.passes.drop_weights import drops_by_places
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.row_values import proportion
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule
from attention_engine.passes.simplify import simplify
from attention_engine.passes.steps import ReduceStep, TileStep
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan.forms import Tile
from attention_engine.plan.rules import HELD_THREADS, STORED_MATRICES, UNIFORM_GROUPS

FORWARD_DIMS = frozenset({(32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (128, 256), (256, 256)})
BACKWARD_DIMS = frozenset(
    {*itertools.product((64, 128), repeat=2), (32, 32), (96, 96), (160, 160), (192, 128), (128, 256), (256, 256)}
)
KEY_SUM_DIMS = frozenset({(64, 64)})
MOST_ROWS = 3  # for which 227 KB have room beside 256 KB of tiles
PLACES = frozenset({Q_IDX, KV_IDX})
LIGHT = frozenset({Op.CONST, Op.VAR, Op.DETACH, Op.ADD, Op.MUL, Op.EXP2, Op.MAXIMUM, Op.MINIMUM})
OF_PLACES = LIGHT | {Op.CAST, Op.ABS}
SPECIAL = frozenset(
    {Op.RECIP, Op.POW, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG1P, Op.SOFTPLUS, Op.SQRT, Op.RSQRT,
     Op.TANH, Op.SIGMOID, Op.ERF, Op.SIN, Op.COS, Op.ATAN}
)  # fmt: skip
OF_SIGNS = frozenset({Op.CONST, Op.VAR, Op.MUL, Op.LESS, Op.WHERE})

DROP_DIMS = frozenset({(64, 64), (128, 128)})
ALL_UNITS = 1 << 30
QUARTERS = 4  # of a step, in which it is told how far blocks are apart
LISTED = Tile(128, 64, 256, 2)  # of a backward pass over queries whose keys a call lists
L2_BYTES = 32 * 1024 * 1024  # for what heads share, of the 50 MB that an H100 has


def copies_are_wide(problem: Problem) -> bool:
    """Are rows whole 16 bytes, as the copies of a tile want? What it has beyond a row, copies fill with zeros, and
    leave out on the way back."""
    return problem.stride_unit == 8


def why_not_forward(problem: Problem, schedule: ForwardSchedule) -> str | None:
    """Why there is no such forward kernel; None: there is one. Another tile of scores, or of a bias, finds no
    room."""
    if problem.dtype == "float32":
        return "products of fp32"
    if problem.tile_dims not in FORWARD_DIMS or not copies_are_wide(problem):
        return f"head dims {problem.dim}/{problem.dim_v}"
    if problem.staged:
        return "a bias of pairs is copied ahead, and finds no room"
    if any(isinstance(step, ReduceStep) and step.source is not None for step in schedule.steps):
        return "a row is reduced of another tile than its scores, which finds no room"
    return None


def may_drop_apart(problem: Problem, schedule: ForwardSchedule | BackwardSchedule) -> bool:
    """May a group of warps of its own choose which weights are dropped? It leaves registers for two groups that
    compute, and its bits of 128 keys fill a word."""
    return (problem.dim, problem.dim_v) in DROP_DIMS and drops_by_places(schedule)


def why_not_over_keys(problem: Problem, schedule: BackwardSchedule, summed: CustomSums) -> str | None:
    """Why there is no such kernel over keys; None: there is one.

    Two warpgroups share dQ by its 64 rows, or 64 head dims, each. Sums for custom inputs are made of the gradients of
    products; others would need a tile of their own, and atomics a pair wait for too long. Sums of keys need registers
    that wider heads leave too few of (ptxas C7512). The widest heads leave shared memory for few rows.
    """
    dims = problem.tile_dims
    if problem.dtype == "float32":
        return "products of fp32"
    if dims not in BACKWARD_DIMS or not copies_are_wide(problem):
        return f"head dims {problem.dim}/{problem.dim_v}"
    if problem.staged:
        return "a bias of pairs is copied ahead, and finds no room"
    if summed.scattered:
        return "gradients of a custom input are added pair by pair"
    if schedule.extremes:  # whose rows another kernel must meet to the last bit
        return "the extreme of a row has a gradient"
    if summed.of_keys and dims not in KEY_SUM_DIMS:
        return f"sums of keys find no registers at head dims {problem.dim}/{problem.dim_v}"
    if max(dims) > 128 and rows_read(schedule) > MOST_ROWS:
        return f"more than {MOST_ROWS} rows of numbers find no room"
    summed_too = (*summed.of_keys, *summed.diagonals)
    if any(proportion(expr, schedule.product_gradient) is None for _, expr in summed_too):
        return "the gradient of a custom input is no multiple of the products' gradient"
    return None


def rows_read(schedule: BackwardSchedule) -> int:
    """How many rows of numbers the pairs read."""
    nodes = topological(schedule.weights, schedule.product_gradient, *(e for _, e in schedule.pair_gradients))
    return sum(node.kind is VarKind.ROW for node in nodes)


def pairs_in_turn(problem: Problem, tile: Tile) -> bool:
    """Do dK and dV leave registers for one fp32 tile of pairs only, where warpgroups have their own keys? They may take
    128 a thread; with more, weights are packed before their gradients are made."""
    sums = tile.kv * (padded(problem.dim) + padded(problem.dim_v)) // tile.threads
    return sums > 128 and not tile.shared_weights


def starts_longest_first(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """Do blocks of earlier keys start first, as they have more queries, or as later ones add to dQ behind them? What
    that works out takes registers, of which the form that has pairs in turn has none left."""
    sorted_by_grid = tile.hopper and not tile.within_sequences  # a list says their order there
    first = plan.later_is_longer or tile.in_order
    return sorted_by_grid and first and not pairs_in_turn(problem, tile)


def starts_latest_first(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """Do blocks of later keys start first, which have fewer queries? Where they add to dQ in order, each block then
    comes to a tile a step or more after the block of keys behind it, and none waits. On an H100, causal, head dim 64,
    S 2048 and 8192: 10 and 13 % faster. At 128, where the last unit starts longest first, from 0.88 to 0.91 of the
    default (S 2048, batch 2), 0.90 to 0.95 (batch 8), 0.87 to 0.95 (S 4096), 0.93 to 0.96 (S 8192). Blocks of grouped
    heads are longer, and fewer: those that start last run alone."""
    dims = problem.dim, problem.dim_v
    return tile.in_order and plan.later_is_longer and problem.group == 1 and (tile.q == tile.kv or dims == (128, 128))


def may_end_longest_first(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """May the last of those units start with the longest blocks, so that short ones end it? A block then starts before
    that of the keys behind its own, and comes to a tile a step later all the same. So it doesn't wait, where a step
    takes longer than an addition takes to be handed on. On an H100, head dim 64, S 2048, batch 2 and 8, 0.867 to 0.897
    and 0.951 to 0.945 of the default, S 1024, 4096 and 8192 within 1 %. Head dim 32, whose steps are shorter, was not
    measured."""
    wide = (problem.dim, problem.dim_v) in ((64, 64), (128, 128))
    return starts_latest_first(problem, tile, plan) and wide


def heads_alternate(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """Do key heads of even numbers and those of odd ones go through their tiles in opposite directions, and in opposite
    orders of keys (hopper/keys/order.py)? Blocks of grouped heads that run together read the same queries so, as walks
    that turn do (`walks_turn`), and none waits for long. A head's order hangs on its own number alone, so that a batch
    changes no bit."""
    both = problem.kv_heads % 2 == 0 and (problem.dim, problem.dim_v) == (128, 128)
    return tile.in_order and problem.group > 1 and plan.later_is_longer and both


def may_start_apart(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """May blocks of a head that add to dQ in order start their walks apart (kernels/apart.py)? Where all meet the same
    tiles, a part of the walk; where heads alternate, some steps.

    Head dim 64, whose blocks take few registers more, is as fast without. Grouped heads without a mask then walk over
    one head after another (`walks_by_heads`)."""
    if heads_alternate(problem, tile, plan):
        return True
    return tile.in_order and not plan.later_is_longer and (problem.dim, problem.dim_v) == (128, 128)


def walks_turn(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """Do blocks over keys walk from the last queries to the first, so many and then not so many (blocks_of_a_turn)?

    Longest first, the first to run start together, and each sees queries from its own keys on. From the last query
    down they read the same ones at the same time. They end one after another, the shortest first, and the next begin
    so, the longest first: those read the same ones at the same time from their first query up, and end together. Were
    all to walk alike, half of the blocks would read at as many places as there are blocks, all heads of a group at
    each, which the L2 cache doesn't hold.
    """
    grouped = problem.group > 1 and starts_longest_first(problem, tile, plan)
    return grouped and plan.sees_to_the_end and not tile.persistent and not tile.in_order


def may_add_in_order(problem: Problem, tile: Tile, plan: TilePlan, summed: CustomSums) -> bool:
    """May blocks over keys add to dQ one after another, in an order of their keys (kernels/hopper/keys/order.py)?

    A block waits for others of its head, so of two neighbours one must meet every tile of queries that the other does:
    what a key doesn't see, later ones don't either, and all see the last queries, or nothing. Walks of grouped heads
    whose blocks differ in length do not turn then: on an H100, 32/8 heads, causal, S 2048, 4096 and 8192, 0.75, 0.74,
    0.81 of the default at head dim 128, by a second kernel 0.80, 0.80, 0.77; where heads alternate 0.91, 0.92, 0.91. At
    64 0.93, 0.95, 0.94 for 0.74.
    """
    grid = tile.hopper and not (tile.persistent or tile.within_sequences or tile.drops_apart or tile.shared_weights)
    sums = (summed.of_keys, summed.diagonals, summed.scattered, summed.by_rows)
    nested = plan.sees_to_the_end and all(bound.kv <= 0 for bound in plan.bounds.bounds)
    dims = (problem.dim, problem.dim_v)
    suits = dims == (64, 64) or (dims == (128, 128) and problem.kv_heads % 2 == 0)
    turned = problem.group > 1 and plan.later_is_longer and not suits
    return grid and nested and not turned and not any(sums) and not pairs_in_turn(problem, tile)


def adds_in_order(tile: Tile, plan: TilePlan) -> Tile:
    """The same whose blocks do. Where each tile of queries has one that sees the first key, by bounds that hold in
    every launch, some block adds to dQ of each, and the first to do so stores."""
    seen = all(not bound.starts and bound.q * (tile.q - 1) + bound.offset >= 0 for bound in plan.bounds.bounds)
    return tile.in_form(in_order=True, stores_first=seen)


def rules_of_backward(problem: Problem) -> tuple[str, ...]:
    """What is done to the text of backward kernels placed by hand. Gradients of products leave registers by matrices at
    head dims 64: on an H100 1 to 2 % faster; at 128, where they are fewer, 1 % slower."""
    narrow = (problem.dim, problem.dim_v) == (64, 64)
    return (UNIFORM_GROUPS, HELD_THREADS, *[STORED_MATRICES] * narrow)


def walks_over_listed_keys(problem: Problem, schedule: BackwardSchedule, plan: TilePlan, summed: CustomSums) -> bool:
    """Is the backward pass one over queries (kernels/hopper/queries.py): where a call lists blocks of whole tiles of
    keys for blocks of whole tiles of queries, and its maths leaves registers for it. Not where each query head has keys
    of its own, and blocks have whole tiles of 128: over keys, such a tile adds half as much to memory. Heads that share
    keys read more than the L2 cache holds there (on an H100, four of them: 343 TFLOP/s for 437)."""
    blocks = plan.blocks
    if blocks is None or not plan.bounds_say_the_rest or blocks.q % LISTED.q or blocks.kv % LISTED.kv:
        return False
    if problem.group == 1 and blocks.kv % (2 * LISTED.kv) == 0:
        return False
    sums = (summed.of_keys, summed.diagonals, summed.scattered, summed.pairs, summed.by_rows)
    plain = (
        schedule.dropped is None and not schedule.extremes and not any(sums) and key_condition(schedule.mask) is None
    )
    read = topological(schedule.product_gradient)
    by_hand = problem.dtype != "float32" and copies_are_wide(problem) and not problem.staged
    return by_hand and plain and PRODUCT not in read and (problem.dim, problem.dim_v) == (128, 128)


def walks_by_heads(problem: Problem, tile: Tile, plan: TilePlan) -> bool:
    """Does a block over keys walk over all queries of one head, and then over those of the next?

    Where blocks that run together see other queries (windows, documents, walks that start apart), they read at as many
    places as there are blocks. The L2 cache holds those of one head of each group, not of all. Those that add to dQ in
    order under causal masks would wait at a head's first tiles for blocks that have more of the head before. The form
    that has pairs in turn has no registers left for it.
    """
    if tile.in_order and plan.later_is_longer:
        return False
    apart = plan.mapped or bool(plan.bounds.bounds) or may_start_apart(problem, tile, plan)
    grouped = problem.group > 1 and not plan.by_head and not pairs_in_turn(problem, tile)
    return grouped and apart and not walks_turn(problem, tile, plan)


def backward_persists(problem: Problem, tile: Tile) -> bool:
    """Is there a form of that kernel over keys whose blocks walk over items? Its warpgroups have keys of their own, and
    tiles of keys and values lie in blocks of 64 columns, by which results leave."""
    return (problem.dim, problem.dim_v) == (128, 128) and not tile.shared_weights


def makes_delta(
    problem: Problem, rows: Backward, schedule: BackwardSchedule, summed: CustomSums, tile: Tile
) -> bool:  # fmt: skip
    """Do blocks over keys make delta for blocks after them? Where shared memory has room for rows of o and do, one row
    of delta alone (and of gradients of returned rows) is all that is made of it, and weights are made without it. Nor
    where gradients of custom inputs are sums of pairs: they take that room, or kernels whose tiles end elsewhere.

    Where blocks add to dQ in order, two warps make it (on an H100, head dim 128: 0 to 5 % faster, 64: 2 to 5 % slower),
    if nobody zeroes sums before."""
    of_delta, widest = rows_of_delta(rows), max(problem.dim, problem.dim_v)
    if widest > 128 or (tile.in_order and not (tile.stores_first and widest == 128)):
        return False
    if rows.exact_delta or rows.row_gradients or len(of_delta) != 1:
        return False
    name, expr = of_delta[0]
    read = [n for n in topological(expr) if n.op is Op.VAR and n is not DELTA]
    alone = all(n.kind is VarKind.ARRIVING for n in read)
    late = row_variable(name) not in topological(*(e for e in (schedule.weights, schedule.mask) if e is not None))
    return alone and late and not any((summed.of_keys, summed.diagonals, summed.pairs, summed.by_rows))


def rows_of_delta(rows: Backward) -> list[tuple[str, Expr]]:
    """The rows that delta is needed for."""
    return [(name, expr) for name, expr in rows.rows if DELTA in topological(expr)]


def vanishes_with_weights(schedule: BackwardSchedule) -> bool:
    """Is the gradient of a product 0 where its weight is?"""
    nothing = simplify(substitute(schedule.product_gradient, {WEIGHT: const(0.0)}))[0]
    return nothing.op is Op.CONST and nothing.value == 0


def scores_are_light(schedule: ForwardSchedule) -> bool:
    """Do its pairs need few registers? Scores that are products, weights of few operations, a mask of plain bounds."""
    return schedule.score is PRODUCT and _weights_are_light(schedule)


def scores_are_of_places(schedule: ForwardSchedule) -> bool:
    """Are they light but for what places add to a score, or multiply it with, as ALiBi and retention do?"""
    of_places = all(node.op in OF_PLACES or is_start(node) for node in topological(schedule.score))
    return schedule.score is not PRODUCT and of_places and _weights_are_light(schedule)


def products_take_turns(schedule: ForwardSchedule) -> bool:
    """Should two warpgroups issue their products in turns? Where a pair takes no more than one special function:
    two of them (softcap, sigmoid) bound a step, not products.

    Measured on an H100 at head dim 128, S 8192, against groups that only start apart: ALiBi 621 to 632 TFLOP/s,
    relative biases 612 to 635, documents 526 to 555; softcap 552 to 538, causal sigmoid 600 to 605.
    """
    return sum(node.op in SPECIAL for node in _of_pairs(schedule.score, *_weights(schedule))) <= 1


def weights_take_special_functions(schedule: ForwardSchedule) -> bool:
    """Are there any that multiplications of the output could run beside?"""
    return any(node.op in SPECIAL for node in _of_pairs(*_weights(schedule)))


def _weights(schedule: ForwardSchedule) -> list[Expr]:
    return [step.value for step in schedule.steps if isinstance(step, TileStep)]


def _of_pairs(*exprs: Expr) -> list[Expr]:
    return [node for node in topological(*exprs) if Axis.KEY in node.axes]


def _weights_are_light(schedule: ForwardSchedule) -> bool:
    nodes = topological(*_weights(schedule))
    return all(node.op in LIGHT or is_start(node) for node in nodes) and analyse_mask(schedule.mask).exact


def pairs_issue_much(schedule: ForwardSchedule) -> bool:
    """Is every pair's score more than a product? Then what a warp issues counts, and chains of row sums issue more.

    Measured on an H100 at head dim 128, in one chain instead of four: ALiBi 538 to 621 TFLOP/s, softcap 530 to 547,
    retention as before, softmax 673 to 658. Biases that most tiles read once (`ends`) are left in four.
    """
    return schedule.score is not PRODUCT and schedule.ends is None


def pairs_are_light(schedule: BackwardSchedule, summed: CustomSums, dims: tuple[int, int]) -> bool:
    """Do its pairs leave registers for the larger tile of these head dims? Only where a mask has plain bounds, pairs
    read no custom input, and none has a gradient summed over pairs; or where they read one table of distances with ends
    and make its gradient, and no pair is masked.

    Compiled for head dims 128: a product that is kept fits where its sign is all that is asked (ReLU) and nothing is
    masked. Places fit at head dims 64; at 128 where they leave the gradient of a product alone (ALiBi, not retention)
    and later queries see more keys, so that blocks have numbers of their own: with the GPU's, products wait for one
    another (ptxas C7512).
    """
    gradient = topological(schedule.product_gradient)
    nodes = [*gradient, *topological(schedule.weights)]
    plan = plan_tiles(schedule.mask)
    reads = {node for node in nodes if node.op is Op.LOAD and not is_start(node)}
    if plan.mapped or summed.of_keys:
        return False
    if reads or summed.diagonals:
        one_table = len(reads) == 1 and schedule.ends is not None and len(summed.diagonals) == 1
        return dims == (128, 128) and one_table and not plan.bounds.bounds and PRODUCT not in gradient
    if PRODUCT in gradient:
        return dims == (128, 128) and not plan.bounds.bounds and all(node.op in OF_SIGNS for node in gradient)
    if not PLACES & set(nodes) or dims == (64, 64):
        return True
    return dims == (128, 128) and not PLACES & set(gradient) and plan.later_is_longer
