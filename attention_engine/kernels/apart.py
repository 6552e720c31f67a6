"""Where blocks of a head start their walks over tiles of queries, if not all with the same tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.plan.hopper import QUARTERS


@dataclass(frozen=True)
class Ring:
    """Blocks that meet the same tiles start a part of their walk apart: each comes to a tile after the block of keys
    before its own, but for the tiles with which it starts. number: 1 if they do, 0 if all start with the first tile."""

    number: Any
    blocks: Any

    def part_of(self, block: Any) -> Any:
        """With which part of a walk a block starts: the first block with the first, the last one with the second."""
        return T.truncmod(self.blocks - block, self.blocks)

    def start_of(self, block: Any, _kv_head: Any, tiles: Any) -> Any:
        """With which of so many tiles a block starts."""
        return self.number * T.truncdiv(self.part_of(block) * tiles, self.blocks)

    def own_tiles(self, block: Any, tiles: Any) -> Any:
        """To how many tiles, at the start of its walk, a block comes before all others."""
        part = self.part_of(block)
        own = T.truncdiv((part + 1) * tiles, self.blocks) - T.truncdiv(part * tiles, self.blocks)
        return T.if_then_else(self.number != 0, own, T.if_then_else(block == 0, tiles, 0))


@dataclass(frozen=True)
class Halves:
    """Where heads alternate, a block goes over its tiles in two parts: the near ones, which its own keys see first, and
    the far ones. Blocks of even heads go over the near ones first, those of odd heads over the far ones.

    number: by how many quarters of a step a block follows the block of keys after its own over the far tiles (of odd
    heads: before its own); 0: no tile is near.
    """

    number: Any
    blocks: Any
    group: int

    def near(self, block: Any) -> Any:
        """How many tiles of a block are near ones."""
        return T.truncdiv(self.number * (self.blocks - 1 - block), QUARTERS * self.group)

    def start_of(self, block: Any, kv_head: Any, tiles: Any) -> Any:
        """With which of so many tiles a block starts, in the direction in which it walks: of even heads back, from the
        last near one; of odd ones from the first far one."""
        near = self.near(block)
        return T.if_then_else(kv_head % 2 == 0, tiles - near, near)
