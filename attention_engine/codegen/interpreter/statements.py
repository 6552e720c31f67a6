"""Runs a tile-level TileLang program on torch CPU tensors, one block after another; what a kernel means without a GPU.

A program is compiled once to Python closures over a frame (a list of values, one slot for each variable and buffer).
A nest of `T.Parallel` loops runs as a few torch operations: each loop variable is a lane axis of a broadcast tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch

from attention_engine.codegen import tir_types as tir
from attention_engine.codegen.interpreter.arguments import Arguments
from attention_engine.codegen.interpreter.expressions import ExpressionCompiler
from attention_engine.codegen.interpreter.grid import GRID_KIND, grid, is_nothing, wait_for_blocks
from attention_engine.codegen.simulator.lanes import STORED
from attention_engine.codegen.simulator.ops import WARP_OPS, enter_block, split
from attention_engine.codegen.simulator.watch import watch_elements, watch_tile
from attention_engine.codegen.tiles.buffers import MASK, ROLE, Lanes
from attention_engine.codegen.tiles.ops import SILENT_OPS, TILE_OPS
from attention_engine.codegen.tiles.tir_nodes import handle_of, is_call, kind_of, variables_of
from attention_engine.codegen.tiles.windows import Frame, Jump, Run, Window, scatter
from attention_engine.errors import NotInterpretable

PARALLEL_KINDS = (1, 2)  # tirx.ForKind.PARALLEL, VECTORIZED: one value for each lane
BODIES = {"For": "body", "While": "body", "AttrStmt": "body", "SBlock": "body", "SBlockRealize": "block"}


class Interpreter:
    """A compiled program: `Interpreter(prim_func)(*tensors_and_scalars)` writes its output tensors in place.

    Tensors lie on the CPU, in the order of the function's parameters, with the dtypes and (static) shapes that it
    declares; variable lengths and strides come from the tensors. Memory on chip starts as NaN, so a read of what
    nobody wrote shows. Raises NotInterpretable for a construct without a meaning here, ValueError for wrong arguments.
    """

    def __init__(self, prim_func: tir.Function) -> None:
        compiler = _StatementCompiler()
        self._arguments = Arguments(compiler, prim_func)
        self._body = compiler.statement(prim_func.body)
        self._slots = compiler.slots

    def __call__(self, *arguments: torch.Tensor | float | int) -> None:
        """Run all blocks of the grid, on one thread: tiles are so small that more would only wait for each other."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                frame: Frame = [None] * self._slots
                self._arguments.bind(frame, arguments)
                self._body(frame)
        finally:
            torch.set_num_threads(threads)


class _BreakLoop(Jump):
    pass


class _ContinueLoop(Jump):
    pass


class _EndBlock(Jump):
    pass


JUMPS: dict[str, type[Jump]] = {
    "tl.loop_break": _BreakLoop,
    "tirx.break_loop": _BreakLoop,
    "tirx.continue_loop": _ContinueLoop,
    "tirx.thread_return": _EndBlock,
}


def _nested_parallel_loops(statement: tir.Statement) -> int:
    """How many lane axes a statement opens at most."""
    kind = kind_of(statement)
    if kind == "SeqStmt":
        return max(_nested_parallel_loops(part) for part in cast(tir.Sequel, statement).seq)
    if kind == "IfThenElse":
        branch = cast(tir.Condition, statement)
        return max(_nested_parallel_loops(case) for case in (branch.then_case, branch.else_case) if case is not None)
    if kind in BODIES:
        inner = _nested_parallel_loops(getattr(statement, BODIES[kind]))
        return inner + (kind == "For" and int(cast(tir.For, statement).kind) in PARALLEL_KINDS)
    return 0


