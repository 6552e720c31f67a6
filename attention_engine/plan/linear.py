"""What calls of one linear attention launch, where tokens have decays or none do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import (
    ROLES,
    LinearProblem,
    LinearProgram,
    LinearTile,
    LinearTiles,
    StatesForm,
    column_tiles,
    parts_of,
    state_tiles,
)
from attention_engine.ir.problem import padded
from attention_engine.passes.differentiate import ONE
from attention_engine.passes.mods import reads_own, row_factor
from attention_engine.plan import linear_buffers as buffers
from attention_engine.plan.buffers import Arguments, Buffer, Role, buffers_of
from attention_engine.plan.launches import Launch, Step, Sum
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION
from attention_engine.plan.targets import Target, as_arch

PIECE = 256  # tokens: a multiple of every tile's chunk
WAVES = 6  # of blocks, one on each SM, that pieces make: two or three run at once, and few are left for the last wave
STATE = 128 * 64  # entries of a state that a block holds, about
DEFAULT_SMS = 132  # where no GPU says
ROWS = 8  # the most numbers a token that a walk keeps, fp32
Read = tuple[Expr, str, bool]  # what a mod reads, the place of what tokens add to its gradient, and: is that in parts?


def piece_length(problem: LinearProblem, target: Target, batch: int, length: int) -> int:
    """How many tokens a piece of a sequence has, where walks begin anew in each: so few that blocks fill the GPU. The
    same for all tiles, as a forward pass and a backward pass must agree."""
    sms = DEFAULT_SMS if isinstance(target, str) else target.sm_count
    blocks = batch * problem.heads * max(problem.dim * problem.dim_v // STATE, 1)
    pieces = min(-(-WAVES * sms // blocks), max(length // PIECE, 1))
    return -(-length // (pieces * PIECE)) * PIECE


class LinearPlan:
    """The launches of one program for one problem, tile choice and target."""

    def __init__(self, program: LinearProgram, problem: LinearProblem, tiles: LinearTiles, target: Target) -> None:
        self.program, self.problem, self.tiles, self.target = program, problem, tiles, target
        self._fitting: dict[str, bool] = {}

    # ---- what is launched, in order

    def forward_steps(
        self, batch: int, length: int, starts: bool, ends: bool, pieces: bool = False
    ) -> tuple[Step, ...]:  # fmt: skip
        """What a forward pass launches. starts: from an initial state; ends: the last state is asked for. pieces: each
        piece has such states of its own; batch and length are then those of pieces."""
        if self.walks("output", batch, length, ()):
            return (*self._sums(self.tiles.forward), self.walk("output", starts, ends, pieces=pieces))
        states = replace(self.states(False, starts, False, pieces=pieces), name="forward states")
        return (*self._sums(self.tiles.states), states, *self._rows("output", False, ()))

    def piece_steps(self, reverse: bool) -> tuple[Launch, ...]:
        """What launches the state that each piece leaves if it begins with none, or in reverse what gradient the state
        before it has if that after it has none; and no more."""
        return (*self._sums(self.tiles.states), self.states(reverse, False, False, pieces=True, keeps=False))

    def backward_steps(
        self, batch: int, length: int, wanted: Collection[str], starts: bool, ends: bool, pieces: bool = False
    ) -> tuple[Step, ...]:  # fmt: skip
        """What a backward pass launches: states that are kept, their gradients in reverse, and what is made of both.

        wanted: gradients beyond those of q, k and v. ends: a gradient arrives at the last state. pieces: as forward.
        """
        of_decay = self.of_decay(wanted)
        walked = {role for role in ("dq", "dk", "dv") if self.walks(role, batch, length, wanted)}
        steps: list[Step] = []
        reverse = not {"dk", "dv"} <= walked or of_decay
        if "dq" not in walked or of_decay:
            steps += [*self._sums(self.tiles.states), self.states(False, starts, False, pieces=pieces)]
        if reverse:
            states = self.states(True, ends, of_decay, of_decay and starts, pieces)
            steps += [*self._sums(self.tiles.states), states]
        for role in ("dq", "dk", "dv"):
            reads = self.reads(ROLES[role].own, wanted)
            if role not in walked:
                steps += self._rows(role, of_decay and role != "dv", reads)
                continue
            begins, last = starts if role == "dq" else ends, role == "dv" and starts and not reverse
            steps += [*self._sums(self.tiles.walks[role]), self.walk(role, begins, last, reads, pieces)]
        if of_decay:
            steps.append(self.decay_gradients(self.reads("decay", wanted)))
        return tuple(dict.fromkeys(steps))

    def step_steps(self, starts: bool) -> tuple[Step, ...]:
        """What one token of decoding launches."""
        return (self.step(starts),)

    def reads_of(self, batch: int, length: int, wanted: Collection[str]) -> list[Read]:
        """The reads of custom inputs that a backward pass finds gradients of."""
        names = [(name, ROLES[f"d{name}"].name) for name in "qkv"]
        found = [(r, f"{role} read_{n}", True) for name, role in names for n, r in enumerate(self.reads(name, wanted))]
        of_decay = self.reads("decay", wanted) if self.of_decay(wanted) else ()
        return [*found, *((r, f"decay read_{n}", False) for n, r in enumerate(of_decay))]

    # ---- what the mods and the tiles ask for

    def reads(self, name: str | None, wanted: Collection[str]) -> tuple[Expr, ...]:
        """The reads of wanted custom inputs in one mod."""
        return tuple(r for r in self.program.loads(name) if r.name in wanted) if name else ()

    def of_decay(self, wanted: Collection[str]) -> bool:
        """Does anything that is wanted need the gradient of decays?"""
        return self.program.decays and ("decay" in wanted or bool(self.reads("decay", wanted)))

    def walks(self, role: str, batch: int, length: int, wanted: Collection[str]) -> bool:
        """Is a result made in one walk? That moves the least memory; a head and tile of columns is a block.

        Where it doesn't fit shared memory, chunks with the state in parts do. Where blocks are too few for the GPU and
        the walk is long, the states' walk is shorter and all chunks then run at once. Heads that share a tensor sum its
        gradient in chunks, and there too arises what the gradient of decays is made of.
        """
        tiles, own = self.tiles, ROLES[role].own
        if own and (role not in tiles.walks or self.problem.heads_of(own) < self.problem.heads):
            return False
        if role in ("dq", "dk") and self.of_decay(wanted):
            return False
        if tiles.plan != "auto":
            return tiles.plan == "walk"
        if own and reads_own(self.program, own, self.reads(own, wanted)):
            return False  # a walk that holds its own tensor too was measured: it wins nothing (benchmarks/notes.md)
        tile = tiles.walks[role] if own else tiles.forward
        if not self._fits(role, tile):
            return False
        blocks = batch * self.problem.heads * column_tiles(self.problem, ROLES[role], tile)[1]
        return length <= 8 * tile.chunk or isinstance(self.target, str) or 2 * blocks >= self.target.sm_count

    def _fits(self, role: str, tile: LinearTile) -> bool:
        """Does a walk fit a block's shared memory? Asked at every call, found out once."""
        if role not in self._fitting:
            needed = walk_shared_bytes(self.program, self.problem, role, tile)
            self._fitting[role] = needed <= as_arch(self.target).shared_memory_per_block
        return self._fitting[role]

    # ---- each launch

    def launch(
        self, name: str, builder: str, given: Sequence[object], arguments: Arguments, made: Iterable[str],
        tile: LinearTile | None = None,
    ) -> Launch:  # fmt: skip
        """A launch that writes these places."""
        rules = (DISABLE_WARP_SPECIALIZATION,) if tile is not None and not tile.specialize else ()
        written = {buffer.place for buffer in buffers_of(arguments) if buffer.role is not Role.GIVEN}
        return Launch(name, f"linear.{builder}", (self.program, *given), arguments, frozenset(written & {*made}), rules)

    def _sums(self, tile: LinearTile) -> list[Launch]:
        return [self.sum_decays(tile.chunk)] if self.program.decays else []

    def sum_decays(self, chunk: int) -> Launch:
        """Decays summed within chunks."""
        name = f"sums of {chunk}"
        return self.launch(name, "token.decays.sum_decays", [chunk], buffers.sum_decays(self.problem, chunk), [name])

    def walk(
        self, role: str, starts: bool, ends: bool, reads: tuple[Expr, ...] = (), pieces: bool = False
    ) -> Launch:  # fmt: skip
        """The output with the last state, or the gradient of q, k or v, in one walk."""
        tile = self.tiles.forward if role == "output" else self.tiles.walks[role]
        arguments = buffers.walk(self.problem, self.program, role, tile, starts, ends, len(reads), pieces)
        made = [buffers.place_of(ROLES[role]), "last", "d_initial", *(f"{role} read_{n}" for n in range(len(reads)))]
        name = "forward walk" if role == "output" else f"backward walk {role}"
        given = [role, tile, starts, ends, reads, *([True] if pieces else [])]
        return self.launch(name, "token.walk.walk", given, arguments, made, tile)

    def step(self, starts: bool) -> Launch:
        """One token."""
        arguments = buffers.step(self.problem, starts)
        return self.launch("step", "step.step", [self.tiles.step, starts], arguments, ["o", "last"])

    def states(
        self, reverse: bool, starts: bool, overlaps: bool, initial: bool = False, pieces: bool = False,
        keeps: bool = True,
    ) -> Launch:  # fmt: skip
        """States before chunks, or in reverse the gradients of those after them; or the last ones alone."""
        tile, form = self.tiles.states, StatesForm(reverse, starts, overlaps, initial, pieces, keeps)
        arguments = buffers.states_walk(self.problem, self.program, tile, form)
        made: list[str] = []
        name = buffers.last_of(form)
        if keeps:
            made, name = (["d_states", "overlap"], "backward states") if reverse else (["states"], "states")
        return self.launch(name, self._states_builder, [tile, form], arguments, [*made, buffers.last_of(form)], tile)

    _states_builder = "token.states.states"

    def _rows(self, role: str, decay_rows: bool, reads: tuple[Expr, ...]) -> list[Step]:
        """The rows of a role, and the sum of their parts where there are several."""
        parts, place = parts_of(self.problem, ROLES[role], self.tiles.rows[role]), buffers.place_of(ROLES[role])
        result = Buffer("result", buffers.result_shape(self.problem, ROLES[role]), self.problem.dtype, key=place)
        added: list[Step] = [Sum(f"parts of {place}", result, 0)] if parts > 1 else []
        return [self.rows(role, decay_rows, reads), *added]

    def rows(self, role: str, decay_rows: bool, reads: tuple[Expr, ...]) -> Launch:
        """The output, or the gradient of q, k or v, from states."""
        tile = self.tiles.rows[role]
        arguments = buffers.chunk_rows(self.problem, self.program, role, tile, decay_rows, len(reads))
        name = "forward output" if role == "output" else f"backward {role}"
        place = buffers.place_of(ROLES[role])
        made = [place, f"parts of {place}", f"{role} of_state", f"{role} of_pairs"]
        made += [f"{role} read_{n}" for n in range(len(reads))]
        return self.launch(name, "token.chunk.chunk_rows", [role, tile, decay_rows, reads], arguments, made, tile)

    def decay_gradients(self, reads: tuple[Expr, ...]) -> Launch:
        """The gradient of decay."""
        dq, dk = (column_tiles(self.problem, ROLES[role], self.tiles.rows[role])[1] for role in ("dq", "dk"))
        chunk, tiles = self.tiles.states.chunk, (dq, dk, state_tiles(self.problem, self.tiles.states))
        arguments = buffers.decay_gradients(self.problem, chunk, tiles, len(reads))
        made = ["d_decay", *(f"decay read_{n}" for n in range(len(reads)))]
        return self.launch("decay gradients", "token.decays.decay_gradients", [chunk, tiles, reads], arguments, made)


def walk_shared_bytes(program: LinearProgram, problem: LinearProblem, role: str, tile: LinearTile) -> int:
    """What a walk (kernels/linear/token/walk.py) takes of shared memory: rows and columns whole, and M, for a tile's
    columns.

    A tensor whose mod is more than a factor stands there twice, as it came and as products read it; fp32 operands have
    a high and a low part.
    """
    form, size = ROLES[role], 4 if problem.dtype == "float32" else 2
    operand, stages = size * (2 if problem.splits else 1), max(tile.stages, 1)
    chunk, width, dim = tile.chunk, column_tiles(problem, form, tile)[0], padded(problem.dim_of(form.rows))

    def copied(name: str, columns: int) -> int:
        factor = ONE if name == "do" else row_factor(program.mod(name))
        kept = stages * operand if factor is not None else stages * size + operand
        return chunk * columns * kept

    total = copied(form.rows, dim) + copied(form.columns, dim) + copied(form.others, width)
    total += (dim + chunk) * width * operand  # M, and the others as it takes them
    if problem.splits:
        total += chunk * width * size  # results on their way out
    if not tile.in_registers or size == 4:
        total += chunk * chunk * operand
    return total + ROWS * chunk * 4
