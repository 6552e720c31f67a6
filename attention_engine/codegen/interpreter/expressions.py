"""Compiles the expressions of a tile program to closures: numbers for a block's own values, tensors for lanes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from typing import cast as typed

import torch

from attention_engine.codegen import tir_types as tir
from attention_engine.codegen.simulator.lanes import READ, STORED
from attention_engine.codegen.simulator.watch import (
    tell,
    vote,
    watch_count,
    watch_counter,
    watch_elements,
    watch_tile,
    watch_variable,
)
from attention_engine.codegen.tiles.buffers import MASK, ROLE, BufferCompiler, Code, constant
from attention_engine.codegen.tiles.scalar_ops import (
    BINARY,
    UNARY,
    UNSIGNED_MASKS,
    cast,
    compute_dtype,
    is_float,
    lift,
    reinterpret,
    wraps,
)
from attention_engine.codegen.tiles.tir_nodes import handle_of, is_call, is_variable, kind_of, nodes_used_twice
from attention_engine.codegen.tiles.windows import BufferInfo, Frame, Run, gather
from attention_engine.errors import NotInterpretable


class ExpressionCompiler(BufferCompiler):
    """Expressions to closures `run(frame) -> value`."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()  # variables that hold a thread's index
        self.asks_thread = False  # within a condition on it
        self.waits = 0  # for barriers, so far
        self.polls = False  # within the condition of a loop that does nothing
        self.blocks_wait = False  # for one another
        self._twice: set[int] = set()
        self._compiled: dict[int, Code] = {}
        self._memory: list[int] = []  # the slots of the values that this statement keeps

    def value(self, node: tir.Expression) -> Run:
        """The code of an expression."""
        return self.expression(node).run

    def sharing(self, roots: Sequence[tir.Expression], build: Callable[[], Run]) -> Run:
        """Build a statement's code so that a node which stands twice in its expressions is evaluated once."""
        outer = self._twice, self._compiled, self._memory
        self._twice, self._compiled, self._memory = nodes_used_twice(roots), {}, []
        run, slots = build(), tuple(self._memory)
        self._twice, self._compiled, self._memory = outer
        if not slots:
            return run

        def forgetting(frame: Frame) -> Any:
            for slot in slots:
                frame[slot] = None
            return run(frame)

        return forgetting

    def shared_expression(self, node: tir.Expression) -> Code:
        """An expression that is a statement's only one."""
        found: list[Code] = []

        def build() -> Run:
            found.append(self.expression(node))
            return found[0].run

        run = self.sharing([node], build)
        return found[0]._replace(run=run)

    def expression(self, node: tir.Expression | float) -> Code:
        """A compiled expression, remembered at run time where the statement uses it again."""
        if isinstance(node, (bool, int, float)):
            return Code(constant(node), "bool" if isinstance(node, bool) else "int32", const=node)
        node = self.resolved(node)
        handle = handle_of(node)
        code = self._compiled.get(handle)
        if code is None:
            code = self._translate(node)
            if handle in self._twice and code.const is None:
                code = code._replace(run=self._remembering(code.run))
            self._compiled[handle] = code
        return code

    def _remembering(self, run: Run) -> Run:
        slot = self.new_slot()
        self._memory.append(slot)

        def remembered(frame: Frame) -> Any:
            value = frame[slot]
            if value is None:
                value = frame[slot] = run(frame)
            return value

        return remembered

    def _translate(self, node: tir.Expression) -> Code:
        kind = kind_of(node)
        if kind in BINARY:
            pair = typed(tir.Pair, node)
            return self._binary(kind, pair.a, pair.b, str(node.dtype))
        if kind not in self._translations:
            raise NotInterpretable(f"the expression {kind}")
        return self._translations[kind](self, node)

    def _integer(self, node: tir.Constant) -> Code:
        dtype = str(node.dtype)
        number = bool(node.value) if dtype == "bool" else int(node.value)
        return Code(constant(number), dtype, const=number)

    def _real(self, node: tir.Constant) -> Code:
        dtype = str(node.dtype)
        number = torch.tensor(float(node.value), dtype=torch.float64).to(compute_dtype(dtype)).item()
        return Code(constant(number), dtype, const=number)

    def _name(self, node: tir.Variable) -> Code:
        if handle_of(node) in self.threads:
            if self.asks_thread:
                return Code(lambda frame: frame[ROLE].threads, "int32")
            raise NotInterpretable(f"the thread index `{node.name}`: blocks run as a whole")
        return self.lookup(node)

    def is_thread_index(self, node: tir.Expression) -> bool:
        """Whether an expression is a thread's own index."""
        if is_call(node):
            return str(node.op.name) == "tl.launch_thread_idx"
        return is_variable(node) and handle_of(node) in self.threads

    def _binary(self, name: str, left: tir.Expression, right: tir.Expression, dtype: str) -> Code:
        a, b = self.expression(left), self.expression(right)
        lanes = a.lanes | b.lanes
        row = BINARY[name]
        function = row.real if is_float(a.dtype) else row.lanes if lanes else row.scalar
        if a.const is not None and b.const is not None and not is_float(a.dtype):
            number = cast(function(a.const, b.const), dtype)
            return Code(constant(number), dtype, const=number)
        first, second = a.run, b.run
        if row.overflows and not is_float(dtype) and dtype != "bool" and (not lanes or dtype in UNSIGNED_MASKS):
            wrap = wraps(dtype)
            return Code(lambda frame: wrap(function(first(frame), second(frame))), dtype, lanes)
        return Code(lambda frame: function(first(frame), second(frame)), dtype, lanes)

    def _logic(self, node: tir.Pair, *, both: bool) -> Code:
        a, b = self.expression(node.a), self.expression(node.b)
        first, second, lanes = a.run, b.run, a.lanes | b.lanes
        if self.asks_thread:
            lanes = frozenset({0})  # a truth for each thread
        if not lanes and both:
            return Code(lambda frame: bool(first(frame) and second(frame)), "bool")
        if not lanes:
            return Code(lambda frame: bool(first(frame) or second(frame)), "bool")
        if both:
            return Code(lambda frame: first(frame) & second(frame), "bool", lanes)
        return Code(lambda frame: first(frame) | second(frame), "bool", lanes)

    def _conjunction(self, node: tir.Pair) -> Code:
        return self._logic(node, both=True)

    def _disjunction(self, node: tir.Pair) -> Code:
        return self._logic(node, both=False)

    def _negation(self, node: tir.Negation) -> Code:
        code = self.expression(node.a)
        run = code.run
        if code.lanes:
            return Code(lambda frame: ~run(frame), "bool", code.lanes)
        return Code(lambda frame: not run(frame), "bool")

    def _conversion(self, node: tir.Conversion) -> Code:
        code, dtype = self.expression(node.value), str(node.dtype)
        if code.const is not None and not is_float(dtype):
            number = cast(code.const, dtype)
            return Code(constant(number), dtype, const=number)
        run = code.run
        return Code(lambda frame: cast(run(frame), dtype), dtype, code.lanes, may_be_view=True)

    def _let(self, node: tir.Let) -> Code:
        value = self.expression(node.value)
        slot, compute = self.bind(node.var, value), value.run
        body = self.expression(node.body)
        result = body.run

        def run(frame: Frame) -> Any:
            frame[slot] = compute(frame)
            return result(frame)

        return body._replace(run=run, lanes=body.lanes | value.lanes, const=None, may_be_view=True)

    def _selection(self, node: tir.Selection) -> Code:
        return self._choice(node.condition, node.true_value, node.false_value, str(node.dtype))

    def _choice(
        self, condition: tir.Expression, true_value: tir.Expression, false_value: tir.Expression, dtype: str
    ) -> Code:
        test, yes, no = (self.expression(part) for part in (condition, true_value, false_value))
        lanes = test.lanes | yes.lanes | no.lanes
        which, then, otherwise = test.run, yes.run, no.run
        if not test.lanes:
            return Code(lambda frame: then(frame) if which(frame) else otherwise(frame), dtype, lanes, may_be_view=True)
        result_dtype = compute_dtype(dtype)

        def run(frame: Frame) -> torch.Tensor:
            chosen = torch.where(which(frame), then(frame), otherwise(frame))
            return chosen if chosen.dtype is result_dtype else chosen.to(result_dtype)

        return Code(run, dtype, lanes)

    def _call(self, node: tir.Call) -> Code:
        name, dtype, arguments = str(node.op.name), str(node.dtype), node.args
        if name in BINARY:
            return self._binary(name, arguments[0], arguments[1], dtype)
        if name in UNARY:
            code, function = self.expression(arguments[0]), UNARY[name]
            run, source = code.run, compute_dtype(code.dtype)
            if code.dtype in UNSIGNED_MASKS:
                raise NotInterpretable(f"the call {name} on {code.dtype}")
            if code.lanes:
                return Code(lambda frame: function(run(frame)), dtype, code.lanes)
            if is_float(code.dtype):
                return Code(lambda frame: function(lift(run(frame), source)), dtype)
            return Code(lambda frame: function(lift(run(frame), source)).item(), dtype)
        match name:
            case "tirx.if_then_else":
                return self._choice(arguments[0], arguments[1], arguments[2], dtype)
            case "tirx.likely":
                return self.expression(arguments[0])
            case "tl.infinity":
                return Code(constant(math.inf), dtype, const=math.inf)
            case "tl.tl_shuffle_elect":
                return Code(constant(True), "bool", const=True)
            case "tirx.reinterpret":
                code = self.expression(arguments[0])
                run, held = code.run, code.dtype
                bits = Code(lambda frame: reinterpret(run(frame), held, dtype), dtype, code.lanes, may_be_view=True)
                if code.lanes or is_float(dtype):
                    return bits
                return bits._replace(run=lambda frame: bits.run(frame).item())
            case "tl.any_sync":  # of the threads that run together here, more than a warp: where one asks, all do
                code = self.expression(arguments[1])
                return Code(vote(code.run), dtype)
            case "tl.shfl_sync":  # here no lane has a value of its own
                code = self.expression(arguments[1])
                if code.lanes:
                    raise NotInterpretable("a shuffle within T.Parallel")
                return code if code.const is not None else code._replace(run=tell(code.run))
            case "tirx.fma" | "tl.fma":
                a, b, c = (self.expression(argument) for argument in arguments[:3])
                return Code(lambda f: a.run(f) * b.run(f) + c.run(f), dtype, a.lanes | b.lanes | c.lanes)
            case "tirx.call_extern" if typed(tir.Text, arguments[0]).value == "__umulhi":
                a, b = (self.expression(argument) for argument in arguments[1:])
                return Code(lambda f: (a.run(f) * b.run(f) >> 32) & UNSIGNED_MASKS["uint32"], dtype, a.lanes | b.lanes)
            case "tl.atomic_load_elem_op":
                code = self.expression(typed(tir.Call, arguments[0]).args[0])
                return code if self.polls else code._replace(run=watch_counter(code.run))
            case "tl.atomic_add_ret_elem_op":
                return self._fetch_and_add(typed(tir.Load, typed(tir.Call, arguments[0]).args[0]), arguments[1])
        raise NotInterpretable(f"the call {name}{self._callee(node)}")

    @staticmethod
    def _callee(node: tir.Call) -> str:
        named = len(node.args) and kind_of(node.args[0]) == "StringImm"
        return f" of {typed(tir.Text, node.args[0]).value}" if named else ""

    # Memory

    def _load(self, node: tir.Load) -> Code:
        info = self.buffer(node.buffer)
        if info.private:
            return self._private_load(info, node.indices)
        indices = [self.expression(index) for index in node.indices]
        lanes = frozenset().union(*(index.lanes for index in indices))
        if not lanes:
            runs = [index.run for index in indices]
            load = watch_elements(info, runs, READ, self._load_one(info, runs), one=True)
            return Code(load, info.dtype, may_be_view=True)
        spans = self.spans(node.indices)
        if spans is not None:
            window = self.window(info, spans, self.rank)
            read = watch_tile(window, READ, window.read)
        else:
            runs = [index.run for index in indices]
            read = watch_elements(info, runs, READ, self._load_anywhere(info, runs), one=False)
        if info.dtype in UNSIGNED_MASKS:
            return Code(lambda frame: read(frame).to(torch.int64), info.dtype, lanes)
        return Code(read, info.dtype, lanes, may_be_view=True)

    def _load_one(self, info: BufferInfo, indices: list[Run]) -> Run:
        slot, is_number = info.slot, not is_float(info.dtype)

        def run(frame: Frame) -> Any:
            tensor = frame[slot]
            where = tuple(index(frame) for index in indices)
            if all(0 <= index < limit for index, limit in zip(where, tensor.shape)):
                element = tensor[where]
                return element.item() if is_number else element
            outside = info.outside(frame)
            return outside if is_number else torch.tensor(outside, dtype=tensor.dtype)

        return run

    def _load_anywhere(self, info: BufferInfo, indices: list[Run]) -> Run:
        slot, outside = info.slot, info.outside
        return lambda frame: gather(frame[slot], [index(frame) for index in indices], outside(frame))

    def _private_index(self, info: BufferInfo, indices: Sequence[tir.Expression]) -> Run:
        codes = [self.expression(index) for index in indices]
        if any(code.lanes for code in codes) or info.shape is None:
            raise NotInterpretable(f"an index into the {info.scope} buffer `{info.name}` that differs between lanes")
        shape, runs = info.shape, [code.run for code in codes]

        def run(frame: Frame) -> int:
            place = 0
            for index, limit in zip(runs, shape):
                place = place * limit + index(frame)
            return place

        return run

    def _private_load(self, info: BufferInfo, indices: Sequence[tir.Expression]) -> Code:
        slot, place = info.slot, self._private_index(info, indices)
        if not self.axes:
            return Code(watch_variable(info, place, READ, lambda frame: frame[slot][place(frame)]), info.dtype)
        dtype = compute_dtype(info.dtype)
        open_axes = frozenset(lanes.axis for lanes in self.axes)
        return Code(lambda frame: lift(frame[slot][place(frame)], dtype), info.dtype, open_axes)

    def private_store(self, info: BufferInfo, indices: Sequence[tir.Expression], value: Code, *, add: bool) -> Run:
        """A store to a variable that each lane has for itself."""
        if add:
            raise NotInterpretable(f"an atomic on the {info.scope} buffer `{info.name}`")
        slot, dtype, compute = info.slot, info.dtype, value.run
        place, may_be_view = self._private_index(info, indices), value.may_be_view

        def run(frame: Frame) -> None:
            result, values, where = cast(compute(frame), dtype), frame[slot], place(frame)
            mask = frame[MASK]
            if mask is not None:
                kept = lift(values[where], compute_dtype(dtype))
                result = torch.where(mask, lift(result, compute_dtype(dtype)), kept)
            elif may_be_view and isinstance(result, torch.Tensor):
                result = result.clone()
            values[where] = result

        return watch_variable(info, place, STORED, run)

    def _fetch_and_add(self, place: tir.Access, value_node: tir.Expression) -> Code:
        info, value = self.buffer(place.buffer), self.expression(value_node)
        indices = [self.expression(index) for index in place.indices]
        if value.lanes or any(index.lanes for index in indices) or self.axes:
            raise NotInterpretable("an atomic that returns the old value within T.Parallel")
        runs = [index.run for index in indices]
        load = self._load_one(info, runs)

        def run(frame: Frame) -> Any:
            held = load(frame)
            held = held.clone() if isinstance(held, torch.Tensor) else held
            frame[info.slot][tuple(index(frame) for index in runs)] = held + value.run(frame)
            return held

        return Code(watch_count(run), info.dtype)

    _translations: ClassVar[dict[str, Callable[[ExpressionCompiler, Any], Code]]] = {
        "IntImm": _integer,
        "FloatImm": _real,
        "Var": _name,
        "SizeVar": _name,
        "Cast": _conversion,
        "Let": _let,
        "Select": _selection,
        "Call": _call,
        "And": _conjunction,
        "Or": _disjunction,
        "Not": _negation,
        "BufferLoad": _load,
    }
