"""The tile maps of calls: which tiles of a mask that bounds don't describe hold a kept pair.

A map of a mask that reads tensors is made anew at each use: it takes microseconds, and no version number tells of every
write to a tensor (`.data`, a replayed graph, another library's kernel). One of indices alone is kept for its lengths.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.compiler import Kernels
from attention_engine.ir.problem import STAGED_UNIT, Problem, Tile

KEPT = 8  # maps of index masks


@dataclass
class TileMaps:
    """The maps of one program on every device."""

    _kept: OrderedDict[object, Tensor] = field(default_factory=OrderedDict)

    def __call__(
        self, kernels: Kernels, tile: Tile, over_keys: bool, q: Tensor, k: Tensor, custom: Sequence[Tensor]
    ) -> list[Tensor]:
        """The kernel argument that says which tiles to walk over: none, where the mask's bounds say it.

        tile, over_keys: of the kernel. custom: as kernels take them, in declared order.
        """
        plan = kernels.tile_plan
        if not plan.mapped:
            return []
        on_gpu = q.device.type == "cuda"
        if plan.reads or (on_gpu and torch.cuda.is_current_stream_capturing()):  # a graph owns what it was captured on
            return [_make(kernels, tile, over_keys, q, k, custom)]
        stream = torch.cuda.current_stream(q.device).cuda_stream if on_gpu else 0
        batch = q.shape[0] if plan.by_batch else 1
        key = (q.device, stream, tile.q, tile.kv, over_keys, batch, q.shape[1:3], k.shape[1:3])
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = _make(kernels, tile, over_keys, q, k, custom)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return [found]


def custom_arguments(
    problem: Problem, custom: Sequence[Tensor], names: Collection[str] | None = None
) -> list[int | Tensor]:
    """Custom inputs (of these names alone) as kernels' arguments: staged ones after their strides in units."""
    found: list[int | Tensor] = []
    for tensor, (name, _, _) in zip(custom, problem.custom, strict=True):
        if names is None or name in names:
            found += [s // STAGED_UNIT for s in tensor.stride()[:-1]] if name in problem.staged else []
            found.append(tensor)
    return found


def _make(kernels: Kernels, tile: Tile, over_keys: bool, q: Tensor, k: Tensor, custom: Sequence[Tensor]) -> Tensor:
    plan, problem = kernels.tile_plan, kernels.problem
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    rows, tiles = -(-queries // tile.q), -(-keys // tile.kv)
    if not over_keys:
        rows, tiles = tiles, rows * plan.candidates(problem)
    shape = (batch if plan.by_batch else 1, plan.heads(problem, over_keys), rows, tiles + 1)
    lists = torch.empty(shape, dtype=torch.int32, device=q.device)
    read = custom_arguments(problem, custom, plan.reads)
    kernels.tile_map(tile, over_keys).run(batch, queries, keys, *read, lists)
    return lists