class _StatementCompiler(ExpressionCompiler):
    """Statements to closures `run(frame) -> None`."""

    def statement(self, node: tir.Statement) -> Run:
        """The code of one statement."""
        kind = kind_of(node)
        if kind not in self._statements:
            raise NotInterpretable(f"the statement {kind}")
        return self._statements[kind](self, node)

    def _sequence(self, node: tir.Sequel) -> Run:
        steps = tuple(self.statement(part) for part in node.seq)

        def run(frame: Frame) -> None:
            for step in steps:
                step(frame)

        return run

    def _realized_block(self, node: tir.Realized) -> Run:
        return self._block(node.block)

    def _block(self, node: tir.Block) -> Run:
        self.note_safe_values(node.annotations)
        enter = enter_block(self, node.annotations)
        allocate = [*enter, *(self.allocation(buffer) for buffer in node.alloc_buffers)]
        body = self.statement(node.body)

        def run(frame: Frame) -> None:
            for step in allocate:
                step(frame)
            with contextlib.suppress(_EndBlock):
                body(frame)
            if enter:
                frame[ROLE].end()

        return run

    def _allocate(self, node: tir.Declaration) -> Run:
        return self.allocation(node.buffer)

    def _alias(self, node: tir.Declaration) -> Run:
        self.buffer(node.buffer)
        return _nothing

    def _annotated(self, node: tir.Wrapped) -> Run:
        return self.statement(node.body)

    def _assertion(self, node: tir.Assertion) -> Run:
        condition = self.value(node.condition)

        def run(frame: Frame) -> None:
            if not condition(frame):
                raise ValueError(f"the kernel's own check failed: {node.condition}")

        return run

    def _binding(self, node: tir.Bind) -> Run:
        if self.is_thread_index(node.value):
            self.threads.add(handle_of(node.var))
            return _nothing
        if not all(self.is_known(variable) for variable in variables_of(node.value)):
            self.defer(node.var, node.value)
            return _nothing

        def build() -> Run:
            value = self.expression(node.value)
            place = self.place(node.value) if value.lanes else None
            slot, compute, may_be_view = self.bind(node.var, value), value.run, value.may_be_view
            offset_slot = MASK if place is None else self.bind_place(node.var, place)

            def keep(frame: Frame) -> None:
                result = compute(frame)
                frame[slot] = result.clone() if may_be_view and isinstance(result, torch.Tensor) else result
                if place is not None:
                    frame[offset_slot] = place.start(frame)

            return keep

        return self.sharing([node.value], build)

    def _evaluate(self, node: tir.Evaluate) -> Run:
        call = node.value
        if not is_call(call) or is_nothing(node):
            return _nothing
        name = str(call.op.name)
        if name in SILENT_OPS:
            return _nothing
        operations = WARP_OPS if name in WARP_OPS else TILE_OPS
        if name in JUMPS:
            return self._jump(name)
        if name in operations:
            if self.axes:
                raise NotInterpretable(f"the tile operation {name} within T.Parallel")
            return self.sharing([call], lambda: operations[name](self, call))
        if name in ("tl.atomic_add_elem_op", "tl.atomic_store_elem_op"):
            place, add = cast(tir.Load, cast(tir.Call, call.args[0]).args[0]), name == "tl.atomic_add_elem_op"
            return self.sharing(call.args[:2], lambda: self._store(place, call.args[1], add=add))
        return self.sharing([call], lambda: self.expression(call).run)

    def _jump(self, name: str) -> Run:
        if self.axes:
            raise NotInterpretable(f"{name} within T.Parallel")
        jump = JUMPS[name]

        def run(frame: Frame) -> None:
            raise jump

        return run

    def _element_store(self, node: tir.Store) -> Run:
        return self.sharing([node.value, *node.indices], lambda: self._store(node, node.value, add=False))

    def _store(self, place: tir.Access, value_node: tir.Expression, *, add: bool) -> Run:
        """A store of one element for each lane (or an addition to it), where the mask allows."""
        info = self.buffer(place.buffer)
        value = self.expression(value_node)
        if info.private:
            return self.private_store(info, place.indices, value, add=add)
        spans = self.spans(place.indices)
        open_axes = {lanes.axis for lanes in self.axes}
        if not self.axes or spans is None or {s.axis for s in spans if s.axis is not None} != open_axes:
            return self._store_anywhere(place, value.run, add=add)
        window = self.window(info, spans, self.rank)
        return watch_tile(window, STORED, self._store_window(window, value.run, add=add))

    def _store_window(self, window: Window, value: Run, *, add: bool) -> Run:
        if add:
            held, plain = window.read, value

            def value(frame: Frame) -> torch.Tensor:
                total: torch.Tensor = held(frame) + plain(frame)
                return total

        if not self.masked:
            return lambda frame: window.write(frame, value(frame))

        def run(frame: Frame) -> None:
            result = value(frame)
            mask = frame[MASK]
            if mask is None:
                window.write(frame, result)
            else:
                window.write_where(frame, mask, result)

        return run

    def _store_anywhere(self, place: tir.Access, value: Run, *, add: bool) -> Run:
        info = self.buffer(place.buffer)
        indices = [self.value(index) for index in place.indices]
        axes, rank = tuple(self.axes), self.rank

        def run(frame: Frame) -> None:
            result = value(frame)
            lanes = [1] * rank
            for axis in axes:
                lanes[axis.axis] = axis.length(frame)
            where = [index(frame) for index in indices]
            scatter(info, frame[info.slot], where, result, frame[MASK], lanes, accumulate=add)

        return watch_elements(info, indices, STORED, run, one=not axes)

    def _condition(self, node: tir.Condition) -> Run:
        if any(handle_of(variable) in self.threads for variable in variables_of(node.condition)):
            return self._thread_cases(node)
        condition = self.shared_expression(node.condition)
        if condition.lanes:
            return self._masked_cases(condition.run, node)
        test, then = condition.run, self.statement(node.then_case)
        otherwise = _nothing if node.else_case is None else self.statement(node.else_case)
        return lambda frame: then(frame) if test(frame) else otherwise(frame)

    def _thread_cases(self, node: tir.Condition) -> Run:
        self.asks_thread = True
        test = self.value(node.condition)
        self.asks_thread = False
        before = self.waits
        then, between = self.statement(node.then_case), self.waits
        otherwise = None if node.else_case is None else self.statement(node.else_case)
        return split(test, then, otherwise, before < between < self.waits)

    def _masked_cases(self, test: Run, node: tir.Condition) -> Run:
        outer_masked, self.masked = self.masked, True
        then = self.statement(node.then_case)
        otherwise = _nothing if node.else_case is None else self.statement(node.else_case)
        self.masked = outer_masked

        def run(frame: Frame) -> None:
            outer, chosen = frame[MASK], test(frame)
            frame[MASK] = chosen if outer is None else outer & chosen
            then(frame)
            frame[MASK] = ~chosen if outer is None else outer & ~chosen
            otherwise(frame)
            frame[MASK] = outer

        return run

    def _while_loop(self, node: tir.While) -> Run:
        self.polls = is_nothing(node.body)
        condition = self.shared_expression(node.condition)
        self.polls = False
        if condition.lanes:
            raise NotInterpretable("a while loop whose condition differs between lanes")
        if is_nothing(node.body):
            self.blocks_wait = True
            return wait_for_blocks(condition.run, str(node.condition))
        test, body = condition.run, self.statement(node.body)

        def run(frame: Frame) -> None:
            try:
                while test(frame):
                    try:
                        body(frame)
                    except _ContinueLoop:
                        continue
            except _BreakLoop:
                return

        return run

    def _loop(self, node: tir.For) -> Run:
        if int(node.kind) in PARALLEL_KINDS:
            return self._parallel(node)
        if int(node.kind) == GRID_KIND:
            return grid(self, node)
        start, extent = self.shared_expression(node.min), self.shared_expression(node.extent)
        stride = 1 if node.step is None else int(node.step)
        slot = self.variable(node.loop_var)
        if start.lanes or extent.lanes:
            return self._ragged_loop(node, slot, start.run, extent.run)
        body = self.statement(node.body)
        first, length = start.run, extent.run

        def run(frame: Frame) -> None:
            low = first(frame)
            try:
                for number in range(low, low + length(frame), stride):
                    frame[slot] = number
                    try:
                        body(frame)
                    except _ContinueLoop:
                        continue
            except _BreakLoop:
                return

        return run

    def _ragged_loop(self, node: tir.For, slot: int, start: Run, extent: Run) -> Run:
        """A serial loop within T.Parallel whose bounds differ between lanes: lanes out of their range are masked."""
        outer_masked, self.masked = self.masked, True
        body = self.statement(node.body)
        self.masked = outer_masked

        def run(frame: Frame) -> None:
            low = torch.as_tensor(start(frame))
            high = low + extent(frame)
            outer = frame[MASK]
            for step in range(int(low.min()), int(high.max())) if high.numel() else ():
                active = (low <= step) & (high > step)
                frame[MASK] = active if outer is None else outer & active
                frame[slot] = step
                body(frame)
            frame[MASK] = outer

        return run

    def _parallel(self, node: tir.For) -> Run:
        """One loop of a parallel nest: its variable becomes an axis of lanes."""
        outermost = not self.axes
        if outermost:
            self.rank = _nested_parallel_loops(node)
        axis, rank = len(self.axes), self.rank
        start, extent = self.shared_expression(node.min), self.shared_expression(node.extent)
        if start.lanes or extent.lanes:
            raise NotInterpretable("a T.Parallel loop whose extent differs between lanes")
        length = extent.const if extent.const is not None else extent.run
        lanes = Lanes(axis, length)
        slot = self.lane_variable(node.loop_var, lanes, start)
        self.axes.append(lanes)
        body = self.statement(node.body)
        self.axes.pop()
        first, count = start.run, lanes.length

        def run(frame: Frame) -> None:
            frame[slot] = lanes.index(first(frame), count(frame), rank)
            body(frame)

        return run

    _statements: ClassVar[dict[str, Callable[[_StatementCompiler, Any], Run]]] = {
        "SeqStmt": _sequence,
        "SBlockRealize": _realized_block,
        "SBlock": _block,
        "AllocBuffer": _allocate,
        "DeclBuffer": _alias,
        "AttrStmt": _annotated,
        "AssertStmt": _assertion,
        "Bind": _binding,
        "Evaluate": _evaluate,
        "BufferStore": _element_store,
        "IfThenElse": _condition,
        "While": _while_loop,
        "For": _loop,
    }


def _nothing(frame: Frame) -> None:
    """A statement without an effect here."""
