"""Drawings of a block of the forward kernel for Hopper, and of one of the backward kernel over keys.

A column each for the warps that part, for the stages of shared memory between them, and for the tensor cores; time
goes down. The acts, their order, and who waits for what come from the warp simulator (recorded.py, replay.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from recorded import Event, Recorded, attend
from replay import Act, Replay, replay
from svg import FAINT, INK, PALE, Box, Line, Picture, Shape, Text, flatten

from attention_engine.plan.forms import HopperForward, HopperKeys, Tile

ROW, TOP, LEFT, GAP = 14, 70, 8, 6
Words = Callable[[Act], tuple[str, str]]  # what a box says of an act, and its kind
COLORS = {"wait": PALE, "copy": "#bbdefb", "product": "#ffe0b2", "maths": "#c8e6c9", "tell": "#e1bee7"}
OF_GROUPS = {"group 1": "#ffcc80", "group 2": "#fff3e0"}
FULL, FILLING = "#90caf9", "#e3f2fd"
BARRIER = "#b71c1c"
FORWARD = Tile(128, 128, 256, 2, HopperForward())
BACKWARD = Tile(64, 128, 256, 2, HopperKeys())
SYMBOLS = {
    ("q", "k"): "S", ("weights", "v"): "O", ("k", "q"): "S", ("v", "do"): "dP",
    ("weights_in", "do"): "dV", ("k", "gradients_out"): "dQ", ("gradients_in", "q"): "dK",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """of: a lane, a stage of a tile ("k_tile[0]"), or "tensor cores"."""

    of: str
    title: tuple[str, str]
    width: float


@functools.cache
def record() -> Recorded:
    """Three steps forward, three backward, and units enough for a block to prepare one."""
    return attend(FORWARD, BACKWARD, 192, 384, heads=4)


def one_block(events: Sequence[Event], first: str) -> list[Event]:
    """The first block's events: each block begins by copying this tensor."""
    starts = [
        n for n, event in enumerate(events) if event.op == "tma_copy" and event.barrier and event.names[0] == first
    ]
    return [held_apart(events, n) for n in range(starts[0], starts[1])]


def held_apart(events: Sequence[Event], n: int) -> Event:
    """An event; a wait that is a fence (barriers.finish_before), for what was waited for before, by another op."""
    event = events[n]
    if event.op == "mbarrier_wait_parity":
        for before in reversed(events[max(0, n - 40) : n]):
            if before.first == event.first and before.op == event.op and before.barrier == event.barrier:
                if before.phase == event.phase:
                    return Event(**(vars(event) | {"op": "finish_before"}))
                break
    return event


def short(name: str) -> str:
    """A tile's name on a drawing."""
    return {"q": "Q", "k": "K", "v": "V", "do": "dO", "o": "O"}.get(name, name)


def forward_length(event: Event) -> int | None:
    """Of an act of a forward block; None: not drawn."""
    match event.op, event.names:
        case ("fill" | "fence_proxy_async" | "sync_warp" | "finish_before", _):
            return None
        case ("ptx_arrive_barrier", _):
            return 0 if event.first < 32 else 1
        case ("copy", ("scores", "weights")):
            return 3
        case ("reduce" | "copy", _):
            return 2
        case _:
            return 1


def backward_length(event: Event) -> int | None:
    """Of an act of a block over keys."""
    match event.op, event.names:
        case ("fill" | "fence_proxy_async" | "sync_warp", _) | ("copy", ("gradients_in", _) | ("weights", _)):
            return None
        case ("ptx_arrive_barrier", _):
            return 0 if event.first < 128 else 1
        case ("tma_copy", (name, _)) if name.startswith("row"):
            return 0
        case ("finish_before", _):
            return 3
        case ("copy" | "reduce" | "atomic_add_elem_op", _):
            return 2
        case _:
            return 1


def forward_words(act: Act) -> tuple[str, str]:
    """What a box says of an act, and its kind."""
    event = act.event
    match event.op, event.names:
        case "wait_wgmma", _:
            return f"wait: {', '.join(act.of)}", "wait"
        case "mbarrier_wait_parity", _:
            return f"wait {event.barrier}", "wait"
        case "ptx_arrive_barrier", _:
            return f"arrive {event.barrier}", "tell"
        case "named_barrier_arrive", _:
            return "hand on the turn", "tell"
        case "tvm_storage_sync", _:
            return ("wait for a turn", "wait") if "thread" in event.numbers[1] else ("the group meets", "wait")
        case "wgmma_gemm", _:
            return f"issue {act.of[0]}", "product"
        case "tma_copy", (_, to) if event.barrier:
            return f"copy {short(to)} {act.of[0].split()[-1]}", "copy"
        case "tma_copy", _:
            return "copy O out", "copy"
        case "reduce", ("scores", _):
            return "row maxima", "maths"
        case "reduce", _:
            return "join row sums", "maths"
        case "copy", ("scores", "weights"):
            return "weights", "maths"
        case "copy", ("output", _):
            return "O to Q's tile", "maths"
        case "copy", _:
            return "store lse", "copy"
        case "tma_store_wait", _:
            return "wait: O read", "wait"
    raise ValueError(f"{event.op} {event.names} has no words")


