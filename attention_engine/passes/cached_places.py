"""Where queries and keys stand whose keys lie in a cache: a query n of request b is at starts[b] + n.

Masks and scores see places alone. A custom input with an axis "seq_len" has an entry for each query of the call, which
is read at the query's own row. Starts and lengths come as custom inputs of a program that runs densely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from attention_engine.errors import WrongIndex
from attention_engine.ir.expr import Expr, Op, Type, const, make, rebuild, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, B, Program, State
from attention_engine.passes.simplify import add, mul, simplify

# Custom inputs of one number a request: the place of its first query, its number of keys, the row of its first query.
STARTS, LENGTHS, ROWS = "_q_starts", "_kv_lengths", "_q_rows"
Axes = Mapping[str, tuple[int | str, ...]]


def _of_request(name: str) -> Expr:
    return make(Op.LOAD, B, arg=name, dtype=Type.INT)


def reads_rows(program: Program, axes: Axes) -> bool:
    """Does the program read a custom input at the query's own row?"""
    return any("seq_len" in axes.get(read.name, ()) for read in program.loads())


def check_rows(program: Program, axes: Axes) -> None:
    """WrongIndex where an entry for each query of a call is read at another index than the query's own."""
    for read in program.loads():
        for axis, index in zip(axes.get(read.name, ()), read.args, strict=False):
            if axis == "seq_len" and index is not Q_IDX:
                raise WrongIndex(
                    f'custom input {read.name!r} has an axis "seq_len", one entry for each query of the call, and is '
                    "read at another index than the query's own. Declare the axis's length instead, as a number."
                )


def at_own_rows(program: Program, axes: Axes) -> Program:
    """Of places: entries for each query of a call are read at the place less the request's start.

    STARTS then counts from the row of the request's first query, where queries are packed.
    """
    own = add(Q_IDX, mul(const(-1, Type.INT), _of_request(STARTS)))
    if not reads_rows(program, axes):
        return program
    found = _rewritten(program, axes, Q_IDX, own)
    return replace(found, custom=(*found.custom, STARTS))


def densely(program: Program, axes: Axes) -> Program:
    """The same attention for keys that were gathered: queries count from 0, and what lies behind a length is masked."""
    own = add(Q_IDX, _of_request(ROWS))
    found = _rewritten(program, axes, add(Q_IDX, _of_request(STARTS)), own)
    inside = make(Op.LESS, KV_IDX, _of_request(LENGTHS))
    mask = inside if found.mask is None else make(Op.AND, found.mask, inside)
    (mask,) = simplify(mask)
    return replace(found, mask=mask, custom=(*found.custom, STARTS, LENGTHS, ROWS), forward=None, backward=None)


def _rewritten(program: Program, axes: Axes, place: Expr, own: Expr) -> Program:
    """The program with these in place of the query's index, and of its own row in the call."""
    done: dict[Expr, Expr] = {}

    def moved(expr: Expr) -> Expr:
        for node in topological(expr):
            if node in done:
                continue
            args = tuple(done[a] for a in node.args)
            if node is Q_IDX:
                done[node] = place
                continue
            if node.op is Op.LOAD:
                of_rows = [axis == "seq_len" for axis in axes.get(node.name, ())]
                of_rows += [False] * (len(args) - len(of_rows))
                args = tuple(own if is_row else a for a, is_row in zip(args, of_rows, strict=True))
            done[node] = rebuild(node, args)
        return done[expr]

    return _mapped(program, moved)


def _mapped(program: Program, change: Callable[[Expr], Expr]) -> Program:
    def changed(expr: Expr) -> Expr:
        (simple,) = simplify(change(expr))
        return simple

    return replace(
        program,
        score=changed(program.score),
        mask=None if program.mask is None else changed(program.mask),
        states=tuple(State(s.name, s.initial, changed(s.update)) for s in program.states),
        weights=changed(program.weights),
        rescale=changed(program.rescale),
        output=changed(program.output),
        finals=tuple((name, changed(row)) for name, row in program.finals),
    )
