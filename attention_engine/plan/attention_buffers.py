"""The arguments of every kernel of softmax-like attention, in the order of its parameters.

Tensors are (batch, length, heads, dim), rows (batch, heads, queries), in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from attention_engine.ir.block_lists import ListedBlocks
from attention_engine.ir.expr import Axis, Expr, Op, const, make
from attention_engine.ir.problem import STAGED_UNIT, Problem, padded
from attention_engine.ir.program import PLACES, Backward
from attention_engine.passes.read_places import CustomSums
from attention_engine.passes.schedule import BackwardSchedule, ForwardSchedule
from attention_engine.passes.tile_plan import TilePlan, plan_tiles
from attention_engine.plan.buffers import (
    BATCH,
    KEYS,
    QUERIES,
    Argument,
    Arguments,
    Buffer,
    Number,
    Role,
    Size,
    ceil_div,
    length,
    own_length,
)
from attention_engine.plan.forms import ROW_PAD, HopperForward, Tile
from attention_engine.plan.hopper import (
    makes_delta,
    may_end_longest_first,
    may_start_apart,
    starts_longest_first,
    walks_turn,
)

LISTS, DEALT = "tile_lists", "items_dealt"
INDICES, COUNTS = "block_indices", "block_counts"
DK_SUMS, DV_SUMS = "dk_sums", "dv_sums"
DK_PARTS, DV_PARTS = "dk_parts", "dv_parts"
SEQUENCE_TILES, KEY_TILES = "sequence_tiles", "key_tiles"
TOGETHER, TURN, AHEAD, MADE_BEFORE = "pairs_of_a_unit", "blocks_of_a_turn", "units_ahead", "units_given"
APART, ENDS = "starts_apart", "ends_longest_first"
LENGTHS = {"batch": BATCH, "seq_len": QUERIES, "seq_len_kv": KEYS}  # of custom inputs' axes


def padded_length(size: Expr, pad: int) -> Expr:
    """A length rounded up for rows that are the backward pass's own, `problem.padded_rows` as an expression."""
    return ceil_div(size + ROW_PAD, pad) * pad


def tensor(name: str, size: Expr, heads: int, dim: int, problem: Problem, role: Role = Role.MADE) -> Buffer:
    """A contiguous tensor in the problem's dtype."""
    return Buffer(name, (BATCH, size, heads, dim), problem.dtype, role)


def strided(name: str, size: Expr, heads: int, dim: int, problem: Problem) -> Buffer:
    """A caller's tensor, with strides of its own."""
    names = tuple(f"{name}_stride_{axis}" for axis in ("batch", "length", "head"))
    return Buffer(name, (BATCH, size, heads, dim), problem.dtype, Role.GIVEN, strides=names, unit=problem.stride_unit)


def row(name: str, problem: Problem, pad: int = 1, role: Role = Role.MADE) -> Buffer:
    """One number for each batch, head and query; queries are padded to a multiple of `pad`."""
    return Buffer(name, (BATCH, problem.heads, QUERIES if pad == 1 else padded_length(QUERIES, pad)), role=role)


def custom_shape(problem: Problem, name: str) -> tuple[Size, ...]:
    """The shape of a custom input; an axis with a name of its own has a length of its own."""
    (axes,) = [axes for each, _, axes in problem.custom if each == name]
    lengths: dict[str, Size] = {**LENGTHS, "heads": problem.heads}
    found = [a if isinstance(a, int) else lengths[a] if a in lengths else own_length(name, a) for a in axes]
    return tuple(found) or (1,)


def custom_inputs(problem: Problem, names: Collection[str] | None = None) -> Arguments:
    """The custom inputs (of these names alone), staged ones with their strides."""
    found = []
    for name, dtype, _ in problem.custom:
        if names is None or name in names:
            shape, staged = custom_shape(problem, name), name in problem.staged
            strides = tuple(f"{name}_stride_{n}" for n in range(len(shape) - 1)) if staged else ()
            unit = STAGED_UNIT if staged else 1
            found.append(Buffer(f"custom_{name}", shape, dtype, Role.GIVEN, strides=strides, unit=unit))
    return tuple(found)


