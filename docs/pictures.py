"""Draws the documents' pictures from what the package itself computes: which tiles a mask keeps, how a row is met.

python docs/pictures.py      writes docs/pictures/*.svg
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attention_engine import CustomIO, create_mask
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate_all
from attention_engine.ir.program import SCORE
from attention_engine.library import OnlineSoftmax, causal, dilated, prefix_lm, sliding_window

FOLDER = Path(__file__).parent / "pictures"
INK, FAINT, KEPT, MASKED = "#263238", "#90a4ae", "#3f6fb5", "#eceff1"
TILES = {"whole": "#2e7d32", "part": "#e07b00", "none": "#b0bec5"}
CELL = 13


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "middle", color: str = INK) -> str:
    """A line of text, its baseline at y."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, line: str = "none", thick: float = 1) -> str:
    """A rectangle."""
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{fill}" stroke="{line}" stroke-width="{thick:g}"/>'


def picture(width: float, height: float, parts: list[str]) -> str:
    """An SVG file on white, so that it reads on light and dark pages."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif">'
    )
    return "\n".join([head, box(0, 0, width, height, "white"), *parts, "</svg>\n"])


def kinds_of_tiles(mask: torch.Tensor, q_tile: int, kv_tile: int) -> list[list[str]]:
    """For each tile of a mask (queries, keys): "whole" (no pair masked), "part", or "none" (all masked)."""
    tiles = mask.unfold(0, q_tile, q_tile).unfold(1, kv_tile, kv_tile).flatten(2)
    whole, some = tiles.all(-1).tolist(), tiles.any(-1).tolist()
    return [
        ["whole" if a else "part" if s else "none" for a, s in zip(row_whole, row_some, strict=True)]
        for row_whole, row_some in zip(whole, some, strict=True)
    ]


def mask_panel(x: float, y: float, title: str, mask_mod: Callable[..., Any], length: int, q_tile: int, kv_tile: int):
    """One mask: pairs as cells, tiles as frames in the color of their kind."""
    mask = create_mask(mask_mod, 1, 1, length, length)[0, 0]
    side = length * CELL
    parts = [text(x + side / 2, y - 8, title), box(x, y, side, side, MASKED)]
    for i, row in enumerate(mask.tolist()):
        start = 0
        for kept, run in itertools.groupby(row):
            count = len(list(run))
            if kept:
                parts.append(box(x + start * CELL, y + i * CELL, count * CELL, CELL, KEPT))
            start += count
    lines = [f"M{x + n * CELL:g} {y:g} v{side} M{x:g} {y + n * CELL:g} h{side}" for n in range(length + 1)]
    parts.append(f'<path d="{" ".join(lines)}" stroke="white" stroke-width="2"/>')
    frames = []
    for i, row in enumerate(kinds_of_tiles(mask, q_tile, kv_tile)):
        for j, kind in enumerate(row):
            place = x + j * kv_tile * CELL + 1.5, y + i * q_tile * CELL + 1.5
            size = kv_tile * CELL - 3, q_tile * CELL - 3
            frame = box(*place, *size, "none", TILES[kind], 1 if kind == "none" else 2.5)
            frames.append((kind != "none", frame))
    return parts + [frame for _, frame in sorted(frames)]


def legend(x: float, y: float) -> list[str]:
    """What the colors of frames mean."""
    parts = []
    words = {"whole": "whole tile: no mask test", "part": "part: each pair tested", "none": "none kept: not visited"}
    for n, (kind, what) in enumerate(words.items()):
        parts.append(box(x + 205 * n, y - 10, 12, 12, "none", TILES[kind], 2.5))
        parts.append(text(x + 18 + 205 * n, y, what, 12, "start"))
    return parts


def tiles_of_causal() -> str:
    """A causal mask in tiles, with the loop of one block of queries."""
    length, q_tile, kv_tile, x, y = 24, 4, 6, 90, 50
    parts = mask_panel(x, y, "keys", causal, length, q_tile, kv_tile)
    block = 3
    top = y + block * q_tile * CELL
    mask = create_mask(causal, 1, 1, length, length)[0, 0]
    steps = sum(kind != "none" for kind in kinds_of_tiles(mask, q_tile, kv_tile)[block])
    parts.append(text(x - 12, y + length * CELL / 2 - 70, "queries", anchor="end"))
    parts.append(text(x - 12, top + q_tile * CELL / 2, "one block", 12, "end"))
    parts.append(text(x - 12, top + q_tile * CELL / 2 + 15, f"{q_tile} queries", 11, "end", FAINT))
    end = x + steps * kv_tile * CELL
    middle = top + q_tile * CELL / 2
    parts.append(f'<path d="M{x + 6} {middle} H{end - 10}" stroke="white" stroke-width="6"/>')
    parts.append(f'<path d="M{x + 6} {middle} H{end - 12}" stroke="{INK}" stroke-width="2.5"/>')
    parts.append(f'<path d="M{end - 16} {middle - 6} L{end - 4} {middle} L{end - 16} {middle + 6} z" fill="{INK}"/>')
    parts.append(text(x + length * CELL + 14, middle - 4, f"walks over {steps} tiles", 12, "start"))
    parts.append(text(x + length * CELL + 14, middle + 12, f"of {kv_tile} keys, and stops", 12, "start"))
    return picture(640, y + length * CELL + 45, parts + legend(20, y + length * CELL + 28))


def masks() -> str:
    """Four masks in tiles."""
    length, tile, parts = 16, 4, []
    shown = {
        "causal": causal, "sliding_window(5)": sliding_window(5), "prefix_lm(6)": prefix_lm(6),
        "dilated(3)": dilated(3),
    }  # fmt: skip
    for n, (title, mask_mod) in enumerate(shown.items()):
        parts += mask_panel(20 + n * (length * CELL + 22), 30, title, mask_mod, length, tile, tile)
    width = 20 + 4 * (length * CELL + 22)
    return picture(width, 30 + length * CELL + 40, parts + legend(width / 2 - 310, 30 + length * CELL + 28))


def row_by_row() -> str:
    """One row of scores met in tiles: the states of OnlineSoftmax after each, computed by the traced program."""
    program = trace(None, None, OnlineSoftmax(), CustomIO())
    draw = random.Random(5)
    scores = [draw.gauss(0.0, 1.0) + n / 6 for n in range(16)]
    tile, x, floor, unit = 4, 30, 190, 30
    roots = [program.rescale, *(state.update for state in program.states)]
    values: dict[Any, Any] = {state.variable: max(state.initial, -1e30) for state in program.states}
    parts = [text(20, 22, "scores of one row, in tiles of 4 keys", 13, "start")]
    for n in range(len(scores) // tile):
        here = scores[n * tile : (n + 1) * tile]
        rescale, m, r = evaluate_all(roots, {SCORE: here, **values}, tile)
        left = x + n * 150
        parts.append(box(left - 8, 40, 140, 260, "none", FAINT))
        for j, score in enumerate(here):
            height = score * unit
            parts.append(box(left + j * 32, floor - max(height, 0), 26, abs(height), KEPT))
        top = f"M{left - 4} {floor - m * unit:g} H{left + 128}"
        parts.append(f'<path d="{top}" stroke="{TILES["part"]}" stroke-width="2.5"/>')
        parts.append(text(left + 60, 268, f"m = {m:.2f},  r = {r:.2f}", 12))
        parts.append(text(left + 60, 288, f"rescale = {rescale:.2f}", 12, color=TILES["part"] if rescale < 1 else INK))
        values = dict(zip(values, (m, r), strict=True))
    below = (
        "m, the maximum so far (orange); r, the sum of exp(score - m) so far.",
        "Where m grows, r and the output so far are multiplied by rescale = exp(old m - new m).",
    )
    parts += [text(20, 325 + 17 * n, words, 12, "start") for n, words in enumerate(below)]
    return picture(650, 355, parts)


PICTURES = {"tiles": tiles_of_causal, "masks": masks, "row": row_by_row}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
