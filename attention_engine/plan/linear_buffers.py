"""The arguments of every kernel of linear attention, in the order of its parameters.

Tensors are (batch, tokens, heads, dim), states (batch, heads, dim, dim_v). Tokens are cut into chunks, and rows are
padded to whole ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import (
    ROLES,
    LinearProblem,
    LinearProgram,
    LinearTile,
    Role,
    StatesForm,
    channel_tiles,
    column_tiles,
    parts_of,
    state_tiles,
    width_tiles,
)
from attention_engine.plan import buffers
from attention_engine.plan.buffers import BATCH, Argument, Arguments, Buffer, Number, Size, ceil_div, length, own_length

TOKENS, PIECES = length("length"), length("pieces")
PIECE = Number("piece_length")  # tokens of a piece, the last one's aside: whole chunks


def chunks_of(chunk: int) -> Expr:
    """How many chunks there are."""
    return ceil_div(TOKENS, chunk)


def inputs(problem: LinearProblem, names: Iterable[str]) -> list[Argument]:
    """These tensors, of "q", "k", "v" and "do", each once."""
    found: list[Argument] = []
    for name in dict.fromkeys(names):
        shape = (BATCH, TOKENS, problem.heads_of(name), problem.dim_of(name))
        strides = tuple(f"{name}_stride_{axis}" for axis in ("batch", "length", "head"))
        found.append(Buffer(name, shape, problem.dtype, buffers.Role.GIVEN, strides=strides, unit=problem.stride_unit))
    return found


def custom_inputs(problem: LinearProblem) -> list[Argument]:
    """The custom inputs."""
    lengths: dict[str, Size] = {"batch": BATCH, "heads": problem.heads, "seq_len": TOKENS, "seq_len_kv": TOKENS}
    found: list[Argument] = []
    for name, dtype, axes in problem.custom:
        sizes: list[Size] = [1] if not axes else []
        for axis in axes:
            known = axis if isinstance(axis, int) else lengths.get(axis)
            sizes.append(own_length(name, str(axis)) if known is None else known)
        found.append(Buffer(f"custom_{name}", tuple(sizes), dtype, buffers.Role.GIVEN))
    return found


def decay(problem: LinearProblem) -> list[Argument]:
    """The decays of tokens, or of their channels; none where no mod reads them."""
    if not problem.decay_dtype:
        return []
    axes = ("batch", "length", "head", *(["channel"] if problem.per_channel else []))
    shape: tuple[Size, ...] = (BATCH, TOKENS, problem.heads, *([problem.dim] if problem.per_channel else []))
    strides = tuple(f"decay_stride_{axis}" for axis in axes)
    return [Buffer("decay", shape, problem.decay_dtype, buffers.Role.GIVEN, strides=strides)]


def row_shape(problem: LinearProblem, chunk: int) -> tuple[Size, ...]:
    """One number for each batch, head and token."""
    return (BATCH, problem.heads, chunks_of(chunk) * chunk)


def sums(problem: LinearProblem, chunk: int) -> Buffer:
    """Sums of decays from each chunk's first token on: whole parts and low ones, where there are two."""
    shape = row_shape(problem, chunk)
    if problem.per_channel:
        shape = (*shape, problem.dim)
    elif problem.splits:
        shape = (2, *shape)
    return Buffer("sums", shape, key=f"sums of {chunk}")


def states(problem: LinearProblem, chunk: int, name: str, key: str = "") -> Buffer:
    """A state before (or after) each chunk."""
    shape = (BATCH, problem.heads, chunks_of(chunk), problem.dim, problem.dim_v)
    return Buffer(name, shape, problem.state_dtype, key=key)


def state(problem: LinearProblem, name: str, key: str, given: bool = False, pieces: bool = False) -> Buffer:
    """One state a head, or one for each of its pieces, in fp32."""
    role = buffers.Role.GIVEN if given else buffers.Role.MADE
    each = [PIECES] if pieces else []
    return Buffer(name, (BATCH, *each, problem.heads, problem.dim, problem.dim_v), role=role, key=key)


def of_role(problem: LinearProblem, program: LinearProgram, role: Role, chunk: int) -> list[Argument]:
    """What kernels of a role read: its tensors, the custom inputs and the sums of decays."""
    names = [role.rows, role.columns, role.others, *([role.own] if role.own else [])]
    own_sums = [sums(problem, chunk)] if program.decays else []
    return [*inputs(problem, names), *custom_inputs(problem), *own_sums]


