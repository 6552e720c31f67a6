"""Masks and scores as pictures: SVG in a notebook, block characters in a terminal."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

INK, FAINT, KEPT, MASKED = "#263238", "#90a4ae", "#3f6fb5", "#eceff1"
QUIET = "#546e7a"  # small words
WARM = "#d9653b"  # scores above 0
ABSENT = "#cfd8dc"  # pairs that a mask leaves out of a picture of scores
TILES = {"whole": "#2e7d32", "part": "#e07b00", "none": "#b0bec5"}
SHADES = 16  # of a colour, so that neighbours of nearly one value are one rectangle
SIDE = 300  # of a panel, in px
COLUMNS = 110  # of a terminal
Rows = Sequence[Sequence[float]]  # one number a cell; NaN: nothing


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle", color: str = INK) -> str:
    """A line of text, its baseline at y."""
    place = f'x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}">{html.escape(words, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, line: str = "none", thick: float = 1) -> str:
    """A rectangle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{fill}" stroke="{line}" stroke-width="{thick:g}"/>'


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    """An SVG file on white, so that it reads on light and dark pages."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif">'
    )
    return "\n".join([head, box(0, 0, width, height, "white"), *parts, "</svg>\n"])


def mix(low: str, high: str, share: float) -> str:
    """The colour between two, in one of SHADES steps."""
    share = round(min(max(share, 0.0), 1.0) * SHADES) / SHADES
    pairs = ((int(low[n : n + 2], 16), int(high[n : n + 2], 16)) for n in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def cells(x: float, y: float, rows: Rows, width: float, height: float, color: Callable[[float], str]) -> list[str]:
    """A field of cells with thin white lines between them; equal neighbours of a row are one rectangle."""
    parts = []
    for i, row in enumerate(rows):
        start = 0
        for fill, run in itertools.groupby(row, color):
            count = len(list(run))
            if fill != MASKED:
                parts.append(box(x + start * width, y + i * height, count * width, height, fill))
            start += count
    across, down = len(rows[0]) if rows else 0, len(rows)
    lines = [f"M{x + n * width:g} {y:g} v{down * height:g}" for n in range(across + 1)]
    lines += [f"M{x:g} {y + n * height:g} h{across * width:g}" for n in range(down + 1)]
    thick = 2 if min(width, height) >= 12 else 1 if min(width, height) >= 6 else 0.4
    parts.append(f'<path d="{" ".join(lines)}" stroke="white" stroke-width="{thick:g}"/>')
    return parts


def kinds_of_tiles(rows: Rows, q_tile: int, kv_tile: int) -> list[list[str]]:
    """Of each tile of q_tile x kv_tile cells: "whole" (all pairs kept), "part", or "none" (none kept)."""
    kinds = []
    for top in range(0, len(rows), q_tile):
        band = rows[top : top + q_tile]
        lefts = range(0, len(band[0]), kv_tile)
        inside = [[share for row in band for share in row[left : left + kv_tile]] for left in lefts]
        kinds.append(["whole" if min(s) == 1 else "none" if max(s) == 0 else "part" for s in inside])
    return kinds


def frames_of_tiles(
    x: float, y: float, rows: Rows, q_tile: int, kv_tile: int, width: float, height: float
) -> list[str]:
    """Tiles of q_tile x kv_tile cells as frames in the colours of their kinds."""
    frames = []
    for i, row in enumerate(kinds_of_tiles(rows, q_tile, kv_tile)):
        for j, kind in enumerate(row):
            left, top = j * kv_tile * width, i * q_tile * height
            right, bottom = min(left + kv_tile * width, len(rows[0]) * width), min(
                top + q_tile * height, len(rows) * height
            )  # fmt: skip
            place = x + left + 1.5, y + top + 1.5, right - left - 3, bottom - top - 3
            frames.append((kind != "none", box(*place, "none", TILES[kind], 1 if kind == "none" else 2.5)))
    return [frame for _, frame in sorted(frames)]


def mask_cells(
    x: float, y: float, title: str, rows: Rows, width: float, height: float, tile: tuple[int, int] | None = None
) -> list[str]:
    """A mask with its title: the share of kept pairs of each cell, and tiles of so many cells as frames."""
    across, down = (len(rows[0]) if rows else 0) * width, len(rows) * height
    parts = [text(x + across / 2, y - 8, title), box(x, y, across, down, MASKED)]
    parts += cells(x, y, rows, width, height, lambda share: mix(MASKED, KEPT, share))
    return parts if tile is None else parts + frames_of_tiles(x, y, rows, *tile, width, height)


def legend_of_tiles(x: float, y: float) -> list[str]:
    """What the colours of frames mean."""
    parts = []
    words = {"whole": "whole tile: no mask test", "part": "part: each pair tested", "none": "none kept: not visited"}
    for n, (kind, what) in enumerate(words.items()):
        parts.append(box(x + 205 * n, y - 10, 12, 12, "none", TILES[kind], 2.5))
        parts.append(text(x + 18 + 205 * n, y, what, 12, "start"))
    return parts


@dataclass(frozen=True)
class Panel:
    """One (batch, head) of a picture: its title and a number for each cell, rows of queries from above."""

    title: str
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Picture:
    """Panels of cells. queries, keys: lengths; cell: how many of them a cell stands for; others: panels left out."""

    title: str
    panels: tuple[Panel, ...]
    queries: int
    keys: int
    cell: tuple[int, int]
    others: int = 0

    @property
    def _size(self) -> tuple[float, float]:
        """Width and height of a cell in px."""
        down, across = (max(-(-length // cell), 1) for length, cell in zip((self.queries, self.keys), self.cell))
        return min(SIDE / across, SIDE / down * 4, 24), min(SIDE / down, SIDE / across * 4, 24)

    def _of_cell(self) -> str:
        q, kv = self.cell
        return "" if (q, kv) == (1, 1) else f"; a cell is {q} x {kv} pairs"

    def _draw(self, draw: Callable[[float, float, Panel], list[str]], legend: Callable[[float], list[str]]) -> str:
        """The SVG: panels side by side under the title, the axes at each, a legend below."""
        width, height = self._size
        across, down = -(-self.keys // self.cell[1]) * width, -(-self.queries // self.cell[0]) * height
        step, left, top = max(across, 110) + 50, 52, 66
        parts = [text(12, 20, self.title, 13, "start"), text(12, 38, self.words(), 12, "start", QUIET)]
        for n, panel in enumerate(self.panels):
            x = left + n * step
            parts += draw(x, top, panel)
            parts.append(text(x, top + down + 14, "key 0", 10, "start", QUIET))
            parts.append(text(x + across, top + down + 14, str(self.keys - 1), 10, "end", QUIET))
            parts.append(text(x - 5, top + 9, "0" if n else "query 0", 10, "end", QUIET))
            parts.append(text(x - 5, top + down, str(self.queries - 1), 10, "end", QUIET))
        bottom = top + down + 38
        wide = max(left + len(self.panels) * step, 12 + 6.4 * max(len(self.title) * 1.08, len(self.words())), 430)
        drawn = picture(wide, bottom + 14, [*parts, *legend(bottom)])
        return drawn.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)

    def words(self) -> str:
        """What the picture says in one line."""
        raise NotImplementedError

    def svg(self) -> str:
        """The picture as an SVG file."""
        raise NotImplementedError

    def _glyphs(self) -> tuple[str, Callable[[float], str]]:
        """A legend, and the character of a cell."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        legend, glyph = self._glyphs()
        lines = [self.title, self.words(), legend]
        blocks = [
            [*([p.title] if p.title else []), *("".join(glyph(value) * 2 for value in row) for row in p.rows)]
            for p in self.panels
        ]
        wide = max((len(line) for block in blocks for line in block), default=1)
        together = max((COLUMNS + 2) // (wide + 2), 1)
        for first in range(0, len(blocks), together):
            beside = itertools.zip_longest(*blocks[first : first + together], fillvalue="")
            lines += ["  ".join(part.ljust(wide) for part in row).rstrip() for row in beside]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class MaskPicture(Picture):
    """Which pairs a mask keeps. Cells hold shares of kept pairs; kept: the share of all pairs of these panels.

    tile: queries and keys of the kernels' tiles, drawn as frames. exact: False where cells were sampled.
    """

    kept: float = 0.0
    tile: tuple[int, int] | None = None
    exact: bool = True

    def words(self) -> str:
        about = "" if self.exact else "about "
        size = f"{self.queries} queries x {self.keys} keys"
        others = f"; {self.others} more batches and heads" if self.others else ""
        return f"{about}{percent(self.kept)} kept of {size}{self._of_cell()}{others}{self._of_tiles()}"

    def _of_tiles(self) -> str:
        if self.tile is None:
            return ""
        kinds = [k for p in self.panels for row in kinds_of_tiles(p.rows, *self._tile_in_cells()) for k in row]
        count = {kind: kinds.count(kind) for kind in TILES}
        q, kv = self.tile
        return f"; tiles of {q} x {kv}: {count['whole']} whole, {count['part']} in part, {count['none']} not visited"

    def _tile_in_cells(self) -> tuple[int, int]:
        assert self.tile is not None
        return self.tile[0] // self.cell[0], self.tile[1] // self.cell[1]

    def svg(self) -> str:
        """The picture as an SVG file."""
        width, height = self._size
        tile = None if self.tile is None else self._tile_in_cells()

        def legend(y: float) -> list[str]:
            if tile is not None:
                return legend_of_tiles(14, y)
            steps = [(0.0, "masked"), *([(0.5, "part")] if self.cell != (1, 1) else []), (1.0, "kept")]
            boxes = [box(14 + 80 * n, y - 10, 12, 12, mix(MASKED, KEPT, s), FAINT) for n, (s, _) in enumerate(steps)]
            return boxes + [text(32 + 80 * n, y, what, 12, "start") for n, (_, what) in enumerate(steps)]

        return self._draw(lambda x, y, p: mask_cells(x, y, p.title, p.rows, width, height, tile), legend)

    def _glyphs(self) -> tuple[str, Callable[[float], str]]:
        def glyph(share: float) -> str:
            return "█" if share == 1 else "·" if share == 0 else "░▒▓"[min(int(share * 3), 2)]

        part = "  ░░ ▒▒ ▓▓ in part" if self.cell != (1, 1) else ""
        return f"██ kept{part}  ·· masked", glyph


@dataclass(frozen=True, repr=False)
class ScorePicture(Picture):
    """Scores after score_mod, or the final weights of rows, of the pairs that the mask keeps; NaN where it keeps none.

    weights: which of the two. low, high: the least and the largest number of a cell.
    """

    weights: bool = False
    low: float = 0.0
    high: float = 0.0

    def words(self) -> str:
        what = "weights" if self.weights else "scores"
        others = f"; {self.others} more batches and heads" if self.others else ""
        mean = " (the mean of those kept)" if self.cell != (1, 1) else ""
        size = f"{self.queries} queries x {self.keys} keys"
        return f"{what} of {size}, {self.low:.3g} to {self.high:.3g}{self._of_cell()}{mean}{others}"

    def _color(self, value: float) -> str:
        if math.isnan(value):
            return ABSENT
        most = max(abs(self.low), abs(self.high)) or 1.0
        share = abs(value) / most
        return mix("#ffffff", KEPT if self.weights or value < 0 else WARM, math.sqrt(share) if self.weights else share)

    def svg(self) -> str:
        """The picture as an SVG file."""
        width, height = self._size
        steps = [self.high * n / 4 for n in range(5)]
        if not self.weights:
            most = max(abs(self.low), abs(self.high))
            steps = [-most, -most / 2, 0.0, most / 2, most]

        def panel(x: float, y: float, one: Panel) -> list[str]:
            across = len(one.rows[0]) * width if one.rows else 0.0
            return [text(x + across / 2, y - 8, one.title), *cells(x, y, one.rows, width, height, self._color)]

        def legend(y: float) -> list[str]:
            keys = [(self._color(v), f"{v:.3g}") for v in steps] + [(ABSENT, "masked")]
            boxes = [box(14 + 68 * n, y - 10, 12, 12, color, FAINT) for n, (color, _) in enumerate(keys)]
            return boxes + [text(30 + 68 * n, y, what, 11, "start") for n, (_, what) in enumerate(keys)]

        return self._draw(panel, legend)

    def _glyphs(self) -> tuple[str, Callable[[float], str]]:
        levels, span = "▁▂▃▄▅▆▇█", (self.high - self.low) or 1.0

        def glyph(value: float) -> str:
            if self.weights and value == 0:
                return " "
            return "·" if math.isnan(value) else levels[min(int((value - self.low) / span * 8), 7)]

        blank = "  blank: exactly 0" if self.weights and self.low == 0 else ""
        return f"▁▁ {self.low:.3g}  to  ██ {self.high:.3g}  ·· masked{blank}", glyph


def percent(share: float) -> str:
    """A share as people read it; never 0 or 100 % where it is not."""
    shown = f"{100 * share:.1f} %"
    if (shown == "0.0 %" and share > 0) or (shown == "100.0 %" and share < 1):
        return "under 0.1 %" if share < 0.5 else "over 99.9 %"
    return shown.replace(".0 %", " %")
