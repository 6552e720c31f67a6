"""Works round a defect of TileLang 0.1.15: waits for cp.async groups whose count is not a constant crash its codegen.

A pipelined loop of dynamic extent with two or more stages, on targets without TMA, ends in an unrolled loop that
waits for `3 - 2 * k` groups; the CUDA printer takes a number only. The pass below writes such short loops out, so
that the counts become numbers. A count that stays unknown becomes 0, which waits for more than it must.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace
from attention_engine.codegen.tir_types import Call, Evaluate, For, Function, Statement

# In the compiler's cache key: another version of the pass is another kernel.
FLAGS = ["-DATTENTION_ENGINE_WAIT_GROUPS=1"]
LONGEST_LOOP = 8  # iterations to write out; the drains of pipelines have at most stages - 1


class Module(Protocol):
    """An IRModule: functions by name."""

    functions: Mapping[object, Function]


def put() -> Undo:
    """The pass runs before TileLang prints CUDA. It changes only functions that would crash."""
    lower: Any = importlib.import_module("tilelang.engine.lower")
    prepare = lower._prepare_device_codegen_mod

    def settle_and_prepare(module: Module) -> object:
        return prepare(_make_pass()(module) if inside() else module)

    return replace((lower, "_prepare_device_codegen_mod", settle_and_prepare))


@functools.cache
def _make_pass() -> Callable[[Module], Module]:
    from tvm import tirx

    def rewrite(function: Function, module: Module, context: object) -> Function:
        if not _has_unknown_wait(function.body):
            return function
        return function.with_body(_settle_waits(_write_out_loops(function.body)))

    settle = tirx.transform.prim_func_pass(rewrite, opt_level=0, name="attention_engine.SettleWaitGroups")

    def run(module: Module) -> Module:
        if not any(_has_unknown_wait(function.body) for function in module.functions.values()):
            return module
        whole: Module = tirx.transform.ConvertSSA()(settle(module))  # a loop written out defines its variables again
        return whole

    return run


def _is_wait(node: object) -> bool:
    return str(getattr(getattr(node, "op", None), "name", "")).endswith("ptx_wait_group")


def _has_unknown_wait(statement: Statement) -> bool:
    from tvm import tirx
    from tvm.tirx.stmt_functor import post_order_visit

    found: list[Call] = []

    def visit(node: object) -> None:
        if isinstance(node, tirx.Call) and _is_wait(node) and not isinstance(node.args[0], tirx.IntImm):
            found.append(node)

    post_order_visit(statement, visit)
    return bool(found)


def _write_out_loops(statement: Statement) -> Statement:
    from tvm import tirx
    from tvm.tirx.stmt_functor import ir_transform, substitute

    def write_out(loop: For) -> Statement | None:
        known = isinstance(loop.min, tirx.IntImm) and isinstance(loop.extent, tirx.IntImm)
        if not known or int(loop.extent) > LONGEST_LOOP or not _has_unknown_wait(loop.body):
            return None
        first, count, dtype = int(loop.min), int(loop.extent), loop.loop_var.dtype
        bodies = [substitute(loop.body, {loop.loop_var: tirx.IntImm(dtype, first + step)}) for step in range(count)]
        written: Statement = bodies[0] if count == 1 else tirx.SeqStmt(bodies)
        return written

    found: Statement = ir_transform(statement, None, write_out, ["tirx.For"])
    return found


def _settle_waits(statement: Statement) -> Statement:
    from tvm import arith, tirx
    from tvm.tirx.stmt_functor import ir_transform

    analyzer = arith.Analyzer()

    def settle(evaluate: Evaluate) -> Statement | None:
        call = evaluate.value
        if not isinstance(call, tirx.Call) or not _is_wait(call):
            return None
        count = analyzer.simplify(call.args[0])
        groups = max(int(count), 0) if isinstance(count, tirx.IntImm) else 0
        settled: Statement = tirx.Evaluate(tirx.Call(call.dtype, call.op, [tirx.IntImm("int32", groups)]))
        return settled

    found: Statement = ir_transform(statement, None, settle, ["tirx.Evaluate"])
    return found


PATCH = Patch(
    defect="a wait for cp.async groups whose count is no constant can't be printed",
    version="0.1.15",
    proof="test_tilelang_cannot_print_waits_of_unknown_counts",
    put=put,
)
