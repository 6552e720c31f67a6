"""The conditions of a mask are hidden while loops are lowered: a third of the passes of a kernel with a mask.

TileLang 0.1.15 tries each parallel loop that it lowers at 64, 32, ... 2 lanes, and asks of each condition in it whether
it is the same for all lanes: six questions that are hundreds to Z3, with one answer where the condition compares the
loop's last variable and lanes that lie side by side are columns side by side. So it is given a name in the place of
such a condition, and the numbers of the row and the column; then the condition, of what it made of these. What comes
out is the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace
from attention_engine.codegen.tir_types import Expression
from attention_engine.plan.rules import NO_STORAGE_SYNC

LOOP_LAYOUT, HIDDEN = "parallel_loop_layout", "attention_engine_condition"
REGISTER, CHOICE = "local.var", "tirx.if_then_else"


def put() -> Undo:
    """TileLang asks for the pass by its name, at each kernel."""
    import tilelang
    from tvm.ir.transform import PassContext

    known = tilelang.transform
    lower = known.LowerTileOp

    def lowered() -> Any:
        whole = lower()

        def run(module: Any) -> Any:
            by_hand = inside() and bool(PassContext.current().config.get(NO_STORAGE_SYNC))
            return with_hidden(module, whole) if by_hand else whole(module)

        return run

    return replace((known, "LowerTileOp", lowered))


def with_hidden(module: Any, lower: Any) -> Any:
    """What `lower` makes of the module, by fewer questions."""
    hidden = Hidden()
    made = lower(_each(module, hidden.take))
    return _each(made, hidden.put_back) if hidden.conditions else made


def _each(module: Any, change: Any) -> Any:
    changed = {name: function.with_body(change(function.body)) for name, function in module.functions.items()}
    return type(module)(changed, module.attrs)


@dataclass
class Hidden:
    """Conditions, each with the variables of the parallel loops around it."""

    conditions: list[tuple[Any, list[Any]]] = field(default_factory=list)

    def take(self, body: Any) -> Any:
        """The statements, with names in the place of conditions that tell lanes apart."""
        from tvm import tirx

        def loop(node: Any) -> Any:
            return self._without(node) if LOOP_LAYOUT in node.annotations else None

        return tirx.stmt_functor.ir_transform(body, loop, None, ["tirx.For"])

    def _without(self, loop: Any) -> Any:
        """A nest of parallel loops without its conditions."""
        from tvm import tirx

        loops = [loop]
        while isinstance(loops[-1].body, tirx.For) and loops[-1].body.kind == tirx.ForKind.PARALLEL:
            loops.append(loops[-1].body)
        variables = [each.loop_var for each in loops]
        if not lanes_are_columns(loop.annotations[LOOP_LAYOUT], len(loops)):
            return loop

        def choice(node: Any) -> Any:
            if getattr(node.op, "name", "") != CHOICE or not hides(node.args[0], variables[-1]):
                return None
            self.conditions.append((node.args[0], variables))
            named = HIDDEN, len(self.conditions) - 1, *variables
            return tirx.Call(node.dtype, node.op, [tirx.call_pure_extern("bool", *named), *node.args[1:]])

        inner = tirx.stmt_functor.ir_transform(loops[-1].body, None, choice, ["tirx.Call"])
        for each in reversed(loops):
            start = each.loop_var, each.min, each.extent, each.kind, inner, each.thread_binding
            inner = tirx.For(*start, each.annotations, each.step)
        return inner

    def put_back(self, body: Any) -> Any:
        """The statements with them, for the rows and columns that the names are given by then."""
        from tvm import tirx

        def call(node: Any) -> Any:
            if not node.args or getattr(node.args[0], "value", "") != HIDDEN:
                return None
            condition, variables = self.conditions[int(node.args[1])]
            return tirx.stmt_functor.substitute(condition, dict(zip(variables, node.args[2:], strict=True)))

        return tirx.stmt_functor.ir_transform(body, call, None, ["tirx.Call"])


def lanes_are_columns(layout: Any, depth: int) -> bool:
    """Whether a thread's first two entries are columns side by side."""
    if len(layout.get_input_shape()) != depth or getattr(layout.replicate_size, "value", 0) != 1:
        return False
    places = [0] * depth, [*[0] * (depth - 1), 1]
    entries, threads = (
        [[getattr(number, "value", None) for number in ask(place)] for place in places]
        for ask in (layout.map_forward_index, layout.map_forward_thread)
    )
    return entries == [[0], [1]] and threads[0] == threads[1] != [None]


def hides(condition: Expression, column: Any) -> bool:
    """Whether it is another one for each column, and reads nothing whose place TileLang chooses."""
    from tvm import tirx

    registers = [True]

    def visit(node: Any) -> None:
        placed = isinstance(node, tirx.BufferLoad) and node.buffer.scope() != REGISTER
        registers[0] &= not (placed or (isinstance(node, tirx.Call) and getattr(node.op, "name", "") == CHOICE))

    tirx.stmt_functor.post_order_visit(condition, visit)
    return registers[0] and _tells(condition, column)


def _tells(condition: Expression, column: Any) -> bool:
    """Whether it compares what grows with the column to a number that may be odd: no even one lies between columns
    that begin a vector and the next."""
    from tvm import tirx

    node: Any = condition
    if isinstance(node, tirx.LT | tirx.LE | tirx.GT | tirx.GE):
        found = _sum(node.a - node.b, column, 1)
        return found is not None and found[0] != 0 and found[1]
    if isinstance(node, tirx.And | tirx.Or):
        return _tells(node.a, column) or _tells(node.b, column)
    bitwise = isinstance(node, tirx.Call) and getattr(node.op, "name", "") in ("tirx.bitwise_and", "tirx.bitwise_or")
    return bitwise and any(_tells(each, column) for each in node.args)


def _sum(number: Any, column: Any, times: int) -> tuple[int, bool] | None:
    """Of so many times a number: how much it grows from one column to the next, and may it be odd by what is not known
    yet? None where it doesn't grow by the same at each column."""
    from tvm import tirx

    if isinstance(number, tirx.Var | tirx.BufferLoad):
        of_column = isinstance(number, tirx.Var) and number.same_as(column)
        return (times, False) if of_column else (0, times % 2 == 1)
    if isinstance(number, tirx.Add | tirx.Sub):
        left = _sum(number.a, column, times)
        right = _sum(number.b, column, times if isinstance(number, tirx.Add) else -times)
        return None if left is None or right is None else (left[0] + right[0], left[1] or right[1])
    if isinstance(number, tirx.Mul) and isinstance(number.b, tirx.IntImm):
        return _sum(number.a, column, times * int(number.b))
    return None if any(column.same_as(each) for each in tirx.analysis.undefined_vars(number)) else (0, False)


PATCH = Patch(
    defect="each condition of a mask is asked of at 64, 32, ... 2 lanes, which always differ",
    version="0.1.15",
    proof="test_tilelang_tries_masks_as_vectors",
    put=put,
)
