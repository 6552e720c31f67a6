"""What a user's linear attention is, once traced, and what its kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from attention_engine.ir.expr import Axis, Expr, Op, is_const, topological, var
from attention_engine.ir.pretty import lines
from attention_engine.ir.problem import padded
from attention_engine.ir.program import digest_of_parts

X = var("x", [Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.CHANNEL])  # an entry of q, k, v or decay
GRADIENT = var("dx", [Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.CHANNEL])  # the gradient of what a mod made of it
DECAY_LIMIT = -80.0  # a log decay below this is taken as this: exp(-80) is nothing in fp32, and sums stay accurate


@dataclass(frozen=True)
class LinearProgram:
    """One linear attention: what becomes of an entry X of q, k, v and decay (the log of what a state keeps a token).

    h_t = exp(decay_t) h_{t-1} + k_t^T v_t and o_t = q_t h_t, for each head, with one decay for a token (Sun et al.
    2023, Dao and Gu 2024) or one for each of its channels, the rows of h (gated linear attention, Yang et al. 2024).
    """

    q: Expr
    k: Expr
    v: Expr
    decay: Expr
    custom: tuple[str, ...] = ()

    def named(self) -> Iterator[tuple[str, Expr]]:
        """Every expression with what it is."""
        yield from (("q", self.q), ("k", self.k), ("v", self.v), ("decay", self.decay))

    def mod(self, name: str) -> Expr:
        """The expression of "q", "k", "v" or "decay"."""
        return dict(self.named())[name]

    @property
    def decays(self) -> bool:
        """Does the state fade at all?"""
        return not is_const(self.decay, 0)

    def with_decay(self, decay: Expr) -> LinearProgram:
        """The program with another log decay."""
        return replace(self, decay=decay)

    @property
    def fingerprint(self) -> str:
        """A name of the program that is the same in every process: equal programs, equal fingerprints."""
        parts = [f"{name} {expr.digest}" for name, expr in self.named()] + [f"custom {c}" for c in self.custom]
        return digest_of_parts(parts)

    def loads(self, name: str) -> tuple[Expr, ...]:
        """The reads of custom inputs in one mod, each once."""
        return tuple(n for n in topological(self.mod(name)) if n.op is Op.LOAD)

    def __str__(self) -> str:
        law = "# h = exp(decay) h + k^T v;  o = q h;  x: the tensor's own entry"
        return "\n".join([law, *lines(list(self.named()))])


@dataclass(frozen=True)
class ModGradient:
    """What an entry of a tensor, and each custom input that its mod reads, gets of GRADIENT; all are of X too."""

    x: Expr
    reads: tuple[tuple[Expr, Expr], ...]  # read -> what the entry adds to its gradient


@dataclass(frozen=True)
class LinearProblem:
    """One linear problem, without batch and length, which are run-time values.

    heads: of v, decay, the state and o; q_heads and k_heads divide it (head h reads query head h // (heads / q_heads)).
    dtype: of q, k, v and o; decay_dtype: of decay; per_channel: does each channel of q and k have its own decay? tf32,
    stride_unit and custom as in ir/problem.py.
    """

    heads: int
    q_heads: int
    k_heads: int
    dim: int
    dim_v: int
    dtype: str
    decay_dtype: str = "float32"
    tf32: bool = False
    stride_unit: int = 8
    custom: tuple[tuple[str, str, tuple[int | str, ...]], ...] = ()
    per_channel: bool = False

    @property
    def splits(self) -> bool:
        """Is each fp32 product made of three tf32 ones?"""
        return self.dtype == "float32" and not self.tf32

    @property
    def state_dtype(self) -> str:
        """What states between chunks are kept in.

        fp16 has neither the range of a sum over tokens nor more digits than its products need: there they are fp32.
        bf16 has fp32's range, and a product would round a state to it anyway.
        """
        return "bfloat16" if self.dtype == "bfloat16" else "float32"

    def heads_of(self, name: str) -> int:
        """The heads of "q", "k", "v" or "do"."""
        return {"q": self.q_heads, "k": self.k_heads}.get(name, self.heads)

    def dim_of(self, name: str) -> int:
        """The last dim of "q", "k", "v" or "do"."""
        return self.dim if name in ("q", "k") else self.dim_v


@dataclass(frozen=True)
class LinearTile:
    """How a kernel cuts its work.

    chunk: tokens that meet pair by pair; states stand between chunks. inner: how much of the summed dim a step takes;
    outer: how much of the other dim a block makes. threads of a block; stages of the copy pipeline (0: none). heads:
    the most heads of a group that one block sums the gradient of. in_registers: weights go from registers into their
    product, each warp keeping whole rows; else through shared memory, for blocks with more warps than rows for them.
    specialize: on Hopper, warps of their own copy (only where all products stand in the pipelined loop).
    blocks: how many the compiler leaves registers for on each SM.
    """

    chunk: int
    inner: int
    outer: int
    threads: int
    stages: int
    heads: int = 1
    in_registers: bool = True
    specialize: bool = True
    blocks: int = 1


@dataclass(frozen=True)
class LinearTiles:
    """The tiles of the kernels of one problem; those of the backward pass share one chunk length."""

    forward: LinearTile
    states: LinearTile
    step: LinearTile
    rows: Mapping[str, LinearTile] = field(default_factory=dict)  # by role: "output", "dq", "dk", "dv"
    walks: Mapping[str, LinearTile] = field(
        default_factory=dict
    )  # by role: "dq", "dk", "dv"; absent: never in one walk
    plan: str = "auto"  # "walk" (a result in one kernel), "chunks" (states, then all chunks at once), "auto"


@dataclass(frozen=True)
class StatesForm:
    """What a walk of states makes. reverse: their gradients; starts: it begins with a given state; overlaps: what
    decays get of states; initial: the state that the forward walk began with is given too. pieces: it begins anew in
    each piece of the tokens, all pieces at once; keeps: are states before chunks wanted, or only the last?"""

    reverse: bool
    starts: bool
    overlaps: bool = False
    initial: bool = False
    pieces: bool = False
    keeps: bool = True


@dataclass(frozen=True)
class Role:
    """A result of chunks, as in kernels/linear/token/roles.py; own: the tensor whose gradient it is (None: the
    output)."""

    name: str
    rows: str
    columns: str
    others: str
    own: str | None
    over_keys: bool
    transposed: bool


ROLES = {
    r.name: r
    for r in (
        Role("output", "q", "k", "v", None, over_keys=False, transposed=False),
        Role("dq", "do", "v", "k", "q", over_keys=False, transposed=True),
        Role("dk", "v", "do", "q", "k", over_keys=True, transposed=True),
        Role("dv", "k", "q", "do", "v", over_keys=True, transposed=False),
    )
}


def tiled(dim: int, tile: int) -> int:
    """How many tiles a dim is cut into."""
    return -(-dim // tile)


def column_tiles(problem: LinearProblem, role: Role, tile: LinearTile) -> tuple[int, int]:
    """The width of a tile of the result, and how many there are."""
    dim = problem.dim if role.transposed else problem.dim_v
    width = min(tile.outer, padded(dim))
    return width, tiled(dim, width)


def heads_a_block(problem: LinearProblem, role: Role, tile: LinearTile) -> int:
    """How many heads a block takes one after the other: the largest divisor of their group that the tile allows.

    They share the q or k whose gradient the block sums; where each has its own result, the rows and columns.
    """
    shared = (role.own,) if role.own in ("q", "k") else (role.rows, role.columns)
    groups = [problem.heads // problem.heads_of(name) for name in shared]
    most = min(max(tile.heads, 1), *groups)
    return max(n for n in range(1, most + 1) if all(group % n == 0 for group in groups))


def parts_of(problem: LinearProblem, role: Role, tile: LinearTile) -> int:
    """How many partial gradients of a shared head blocks leave to be added up; 1: the gradient itself."""
    if role.own not in ("q", "k"):
        return 1
    return problem.heads // problem.heads_of(role.own) // heads_a_block(problem, role, tile)


def tile_of_state(problem: LinearProblem, tile: LinearTile) -> tuple[int, int]:
    """The part of a state that a block of the states' walk holds."""
    return min(tile.inner, padded(problem.dim)), min(tile.outer, padded(problem.dim_v))


def state_tiles(problem: LinearProblem, tile: LinearTile) -> int:
    """How many blocks share a state."""
    dim, dim_v = tile_of_state(problem, tile)
    return tiled(problem.dim, dim) * tiled(problem.dim_v, dim_v)


def width_tiles(problem: LinearProblem, tile: LinearTile) -> int:
    """How many tiles the columns of v are cut into, where channels have decays."""
    return tiled(problem.dim_v, min(tile.outer, padded(problem.dim_v)))


def channel_tiles(problem: LinearProblem, tile: LinearTile) -> int:
    """How many tiles the channels of q and k are cut into, where they have decays."""
    return tiled(problem.dim, min(tile.outer, padded(problem.dim)))
