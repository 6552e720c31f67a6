"""Writes the drawings of the pages for maintainers: `python docs/drawings/draw.py`, or `make drawings`."""

from __future__ import annotations

from pathlib import Path

import blocks
import units

FOLDER = Path(__file__).parent
DRAWINGS = {
    "forward_block": blocks.forward_block, "backward_block": blocks.backward_block, "unit_life": units.life,
    "unit_calendar": units.calendar,
}  # fmt: skip


def main() -> None:
    """Each into a file of this folder."""
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
