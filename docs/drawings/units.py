"""Drawings of how dQ is made where blocks over keys are persistent: what happens to each unit, and when.

`calendar` is what the warp simulator saw: eight key heads with two blocks of keys each, on its GPU that runs three
blocks at once. `life` puts one unit's stations in a row, with who brings it there and by which counter others know.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator

from blocks import BACKWARD, FORWARD
from recorded import Event, attend
from svg import FAINT, INK, PALE, Box, Line, Picture, Shape, Text, flatten

from attention_engine.plan.forms import padded_rows

HEADS, QUERIES, KEYS, DIM = 8, 128, 256, 128
BEFORE, AFTER = "preprocess", "postprocess"
COLORS = {"prepared": "#fff59d", "computed": "#ffcc80", "stored": "#a5d6a7"}


@functools.cache
def events() -> list[Event]:
    """A backward pass by persistent blocks."""
    return attend(FORWARD, BACKWARD.in_form(persistent=True), QUERIES, KEYS, HEADS).backward


def found(recorded: list[Event]) -> Iterator[tuple[str, int, str]]:
    """What was done to which unit, and during which unit's items, or by which kernel."""
    items: dict[int, int] = defaultdict(int)  # over, of each spare warp
    blocks = KEYS // BACKWARD.kv
    walking = False
    for event in recorded:
        places = dict(event.at)
        match event.op, event.names:
            case "ptx_arrive_barrier", _ if event.barrier.startswith("read") and 0 < event.first < 128:
                items[event.first] += 1
            case "copy", ("o", _) if not walking:
                yield "prepared", places["o"] // DIM % HEADS, BEFORE
            case "tma_copy", ("k", "k"):
                walking = True
                yield "computed", places["k"] // DIM % HEADS, f"unit {places['k'] // DIM % HEADS}"
            case "tma_copy", ("zeroes", _):
                row = places["workspace"] // (padded_rows(QUERIES, BACKWARD.row_pad) * DIM)
                yield "prepared", row, f"unit {items[event.first] // blocks}"
            case "tma_copy", _ if "dq" in places:
                yield "stored", places["dq"] // DIM % HEADS, f"unit {items[event.first] // blocks}"
            case "copy", _ if "dq" in places:
                yield "stored", places["dq"] // DIM % HEADS, AFTER


def calendar() -> Picture:
    """Which units are prepared, computed and stored during which units' items."""
    when = [BEFORE, *(f"unit {n}" for n in range(HEADS)), AFTER]
    acts = dict.fromkeys((what, unit, at) for what, unit, at in found(events()))
    left, top, width, height, wide = 64.0, 78.0, 66.0, 26.0, 104.0
    ends = [left]
    for at in when:
        ends.append(ends[-1] + (wide if at in (BEFORE, AFTER) else width))
    bottom = top + HEADS * height
    shapes: list[Shape] = [
        Text(left + wide + HEADS * width / 2, top - 32, "one kernel over keys, during the items of", 11)
    ]
    for n, at in enumerate(when):
        shapes.append(Text((ends[n] + ends[n + 1]) / 2, top - 10, at, 11, bold=True))
        shapes.append(Line([(ends[n], top - 22), (ends[n], bottom)], FAINT if at in (BEFORE, AFTER) else PALE))
    for unit in range(HEADS):
        shapes.append(Text(left - 8, top + unit * height + 17, f"unit {unit}", 11, "end", INK, True))
        shapes.append(Line([(left, top + unit * height), (ends[-1], top + unit * height)], PALE))
    for what, unit, at in acts:
        n = when.index(at)
        shapes.append(
            Box(ends[n] + 2, top + unit * height + 2, ends[n + 1] - ends[n] - 4, height - 4, COLORS[what], FAINT)
        )
        shapes.append(Text((ends[n] + ends[n + 1]) / 2, top + unit * height + 17, what, 11))
    shapes.append(Line([(left, bottom), (ends[-1], bottom)], FAINT))
    shapes.append(Line([(ends[-1], top - 22), (ends[-1], bottom)], FAINT))
    title = "A row for each unit of blocks over keys: when it is prepared, computed and stored"
    shapes.append(Text(left, 20, title, 13, "start", INK, True))
    return Picture(ends[-1] + 12, bottom + 14, title, flatten(shapes))


STATIONS = (
    (
        "prepared",
        ("sums of dQ are zero,", "delta is made"),
        ("spare warps of the unit", "`ahead` units before it;", "preprocess: the first ones"),
    ),
    (
        "computed",
        ("dK and dV leave, products", "are added to the sums"),
        ("the warpgroups of its own", "blocks, by atomics"),
    ),
    ("finished", ("nobody adds to", "the sums any more"), ("a spare warp of each of", "its blocks counts it")),
    (
        "stored",
        ("dQ = scale * sums,", "in 16 bits"),
        ("spare warps of the unit", "`behind` units after it;", "postprocess: the last ones"),
    ),
)


def life() -> Picture:
    """A unit's stations in a row."""
    left, top, width, gap = 12.0, 52.0, 184.0, 24.0
    shapes: list[Shape] = [Text(left, 20, "The life of a unit", 13, "start", INK, True)]
    colors = {**COLORS, "finished": "#ffe0b2"}
    for n, (station, what, who) in enumerate(STATIONS):
        x = left + n * (width + gap)
        shapes.append(Box(x, top, width, 68, colors[station], FAINT))
        shapes.append(Text(x + width / 2, top + 20, station, 13, bold=True))
        shapes += [Text(x + width / 2, top + 38 + 15 * i, line) for i, line in enumerate(what)]
        shapes += [Text(x + width / 2, top + 90 + 15 * i, line) for i, line in enumerate(who)]
        if n + 1 < len(STATIONS):
            shapes.append(Line([(x + width + 3, top + 34), (x + width + gap - 3, top + 34)], tip=True))
    signs = (
        (0, "its counter PREPARED", "from -3 x blocks up to 0:", "every spare warp adds 1"),
        (2, "its counter FINISHED", "from -blocks up to 0:", "every block adds 1"),
    )
    for n, *lines in signs:
        x = left + n * (width + gap)
        shapes.append(Line([(x + width / 2, top + 142), (x + width / 2, top + 128)], FAINT, tip=True))
        shapes.append(Box(x, top + 144, width, 56, PALE, FAINT))
        shapes += [Text(x + width / 2, top + 161 + 15 * i, line, 11, bold=i == 0) for i, line in enumerate(lines)]
    waits = (
        (1, ("the warp that notes an item", "waits until PREPARED is 0,", "and only then tells it")),
        (3, ("who stores waits until", "FINISHED is 0, then fences", "and reads by TMA")),
    )
    for n, lines in waits:
        x = left + n * (width + gap)
        shapes.append(Line([(x - gap + 2, top + 172), (x - 3, top + 172)], FAINT, tip=True))
        shapes += [Text(x + width / 2, top + 161 + 15 * i, line) for i, line in enumerate(lines)]
    return Picture(left + 4 * width + 3 * gap + 12, top + 216, "The life of a unit", flatten(shapes))
