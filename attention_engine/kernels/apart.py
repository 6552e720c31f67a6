"""Where blocks of a head start their walks over tiles, if they start a part of it apart: in a ring, in which each comes
to a tile after the block of keys before its own, but for the tiles with which it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T


@dataclass(frozen=True)
class Apart:
    """The ring of a head's blocks. number: 1 if they start apart, 0 if all start with the first tile."""

    number: Any
    blocks: Any

    def part_of(self, block: Any) -> Any:
        """With which part of a walk a block starts: the first block with the first, the last one with the second."""
        return T.truncmod(self.blocks - block, self.blocks)

    def start_of(self, block: Any, tiles: Any) -> Any:
        """With which of so many tiles a block starts."""
        return self.number * T.truncdiv(self.part_of(block) * tiles, self.blocks)

    def own_tiles(self, block: Any, tiles: Any) -> Any:
        """To how many tiles, at the start of its walk, a block comes before all others."""
        part = self.part_of(block)
        own = T.truncdiv((part + 1) * tiles, self.blocks) - T.truncdiv(part * tiles, self.blocks)
        return T.if_then_else(self.number != 0, own, T.if_then_else(block == 0, tiles, 0))

    def blocks_before(self, block: Any, tile: Any, tiles: Any) -> Any:
        """How many blocks come to a tile before this one does."""
        part = self.number * T.truncdiv((tile + 1) * self.blocks - 1, tiles)
        return T.truncmod(block + part, self.blocks)
