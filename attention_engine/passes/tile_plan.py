"""What a mask asks of the loops over tiles: bounds, or a map of the tiles that hold a kept pair."""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.expr import Axis, Expr, Op, topological
from attention_engine.ir.problem import Problem
from attention_engine.passes.analyse_mask import MaskPlan, analyse_mask


@dataclass(frozen=True)
class TilePlan:
    """A mask as the kernels see it: its bounds, and whether a map of tiles is needed (and for each batch, each head).

    by_head: then a block of keys, which many query heads may share, walks over a list of (query tile, head in its
    group) pairs: tile * group + head. reads: the names of the custom inputs that the mask reads.
    """

    mask: Expr | None
    bounds: MaskPlan
    mapped: bool
    by_batch: bool
    by_head: bool
    reads: frozenset[str]

    @property
    def later_is_longer(self) -> bool:
        """Do later queries see more keys, or as many of them as a window leaves?"""
        return any(bound.q > 0 and bound.kv < 0 for bound in self.bounds.bounds)

    @property
    def sees_to_the_end(self) -> bool:
        """Does a key that some query sees have all later ones too, and say the bounds so alone?"""
        return not self.mapped and all(bound.q >= 0 for bound in self.bounds.bounds)

    def heads(self, problem: Problem, over_keys: bool) -> int:
        """Heads of the lists."""
        return (problem.heads if over_keys else problem.kv_heads) if self.by_head else 1

    def candidates(self, problem: Problem) -> int:
        """Entries that one tile of queries may have in the list of a tile of keys."""
        return problem.group if self.by_head else 1


def plan_tiles(mask: Expr | None) -> TilePlan:
    """What is known of a mask before its tensors and lengths are."""
    bounds = analyse_mask(mask)
    axes = mask.axes if mask is not None else frozenset[Axis]()
    reads = frozenset(n.name for n in topological(mask) if n.op is Op.LOAD) if mask is not None else frozenset[str]()
    return TilePlan(mask, bounds, not bounds.exact, Axis.BATCH in axes, Axis.HEAD in axes, reads)
