"""When the acts of a recorded block happen, if each takes so many steps: the time axis of the drawings of blocks.

What is recorded: the acts, their order in each role, which barrier a wait is for, and which of its phases ends it. What
is set: how long an act takes (`lengths`, by the drawing), a copy until it has landed, and a product; that one product
runs at a time, in the order of their issue, as the groups of a block share the tensor cores. Two groups run the same
code, so what both do is replayed once for each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from recorded import GROUP, Event

LANDING, PRODUCT = 4, 3  # steps from the issue of a copy until it is there; of a product on the tensor cores
WAITS = {"mbarrier_wait_parity", "wait_wgmma", "tma_store_wait"}  # they take no step where they are over already
BOTH = "256"  # threads of two groups, at a named barrier


@dataclass(frozen=True)
class Act:
    """An event in its lane, from one step to another; of: what it waited for, or started, numbered by kind."""

    lane: str
    event: Event
    start: int
    end: int
    of: tuple[str, ...] = ()


@dataclass
class Phases:
    """A barrier: when its phases were over; who arrived in the present one, and when the last of those and of its
    copies came."""

    over: list[int] = field(default_factory=list)
    arrived: int = 0
    last: int = 0

    def arrive(self, threads: int, count: int, at: int) -> None:
        """So many threads arrive."""
        self.arrived, self.last = self.arrived + threads, max(self.last, at)
        if self.arrived == count:
            self.over.append(self.last)
            self.arrived, self.last = 0, 0


@dataclass
class Replay:
    """A block, replayed: acts of its lanes; copies until they have landed; products on the tensor cores."""

    acts: list[Act] = field(default_factory=list)
    copies: list[Act] = field(default_factory=list)
    products: list[Act] = field(default_factory=list)
    barriers: dict[str, Phases] = field(default_factory=lambda: defaultdict(Phases))

    @property
    def end(self) -> int:
        """The last step."""
        return max(act.end for act in self.acts)


def lanes_of(event: Event) -> list[str]:
    """Whose act an event is."""
    if event.first < GROUP:
        return [f"warp {event.first // 32}"]
    return [f"group {group}" for group in event.threads]


def replay(events: Sequence[Event], lengths: Callable[[Event], int | None], symbols: dict[tuple[str, ...], str],
           without: Sequence[str] = ()) -> Replay:  # fmt: skip
    """Of one block. lengths: None for what is no act of the drawing; symbols: of products, by their operands; without:
    lanes that are left out, for whom nobody waits."""
    todo: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        for lane in lanes_of(event):
            if lengths(event) is not None and lane not in without:
                todo[lane].append(event)
    run = _Run(dict.fromkeys(todo, 0), lengths, symbols)
    while any(todo.values()):
        able = {}
        for lane, acts in todo.items():
            at = run.ready(lane, acts[0]) if acts else None
            if at is not None:
                able[lane] = max(run.clock[lane], at)
        assert able, f"nobody can go on: {[(lane, acts[0]) for lane, acts in todo.items() if acts]}"
        lane = min(able, key=lambda lane: (able[lane], lane))
        run.act(lane, todo[lane].pop(0))
    return run.made


@dataclass
class _Run:
    clock: dict[str, int]
    lengths: Callable[[Event], int | None]
    symbols: dict[tuple[str, ...], str]
    made: Replay = field(default_factory=Replay)
    issued: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))  # ends, names
    busy: int = 0  # until when the tensor cores are
    numbers: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    came: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))  # at named barriers:
    # those of a lane, to meet there, or of any, to hand on a turn
    gone: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))

    def ready(self, lane: str, event: Event) -> int | None:
        """When others let an act go on; None: that is not known yet."""
        if event.op == "mbarrier_wait_parity":
            over = self.made.barriers[event.barrier].over
            return 0 if event.phase < 0 else over[event.phase] if event.phase < len(over) else None
        if event.op == "wait_wgmma":
            return max((end for end, _ in self._over(lane, event)), default=0)
        if event.op == "tvm_storage_sync" and event.numbers[2] == BOTH:
            number, turn = _barrier_of(event.numbers[1], lane), self.gone[lane, event.numbers[1]]
            if _takes_turn(event):
                others = self.came[number, ""]
            else:
                others = self.came[number, "group 2" if lane == "group 1" else "group 1"]
                if len(self.came[number, lane]) == turn:
                    self.came[number, lane].append(self.clock[lane])
            return others[turn] if turn < len(others) else None
        return 0

    def _over(self, lane: str, event: Event) -> list[tuple[int, str]]:
        issued = self.issued[lane]
        return issued[: len(issued) - int(event.numbers[0])]

    def act(self, lane: str, event: Event) -> None:
        """Does it, from the lane's clock on."""
        start, ready = self.clock[lane], self.ready(lane, event)
        length, of = self.lengths(event), ()
        assert length is not None and ready is not None
        end = max(start, ready) if event.op in WAITS else max(start + length, ready)
        if event.op == "ptx_arrive_barrier":
            group = int(lane.split()[1]) if lane.startswith("group") else 0
            self.made.barriers[event.barrier].arrive(event.threads[group], event.count, end)
        elif event.op == "tma_copy" and event.barrier:
            of = (self._number(lane, event.names[1]),)
            self.made.copies.append(Act(lane, event, end, end + LANDING, of))
            phases = self.made.barriers[event.barrier]
            phases.last = max(phases.last, end + LANDING)
        elif event.op == "wgmma_gemm":
            of = (self._number(lane, self.symbols[event.names[:2]]),)
            first = max(end, self.busy)
            self.busy = first + PRODUCT
            self.issued[lane].append((self.busy, *of))
            self.made.products.append(Act(lane, event, first, self.busy, of))
        elif event.op == "wait_wgmma":
            of = tuple(name for _, name in self._over(lane, event))
            del self.issued[lane][: len(of)]
        elif event.op == "named_barrier_arrive":
            self.came[_barrier_of(event.numbers[0], lane), ""].append(end)
        elif event.op == "tvm_storage_sync" and event.numbers[2] == BOTH:
            self.gone[lane, event.numbers[1]] += 1
        if end > start:
            self.made.acts.append(Act(lane, event, start, end, of))
        self.clock[lane] = end

    def _number(self, lane: str, name: str) -> str:
        self.numbers[lane, name] += 1
        return f"{name} {self.numbers[lane, name] - 1}"


def _takes_turn(event: Event) -> bool:
    return not event.numbers[1].isdigit()


def _barrier_of(number: str, lane: str) -> int:
    """Of a formula of the thread's index, for a lane's first thread."""
    formula = re.sub(r"[A-Za-z_]\w*", str(int(lane.split()[1]) * GROUP), number)
    assert re.fullmatch(r"[\d+*/%() -]+", formula), number
    return int(eval(formula))
