"""What the interpreter does for barriers, asynchronous copies and products, and conditions on the thread's index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from attention_engine.codegen.simulator.lanes import READ, STORED, WARP, Lanes
from attention_engine.codegen.simulator.roles import Barrier, Role, Turns
from attention_engine.codegen.simulator.watch import watched
from attention_engine.codegen.tiles.buffers import ROLE
from attention_engine.codegen.tiles.ops import TILE_OPS
from attention_engine.codegen.tiles.scalar_ops import poison
from attention_engine.codegen.tiles.tir_nodes import handle_of, kind_of
from attention_engine.codegen.tiles.windows import Frame, Jump, Run, Window
from attention_engine.codegen.tir_types import Annotations, Call, Expression, Load, Variable
from attention_engine.errors import HazardInKernel, NotInterpretable

Cases = tuple[Run, Run]


class Compiler(Protocol):
    """The part of the interpreter's compiler that these operations need."""

    barriers: dict[int, int]  # the slots of barriers, by their memory
    waits: int  # for barriers, so far

    def region(self, node: Expression, *, keep_ones: bool = False) -> Window:
        """The window that a region argument names."""

    def value(self, node: Expression) -> Run:
        """The code of an expression."""

    def new_slot(self) -> int:
        """A fresh slot of the frame."""


def enter_block(compiler: Compiler, annotations: Annotations) -> list[Run]:
    """Code for the start of a block: its threads as one role, and its barriers."""
    steps: list[Run] = []
    for name, value in annotations.items():
        if str(name) == "tl.launch_threads":
            steps.append(_all_threads(int(cast(Sequence[Expression], value)[0])))
        elif str(name) == "barrier_init":
            for memory, counts in cast(Mapping[Variable, Sequence[Expression]], value).items():
                slot = compiler.barriers[handle_of(memory)] = compiler.new_slot()
                steps.append(_fresh_barriers(slot, str(memory.name), [int(c) for c in counts]))
    return steps


def _all_threads(count: int) -> Run:
    threads = torch.arange(count)

    def run(frame: Frame) -> None:
        frame[ROLE] = Role(threads)

    return run


def _fresh_barriers(slot: int, name: str, counts: list[int]) -> Run:
    def run(frame: Frame) -> None:
        frame[slot] = [Barrier(f"{name}[{i}]", count) for i, count in enumerate(counts)]

    return run


def split(test: Run, then: Run, otherwise: Run | None, both_wait: bool) -> Run:
    """A condition on the thread's index: two roles where both cases have threads, else a part of this one. A role's
    own cases run one after another, or beside each other where both wait for barriers."""

    def part(frame: Frame, role: Role, case: Run, threads: torch.Tensor) -> None:
        everybody = role.threads
        role.narrow(threads)
        try:
            case(frame)
        except Jump as jump:
            if len(threads) < len(everybody):
                raise NotInterpretable("a jump that only some threads take") from jump
            raise
        role.narrow(everybody)

    def run(frame: Frame) -> None:
        role: Role = frame[ROLE]
        chosen = torch.as_tensor(test(frame)).expand(role.threads.shape)
        everybody = role.threads
        if otherwise is not None and chosen.any() and not chosen.all():
            if role.turns is None:
                _fork(frame, role, chosen, (then, otherwise))
                return
            if both_wait:
                _fork_off(frame, role, chosen, (then, otherwise))
                return
        for case, threads in ((then, everybody[chosen]), (otherwise, everybody[~chosen])):
            if case is not None and len(threads):
                part(frame, role, case, threads)

    return run


def _own(frame: Frame) -> Frame:
    """A role's own variables, and the buffers and barriers of all."""
    return [list(value) if isinstance(value, list) else value for value in frame]