def inputs(problem: Problem) -> Arguments:
    """q, k, v and the custom inputs."""
    return (
        strided("q", QUERIES, problem.heads, problem.dim, problem),
        strided("k", KEYS, problem.heads_of_keys, problem.dim, problem),
        strided("v", KEYS, problem.heads_of_keys, problem.dim_v, problem),
        *custom_inputs(problem),
    )


def output_gradient(problem: Problem) -> Buffer:
    """The gradient of the output."""
    return strided("do", QUERIES, problem.heads, problem.dim_v, problem)


def output(problem: Problem, role: Role = Role.MADE) -> Buffer:
    """The output."""
    return tensor("o", QUERIES, problem.heads, problem.dim_v, problem, role)


def tile_lists(plan: TilePlan, problem: Problem, tile: Tile, over_keys: bool, key: str = "") -> Arguments:
    """Which tiles each block walks over, if the mask's bounds don't say it. over_keys: blocks walk over keys."""
    if not plan.mapped:
        return ()
    rows, tiles = ceil_div(QUERIES, tile.q), ceil_div(KEYS, tile.kv)
    if not over_keys:
        rows, tiles = tiles, rows * plan.candidates(problem)
    shape = (BATCH if plan.by_batch else 1, plan.heads(problem, over_keys), rows, tiles + 1)
    lists = Buffer(LISTS, shape, "int32", key=key)
    return (lists, Buffer(DEALT, (1,), "int32")) if deals_by_counter(plan, tile, over_keys) else (lists,)


def deals_by_counter(plan: TilePlan, tile: Tile, over_keys: bool) -> bool:
    """Does a counter deal the items of a forward pass to persistent blocks, one to whoever is free? Who writes the
    lists sets it to 0, and the last block of a launch sets it back."""
    return plan.mapped and over_keys and isinstance(tile.form, HopperForward) and tile.persistent


def tile_map(problem: Problem, plan: TilePlan, tile: Tile, over_keys: bool, key: str = "") -> Arguments:
    """Of the kernel that writes those lists."""
    lengths = tuple(Number(size.name) for size in (BATCH, QUERIES, KEYS))
    return (*lengths, *custom_inputs(problem, plan.reads), *tile_lists(plan, problem, tile, over_keys, key))


def block_rows(problem: Problem, schedule: ForwardSchedule, blocks: ListedBlocks) -> Arguments:
    """Of the kernel that makes rows of each block that lists name: those that `schedule` returns, for each entry."""
    lists = 1 if blocks.sharing == 0 else problem.heads // blocks.sharing
    shape, entries = (BATCH if blocks.by_batch else 1, lists, length("q_blocks")), length("entries")
    return (
        strided("q", QUERIES, problem.heads, problem.dim, problem),
        strided("k", KEYS, problem.kv_heads, problem.dim, problem),
        *custom_inputs(problem),
        Buffer(INDICES, (*shape, entries), "int32", Role.GIVEN), Buffer(COUNTS, shape, "int32", Role.GIVEN),
        *(Buffer(f"row_{name}", (BATCH, problem.heads, entries, QUERIES)) for name, _ in schedule.rows),
    )  # fmt: skip


def sequence_tiles(problem: Problem, tile: Tile) -> Buffer:
    """(1 + tiles, 2): how many tiles of queries the packed sequences have, then of each its sequence and its first row,
    those with the fewest steps first. There may be as many as rows fill, and one more for each sequence, and for what
    is behind the last."""
    sequences = custom_shape(problem, PLACES)[0]
    return Buffer(SEQUENCE_TILES, (most_tiles(tile, sequences) + 1, 2), "int32")


def most_tiles(tile: Tile, sequences: Size) -> Expr:
    """How many tiles of queries there may be, of so many sequences and what is behind the last."""
    return make(Op.FLOORDIV, QUERIES, const(tile.q)) + sequences


