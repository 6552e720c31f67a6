"""Fragments get their layouts operation by operation; TileLang starts from each one anew, half of its passes' time.

TileLang 0.1.15 takes operations that share fragments (tiles in registers) together. Products say where their fragments
lie, and the others follow. Then it starts from every one of them once more, and checks all of them each time: thirty
times thirty checks, with one result. Here TileLang is given an operation alone, with the layouts that are known by
then, in the order in which it would have come to it; twins, alike but for a loop's variables and the numbers of a
step, once. It still makes and checks each layout. Where that leaves a fragment without one, or TileLang refuses one,
it is asked for all at once, as ever.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace
from attention_engine.codegen.tir_types import Annotations, Buffer, Expression, Statement
from attention_engine.plan.rules import NO_STORAGE_SYNC

LOG = logging.getLogger("attention_engine")
FRAGMENT, OF_A_THREAD = "local.fragment", ("local", "local.var")
MAP, LOOP_LAYOUT = "layout_map", "parallel_loop_layout"
MARK = "attention_engine_operation"  # stands for an operation while TileLang is asked about the others
Infer = Callable[[Any], Any]  # a function, with its layouts
Layouts = dict[Buffer, Any]
Twin = tuple[object, ...]


class _NotAlone(Exception):
    """The operations of this kernel need TileLang's own search."""


@dataclass(frozen=True)
class _Operation:
    """A parallel loop, or a call, that works on fragments."""

    statement: Any
    branches: tuple[tuple[Expression, bool], ...]  # conditions on threads around it, and which way they went
    fragments: tuple[Buffer, ...]
    shared: tuple[Buffer, ...]
    written: tuple[Buffer, ...]
    twin: Twin  # equal for operations that get the same layouts

    @property
    def is_loop(self) -> bool:
        """Whether it is a loop."""
        return not hasattr(self.statement, "value")

    @property
    def calls(self) -> str:
        """What a call calls."""
        return "" if self.is_loop else str(getattr(self.statement.value.op, "name", ""))

    @property
    def is_product(self) -> bool:
        """Whether tensor cores say where its fragments lie."""
        return "gemm" in self.calls


@dataclass
class _Kernel:
    """What a kernel does, in order."""

    operations: list[_Operation] = field(default_factory=list)
    loops: list[Any] = field(default_factory=list)  # parallel ones, with fragments or without
    elsewhere: set[Buffer] = field(default_factory=set)  # fragments that something else reads
    threads: Any = None  # the statement that says how many there are


def put() -> Undo:
    """TileLang asks for the pass by its name, at each kernel."""
    import tilelang
    from tvm.ir.transform import PassContext

    known = tilelang.transform
    infer = known.LayoutInference

    def inferred() -> Any:
        whole = infer()

        def run(module: Any) -> Any:
            by_hand = inside() and bool(PassContext.current().config.get(NO_STORAGE_SYNC))
            return one_by_one(module, whole) if by_hand else whole(module)

        return run

    return replace((known, "LayoutInference", inferred))


def one_by_one(module: Any, whole: Callable[[Any], Any]) -> Any:
    """The module with its layouts, by fewer questions; by `whole`, TileLang's pass, where these don't do."""
    try:
        ((name, function),) = module.functions.items()

        def infer(asked: Any) -> Any:
            (found,) = whole(type(module)({name: asked})).functions.values()
            return found

        return type(module)({name: _with_layouts(function, infer)})
    except (_NotAlone, RuntimeError, ValueError) as error:  # TileLang's refusals are RuntimeErrors
        LOG.debug("layouts are searched for all at once: %s", str(error).splitlines()[-1:])
        return whole(module)


def _with_layouts(function: Any, infer: Infer) -> Any:
    kernel = _read(function.body)
    near = _near_products(kernel.operations)
    if not near or kernel.elsewhere & near or len({buffer.data for buffer in near}) < len(near):
        raise _NotAlone("no product, or a fragment that is read outside of loops, or under two names")
    apart = _apart(kernel.operations, near)
    body = infer(function.with_body(_with_marks(function.body, apart))).body
    strict = {b for o in kernel.operations if o.is_product for b in o.fragments}
    known = {buffer: layout for buffer, layout in _map_of(body) if buffer not in near or buffer in strict}
    questions = _Questions(function, kernel, infer, known)
    questions.follow([o for o in kernel.operations if not (o.is_product or near.isdisjoint(o.fragments))])
    if any(b not in known for o in kernel.operations for b in o.fragments):
        raise _NotAlone("products and what follows from them leave a fragment without a layout")
    if any(o.is_loop and o.twin not in questions.loops for o in apart):
        raise _NotAlone("a loop has no layout")
    return function.with_body(_put_back(body, apart, questions))


def _near_products(operations: Sequence[_Operation]) -> set[Buffer]:
    """The fragments of products, of what works on these, and so on."""
    near = {buffer for operation in operations if operation.is_product for buffer in operation.fragments}
    while True:
        more = {b for o in operations if not near.isdisjoint(o.fragments) for b in o.fragments} - near
        if not more:
            return near
        near |= more


