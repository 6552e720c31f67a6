"""What calls of one linear attention launch, where each channel has a decay of its own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearTile, width_tiles
from attention_engine.plan import linear_buffers as buffers
from attention_engine.plan.buffers import BATCH, Buffer
from attention_engine.plan.launches import Launch, Step, Sum
from attention_engine.plan.linear import LinearPlan, Read

Reads = tuple[tuple[Expr, ...], tuple[Expr, ...], tuple[Expr, ...]]


class ChannelPlan(LinearPlan):
    """Every pass sums decays and makes the weights of pairs, then states, then all chunks at once."""

    def forward_steps(
        self, batch: int, length: int, starts: bool, ends: bool, pieces: bool = False
    ) -> tuple[Step, ...]:  # fmt: skip
        """What a forward pass launches."""
        states = replace(self.states(False, starts, False, pieces=pieces), name="forward states")
        return (self.channel_sums, self.scores, states, self.channel_rows("output", ()))

    def backward_steps(
        self, batch: int, length: int, wanted: Collection[str], starts: bool, ends: bool, pieces: bool = False
    ) -> tuple[Step, ...]:  # fmt: skip
        """What a backward pass launches. ends: a gradient arrives at the last state."""
        of_decay = self.of_decay(wanted)
        reads = self.reads("q", wanted), self.reads("k", wanted), self.reads("decay", wanted) if of_decay else ()
        parts = width_tiles(self.problem, self.tiles.states) if of_decay else 0
        return (
            self.channel_sums, self.scores, self.states(False, starts, False, pieces=pieces),
            self.states(True, ends, of_decay, of_decay and starts, pieces),
            self.channel_rows("dv", self.reads("v", wanted)),
            self.gradients(of_decay, parts, reads), *self._sums_of_heads(),
        )  # fmt: skip

    def reads_of(self, batch: int, length: int, wanted: Collection[str]) -> list[Read]:
        """The reads of custom inputs that a backward pass finds gradients of."""
        names = ["v", "q", "k", *(["decay"] if self.of_decay(wanted) else [])]
        return [(r, f"{name}_read_{n}", True) for name in names for n, r in enumerate(self.reads(name, wanted))]

    def _sums_of_heads(self) -> list[Step]:
        """Gradients of q or k, whose heads several heads of v share: the sums of theirs."""
        problem, found = self.problem, []
        for name in ("q", "k"):
            if problem.heads_of(name) < problem.heads:
                shape = (BATCH, buffers.TOKENS, problem.heads_of(name), problem.dim)
                result = Buffer(f"d{name}", shape, problem.dtype)
                found.append(Sum(f"d{name} of heads", result, 3, problem.heads // problem.heads_of(name)))
        return [*found]

    def _sums(self, tile: LinearTile) -> list[Launch]:
        return [self.channel_sums]

    @property
    def channel_sums(self) -> Launch:
        """Decays summed within chunks."""
        tile = self.tiles.rows["sums"]
        arguments = buffers.sum_decays(self.problem, tile.chunk)
        name = f"sums of {tile.chunk}"
        return self.launch(name, "channels.decays.sum_decays", [tile], arguments, [name], tile)

    @property
    def scores(self) -> Launch:
        """The weights of pairs."""
        tile = self.tiles.rows["scores"]
        arguments = buffers.channel_scores(self.problem, tile)
        return self.launch("scores", "channels.scores.scores", [tile], arguments, ["scores"], tile)

    _states_builder = "channels.states.states"

    def channel_rows(self, role: str, reads: tuple[Expr, ...]) -> Launch:
        """The output, or the gradient of v."""
        tile = self.tiles.rows[role]
        arguments = buffers.channel_rows(self.problem, role, tile, len(reads))
        name = "forward output" if role == "output" else f"backward {role}"
        made = ["o", "dv", *(f"v_read_{n}" for n in range(len(reads)))]
        return self.launch(name, "channels.rows.channel_rows", [role, tile, reads], arguments, made, tile)

    def gradients(self, of_decay: bool, parts: int, reads: Reads) -> Launch:
        """The gradients of q, k and decay."""
        tile = self.tiles.rows["gradients"]
        of_q, of_k, of_decays = map(len, reads)
        arguments = buffers.channel_gradients(self.problem, tile, of_decay, parts, (of_q, of_k, of_decays))
        made = ["dq", "dk", "dq of heads", "dk of heads", "d_decay"]
        names = zip(("q", "k", "decay"), (of_q, of_k, of_decays), strict=True)
        made += [f"{name}_read_{n}" for name, count in names for n in range(count)]
        builder, given = "channels.gradients.channel_gradients", [tile, of_decay, parts, reads]
        return self.launch("backward gradients", builder, given, arguments, made, tile)
