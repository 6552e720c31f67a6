"""Warp-specialised kernels on a CPU: barriers, asynchronous copies and products, each as late as the hardware may be.

Where a condition splits a block's threads in two, its cases run as roles, in turns: a role runs until it waits on a
barrier that is not there yet. A copy lands when a barrier that it arrives at is waited for, a product is there when it
is waited for; until then their targets are NaN. Raises HazardInKernel for a deadlock, a wait that could miss a phase,
an operand that changes while a product or a copy reads it, a product or copy nobody waits for, and shared memory handed
over without a fence or a meeting of threads; and where lanes of a warp that are late, or early, might find in shared
memory what others have stored too soon or too late, or would not meet each other (lanes.py).

Not modelled: the layout of tiles, and races between the threads of one role other than by shared memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from attention_engine.codegen.simulator.blocks import block_here
from attention_engine.codegen.simulator.lanes import READ, WARP, Accesses, Clock, Lanes, join
from attention_engine.codegen.tiles.scalar_ops import as_matrix_operand
from attention_engine.errors import HazardInKernel

Extent = tuple[int, int]  # first byte, and one past the last, of memory on chip


def extent_of(view: torch.Tensor) -> Extent:
    """The bytes that a view spans."""
    steps = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
    return view.data_ptr(), view.data_ptr() + (steps + 1) * view.element_size()


def _meets(one: Extent, others: Sequence[Extent]) -> bool:
    return any(one[0] < other[1] and other[0] < one[1] for other in others)


class Turns:
    """Roles of one block, as Python threads of which one runs at a time: the next one that can, or of all others before
    the `late` one, which shows who would miss it if its warps were slow."""

    late: int | None = None

    def __init__(self, roles: Sequence[Callable[[], None]]) -> None:
        self._roles = list(roles)
        self._free = threading.Condition()
        self._running = 0
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._done: set[int] = set()
        self._met: dict[int, int] = {}  # threads that came to a named barrier, over all meetings there
        self._told: dict[tuple[int, int], Clock] = {}  # at each meeting there
        self.accesses = Accesses()
        self._error: BaseException | None = None
        self._block = block_here()

    def run(self) -> None:
        """All roles to their ends; raises the first error of any."""
        threads = [self._start(role) for role in range(len(self._roles))]
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def beside(self, others: Sequence[Callable[[], None]], own: Callable[[], None]) -> None:
        """What the running role does next, and other roles for the while: until all have ended."""
        numbers = range(len(self._roles), len(self._roles) + len(others))
        self._roles += others
        for number in numbers:
            self._start(number)
        own()
        self.wait(lambda: self._done.issuperset(numbers), f"for roles {numbers.start} to {numbers.stop - 1}")

    def meet(self, barrier: int, coming: int, expected: int, clock: Clock) -> Clock:
        """So many threads come to a named barrier, where so many are expected each time; what they and the others told
        there."""
        over = self._met.get(barrier, 0) // expected + 1
        self._met[barrier] = self._met.get(barrier, 0) + coming
        told = self._told.setdefault((barrier, over), {})
        join(told, clock)
        self.wait(lambda: self._met[barrier] >= over * expected, f"{coming} threads meet at a barrier of {expected}")
        return told

    def _start(self, role: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(role,), daemon=True)
        thread.start()
        return thread

    def _run(self, role: int) -> None:
        try:
            with self._free:
                self._free.wait_for(lambda: self._running == role or self._error is not None)
            if self._error is None:
                with torch.no_grad():
                    self._roles[role]()
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._error = error
        finally:
            with self._free:
                self._done.add(role)
                self._pass_on()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run until `ready`."""
        if ready():
            return
        with self._free:
            role = self._running
            self._waiting[role] = (ready, what)
            self._pass_on()
            self._free.wait_for(lambda: self._running == role or self._error is not None)
            if self._error is not None:
                raise _Stopped

    def _pass_on(self) -> None:
        while not self._choose() and self._error is None and len(self._done) < len(self._roles):
            if self._block is None or self._block.is_last_try:
                stuck = "; ".join(what for role, (_, what) in sorted(self._waiting.items()) if role not in self._done)
                self._error = HazardInKernel(f"a deadlock: {stuck}")
            else:
                self._block.let_others_run()
        self._free.notify_all()

    def _choose(self) -> bool:
        """The role that runs next, if one can."""
        order = [(self._running + 1 + i) % len(self._roles) for i in range(len(self._roles))]
        for role in sorted(order, key=lambda role: role == self.late):
            if role in self._done:
                continue
            ready, _ = self._waiting.get(role, (lambda: True, ""))
            try:
                may_run = ready()
            except HazardInKernel as error:  # found in another role's name, whose thread would else end alone
                self._error = error
                break
            if may_run:
                self._waiting.pop(role, None)
                self._running = role
                if self._block is not None:
                    self._block.moved = True
                return True
        return False