def backward_words(act: Act) -> tuple[str, str]:
    """The same of a block over keys."""
    event = act.event
    match event.op, event.names:
        case "finish_before", _:
            return "weights", "maths"
        case "copy", ("gradients", _):
            return "their gradients", "maths"
        case "copy", (_, ("k" | "v")):
            return f"{'dK' if event.names[1] == 'k' else 'dV'} to {short(event.names[1])}'s tile", "maths"
        case "copy", (_, to):
            return f"copy {to[0]}{to[1].upper()} out", "copy"
        case "atomic_add_elem_op", _:
            return "add to dQ's sums", "copy"
        case "atomic_add_ret_elem_op", _:
            return f"count {'PREPARED' if 'ahead' in event.numbers[0] else 'FINISHED'}", "tell"
        case "tma_copy", ("zeroes", _):
            return "zeroes out", "copy"
        case "tma_copy", ("row", _):
            return "delta out", "copy"
        case "tma_copy", (("o" | "do"), _) if event.first == 32:
            return f"rows of {short(event.names[0])}", "copy"
        case "reduce", _:
            return "rows o . dO", "maths"
        case "mbarrier_wait_parity", _ if event.barrier.startswith("["):
            return "wait: rows here", "wait"
        case "tvm_storage_sync", _:
            return ("groups meet" if event.first >= 128 else "warps meet"), "wait"
        case _:
            return forward_words(act)


def stage_boxes(
    made: Replay, tile: str, stage: int, place: tuple[float, float], arrows: Sequence[float]
) -> list[Shape]:
    """What a stage of a tile holds, from when a copy begins until nobody reads it."""
    shapes: list[Shape] = []
    x, width = place[0], place[1] - place[0]
    landed = [c for c in made.copies if c.event.names[1] == tile and c.event.barrier == f"{tile}_full[{stage}]"]
    emptied = made.barriers[f"{tile}_empty[{stage}]"].over if f"{tile}_empty[{stage}]" in made.barriers else []
    for number, copy in enumerate(landed):
        last = max(
            (p.end for p in made.products if tile in p.event.names and p.of[0].endswith(copy.of[0][-2:])), default=0
        )
        end = emptied[number] if number < len(emptied) else max(last, copy.end)
        top, middle, bottom = (TOP + ROW * at for at in (copy.start, copy.end, end))
        held, center = f"{short(tile)} {copy.of[0][-1]}", x + width / 2
        shapes += [
            Box(x, top, width, middle - top, FILLING, FAINT),
            Box(x, middle, width, bottom - middle, FULL, FAINT),
            Text(center, beside(arrows, (top + middle) / 2 + 4), "comes", 10),
            Text(center, beside(arrows, (middle + bottom) / 2 + 4), held, bold=True),
        ]
    return shapes


def beside(arrows: Sequence[float], baseline: float) -> float:
    """The baseline for a word where no arrow passes, as near as may be."""
    tried = (baseline + offset for offset in (0, 6, -6, 12, -12, 18, -18))
    return next(y for y in tried if not any(y - 9 < arrow < y + 3 for arrow in arrows))


def links(made: Replay, places: dict[str, tuple[float, float]]) -> list[Line]:
    """From who ends a wait to who waited: an arrival of a warp, or a copy that has landed; places: of columns."""
    found: list[Line] = []
    for wait in made.acts:
        name = wait.event.barrier
        if wait.event.op != "mbarrier_wait_parity" or name.startswith("["):
            continue
        arrivals = [a for a in made.acts if a.event.op == "ptx_arrive_barrier" and a.event.barrier == name]
        source = next((a.lane for a in reversed(arrivals) if a.end == wait.end), name.replace("_full", ""))
        if source in places:
            (left, right), (of_left, of_right) = places[source], places[wait.lane]
            y = TOP + ROW * wait.end
            ends = (left, of_right) if of_right < left else (right, of_left)
            found.append(Line([(x, y) for x in ends], BARRIER, 1.1, "3 2", tip=True))
    return found


