"""Gradients of custom inputs in one backward pass: what kernels sum, and how torch brings it to the entries read.

Tensors are (batch, length, heads, dim) here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attention_engine.compiler import Kernels
from attention_engine.ir.expr import Axis, Expr
from attention_engine.ir.program import DELTA, KV_IDX, Q_IDX, B, H, final_gradient, final_variable
from attention_engine.reference.evaluate import Evaluator, add_at
from attention_engine.runtime.run import Memory, launch_once, tensor_of

PAIRS_AT_ONCE = 1 << 22  # of a tile of pairs that torch scatters


class CustomGradients:
    """The gradients of one call. kernels: those of the gradients that are wanted; custom: as kernels take them.

    memory: of the call, after its backward pass: what kernels summed is there by the names of their parameters.
    """

    def __init__(
        self, kernels: Kernels, q: Tensor, k: Tensor, custom: Mapping[str, Tensor], memory: Memory
    ) -> None:  # fmt: skip
        plan = kernels.plan
        assert plan.row_sums is not None
        self.kernels, self.custom, self.row_plan, self.plan = kernels, custom, plan.row_sums, plan.custom_sums
        self.device, self.batch, self.queries, self.keys = q.device, q.shape[0], q.shape[1], k.shape[1]
        self.heads, self.memory = q.shape[2], memory
        scattered = {read.name for read, _ in self.plan.scattered}
        self.found = {name: self._made(f"d_custom_{name}") for name in custom if name in scattered}

    def _made(self, place: str) -> Tensor:
        return tensor_of(self.memory, place)

    def _sums(self, name: str, count: int) -> list[Tensor]:
        return [self._made(f"{name}{n}") for n in range(count)]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)

    def _walk_pairs(self) -> None:
        """Runs the kernel of pairs for each read that needs it."""
        for read, expr in self.plan.pairs:
            tensor = self.custom[read.name]
            alone = sum(r.name == read.name for r, _ in self._all_reads()) == 1
            dtype = tensor.dtype if alone else torch.float32
            found = torch.empty(tensor.shape, dtype=dtype, device=self.device)
            size = (*self._owners(read), self.queries, self.keys)
            launch = self.kernels.plan.pairs(read, expr, str(dtype).removeprefix("torch."))
            launch_once(launch, self.kernels.kernel, {**self.memory, "first_query": 0, "d_pairs": found.view(size)})
            before = self.found.get(read.name)
            self.found[read.name] = found if before is None else before + found
        for read, expr in self.plan.by_rows:
            self._scatter_rows(read, expr)

    def _all_reads(self) -> list[tuple[Expr, Expr]]:
        backward = self.kernels.maths.backward
        assert backward is not None
        return [*backward.pair_gradients, *backward.row_gradients]

    def _owners(self, read: Expr) -> tuple[int, int]:
        return (self.batch if Axis.BATCH in read.axes else 1, self.heads if Axis.HEAD in read.axes else 1)

    def _scatter_rows(self, read: Expr, expr: Expr) -> None:
        """Pairs as a tensor of a few rows, which torch adds to the entries in a fixed order."""
        tile, owners = self.kernels.tiles.pairs.q, self._owners(read)
        count = max(1, PAIRS_AT_ONCE // (owners[0] * owners[1] * self.keys * tile)) * tile
        launch = self.kernels.plan.pairs(read, expr, "float32")
        for first in range(0, self.queries, count):
            rows = min(count, self.queries - first)
            pairs = torch.empty((*owners, rows, self.keys), dtype=torch.float32, device=self.device)
            launch_once(launch, self.kernels.kernel, {**self.memory, "first_query": first, "d_pairs": pairs})
            place = self._indices()
            place[Q_IDX] = place[Q_IDX][:, :, first : first + rows]
            self._add(read, pairs, place)

    def collect(self, d_finals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients by name, from the sums, from pairs, and from rows: saved ones, delta, and gradients that arrive
        at rows."""
        backward = self.kernels.maths.backward
        assert backward is not None
        self._walk_pairs()
        if self.row_plan.gradients or backward.row_gradients:
            saved = {name: self._made(f"saved_{name}") for name in backward.given_rows}
            values = self._rows_of(saved, self._made("delta"), d_finals)
            self._from_rows(values)
            self._from_outside(values)
        of_keys = self._sums("key_sum", len(self.plan.of_keys))
        diagonals = self._sums("diagonal", len(self.plan.diagonals))
        for (read, _), total in zip(self.plan.of_keys, of_keys, strict=True):
            self._add(read, total[:, :, None], self._indices())
        places = torch.arange(1 - self.keys, self.queries + 1, device=self.device).view(1, 1, 1, -1)
        for (read, _), total in zip(self.plan.diagonals, diagonals, strict=True):
            place = {**self._indices(), Q_IDX: places, KV_IDX: torch.zeros_like(places)}
            self._add(read, total.sum(2, keepdim=True), place)
        return self.found

    def _rows_of(
        self, saved: Mapping[str, Tensor], delta: Tensor, d_finals: Mapping[str, Tensor]
    ) -> dict[Expr, Tensor]:
        """What an expression of rows may read, each with an axis of one key: saved rows, delta, arriving gradients."""
        found = {final_variable(n): r[..., None] for n, r in saved.items()}
        found[DELTA] = delta[..., : self.queries, None]
        nothing = torch.zeros_like(found[DELTA])
        for name, _ in self.kernels.maths.program.finals:
            arriving = d_finals.get(name)
            found[final_gradient(name)] = nothing if arriving is None else arriving[..., None].float()
        return found

    def _from_rows(self, values: Mapping[Expr, Tensor]) -> None:
        """Gradients of reads that a row sums up, corrected for the rounding of the output (row_sums.py)."""
        plan = self.row_plan
        evaluate = self._evaluator({**self._indices(), **values})
        rows = self._sums("sum", len(plan.sums)) if plan.gradients else []
        for gradient in plan.gradients:
            total = rows[gradient.index]
            if plan.delta is not None:
                rounding = rows[plan.delta] - values[DELTA][..., 0]
                for correction in gradient.corrections:
                    slope = evaluate(correction.slope).expand(*rounding.shape, 1)[..., 0]
                    total = total + torch.where(rounding == 0, 0.0, rounding * slope * rows[correction.index])
            self._add(gradient.load, total[..., None], self._indices())

    def _from_outside(self, values: Mapping[Expr, Tensor]) -> None:
        """Gradients of reads outside the sums (a sink): from rows alone, so torch makes them."""
        maths = self.kernels.maths
        assert maths.backward is not None
        silent = values[DELTA] == 0
        for name, _ in maths.program.finals:
            silent = silent & (values[final_gradient(name)] == 0)
        evaluate = self._evaluator({**self._indices(), **values})
        for load, expr in maths.backward.row_gradients:
            value = evaluate(expr).expand(values[DELTA].shape)
            self._add(load, torch.where(silent, 0.0, value), self._indices())  # an empty row adds nothing

    def _indices(self) -> dict[Expr, Tensor]:
        sizes = {B: self.batch, H: self.heads, Q_IDX: self.queries, KV_IDX: self.keys}
        shape = [1, 1, 1, 1]
        return {
            variable: torch.arange(size, device=self.device).view(*shape[:axis], -1, *shape[axis + 1 :])
            for axis, (variable, size) in enumerate(sizes.items())
        }

    def _evaluator(self, values: Mapping[Expr, Tensor]) -> Evaluator:
        return Evaluator(values, self.custom, torch.float32, self.device)

    def _add(self, load: Expr, values: Tensor, place: Mapping[Expr, Tensor]) -> None:
        """Adds values, (batch, heads, queries, keys), 1 where they are summed, to the entries that were read there."""
        total = self.found.get(load.name)
        total = self._zeros(*self.custom[load.name].shape) if total is None else total
        self.found[load.name] = add_at(total, load, values, self._evaluator(place))