def result_shape(problem: LinearProblem, role: Role) -> tuple[Size, ...]:
    """Of the output, or of the gradient of a tensor."""
    own = role.own or "v"
    return (BATCH, TOKENS, problem.heads_of(own), problem.dim_of(own))


def place_of(role: Role) -> str:
    """Where a role's result lies."""
    return "o" if role.own is None else role.name


def row_sums(problem: LinearProblem, role: Role, tile: LinearTile, decay_rows: bool, reads: int) -> list[Argument]:
    """What rows are summed to, in a part for each tile of columns."""
    of_decays = ["of_state", "of_pairs"] if decay_rows else []
    shape = (column_tiles(problem, role, tile)[1], *row_shape(problem, tile.chunk))
    names = [*of_decays, *(f"read_{n}" for n in range(reads))]
    return [Buffer(n, shape, key=f"{role.name} {n}") for n in names]


def has_decay_rows(program: LinearProgram, role: Role, asked: bool) -> bool:
    """Do rows of this role add to the gradient of decays?"""
    return asked and program.decays and role.transposed


def walk(
    problem: LinearProblem, program: LinearProgram, name: str, tile: LinearTile, starts: bool, ends: bool, reads: int,
    pieces: bool = False,
) -> Arguments:  # fmt: skip
    """Of a walk that makes a role's result, with the state that it (or each piece of it) begins and ends with."""
    role = ROLES[name]
    first = "initial" if name in ("output", "dq") else "d_last"
    last = "last" if name == "output" else "d_initial"
    return (
        *of_role(problem, program, role, tile.chunk),
        *([PIECE] if pieces else []),
        *([state(problem, "first", first, True, pieces)] if starts else []),
        Buffer("result", result_shape(problem, role), problem.dtype, key=place_of(role)),
        *([state(problem, "last", last, False, pieces)] if ends else []),
        *row_sums(problem, role, tile, False, reads),
    )


def chunk_rows(
    problem: LinearProblem, program: LinearProgram, name: str, tile: LinearTile, decay_rows: bool, reads: int
) -> Arguments:
    """Of the kernel that makes a role's result in all chunks at once; in parts, where heads that share a tensor are
    summed later."""
    role = ROLES[name]
    parts, shape = parts_of(problem, role, tile), result_shape(problem, role)
    result = Buffer("result", shape, problem.dtype, key=place_of(role))
    if parts > 1:
        result = Buffer("result", (parts, *shape), key=f"parts of {place_of(role)}")
    kept = "d_states" if role.over_keys else "states"
    return (
        *of_role(problem, program, role, tile.chunk), states(problem, tile.chunk, "states", kept), result,
        *row_sums(problem, role, tile, has_decay_rows(program, role, decay_rows), reads),
    )  # fmt: skip


def states_walk(problem: LinearProblem, program: LinearProgram, tile: LinearTile, form: StatesForm) -> Arguments:
    """Of a walk along chunks that keeps states, or in reverse their gradients, or makes the last ones alone."""
    chunk, names, pieces = tile.chunk, ("q", "do") if form.reverse else ("k", "v"), form.pieces
    found = [*inputs(problem, names), *custom_inputs(problem)]
    found += [sums(problem, chunk)] if program.decays else []
    found += [PIECE] if pieces else []
    found += [state(problem, "first", "d_last" if form.reverse else "initial", True, pieces)] if form.starts else []
    found += [states(problem, chunk, "other", "states")] if form.overlaps else []
    found += [state(problem, "initial", "initial", True, pieces)] if form.initial else []
    found += [states(problem, chunk, "kept", "d_states" if form.reverse else "states")] if form.keeps else []
    found += [state(problem, "last", last_of(form), False, pieces)]
    return (*found, *([overlap(problem, tile)] if form.overlaps else []))


def last_of(form: StatesForm) -> str:
    """Where a walk of states leaves the last ones."""
    if form.keeps:
        return "d_initial" if form.reverse else "last"
    return "d_states of pieces" if form.reverse else "states of pieces"


def overlap(problem: LinearProblem, tile: LinearTile) -> Buffer:
    """Products of each chunk's state and its gradient, by tiles; for each channel, where channels have decays."""
    inner = (width_tiles(problem, tile), problem.dim) if problem.per_channel else (state_tiles(problem, tile),)
    return Buffer("overlap", (BATCH, problem.heads, chunks_of(tile.chunk), *inner))