def _apart(operations: Sequence[_Operation], near: set[Buffer]) -> list[_Operation]:
    """What follows from products. The others, and copies that say where a tile in shared memory lies, TileLang is asked
    about together."""
    operands = {tile for o in operations if o.is_product for tile in o.shared}
    return [
        o for o in operations
        if not near.isdisjoint(o.fragments) and not o.is_product and (o.is_loop or operands.issuperset(o.shared))
    ]  # fmt: skip


def _with_marks(body: Statement, apart: Sequence[_Operation]) -> Statement:
    """The statements, with a mark in the place of each of these operations."""
    from tvm import tirx

    marks = {operation.statement: _mark(number) for number, operation in enumerate(apart)}

    def mark(statement: Any) -> Any:
        return marks.get(statement, statement if _is_parallel(statement) else None)

    made: Statement = tirx.stmt_functor.ir_transform(body, mark, None, ["tirx.For", "tirx.Evaluate"])
    return made


def _mark(number: int) -> Any:
    from tvm import tirx

    return tirx.Evaluate(tirx.call_extern("int32", MARK, number))


def _marked(node: Any) -> int | None:
    """The number of a mark."""
    arguments: Sequence[Any] = getattr(node.value, "args", ())
    return int(arguments[-1]) if arguments and getattr(arguments[0], "value", "") == MARK else None


@dataclass
class _Questions:
    """What TileLang is asked of one operation at a time, and what is known by then."""

    function: Any
    kernel: _Kernel
    infer: Infer
    known: Layouts
    loops: dict[Twin, Annotations] = field(default_factory=dict)

    def follow(self, operations: Sequence[_Operation]) -> None:
        """From the layouts that are known, those of these operations' fragments: TileLang's order, without its search.

        All of them wait in a queue. One whose turn comes too early waits until a fragment of it is known, and is next.
        """
        kinds = list({operation.twin: operation for operation in reversed(operations)}.values())[::-1]
        queue, asked = deque(kinds), set[Twin]()
        waiting = {operation.twin for operation in kinds}
        while queue:
            operation = queue.popleft()
            waiting.discard(operation.twin)
            if operation.twin in asked or not self._can_follow(operation):
                continue
            asked.add(operation.twin)
            for buffer in self._ask(operation):
                for user in kinds:
                    if buffer in user.fragments and user.twin not in waiting | {operation.twin}:
                        waiting.add(user.twin)
                        queue.appendleft(user)
        for operation in kinds:  # a loop that only reads what several threads have: TileLang chooses
            if operation.is_loop and operation.twin not in asked and all(b in self.known for b in operation.fragments):
                self._ask(operation)

    def _can_follow(self, operation: _Operation) -> bool:
        """Whether TileLang would find a loop's layout by now: from a fragment that it writes, or one whose entries are
        in one thread each."""
        if not operation.is_loop:
            return any(buffer in self.known for buffer in operation.fragments)
        return LOOP_LAYOUT in operation.statement.annotations or any(
            buffer in operation.written or int(self.known[buffer].replicate_size) == 1
            for buffer in operation.fragments
            if buffer in self.known
        )

    def _ask(self, operation: _Operation) -> list[Buffer]:
        """The fragments whose layouts are known by this operation."""
        found = self.infer(self._alone(operation)).body
        if operation.is_loop:
            (loop,) = _read(found).loops
            self.loops[operation.twin] = loop.annotations
        new = [(b, layout) for b, layout in _map_of(found) if b in operation.fragments and b not in self.known]
        self.known.update(new)
        return [buffer for buffer, _ in new]

    def _alone(self, operation: _Operation) -> Any:
        """A function that does this and nothing else."""
        from tvm import tirx

        inner = operation.statement
        for condition, way in reversed(operation.branches):
            then, other = (inner, None) if way else (_nothing(), inner)
            inner = tirx.IfThenElse(condition, then, other)
        tiles = [*operation.fragments, *operation.shared]
        layouts = {buffer.data: self.known[buffer] for buffer in operation.fragments if buffer in self.known}
        block = tirx.SBlock([], [], [], "tilelang_root", inner, None, tiles, [], {MAP: layouts})
        threads = self.kernel.threads
        body = tirx.AttrStmt(threads.node, threads.attr_key, threads.value, tirx.SBlockRealize([], True, block))
        return tirx.PrimFunc([], body, None, {}, self.function.attrs)


def _put_back(body: Statement, apart: Sequence[_Operation], questions: _Questions) -> Statement:
    """The operations in the place of their marks, with what TileLang notes at loops and blocks."""
    from tvm import tirx

    def operation(node: Any) -> Any:
        number = _marked(node) if isinstance(node, tirx.Evaluate) else None
        if number is None:
            return None
        found = apart[number]
        if not found.is_loop:
            return found.statement
        loop = found.statement
        start = loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding
        return tirx.For(*start, questions.loops[found.twin], loop.step)

    def block(node: Any) -> Any:
        if not isinstance(node, tirx.SBlock):
            return None
        start = node.iter_vars, node.reads, node.writes, node.name_hint, node.body, node.init
        noted = {**dict(node.annotations.items()), MAP: questions.known}
        return tirx.SBlock(*start, node.alloc_buffers, node.match_buffers, noted)

    made: Statement = tirx.stmt_functor.ir_transform(body, operation, block, ["tirx.Evaluate", "tirx.SBlock"])
    return made