def list_sequence_tiles(problem: Problem, tile: Tile) -> Arguments:
    """Of the kernel that writes that list."""
    lengths = Number(QUERIES.name), Number(KEYS.name)
    return (*lengths, *custom_inputs(problem, {PLACES}), sequence_tiles(problem, tile))


def key_tiles(problem: Problem, tile: Tile) -> Buffer:
    """(1 + tiles, 3): how many tiles of keys packed sequences have, then of each its sequence, its first row, and one
    past its sequence's last. The longest sequences come first. There may be as many as of queries; rows behind the last
    sequence are in tiles too."""
    return Buffer(KEY_TILES, (most_key_tiles(problem, tile) + 1, 3), "int32")


def most_key_tiles(problem: Problem, tile: Tile) -> Expr:
    """How many tiles of keys there may be."""
    return make(Op.FLOORDIV, KEYS, const(tile.kv)) + custom_shape(problem, PLACES)[0]


def list_key_tiles(problem: Problem, tile: Tile) -> Arguments:
    """Of the kernel that writes that list."""
    return (Number(KEYS.name), *custom_inputs(problem, {PLACES}), key_tiles(problem, tile))


def forward(
    problem: Problem, schedule: ForwardSchedule, tile: Tile, lists: str = "", unfinished: bool = False
) -> Arguments:  # fmt: skip
    """Of the kernels that make o and the rows. lists: the place of the tile lists; unfinished: is o stored as it was
    summed, in fp32?"""
    plan, made = plan_tiles(schedule.mask), output(problem)
    return (
        *inputs(problem), *tile_lists(plan, problem, tile, True, lists),
        *([sequence_tiles(problem, tile)] if tile.within_sequences else []),
        replace(made, dtype="float32") if unfinished else made,
        *(row(f"row_{name}", problem) for name, _ in schedule.rows),
    )  # fmt: skip


def extremes(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, lists: str = ""
) -> Arguments:  # fmt: skip
    """Of the kernel that finds rows' extremes, and how many pairs share each."""
    names = [name for extreme in rows.extremes for name in extreme.names]
    return (
        *inputs(problem), *tile_lists(plan_tiles(schedule.mask), problem, tile, True, lists),
        *(row(name, problem).at(f"saved_{name}") for name in names),
    )  # fmt: skip


def workspace(problem: Problem, pad: int) -> Buffer:
    """The sums of dQ: (batch * heads, padded queries * padded dim), tile after tile, each in the order of
    `kernels/workspace.py`. The second length has a name of its own in kernels: that costs no division of 64 bits."""
    sums = length("sums_of_a_head")
    known = padded_length(QUERIES, pad) * padded(problem.dim)
    return Buffer("workspace", (BATCH * problem.heads, sums), known=((sums.name, known),))


def counters(problem: Problem) -> Buffer:
    """(1 + batch * key heads, 2), by which blocks over keys tell how far a unit of them (items.KeyBlocks) is: what is
    left to do, below 0. [1 + unit, PREPARED] of warps that zero its sums or make its rows, [1 + unit, FINISHED] of its
    blocks. The first row says how many blocks were begun, where persistent ones deal them."""
    return Buffer("counters", (const(1) + BATCH * problem.kv_heads, 2), "int32")


def tickets(problem: Problem, tile: Tile) -> Buffer:
    """(batch * heads, tiles of queries): how many blocks of keys have added to a tile's dQ, where they do in order."""
    return Buffer("tickets", (BATCH * problem.heads, ceil_div(QUERIES, tile.q)), "int32")


def place_of_gradient(final: str) -> str:
    """Where the gradient that arrives at a returned row lies: no name of an argument has a blank."""
    return f"gradient of {final}"