def _fork(frame: Frame, role: Role, chosen: torch.Tensor, cases: Cases) -> None:
    def start(case: Run, threads: torch.Tensor) -> Callable[[], None]:
        own = _own(frame)
        own[ROLE] = Role(threads)
        roles.append(own[ROLE])

        def run() -> None:
            case(own)
            own[ROLE].end()

        return run

    roles: list[Role] = []
    turns = Turns([start(cases[0], role.threads[chosen]), start(cases[1], role.threads[~chosen])])
    for part in roles:
        part.turns, part.lanes = turns, Lanes(turns.accesses, part.threads)
    turns.run()


def _fork_off(frame: Frame, role: Role, chosen: torch.Tensor, cases: Cases) -> None:
    """The role goes on with one case; the other's threads are roles of their own meanwhile, one for each warp."""

    then, otherwise = cases
    everybody, turns, lanes = role.threads, role.turns, role.lanes
    assert turns is not None and lanes is not None
    accesses, released = turns.accesses, lanes.released

    def start(threads: torch.Tensor) -> Callable[[], None]:
        own = _own(frame)
        own[ROLE] = Role(threads, turns, Lanes(accesses, threads, released()))

        def run() -> None:
            otherwise(own)
            own[ROLE].end()

        return run

    others = [start(threads) for threads in everybody[~chosen].split(WARP)]
    role.threads = everybody[chosen]
    lanes.name(role.threads)
    turns.beside(others, lambda: then(frame))
    role.threads = everybody
    lanes.name(everybody)


def _barrier(compiler: Compiler, access: Expression) -> Run:
    node = cast(Load, access)
    slot = compiler.barriers[handle_of(node.buffer.data)]
    (index,) = (compiler.value(i) for i in node.indices)
    return lambda frame: frame[slot][index(frame)]


def _arrive(compiler: Compiler, call: Call) -> Run:
    barrier = _barrier(compiler, call.args[0])
    return lambda frame: frame[ROLE].arrive(barrier(frame))


def _wait(compiler: Compiler, call: Call) -> Run:
    barrier, parity = _barrier(compiler, call.args[0]), compiler.value(call.args[1])
    compiler.waits += 1
    return lambda frame: frame[ROLE].wait(barrier(frame), parity(frame))


_copy_tiles = watched("tl.tileop.copy", 0, 1)


def _copy(compiler: Compiler, call: Call) -> Run:
    """A copy by all threads; what it stores in shared memory, or hands on from there, is theirs to order."""
    copy = _copy_tiles(compiler, call)
    source, target = (compiler.region(argument) for argument in call.args[:2])
    from_shared = source.buffer.scope.startswith("shared") and target.buffer.scope == "global"
    if target.buffer.scope.startswith("shared") and source.buffer.scope != "global":

        def store(frame: Frame) -> None:
            frame[ROLE].store(target.read(frame))
            copy(frame)

        return store

    def hand_on(frame: Frame) -> None:
        frame[ROLE].check_handed_over(source.read(frame), "a copy reads")
        copy(frame)

    return hand_on if from_shared else copy


ELECTION = "an election of one of them, for a copy"
TMA_ALIGNMENT = 128  # bytes, of an address in shared memory (CUDA driver API, tensor maps)


def _tma_copy(compiler: Compiler, call: Call) -> Run:
    """A load that lands when its barrier says so; without one, a store that reads until it is waited for."""
    source, target = (compiler.region(argument) for argument in call.args[:2])
    if source.buffer.dtype != target.buffer.dtype:
        raise HazardInKernel(f"a TMA copy of {source.buffer.dtype} to {target.buffer.dtype}, which converts nothing")
    found = [value for name, value in call.annotations.items() if str(name) == "barrier"]
    if not found:
        return _tma_store(compiler, call)
    barrier, bad = _barrier(compiler, cast(Load, found[0])), poison(target.buffer.dtype)

    def run(frame: Frame) -> None:
        role: Role = frame[ROLE]
        role.meet_in_warps(ELECTION)
        tile, view = source.read(frame).clone(), target.read(frame)
        if role.lanes is not None:
            role.lanes.access(STORED, target.buffer.name, view, by_one=True)
        start = view.storage_offset() * view.element_size()
        if start % TMA_ALIGNMENT:
            raise HazardInKernel(f"a TMA copy to byte {start} of a buffer, which is no multiple of {TMA_ALIGNMENT}")
        view.fill_(bad)
        barrier(frame).copies.append(lambda: view.copy_(tile))

    return run