def _map_of(body: Statement) -> Iterator[tuple[Buffer, Any]]:
    """The layouts that TileLang noted at a kernel's blocks."""
    from tvm import tirx

    maps: list[Mapping[Buffer, Any]] = []

    def visit(node: Any) -> None:
        if isinstance(node, tirx.SBlock) and MAP in node.annotations:
            maps.append(node.annotations[MAP])

    tirx.stmt_functor.post_order_visit(body, visit)
    yield from maps[0].items()


def _nothing() -> Any:
    from tvm import tirx

    return tirx.Evaluate(tirx.IntImm("int32", 0))


def _is_parallel(statement: Any) -> bool:
    from tvm import tirx

    return isinstance(statement, tirx.For) and statement.kind == tirx.ForKind.PARALLEL


def _read(body: Statement) -> _Kernel:
    """The operations of a kernel, and its loops."""
    kernel = _Kernel()
    _Reader(kernel).visit(body, ())
    return kernel


class _Reader:
    """Walks over a kernel's statements."""

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel = kernel

    def visit(self, node: Any, branches: tuple[tuple[Expression, bool], ...]) -> None:
        """Notes what this statement does, and those in it."""
        from tvm import tirx

        if _is_parallel(node):
            self.kernel.loops.append(node)
            self._operation(node, branches)
        elif isinstance(node, tirx.Evaluate):
            self._operation(node, branches)
        elif isinstance(node, tirx.SeqStmt):
            for each in node.seq:
                self.visit(each, branches)
        elif isinstance(node, tirx.SBlockRealize):
            self.visit(node.block, branches)
        elif isinstance(node, tirx.IfThenElse):
            self._elsewhere(node.condition)
            asks = self._asks_for_thread(node.condition)
            self.visit(node.then_case, (*branches, (node.condition, True)) if asks else branches)
            if node.else_case is not None:
                self.visit(node.else_case, (*branches, (node.condition, False)) if asks else branches)
        elif hasattr(node, "body"):
            self._around(node)
            self.visit(node.body, branches)
        else:
            self._elsewhere(node)

    def _around(self, node: Any) -> None:
        """What a statement around others says itself."""
        from tvm import tirx

        if isinstance(node, tirx.AttrStmt):
            if node.attr_key == "thread_extent" and node.node.thread_tag == "threadIdx.x":
                self.kernel.threads = node
        elif isinstance(node, tirx.For):
            self._elsewhere(node.extent)
        elif isinstance(node, tirx.While):
            self._elsewhere(node.condition)

    def _operation(self, node: Any, branches: tuple[tuple[Expression, bool], ...]) -> None:
        from tvm.ir import structural_hash

        read, written = _accesses(node)
        tiles = list(dict.fromkeys(buffer for buffer in [*read, *written]))
        fragments = tuple(b for b in tiles if b.scope() == FRAGMENT)
        if not fragments:
            return
        others = [b for b in tiles if b.scope() not in (FRAGMENT, *OF_A_THREAD)]
        way = tuple((structural_hash(condition, map_free_vars=True), way) for condition, way in branches)
        alike = structural_hash(node, map_free_vars=True), fragments, way, node if others else None
        shared = tuple(b for b in others if str(b.scope()).startswith("shared"))
        made = _Operation(node, branches, fragments, shared, tuple(written), alike)
        self.kernel.operations.append(made)

    def _elsewhere(self, node: Any) -> None:
        read, written = _accesses(node)
        self.kernel.elsewhere |= {buffer for buffer in [*read, *written] if buffer.scope() == FRAGMENT}

    def _asks_for_thread(self, condition: Any) -> bool:
        from tvm import tirx

        threads, found = self.kernel.threads, [False]

        def visit(node: Any) -> None:
            if isinstance(node, tirx.Var) and threads is not None and node.same_as(threads.node.var):
                found[0] = True

        tirx.stmt_functor.post_order_visit(condition, visit)
        return found[0]


def _accesses(node: Any) -> tuple[list[Buffer], list[Buffer]]:
    """The buffers that something reads, and those that it writes by stores, in order."""
    from tvm import tirx

    read: list[Buffer] = []
    written: list[Buffer] = []

    def visit(each: Any) -> None:
        if isinstance(each, tirx.BufferLoad):
            read.append(each.buffer)
        elif isinstance(each, tirx.BufferStore):
            written.append(each.buffer)

    tirx.stmt_functor.post_order_visit(node, visit)
    return read, written


PATCH = Patch(
    defect="layouts of fragments that follow from products are searched for from each operation anew",
    version="0.1.15",
    proof="test_tilelang_searches_layouts_from_each_operation",
    put=put,
)