def preprocess(
    problem: Problem, backward: Backward, finals: Sequence[str], tile: Tile | None, pad: int, longest_first: bool,
    given: str = "",
) -> Arguments:  # fmt: skip
    """Of the kernel that makes delta and the rows of pairs, and zeroes the sums of dQ. given: the place of a delta that
    comes instead of o and dO."""
    sources: list[Argument] = [output(problem, Role.GIVEN), output_gradient(problem)]
    if given:
        sources = [row("given", problem).at(given)]
    made = {name for extreme in backward.extremes for name in extreme.names}
    saved = [row(f"saved_{n}", problem, role=Role.MADE if n in made else Role.GIVEN) for n in backward.given_rows]
    arriving = [row(f"d_{n}", problem, role=Role.GIVEN).at(place_of_gradient(n)) for n in finals]
    found = [*inputs(problem), *sources, *saved, *arriving, row("delta", problem, pad)]
    found += [row(name, problem, pad) for name, _ in backward.rows]
    if tile is not None:
        found += [key_tiles(problem, tile)] if tile.within_sequences else []
        found += [] if tile.stores_first else [workspace(problem, tile.row_pad)]
        if tile.hopper:
            found += [counters(problem), *([Number(TOGETHER)] if longest_first else []), Number(AHEAD)]
        found += [tickets(problem, tile)] if tile.in_order else []
    return tuple(found)


def custom_sums(problem: Problem, tile: Tile, summed: CustomSums) -> list[Buffer]:
    """What a kernel over keys sums for custom inputs."""
    found = []
    for number, (read, _) in enumerate(summed.of_keys):
        heads = problem.heads if Axis.HEAD in read.axes else problem.kv_heads
        found.append(Buffer(f"key_sum{number}", (BATCH, heads, KEYS), role=Role.ZEROED))
    strips = ceil_div(KEYS, tile.kv) if summed.ordered else 1
    for number in range(len(summed.diagonals)):
        shape = (BATCH, problem.heads, strips, QUERIES + KEYS)
        found.append(Buffer(f"diagonal{number}", shape, role=Role.ZEROED))
    for name in dict.fromkeys(read.name for read, _ in summed.scattered):
        found.append(Buffer(f"d_custom_{name}", custom_shape(problem, name), role=Role.ZEROED))
    return found


def over_keys(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, with_dq: bool, summed: CustomSums,
    persistent: bool = False, lists: str = "", wide: bool = False,
) -> Arguments:  # fmt: skip
    """Of the kernels over keys, which make dK, dV (of key heads that have copies: their parts) and the sums of dQ.
    persistent: their blocks store dQ too; wide: dK and dV are fp32."""
    plan = plan_tiles(schedule.mask)
    found: list[Argument] = [*inputs(problem), *tile_lists(plan, problem, tile, False, lists)]
    found += [key_tiles(problem, tile)] if tile.within_sequences else []
    found += [output_gradient(problem), *(row(name, problem, tile.row_pad) for name, _ in rows.rows)]
    found += key_gradients(problem, wide) if problem.copies == 1 else key_parts(problem)
    if tile.hopper:
        found += [Number(TOGETHER)] if starts_longest_first(problem, tile, plan) else []
        found += [Number(TURN)] if walks_turn(problem, tile, plan) else []
        found += [Number(APART)] if with_dq and may_start_apart(problem, tile, plan) else []
        found += [Number(ENDS)] if with_dq and may_end_longest_first(problem, tile, plan) else []
        makes = with_dq and makes_delta(problem, rows, schedule, summed, tile)
        found += [Number(AHEAD)] if with_dq and (makes or not tile.in_order) else []
        found += [Number(MADE_BEFORE), output(problem, Role.GIVEN)] if makes else []
        found += [dq(problem)] if persistent else []
    if with_dq:
        found += [workspace(problem, tile.row_pad), *([counters(problem)] if tile.hopper else [])]
        found += [tickets(problem, tile)] if tile.in_order else []
    return (*found, *custom_sums(problem, tile, summed))


def key_gradients(problem: Problem, wide: bool = False) -> list[Buffer]:
    """dK and dV."""
    each = ("dk", problem.dim), ("dv", problem.dim_v)
    return [gradient(name, KEYS, problem.heads_of_keys, dim, problem, wide) for name, dim in each]