def step(problem: LinearProblem, starts: bool) -> Arguments:
    """Of one token of decoding."""
    output = Buffer("o", (BATCH, TOKENS, problem.heads, problem.dim_v), problem.dtype)
    return (
        *inputs(problem, "qkv"), *decay(problem), *custom_inputs(problem),
        *([state(problem, "first", "initial", given=True)] if starts else []), output, state(problem, "last", "last"),
    )  # fmt: skip


def sum_decays(problem: LinearProblem, chunk: int) -> Arguments:
    """Of the kernel that sums decays within chunks."""
    return (*decay(problem), *custom_inputs(problem), sums(problem, chunk))


def decay_gradients(problem: LinearProblem, chunk: int, tiles: tuple[int, int, int], reads: int) -> Arguments:
    """Of the kernel that makes the gradient of decays of tokens. tiles: how many parts dq's rows, dk's rows and the
    overlaps come in."""
    shape = row_shape(problem, chunk)
    sources = [("of_queries", "dq of_state"), ("of_query_pairs", "dq of_pairs")]
    found: list[Argument] = [Buffer(n, (tiles[0], *shape), key=key) for n, key in sources]
    sources = [("of_keys", "dk of_state"), ("of_key_pairs", "dk of_pairs")]
    found += [Buffer(n, (tiles[1], *shape), key=key) for n, key in sources]
    found += [Buffer("overlap", (BATCH, problem.heads, chunks_of(chunk), tiles[2]))]
    if problem.decay_dtype:
        found.append(Buffer("gradient", (BATCH, TOKENS, problem.heads), key="d_decay"))
    found += [Buffer(f"read_{n}", shape, key=f"decay read_{n}") for n in range(reads)]
    return (*decay(problem), *custom_inputs(problem), *found)


# ---- where each channel has a decay of its own


def scores(problem: LinearProblem, chunk: int) -> Buffer:
    """The weights of each chunk's pairs: (batch, head, query, key within the chunk)."""
    return Buffer("scores", (*row_shape(problem, chunk), chunk))


def values(problem: LinearProblem, name: str, dtype: str, dim: int, key: str) -> Buffer:
    """A contiguous tensor with one head for each head of v."""
    return Buffer(name, (BATCH, TOKENS, problem.heads, dim), dtype, key=key)


def channel_scores(problem: LinearProblem, tile: LinearTile) -> Arguments:
    """Of the kernel that makes the weights of pairs."""
    found = (*inputs(problem, "qk"), *custom_inputs(problem), sums(problem, tile.chunk))
    return (*found, scores(problem, tile.chunk))


def channel_rows(problem: LinearProblem, name: str, tile: LinearTile, reads: int) -> Arguments:
    """Of the kernel that makes the output, or the gradient of v."""
    role, chunk = ROLES[name], tile.chunk
    names = [role.rows, role.others, *([role.own] if role.own else [])]
    shape = (width_tiles(problem, tile), *row_shape(problem, chunk))
    return (
        *inputs(problem, names), *custom_inputs(problem), sums(problem, chunk),
        states(problem, chunk, "states", "d_states" if role.over_keys else "states"), scores(problem, chunk),
        values(problem, "result", problem.dtype, problem.dim_v, place_of(role)),
        *(Buffer(f"{role.own}_read_{n}", shape) for n in range(reads)),
    )  # fmt: skip


def channel_gradients(
    problem: LinearProblem, tile: LinearTile, of_decay: bool, parts: int, reads: tuple[int, int, int]
) -> Arguments:
    """Of the kernel that makes the gradients of q, k and decay, for each head of v; in fp32 where heads are still to be
    summed. parts: of the overlaps."""
    chunk = tile.chunk
    found = [*inputs(problem, ("q", "k", "v", "do")), *(decay(problem) if of_decay else []), *custom_inputs(problem)]
    found += [sums(problem, chunk), states(problem, chunk, "states", "states")]
    found += [states(problem, chunk, "d_states", "d_states")]
    if of_decay:
        found.append(Buffer("overlap", (BATCH, problem.heads, chunks_of(chunk), parts, problem.dim)))
    for name in "qk":
        whole = problem.heads_of(name) == problem.heads
        key = f"d{name}" if whole else f"d{name} of heads"
        found.append(values(problem, f"d{name}", problem.dtype if whole else "float32", problem.dim, key))
    found += [values(problem, "d_decay", "float32", problem.dim, "d_decay")] if of_decay else []
    shape = (channel_tiles(problem, tile), *row_shape(problem, chunk))
    names = [f"{name}_read_{n}" for name, count in zip(("q", "k", "decay"), reads, strict=True) for n in range(count)]
    return (*found, *(Buffer(n, shape) for n in names))