def draw(made: Replay, columns: Sequence[Column], words: Words, title: str) -> Picture:
    """A block."""
    shapes: list[Shape] = []
    places: dict[str, tuple[float, float]] = {}
    x, height = float(LEFT), TOP + ROW * made.end + 60
    for column in columns:
        places[column.of] = x, x + column.width
        x += column.width + GAP
    arrows = links(made, places)
    passed = [arrow.points[0][1] for arrow in arrows]
    rules = [Line([(LEFT, TOP + ROW * at), (LEFT + sum(c.width + GAP for c in columns) - GAP, TOP + ROW * at)], PALE)
             for at in range(0, made.end + 1, 5)]  # fmt: skip
    for column in columns:
        (left, right), width = places[column.of], column.width
        middle = (left + right) / 2
        shapes.append(Box(left, TOP, width, ROW * made.end, "none", PALE))
        shapes += [Text(middle, TOP - 22 + 14 * n, line, 11, bold=True) for n, line in enumerate(column.title)]
        if column.of == "tensor cores":
            for product in made.products:
                top, bottom = TOP + ROW * product.start, TOP + ROW * product.end
                shapes.append(Box(left, top, width, bottom - top, OF_GROUPS[product.lane], FAINT))
                shapes.append(Text(middle, (top + bottom) / 2 + 4, product.of[0], 11))
        elif "[" in column.of:
            tile, stage = column.of.rstrip("]").split("[")
            shapes += stage_boxes(made, tile, int(stage), (left, right), passed)
        else:
            for act in merged([a for a in made.acts if a.lane == column.of], words):
                top, bottom = TOP + ROW * act.start, TOP + ROW * act.end
                said, kind = words(act)
                shapes.append(Box(left + 1, top + 0.5, width - 2, bottom - top - 1, COLORS[kind], FAINT, 0.6))
                shapes.append(Text(middle, (top + bottom) / 2 + 3.6, said, 10))
    legend, at = [], float(LEFT)
    for kind, what in {"wait": "waits", "copy": "copies", "product": "issues", "maths": "computes",
                       "tell": "tells"}.items():  # fmt: skip
        legend += [Box(at, height - 40, 12, 12, COLORS[kind], FAINT), Text(at + 18, height - 30, what, 11, "start")]
        at += 36 + 7 * len(what)
    for group, color in OF_GROUPS.items():
        legend += [
            Box(at, height - 40, 12, 12, color, FAINT),
            Text(at + 18, height - 30, f"product of {group}", 11, "start"),
        ]
        at += 146
    below = "Time goes down. Red: who ends a wait. A wait that is over when its warp comes to it is not drawn."
    legend.append(Text(LEFT, height - 10, below, 11, "start"))
    return Picture(
        x - GAP + LEFT,
        height,
        title,
        flatten([Text(LEFT, 18, title, 13, "start", INK, True), *rules, *shapes, *arrows, *legend]),
    )


def merged(acts: list[Act], words: Words) -> list[Act]:
    """Acts of one lane, those that follow each other and say the same as one."""
    found: list[Act] = []
    for act in acts:
        if found and found[-1].end == act.start and words(found[-1]) == words(act):
            found[-1] = Act(act.lane, act.event, found[-1].start, act.end, act.of)
        else:
            found.append(act)
    return found


def forward_block() -> Picture:
    """A block of 128 queries and three tiles of keys, at head dims 128."""
    made = replay(one_block(record().forward, "q"), forward_length, SYMBOLS)
    columns = [
        Column("warp 0", ("copying", "warp"), 104),
        *(Column(f"{tile}[{n}]", (f"{short(tile)} tile", f"stage {n}"), 62) for tile in "kv" for n in range(2)),
        Column("tensor cores", ("tensor", "cores"), 74),
        *(Column(f"group {n}", ("warpgroup", f"{n}"), 128) for n in (1, 2)),
    ]
    return draw(made, columns, forward_words, "Forward for Hopper, a block: 128 queries, three tiles of 128 keys")


def backward_block() -> Picture:
    """A block of 128 keys and three tiles of queries, at head dims 128."""
    made = replay(one_block(record().backward, "k"), backward_length, SYMBOLS, ["warp 2", "warp 3"])
    columns = [
        Column("warp 0", ("copying", "warp"), 104), Column("warp 1", ("a spare", "warp"), 112),
        *(Column(f"{tile}[{n}]", (f"{short(tile)} tile", f"stage {n}"), 56) for tile in ("q", "do") for n in range(2)),
        Column("tensor cores", ("tensor", "cores"), 66),
        *(Column(f"group {n}", ("warpgroup", f"{n}"), 128) for n in (1, 2)),
    ]  # fmt: skip
    return draw(made, columns, backward_words, "Backward for Hopper, a block: 128 keys, three tiles of 64 queries")
