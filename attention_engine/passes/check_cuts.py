"""Refuses a program whose result depends on how a row is cut into tiles: the law, tried on small random rows."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from attention_engine.errors import NotOnline
from attention_engine.ir.evaluate import LOWEST, Value, evaluate_all
from attention_engine.ir.expr import Axis, Expr, Op, Type, topological
from attention_engine.ir.program import OUTPUT, Program

KEYS = 10
TOLERANCE = 1e-6  # of the larger result: far above the rounding of ten additions, far below a forgotten factor
SMALLEST = 1e-3  # results below this are compared as if they were this large
ROWS = ((0, 0.0, 1.0), (1, 0.0, 4.0), (2, 2.0, 0.5))  # seed, center and spread of each row's scores


@dataclass(frozen=True)
class Cut:
    """Tiles of one row: the keys of each, in the order they are met; a tile whose pairs are all masked has none."""

    name: str
    tiles: tuple[tuple[int, ...], ...]


def _cuts() -> Iterator[Cut]:
    keys = tuple(range(KEYS))
    yield Cut("one tile", (keys,))
    for stops in ((4,), (1, 7), (3, 5, 9)):
        starts = (0, *stops)
        tiles = tuple(keys[a:b] for a, b in zip(starts, (*stops, KEYS), strict=True))
        yield Cut(f"tiles of {_sizes(tiles)} keys", tiles)
        yield Cut(f"tiles of {_sizes(tiles[::-1])} keys, last keys first", tiles[::-1])
    yield Cut("a masked tile, then one of all keys", ((), keys))
    yield Cut("tiles of 0 (all masked), 6, 0 and 4 keys", ((), keys[:6], (), keys[6:]))


def _sizes(tiles: tuple[tuple[int, ...], ...]) -> str:
    *first, last = (str(len(t)) for t in tiles)
    return f"{', '.join(first)} and {last}"


CUTS = tuple(_cuts())


def random_cuts(draw: random.Random, count: int) -> Iterator[Cut]:
    """Cuts into any number of tiles, in any order, some of them masked whole."""
    for _ in range(count):
        keys = list(range(KEYS))
        draw.shuffle(keys)
        stops = sorted(draw.choices(range(KEYS + 1), k=draw.randrange(2 * KEYS)))
        tiles = tuple(tuple(keys[a:b]) for a, b in zip((0, *stops), (*stops, KEYS), strict=True))
        yield Cut(f"tiles of {_sizes(tiles)} keys, in random order" if len(tiles) > 1 else "one tile, shuffled", tiles)


def check_online(program: Program, cuts: Sequence[Cut] = CUTS, where: str = "") -> None:
    """Runs the program on random rows, each cut in several ways; raises NotOnline where two results differ. where: what
    its message begins with. A program that passed is not run again: engines made alike are many."""
    _check(program, tuple(cuts), where)


@functools.lru_cache(maxsize=256)
def _check(program: Program, cuts: tuple[Cut, ...], where: str) -> None:
    roots = [program.output, *(final for _, final in program.finals), *_each_tile(program)]
    carried = {OUTPUT, *(state.variable for state in program.states)}
    variables = [n for n in topological(*roots) if n.op in (Op.VAR, Op.LOAD) and n not in carried]
    for seed, center, spread in ROWS:
        draw = random.Random(seed)
        row = {n: _draw(n, draw, center, spread) for n in variables}
        values = [draw.gauss(0.0, 1.0) for _ in range(KEYS)]
        whole = _run(program, CUTS[0], row, values, where)
        for cut in cuts:
            _compare(whole, cut, _run(program, cut, row, values, where), where)


def _each_tile(program: Program) -> list[Expr]:
    return [program.weights, program.rescale, *(state.update for state in program.states)]


def _draw(node: Expr, draw: random.Random, center: float, spread: float) -> Value:
    """A value for a variable or a read of a custom input: a row of them where it depends on the key."""
    match node.dtype:
        case Type.FLOAT:
            numbers: list[float] = [draw.gauss(center, spread) for _ in range(KEYS)]
        case Type.INT | Type.LONG:
            numbers = list(range(KEYS))
        case Type.BOOL:
            numbers = [draw.random() < 0.5 for _ in range(KEYS)]
        case _:
            assert_never(node.dtype)
    return numbers if Axis.KEY in node.axes else numbers[1]


def _run(
    program: Program, cut: Cut, row: Mapping[Expr, Value], values: list[float], where: str
) -> dict[str, float]:  # fmt: skip
    """The output (of one channel) and the returned rows."""
    states: dict[Expr, Value] = {s.variable: max(min(s.initial, -LOWEST), LOWEST) for s in program.states}
    output = 0.0
    roots = _each_tile(program)
    for tile in cut.tiles:
        known = {n: [v[j] for j in tile] if isinstance(v, list) else v for n, v in row.items()} | states
        weights, rescale, *updates = evaluate_all(roots, known, len(tile))
        if not isinstance(weights, list):  # the same for every key
            weights = [weights] * len(tile)
        if output == 0 and math.isinf(rescale):
            raise NotOnline(
                f"{where}rescale is {rescale} where nothing was added yet, and 0 times it is NaN in each row.\n"
                "  It is what the output so far is multiplied with: exp(old maximum - new maximum), which is 0 at "
                "first."
            )
        output = output * rescale + sum(w * values[j] for w, j in zip(weights, tile, strict=True))
        states = dict(zip(states, updates, strict=True))
    end = {**row, **states, OUTPUT: output}
    found, *finals = evaluate_all([program.output, *(final for _, final in program.finals)], end)
    names = (f"the returned row {name!r}" for name, _ in program.finals)
    return {"the output": found, **dict(zip(names, finals, strict=True))}


def _compare(whole: Mapping[str, float], cut: Cut, found: Mapping[str, float], where: str) -> None:
    for what, expected in whole.items():
        got = found[what]
        if not _agree(expected, got):
            raise NotOnline(
                f"{where}{what} depends on how a row is cut into tiles. Is a rescale forgotten?\n"
                f"  Of the same {KEYS} keys:\n"
                f"    {CUTS[0].name}: {expected:.6g}\n"
                f"    {cut.name}: {got:.6g}\n"
                "  The third result of online_fwd multiplies the output of earlier tiles; a state that sums weights "
                "needs\n  it too: r * rescale + weights.get_reduce('sum'). Weights that need all scores of their row "
                "(sparsemax, entmax)\n  or those of later keys (stick breaking) can't be made tile by tile."
            )


def _agree(a: float, b: float) -> bool:
    return a == b or (a != a and b != b) or abs(a - b) <= TOLERANCE * max(abs(a), abs(b), SMALLEST)