def _tma_store(compiler: Compiler, call: Call) -> Run:
    copy, source = TILE_OPS["tl.tileop.copy"](compiler, call), compiler.region(call.args[0])
    scopes = [value for name, value in call.annotations.items() if str(name) == "leader_scope_threads"]
    scope = int(cast(Expression, scopes[0])) if scopes else None

    def run(frame: Frame) -> None:
        role: Role = frame[ROLE]
        role.meet_in_warps(ELECTION)
        tile = source.read(frame)
        role.check_handed_over(tile, "a copy reads")
        if role.lanes is not None:
            role.lanes.access(READ, source.buffer.name, tile, by_one=True)
        copy(frame)
        role.copy_out(source.buffer.name, tile, scope)

    return run


def _wait_stores(compiler: Compiler, call: Call) -> Run:
    left, written = int(call.args[0]), len(call.args) > 1 and not int(call.args[1])
    return lambda frame: frame[ROLE].wait_stores(left, written=written)


def _product(compiler: Compiler, call: Call) -> Run:
    left, right, total = (compiler.region(argument) for argument in call.args[:3])
    transposed = bool(int(call.args[3])), bool(int(call.args[4]))
    clear = compiler.value(call.args[9])
    shared = [window for window in (left, right) if window.buffer.scope.startswith("shared")]

    def run(frame: Frame) -> None:
        tiles = [window.read(frame) for window in shared]
        role: Role = frame[ROLE]
        role.meet_in_warps("a product")
        role.issue(total.read(frame), left.read(frame), right.read(frame), transposed, bool(clear(frame)), tiles)

    return run


def _wait_products(compiler: Compiler, call: Call) -> Run:
    left = int(call.args[0])

    def run(frame: Frame) -> None:
        frame[ROLE].meet_in_warps("a wait for products")
        frame[ROLE].wait_products(left)

    return run


def _fence(compiler: Compiler, call: Call) -> Run:
    return lambda frame: frame[ROLE].unfenced.clear()


def _meet(compiler: Compiler, call: Call) -> Run:
    if len(call.args) > 2 and kind_of(call.args[1]) != "IntImm":  # each group at its own: turns, no meeting
        return lambda frame: frame[ROLE].meet_in_warps("a barrier of threads", of_memory=True)
    threads = int(call.args[2]) if len(call.args) > 2 else None
    barrier = int(call.args[1]) if len(call.args) > 2 else 0
    return lambda frame: frame[ROLE].meet(threads, barrier)


def _meet_in_warps(compiler: Compiler, call: Call) -> Run:
    return lambda frame: frame[ROLE].meet_in_warps("a sync_warp", of_memory=True)


WARP_OPS: dict[str, Callable[[Any, Any], Run]] = {
    "tl.tileop.copy": _copy,
    "tl.tileop.fill": watched("tl.tileop.fill", None, 0),
    "tl.tileop.reduce": watched("tl.tileop.reduce", 0, 1),
    "tl.tileop.transpose": watched("tl.tileop.transpose", 0, 1),
    "tl.tileop.tma_copy": _tma_copy,
    "tl.tileop.wgmma_gemm": _product,
    "tl.wait_wgmma": _wait_products,
    "tl.tma_store_wait": _wait_stores,
    "tl.mbarrier_wait_parity": _wait,
    "tirx.ptx_arrive_barrier": _arrive,
    "tl.fence_proxy_async": _fence,
    "tirx.tvm_storage_sync": _meet,
    "tl.sync_warp": _meet_in_warps,
    "tl.named_barrier_arrive": lambda compiler, call: lambda frame: None,
}
