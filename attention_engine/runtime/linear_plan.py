"""The kernels of a linear attention for one problem: which there are, and which a call launches."""

from __future__ import annotations

from collections.abc import Collection

from attention_engine.codegen.compile import DISABLE_WARP_SPECIALIZATION
from attention_engine.compiler import Kernel, Target, pass_configs
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import (
    ROLES,
    LinearProblem,
    LinearProgram,
    LinearTile,
    LinearTiles,
    column_tiles,
    state_tiles,
)
from attention_engine.ir.problem import padded
from attention_engine.passes.differentiate import ONE
from attention_engine.passes.mods import reads_own, row_factor
from attention_engine.tuner.space import as_arch

ROWS = 8  # the most numbers a token that a walk keeps, fp32


class LinearKernels:
    """The kernels of a program for one problem, tile choice and target."""

    def __init__(self, program: LinearProgram, problem: LinearProblem, tiles: LinearTiles, target: Target) -> None:
        self.program, self.problem, self.tiles, self.target = program, problem, tiles, target
        self._made: dict[object, Kernel] = {}
        self._fitting: dict[str, bool] = {}

    def _kernel(self, builder: str, *given: object, tile: LinearTile | None = None) -> Kernel:
        key = (builder, *given)
        if key not in self._made:
            configs = pass_configs(self.problem)
            if tile is not None and not tile.specialize:
                configs = {**configs, DISABLE_WARP_SPECIALIZATION: True}
            given = (self.problem, self.program, *given)
            self._made[key] = Kernel(f"linear.{builder}", given, self.target, self.problem, configs)
        return self._made[key]

    def sum_decays(self, chunk: int) -> Kernel:
        """Decays summed within chunks."""
        return self._kernel("decays.sum_decays", chunk)

    def walk(self, role: str, starts: bool, ends: bool, reads: tuple[Expr, ...] = ()) -> Kernel:
        """The output with the last state, or the gradient of q, k or v, in one walk."""
        tile = self.tiles.forward if role == "output" else self.tiles.walks[role]
        return self._kernel("walk.walk", role, tile, starts, ends, reads, tile=tile)

    def step(self, starts: bool) -> Kernel:
        """One token."""
        return self._kernel("step.step", self.tiles.step, starts)

    def states(self, reverse: bool, starts: bool, overlaps: bool, initial: bool = False) -> Kernel:
        """States before chunks, or in reverse the gradients of those after them."""
        tile = self.tiles.states
        return self._kernel("states.states", tile, reverse, starts, overlaps, initial, tile=tile)

    def rows(self, role: str, decay_rows: bool, reads: tuple[Expr, ...]) -> Kernel:
        """The output, or the gradient of q, k or v, from states."""
        tile = self.tiles.rows[role]
        return self._kernel("chunk.chunk_rows", role, tile, decay_rows, reads, tile=tile)

    def decay_gradients(self, reads: tuple[Expr, ...]) -> Kernel:
        """The gradient of decay."""
        parts = [column_tiles(self.problem, ROLES[role], self.tiles.rows[role])[1] for role in ("dq", "dk")]
        tiles = (*parts, state_tiles(self.problem, self.tiles.states))
        return self._kernel("decays.decay_gradients", self.tiles.states.chunk, tiles, reads)

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

    def of_forward(self, batch: int, length: int) -> dict[str, Kernel]:
        """What a forward pass launches that neither begins nor ends with a state, by the tuner's names."""
        if self.walks("output", batch, length, ()):
            return {"forward walk": self.walk("output", False, False), **self._sums(self.tiles.forward)}
        return {
            "forward states": self.states(False, False, False),
            "forward output": self.rows("output", False, ()),
            **self._sums(self.tiles.states),
        }

    def of_backward(self, batch: int, length: int, wanted: Collection[str]) -> dict[str, Kernel]:
        """What a backward pass launches where no state was given."""
        of_decay, found, chunks = self.of_decay(wanted), {}, []
        for role in ("dq", "dk", "dv"):
            reads = self.reads(ROLES[role].own, wanted)
            if self.walks(role, batch, length, wanted):
                found[f"backward walk {role}"] = self.walk(role, False, False, reads)
                found |= self._sums(self.tiles.walks[role])
            else:
                chunks.append(role)
                found[f"backward {role}"] = self.rows(role, of_decay and role != "dv", reads)
        if {"dk", "dv"} & {*chunks}:
            found["backward states"] = self.states(True, False, of_decay)
            found |= self._sums(self.tiles.states)
        if "dq" in chunks:
            found["states"] = self.states(False, False, False)
        if of_decay:
            found["decay gradients"] = self.decay_gradients(self.reads("decay", wanted))
        return found

    def _sums(self, tile: LinearTile) -> dict[str, Kernel]:
        return {f"sums of {tile.chunk}": self.sum_decays(tile.chunk)} if self.program.decays else {}


def walk_shared_bytes(program: LinearProgram, problem: LinearProblem, role: str, tile: LinearTile) -> int:
    """What a walk (kernels/linear/walk.py) takes of shared memory: rows and columns whole, and M, for a tile's columns.

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