class _Stopped(Exception):
    """Ends a role after another one failed."""


@dataclass
class Barrier:
    """One mbarrier: `phase` counts the phases that are over, of which `over` is what those who arrived had done."""

    name: str
    count: int
    phase: int = 0
    arrived: int = 0
    copies: list[Callable[[], None]] = field(default_factory=list)
    arriving: Clock = field(default_factory=dict)
    over: Clock = field(default_factory=dict)

    def arrive(self, threads: int, clock: Clock | None = None) -> None:
        """So many threads arrive in this phase."""
        self._turn()
        self.arrived += threads
        join(self.arriving, clock or {})
        if self.arrived > self.count:
            raise HazardInKernel(f"{self.arrived} threads arrive at {self.name}, which counts {self.count}")

    def passed(self, parity: int) -> bool:
        """Is the phase of this parity over? Only now do its copies land."""
        if self.phase & 1 == parity:
            self._turn()
        elif self.arrived == self.count:
            raise HazardInKernel(f"phase {parity} of {self.name} is waited for late: the next one is over too")
        return self.phase & 1 != parity

    def _turn(self) -> None:
        if self.arrived == self.count:
            for land in self.copies:
                land()
            self.copies.clear()
            join(self.over, self.arriving)
            self.arriving.clear()
            self.phase, self.arrived = self.phase + 1, 0


class Product:
    """A wgmma group on its way: its target holds NaN, and its operands must stay as they are."""

    def __init__(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, transposed: tuple[bool, bool],
                 before: Product | torch.Tensor | None) -> None:  # fmt: skip
        self.total, self.operands, self.transposed, self.before = total, (left, right), transposed, before
        self.seen = tuple(as_matrix_operand(x).clone() for x in self.operands)
        self.result: torch.Tensor | None = None
        total.fill_(torch.nan)

    def complete(self) -> None:
        """Write the result."""
        for now, then in zip(self.operands, self.seen, strict=True):
            if not torch.equal(as_matrix_operand(now).nan_to_num(7e30), then.nan_to_num(7e30)):
                raise HazardInKernel("an operand changed while a product was reading it")
        a, b = (x.T if transposed else x for x, transposed in zip(self.seen, self.transposed, strict=True))
        product = torch.mm(a, b)
        before = self.before.result if isinstance(self.before, Product) else self.before
        self.result = product if before is None else product + before
        self.total.copy_(self.result)


@dataclass(frozen=True, eq=False)
class Store:
    """A copy out of shared memory on its way: the tile must stay as it is. One of the threads issued it."""

    name: str
    tile: torch.Tensor
    seen: torch.Tensor
    threads: torch.Tensor

    def complete(self) -> None:
        """The tile has been read."""
        if not torch.equal(self.tile.nan_to_num(7e30), self.seen.nan_to_num(7e30)):
            raise HazardInKernel("shared memory changed while a copy out of it was reading it")


