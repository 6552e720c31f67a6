"""What a loop reads beside tiles is hidden while loops are lowered: a third of the passes of a kernel with a mask, and
more than half where masks read tables.

TileLang 0.1.15 tries each parallel loop that it lowers at 64, 32, ... 2 lanes, and asks of each condition in it whether
it is the same for all lanes: six questions that are hundreds to Z3, and thousands where a condition stands inside
another, as around reads of a table. Of two kinds of loops the answer is known, one lane: a condition compares the
loop's last variable, and lanes that lie side by side are columns side by side; or a number is written to a variable of
the thread, as a loop that names a value does. So TileLang is given a name in the place of such a condition, or in the
second kind of all that reads no tile, and the numbers of the row and the column; then the formula, of what it made of
these. What comes out is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial as bind
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace
from attention_engine.codegen.tir_types import Expression

LOOP_LAYOUT, HIDDEN = "parallel_loop_layout", "attention_engine_condition"
TOLD = {LOOP_LAYOUT, "parallel_loop_predicate", "parallel_loop_requires_padding_guard"}
VARIABLE, MEMORY, CHOICE = "local.var", "global", "tirx.if_then_else"
ADDRESSES = "tirx.address_of", "tirx.tvm_access_ptr", "tl.access_ptr"
FORMULAS = [
    f"tirx.{kind}"
    for kind in (
        "Call", "BufferLoad", "Cast", "Select", "Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max",
        "LT", "LE", "GT", "GE", "EQ", "NE", "And", "Or", "Not",
    )
]  # fmt: skip


def put() -> Undo:
    """TileLang asks for the pass by its name, at each kernel."""
    import tilelang

    known = tilelang.transform
    lower = known.LowerTileOp

    def lowered() -> Any:
        whole = lower()
        return lambda module: with_hidden(module, whole) if inside() else whole(module)

    return replace((known, "LowerTileOp", lowered))


def with_hidden(module: Any, lower: Any) -> Any:
    """What `lower` makes of the module, by fewer questions."""
    hidden = Hidden()
    made = lower(_each(module, hidden.take))
    return _each(made, hidden.put_back) if hidden.formulas else made


def _each(module: Any, change: Any) -> Any:
    changed = {name: function.with_body(change(function.body)) for name, function in module.functions.items()}
    return type(module)(changed, module.attrs)


@dataclass
class Hidden:
    """Formulas that have names in their places, each with the variables of the parallel loops around it."""

    formulas: list[tuple[Any, list[Any]]] = field(default_factory=list)

    def take(self, body: Any) -> Any:
        """The statements, with names in the place of formulas where loops have one lane."""
        from tvm import tirx

        def loop(node: Any) -> Any:
            return self._without(node) if LOOP_LAYOUT in node.annotations else None

        return tirx.stmt_functor.ir_transform(body, loop, None, ["tirx.For"])

    def _without(self, loop: Any) -> Any:
        """A nest of parallel loops without its formulas, if it has one lane."""
        from tvm import tirx

        loops = [loop]
        while isinstance(loops[-1].body, tirx.For) and loops[-1].body.kind == tirx.ForKind.PARALLEL:
            loops.append(loops[-1].body)
        variables, inner = [each.loop_var for each in loops], loops[-1].body
        in_columns = lanes_are_columns(loop.annotations[LOOP_LAYOUT], len(loops))
        named = writes_variables(inner)
        if not (named or in_columns) or defines(inner) or not TOLD.issuperset(loop.annotations.keys()):
            return loop
        name = self._formula if named else self._condition
        inner = tirx.stmt_functor.ir_transform(inner, bind(name, variables), None, FORMULAS)
        for each in reversed(loops):
            start = each.loop_var, each.min, each.extent, each.kind, inner, each.thread_binding
            inner = tirx.For(*start, each.annotations, each.step)
        return inner

    def _named(self, variables: list[Any], formula: Any) -> Any:
        from tvm import tirx

        self.formulas.append((formula, variables))
        return tirx.call_pure_extern(formula.dtype, HIDDEN, len(self.formulas) - 1, *variables)

    def _formula(self, variables: list[Any], node: Any) -> Any:
        """A name in the place of what reads no tile; None where the node's parts are to be looked at."""
        if is_address(node):
            return node
        return self._named(variables, node) if reads_no_tile(node) and is_asked(node) else None

    def _condition(self, variables: list[Any], node: Any) -> Any:
        """A choice without its condition, where that says that the loop has one lane; TileLang has to find it there."""
        from tvm import tirx

        if not is_choice(node) or not hides(node.args[0], variables[-1]):
            return None
        return tirx.Call(node.dtype, node.op, [self._named(variables, node.args[0]), *node.args[1:]])

    def put_back(self, body: Any) -> Any:
        """The statements with them, for the rows and columns that the names are given by then."""
        from tvm import tirx

        def call(node: Any) -> Any:
            if not node.args or getattr(node.args[0], "value", "") != HIDDEN:
                return None
            formula, variables = self.formulas[int(node.args[1])]
            return tirx.stmt_functor.substitute(formula, dict(zip(variables, node.args[2:], strict=True)))

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


def writes_variables(body: Any) -> bool:
    """Does it write to a variable of the thread, where all lanes would write to the same place?"""
    from tvm import tirx

    return _any(body, lambda node: isinstance(node, tirx.BufferStore) and node.buffer.scope() == VARIABLE)


def defines(body: Any) -> bool:
    """Does it define variables? TileLang may give them other names."""
    from tvm import tirx

    return _any(body, lambda node: isinstance(node, tirx.Bind | tirx.For))


def hides(condition: Expression, column: Any) -> bool:
    """Is it another one for each column, and reads no tile?"""
    return reads_no_tile(condition) and _tells(condition, column)


def reads_no_tile(formula: Expression) -> bool:
    """Does it read nothing whose place TileLang chooses?"""
    from tvm import tirx

    def placed(node: Any) -> bool:
        return isinstance(node, tirx.BufferLoad) and node.buffer.scope() not in (VARIABLE, MEMORY)

    return not _any(formula, lambda node: placed(node) or is_address(node))


def is_address(node: Any) -> bool:
    """Does it say where a number stands?"""
    from tvm import tirx

    return isinstance(node, tirx.Call) and getattr(node.op, "name", "") in ADDRESSES


def is_asked(formula: Expression) -> bool:
    """Would TileLang ask of it at each number of lanes? Of conditions and of reads of memory, it would."""
    from tvm import tirx

    comparisons = tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE

    def asked(node: Any) -> bool:
        reads = isinstance(node, tirx.BufferLoad) and node.buffer.scope() == MEMORY
        return reads or isinstance(node, comparisons) or is_choice(node)

    return _any(formula, asked)


def is_choice(node: Any) -> bool:
    """Does it choose between two values?"""
    from tvm import tirx

    return isinstance(node, tirx.Call) and getattr(node.op, "name", "") == CHOICE


def _any(node: Any, holds: Callable[[Any], bool]) -> bool:
    from tvm import tirx

    found = [False]

    def visit(each: Any) -> None:
        found[0] = found[0] or holds(each)

    tirx.stmt_functor.post_order_visit(node, visit)
    return found[0]


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
