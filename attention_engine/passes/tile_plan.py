"""What a mask asks of the loops over tiles: bounds, or a map of the tiles that hold a kept pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attention_engine.ir.block_lists import ListedBlocks, listed_blocks, without_blocks
from attention_engine.ir.expr import Axis, Expr, Op, topological
from attention_engine.ir.problem import Problem
from attention_engine.passes.analyse_mask import MaskPlan, analyse_mask


@dataclass(frozen=True)
class TilePlan:
    """A mask as the kernels see it: its bounds, and whether a map of tiles is needed (and for each batch, each head).

    by_head: then a block of keys, which many query heads may share, walks over a list of (query tile, head in its
    group) pairs: tile * group + head. reads: the names of the custom inputs that the mask reads. blocks: those that a
    call lists; bounds_say_the_rest: does a mask that reads them ask nothing else that bounds don't say? by_group: heads
    that share keys share a list, and others have others.
    """

    mask: Expr | None
    bounds: MaskPlan
    mapped: bool
    by_batch: bool
    by_head: bool
    reads: frozenset[str]
    blocks: ListedBlocks | None = None
    bounds_say_the_rest: bool = False
    by_group: bool = False

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
        if self.by_group:
            return problem.kv_heads
        return (problem.heads if over_keys else problem.kv_heads) if self.by_head else 1

    def list_of(self, head: Any) -> Any:
        """Which list has a head: of queries, where blocks walk over keys, else of keys."""
        return head if self.by_head or self.by_group else 0

    def follows_blocks(self, q_tile: int, kv_tile: int) -> bool:
        """May lists of such tiles be made of a call's lists of blocks alone, with no look at pairs? Tiles then divide
        blocks, or blocks tiles."""
        if self.blocks is None or not self.bounds_say_the_rest:
            return False
        both = (q_tile, self.blocks.q), (kv_tile, self.blocks.kv)
        return all(tile % block == 0 or block % tile == 0 for tile, block in both)

    def candidates(self, problem: Problem) -> int:
        """Entries that one tile of queries may have in the list of a tile of keys."""
        return problem.group if self.by_head else 1


def plan_tiles(mask: Expr | None) -> TilePlan:
    """What is known of a mask before its tensors and lengths are."""
    bounds = analyse_mask(mask)
    axes = mask.axes if mask is not None else frozenset[Axis]()
    reads = frozenset(n.name for n in topological(mask) if n.op is Op.LOAD) if mask is not None else frozenset[str]()
    by_head, blocks, say = Axis.HEAD in axes, listed_blocks(mask), False
    by_group = False
    if mask is not None and blocks is not None:
        rest = without_blocks(mask)
        say = all(analyse_mask(part).exact for part in rest) and not any(bound.starts for bound in bounds.bounds)
        by_group = blocks.sharing > 1 and not any(Axis.HEAD in part.axes for part in rest)
    by_batch = Axis.BATCH in axes
    return TilePlan(
        mask, bounds, not bounds.exact, by_batch, by_head and not by_group, reads, blocks, say, by_group
    )  # fmt: skip
