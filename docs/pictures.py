"""Draws the documents' pictures from what the package itself computes: which tiles a mask keeps, how a row is met.

python docs/pictures.py      writes docs/pictures/*.svg
"""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from attention_engine import CustomIO, create_mask, show_scores
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate_all
from attention_engine.ir.program import SCORE
from attention_engine.library import OnlineSoftmax, causal, dilated, prefix_lm, sliding_window
from attention_engine.runtime.pictures import (
    FAINT,
    INK,
    KEPT,
    MASKED,
    TILES,
    WARM,
    box,
    cells,
    kinds_of_tiles,
    legend_of_tiles,
    mask_cells,
    mix,
    picture,
    text,
)

FOLDER = Path(__file__).parent / "pictures"
CELL = 13
SMALL, LITTLE = 24, 5  # queries and keys of a panel of a gallery, and a cell of it


def mask_panel(x: float, y: float, title: str, mask_mod: Callable[..., Any], length: int, q_tile: int, kv_tile: int):
    """One mask: pairs as cells, tiles as frames in the color of their kind."""
    return mask_cells(x, y, title, pairs_of(mask_mod, length), CELL, CELL, (q_tile, kv_tile))


def pairs_of(mask_mod: Callable[..., Any], length: int) -> list[list[float]]:
    """1 for each pair that the mask keeps, 0 for the others."""
    return create_mask(mask_mod, 1, 1, length, length)[0, 0].double().tolist()


def tiles_of_causal() -> str:
    """A causal mask in tiles, with the loop of one block of queries."""
    length, q_tile, kv_tile, x, y = 24, 4, 6, 90, 50
    parts = mask_panel(x, y, "keys", causal, length, q_tile, kv_tile)
    block = 3
    top = y + block * q_tile * CELL
    steps = sum(kind != "none" for kind in kinds_of_tiles(pairs_of(causal, length), q_tile, kv_tile)[block])
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
    return picture(640, y + length * CELL + 45, parts + legend_of_tiles(20, y + length * CELL + 28))


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
    return picture(width, 30 + length * CELL + 40, parts + legend_of_tiles(width / 2 - 310, 30 + length * CELL + 28))


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


def gallery(block: int) -> dict[str, Callable[..., Any]]:
    """The functions that a block of the page of masks and scores defines, after those before it."""
    names: dict[str, Any] = {}
    page = Path(__file__).parent / "flex-gallery.md"
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[: block + 1]:
        exec(code, names)
    found: dict[str, Callable[..., Any]] = names["scores" if block else "masks"]
    return found


def grid(panels: Sequence[list[str]], size: int, across: int = 5) -> str:
    """Panels of this size side by side, drawn at (0, 0) each, their titles above."""
    parts = []
    for n, panel in enumerate(panels):
        x, y = 14 + n % across * (size + 16), 28 + n // across * (size + 34)
        parts += [f'<g transform="translate({x} {y})">', *panel, "</g>"]
    rows = -(-len(panels) // across)
    return picture(14 + across * (size + 16), 14 + rows * (size + 34), parts)


def gallery_masks() -> str:
    """Every mask of the page: pairs kept."""
    drawn = [mask_cells(0, 0, name, pairs_of(mask, SMALL), LITTLE, LITTLE) for name, mask in gallery(0).items()]
    return grid(drawn, SMALL * LITTLE)


def gallery_scores() -> str:
    """Every score function of the page, of a score of 1: its sign and size as a colour."""
    size, cell = 2 * SMALL // 3, 3 * LITTLE / 2
    one = torch.ones(1, size, 1, 1)
    panels = []
    for name, mod in gallery(1).items():

        def score(score: Any, custom: Any, *place: Any) -> Any:
            return mod(score, *place)  # noqa: B023

        (panel,) = show_scores(one, one, score, scale=1.0).panels
        most = max(max(map(abs, row)) for row in panel.rows)

        def color(x: float) -> str:
            return mix(MASKED, WARM if x > 0 else KEPT, abs(x) / most)  # noqa: B023

        back = box(0, 0, size * cell, size * cell, MASKED)
        title = text(size * cell / 2, -8, name)
        panels.append([title, back, *cells(0, 0, panel.rows, cell, cell, color)])
    return grid(panels, round(size * cell))


PICTURES = {
    "tiles": tiles_of_causal, "masks": masks, "row": row_by_row, "gallery_masks": gallery_masks,
    "gallery_scores": gallery_scores,
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