@dataclass
class Role:
    """The threads that run one piece of code together, and what they have under way."""

    threads: torch.Tensor
    turns: Turns | None = None
    lanes: Lanes | None = None  # where roles run in turns
    products: list[Product] = field(default_factory=list)
    unfenced: list[Extent] = field(default_factory=list)  # stored by threads, unseen by copies and products
    unmet: list[Extent] = field(default_factory=list)  # stored since the threads last met
    read: list[Extent] = field(default_factory=list)  # by products and copies, since they last met
    stores: list[Store] = field(default_factory=list)

    def narrow(self, threads: torch.Tensor) -> None:
        """Those that run the present piece of code."""
        self.threads = threads
        if self.lanes is not None:
            self.lanes.narrow(threads)

    def arrive(self, barrier: Barrier) -> None:
        """The threads arrive at a barrier."""
        barrier.arrive(len(self.threads), None if self.lanes is None else self.lanes.released())

    def meet_in_warps(self, what: str, *, of_memory: bool = False) -> None:
        """The lanes of each warp meet."""
        if self.lanes is not None:
            self.lanes.meet(what, of_memory=of_memory)

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Until a barrier's phase is over."""
        what = f"threads {int(self.threads[0])}... wait for phase {parity} of {barrier.name}"
        if self.turns is not None:
            self.turns.wait(lambda: barrier.passed(parity), what)
        elif not barrier.passed(parity):
            raise HazardInKernel(f"a deadlock: {what}")
        if self.lanes is not None:
            self.lanes.learn(barrier.over)

    def issue(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, transposed: tuple[bool, bool],
              clear: bool, shared: Sequence[torch.Tensor]) -> None:  # fmt: skip
        """Start a product."""
        for tile in shared:
            self.check_handed_over(tile, "a product reads")
            self.read.append(extent_of(tile))
        same = [p for p in self.products if extent_of(p.total) == extent_of(total)]
        before = None if clear else same[-1] if same else total.clone()
        self.products.append(Product(total, left, right, transposed, before))

    def wait_products(self, left: int) -> None:
        """Until no more than so many products are under way."""
        while len(self.products) > left:
            product = self.products.pop(0)
            product.complete()
            if any(extent_of(p.total) == extent_of(product.total) for p in self.products):
                product.total.fill_(torch.nan)

    def copy_out(self, name: str, tile: torch.Tensor, scope: int | None) -> None:
        """Start a copy out of shared memory; scope: by a lane of the first warp of so many threads each."""
        issuing = self.threads if scope is None else self.threads[self.threads % scope < WARP]
        self.stores.append(Store(name, tile, tile.clone(), issuing))

    def wait_stores(self, left: int, *, written: bool = False) -> None:
        """Until no more than so many copies have still to be read, of those that only these threads can have issued;
        written: and are in memory, too."""
        mine = [s for s in self.stores if torch.isin(s.threads, self.threads).all()]
        for store in mine[: len(mine) - left]:
            store.complete()
            self.read.append(extent_of(store.tile))
            if self.lanes is not None:  # only the lane that issued it knows by its wait
                self.lanes.access(READ, store.name, store.tile, by_one=True)
            self.stores.remove(store)
        if written and self.lanes is not None:
            self.lanes.know_written()

    def store(self, tile: torch.Tensor) -> None:
        """The threads stored a tile in shared memory; TileLang orders that itself where threads don't split."""
        if self.turns is None:
            return
        place = extent_of(tile)
        if _meets(place, self.read):
            what = "before the threads met after a product or copy that reads it"
            raise HazardInKernel(f"shared memory is written {what}")
        self.unfenced.append(place)
        self.unmet.append(place)

    def change(self, tile: torch.Tensor) -> None:
        """Threads of several warps stored entries of a tile. Of one warp, and of what was read before, lanes tell."""
        if self.turns is not None and len(self.threads) > WARP:
            self.unfenced.append(extent_of(tile))
            self.unmet.append(extent_of(tile))

    def check_handed_over(self, tile: torch.Tensor, what: str) -> None:
        """Stored tiles are seen by copies and products after a fence and a meeting of threads."""
        place = extent_of(tile)
        if _meets(place, self.unfenced):
            raise HazardInKernel(f"{what} shared memory that threads stored, without a fence")
        if _meets(place, self.unmet):
            raise HazardInKernel(f"{what} shared memory that threads stored, before they met")

    def meet(self, threads: int | None, barrier: int = 0) -> None:
        """The threads of the role meet, with those of others where more are expected at a barrier (bar.sync)."""
        if threads is None and self.turns is None:
            return
        if threads is None or threads % len(self.threads):
            raise HazardInKernel(f"{len(self.threads)} threads meet at a barrier of {threads or 'the whole block'}")
        self.meet_in_warps("a barrier of threads", of_memory=True)
        if threads != len(self.threads):
            if self.turns is None:
                raise HazardInKernel(f"{len(self.threads)} threads meet at a barrier of {threads}")
            told = self.turns.meet(barrier, len(self.threads), threads, self.lanes.released() if self.lanes else {})
            if self.lanes is not None:
                self.lanes.learn(told)
        self.unmet.clear()
        self.read = [extent_of(tile) for p in self.products for tile in p.operands]

    def end(self) -> None:
        """Nothing may be left under way."""
        if self.products:
            raise HazardInKernel(f"{len(self.products)} products that nobody waits for")
        if self.stores:
            raise HazardInKernel(f"{len(self.stores)} copies out of shared memory that nobody waits for")