def key_parts(problem: Problem) -> list[Buffer]:
    """What each part of a group makes of dK and dV, in fp32: (batch, keys, key heads with their copies, dim)."""
    each = ("dk", DK_PARTS, problem.dim), ("dv", DV_PARTS, problem.dim_v)
    return [gradient(name, KEYS, problem.kv_heads, dim, problem, True).at(place) for name, place, dim in each]


def add_parts(problem: Problem, wide: bool) -> Arguments:
    """Of the kernel that adds them up."""
    return (*key_gradients(problem, wide), *(replace(part, name=part.place, key="") for part in key_parts(problem)))


def gradient(name: str, size: Expr, heads: int, dim: int, problem: Problem, wide: bool) -> Buffer:
    """The gradient of q, k or v; wide: in fp32."""
    found = tensor(name, size, heads, dim, problem)
    return replace(found, dtype="float32") if wide else found


def dq(problem: Problem, wide: bool = False) -> Buffer:
    """The gradient of q."""
    return gradient("dq", QUERIES, problem.heads, problem.dim, problem, wide)


def over_queries(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, sums: Sequence[Expr], tile: Tile, pad: int,
    with_dq: bool = True, lists: str = "", exact: str = "", wide: bool = False,
) -> Arguments:  # fmt: skip
    """Of the kernel over queries, which makes dQ and sums of rows. exact: the place of the only sum, if it is delta."""
    plan = plan_tiles(schedule.mask)
    return (
        *inputs(problem), *tile_lists(plan, problem, tile, True, lists), output_gradient(problem),
        *(row(name, problem, pad) for name, _ in rows.rows), *([dq(problem, wide)] if with_dq else []),
        *(row(f"sum{n}", problem).at(exact) for n in range(len(sums))),
    )  # fmt: skip


def key_sums(problem: Problem, tile: Tile) -> Arguments:
    """The sums of dK and dV where blocks of queries add to them: (batch * key heads, padded keys * dim), tile after
    tile, each in the order of `kernels/workspace.py`."""
    keys, owners = ceil_div(KEYS, tile.kv) * tile.kv, BATCH * problem.kv_heads
    dims = (DK_SUMS, problem.dim), (DV_SUMS, problem.dim_v)
    return tuple(Buffer(name, (owners, keys * padded(dim)), role=Role.ZEROED) for name, dim in dims)


def by_queries(
    problem: Problem, schedule: BackwardSchedule, rows: Backward, tile: Tile, lists: str = ""
) -> Arguments:  # fmt: skip
    """Of the kernel over queries that adds to the sums of dK and dV."""
    made = over_queries(problem, schedule, rows, (), tile, tile.row_pad, lists=lists)
    return (*made, *key_sums(problem, tile))


def finish_keys(problem: Problem, tile: Tile) -> Arguments:
    """Of the kernel that makes dK and dV of their sums."""
    return (*key_gradients(problem), *key_sums(problem, tile))


def pairs(problem: Problem, rows: Backward, read: Expr, pad: int, dtype: str) -> Arguments:
    """Of the kernel that makes the gradient of a read as tiles of pairs, of so many queries from the first on."""
    owners = (BATCH if Axis.BATCH in read.axes else 1, problem.heads if Axis.HEAD in read.axes else 1)
    return (
        *inputs(problem), output_gradient(problem), *(row(name, problem, pad) for name, _ in rows.rows),
        Number("first_query"), Buffer("d_pairs", (*owners, length("queries"), KEYS), dtype, Role.GIVEN),
    )  # fmt: skip


def postprocess(problem: Problem, tile: Tile, longest_first: bool, wide: bool = False) -> Arguments:
    """Of the kernel that makes dQ of its sums."""
    found: list[Argument] = [dq(problem, wide), workspace(problem, tile.row_pad)]
    if tile.hopper:
        found += [counters(problem), *([Number(TOGETHER)] if longest_first else [])]
    found += [Number(AHEAD)] if tile.persistent else []
    return tuple(found)
