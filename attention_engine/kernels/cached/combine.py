"""Joins the parts of rows by the merge that was derived: a block has one query and head.

The merge's reductions over parts are reductions of a tile of one row, which holds as many parts as there may be; what
is behind the last part holds states as they begin, which change nothing. The sums of weights times values are then
added, each times its part's factor, several parts side by side, and the program's epilogue ends the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tilelang.language as T

from attention_engine.ir.expr import Expr, Op, substitute, topological, var
from attention_engine.ir.merge import Merge, part_variable, whole_variable
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import OUTPUT, Q_IDX, ROW, B, H
from attention_engine.kernels.common import FLOAT, Sizes, assign, build, named, over_pairs, over_rows, reader, store
from attention_engine.kernels.splice import Splice, name_value
from attention_engine.kernels.tile_maths import REDUCE
from attention_engine.passes.empty_rows import finite
from attention_engine.passes.strength import use_exp2
from attention_engine.plan import cached

THREADS = 128
SIDE_BY_SIDE = 16  # parts whose sums are read at once: few blocks run, and each would wait for one after the other
STEPS = 20  # of a search among a million requests
OfRow: TypeAlias = tuple[Any, Any, tuple[Any, Any, Any]]  # its first part, how many, its other indices in parts
LEAST = {"max": -3e38, "min": 3e38}


def combine(problem: Problem, merge: Merge, most: int, cache: cached.Cache, overlaps: bool) -> Any:
    """The PrimFunc: (custom..., kv_lengths, [q_starts], part_o, part_<state>..., o, rows...).

    overlaps: it is launched while the parts are computed, and waits for them.
    """
    sizes = Sizes(problem)
    parameters = sizes.declare(cached.joining(problem, cache, merge))
    dim_v = padded(problem.dim_v)

    @T.macro
    def body(buffers: Any) -> None:
        batches = 1 if cache.packed else sizes.batch
        with T.Kernel(problem.heads, sizes.q, batches, threads=THREADS) as (head, query, owner):
            batch, place = find_place(cache, sizes, buffers, owner, query)
            row = _Row(problem, merge, most, sizes, buffers, (batch, head, place), (owner, query, head))
            factors = T.alloc_shared([most], FLOAT)
            ahead = T.alloc_fragment([SIDE_BY_SIDE, dim_v], FLOAT)
            sums = T.alloc_fragment([SIDE_BY_SIDE, dim_v], FLOAT)
            output = T.alloc_fragment([dim_v], FLOAT)
            T.fill(sums, 0)
            if overlaps:
                T.pdl_sync()  # it was launched while the parts run: from here on all of them are there
            first, parts, holder = parts_of_request(cache, sizes, buffers, owner)
            of_row = first, parts, (holder, query, head)
            _bring_sums(ahead, buffers["part_o"], 0, of_row, problem.dim_v)
            row.bring(of_row)
            row.join()
            row.write_factors(factors, parts)
            for step in T.serial(T.ceildiv(parts, SIDE_BY_SIDE)):
                for n, d in T.Parallel(SIDE_BY_SIDE, dim_v):
                    sums[n, d] = sums[n, d] + factors[step * SIDE_BY_SIDE + n] * ahead[n, d]
                if (step + 1) * SIDE_BY_SIDE < parts:
                    _bring_sums(ahead, buffers["part_o"], (step + 1) * SIDE_BY_SIDE, of_row, problem.dim_v)
            T.reduce_sum(sums, output, dim=0)
            row.finish(output)

    return build("combine", parameters, body)


def in_exp2(*roots: Expr) -> tuple[Expr, ...]:
    """exp as exp2, of differences times a factor: a part without keys has -1e30 for its maximum, as the whole row may.

    nvcc makes one instruction of a product and a sum, which rounds once: of products of -1e30 no difference is 0.
    """
    return use_exp2(*roots, differences=True)


def parts_of_request(cache: cached.Cache, sizes: Sizes, buffers: Any, owner: Any) -> tuple[Any, Any, Any]:
    """A request's first part, how many it has, and the second index of parts."""
    if not cache.dealt:
        return 0, sizes.spell(cached.PARTS), owner
    starts = buffers[cached.PART_STARTS]
    first = name_value(starts[owner])
    return first, name_value(starts[owner + 1] - first), 0


def find_place(cache: cached.Cache, sizes: Sizes, buffers: Any, owner: Any, query: Any) -> tuple[Any, Any]:
    """The request of a query, and its place there."""
    if not cache.packed:
        start = buffers["q_starts"][owner] if cache.starts else buffers["kv_lengths"][owner] - sizes.q
        return owner, start + query
    ends = buffers["cu_seqlens_q"]
    found = _Search(T.alloc_var("int32"), T.alloc_var("int32"))
    _search(ends, found, sizes.batch, query)
    batch = name_value(T.min(found.low[0], sizes.batch - 1))  # behind the last request: a row that nobody has
    count = ends[batch + 1] - ends[batch]
    start = buffers["q_starts"][batch] if cache.starts else buffers["kv_lengths"][batch] - count
    return batch, start + query - ends[batch]


@dataclass(frozen=True)
class _Search:
    """The requests among which one is sought: from `low` up to and without `high`."""

    low: Any
    high: Any


@T.macro
def _search(ends: Any, among: _Search, requests: Any, query: Any) -> None:
    """low = the first request that ends behind the query."""
    store(among.low, T.int32(0), 0)
    store(among.high, requests, 0)
    for _ in T.serial(STEPS):
        if among.low[0] < among.high[0]:
            if ends[(among.low[0] + among.high[0]) // 2 + 1] <= query:
                store(among.low, (among.low[0] + among.high[0]) // 2 + 1, 0)
            else:
                store(among.high, (among.low[0] + among.high[0]) // 2, 0)


@dataclass
class _Row:
    """One row, its parts' states in tiles of one row, and what is known of the whole so far.

    at: batch, head and the query's place. row: its indices in parts. known: row values, each a fragment of one entry.
    held: reductions of the merge, as the variables that hold them.
    """

    problem: Problem
    merge: Merge
    most: int
    sizes: Sizes
    buffers: Any
    at: tuple[Any, Any, Any]
    row: tuple[Any, Any, Any]
    parts: dict[Expr, Any] = field(default_factory=dict)
    known: dict[Expr, Any] = field(default_factory=dict)
    held: dict[Expr, Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tile = T.alloc_fragment([1, self.most], FLOAT)
        self.parts = {
            part_variable(name): named(f"part_of_{name}", T.alloc_fragment([1, self.most], FLOAT))
            for name in self.merge.read
        }

    def bring(self, of_row: OfRow) -> None:
        """The parts' states."""
        initial = {state.name: finite(state.initial) for state in self.merge.program.states}
        for name in self.merge.read:
            source, target = self.buffers[f"part_{name}"], self.parts[part_variable(name)]
            _bring(source, target, self.most, of_row, initial[name])

    def splice(self, values: dict[Expr, Any]) -> Splice:
        """Splices at the row."""
        batch, head, place = self.at
        inside = ((batch, self.sizes.batch), (head, self.problem.heads))
        at = {B: batch, H: head, Q_IDX: place, **{v: fragment[0] for v, fragment in self.known.items()}, **values}
        return Splice(at, reader(self.buffers, inside), self.problem.approximate)

    def _over_parts(self, target: Any, expr: Expr) -> None:
        def entry(i: Any, n: Any) -> None:
            assign([(target, expr)], self.splice({v: f[i, n] for v, f in self.parts.items()}), i, n)

        over_pairs(1, self.most, entry)

    def join(self) -> None:
        """The states of the whole row, one after the other."""
        for name, expr in self.merge.states:
            (expr,) = in_exp2(expr)
            for node in topological(expr):
                if node.op is Op.REDUCE and node not in self.held:
                    self._reduce(node)
            self._keep(whole_variable(name), substitute(expr, self.held))

    def _reduce(self, node: Expr) -> None:
        self._over_parts(self.tile, substitute(node.args[0], self.held))
        found = var(f"joined{len(self.held)}", ROW)
        fragment = named(f"joined{len(self.held)}", T.alloc_fragment([1], FLOAT))
        _reduce(str(node.arg), self.tile, fragment)
        self.held[node], self.known[found] = found, fragment

    def _keep(self, variable: Expr, expr: Expr) -> None:
        fragment = named(variable.name, T.alloc_fragment([1], FLOAT))

        def entry(i: Any) -> None:
            assign([(fragment, expr)], self.splice({}), i)

        over_rows(1, entry)
        self.known[variable] = fragment

    def write_factors(self, factors: Any, parts: Any) -> None:
        """What each part's sum is multiplied with; 0 behind the last part, where a factor may be 0 / 0."""
        (factor,) = in_exp2(self.merge.factor)
        for node in topological(factor):
            if node.op is Op.REDUCE and node not in self.held:
                self._reduce(node)
        factor = substitute(factor, self.held)

        def entry(i: Any, n: Any) -> None:
            (value,) = self.splice({v: f[i, n] for v, f in self.parts.items()})(factor)
            store(factors, T.if_then_else(n < parts, T.cast(value, FLOAT), T.float32(0)), n)

        over_pairs(1, self.most, entry)

    def _shared_rows(self, expr: Expr) -> dict[Expr, Any]:
        """The row's values that it reads, where every thread can read them: TileLang finds no layout for several
        fragments of one entry beside the output's."""
        read = [node for node in topological(expr) if node in self.known]
        if len(read) < 2:
            return {}
        values = T.alloc_shared([len(read)], FLOAT)
        for place, variable in enumerate(read):

            def entry(i: Any, place: int = place, fragment: Any = self.known[variable]) -> None:
                store(values, fragment[i], place)

            over_rows(1, entry)
        return {variable: values[place] for place, variable in enumerate(read)}

    def finish(self, output: Any) -> None:
        """The epilogue, on the sum of all parts."""
        owner, query, head = self.row
        final, *rows = in_exp2(self.merge.output, *(row for _, row in self.merge.finals))
        shared = self._shared_rows(final)

        def entry(d: Any) -> None:
            (value,) = self.splice({OUTPUT: output[d], **shared})(final)
            _store_inside(
                d < self.problem.dim_v, self.buffers["o"], T.cast(value, self.problem.dtype), (owner, query, head, d)
            )

        over_rows(padded(self.problem.dim_v), entry)
        for (name, _), row in zip(self.merge.finals, rows, strict=True):
            target = self.buffers[f"row_{name}"]

            def row_entry(_: Any, row: Expr = row, target: Any = target) -> None:
                (value,) = self.splice({})(row)
                store(target, value, owner, head, query)

            over_rows(1, row_entry)


@T.macro
def _store_inside(inside: Any, target: Any, value: Any, at: tuple[Any, ...]) -> None:
    if inside:
        store(target, value, *at)


@T.macro
def _bring(source: Any, target: Any, most: int, of_row: OfRow, initial: float) -> None:
    base, parts, (owner, query, head) = of_row
    for i, n in T.Parallel(1, most):
        target[i, n] = T.if_then_else(n < parts, source[base + n, owner, query, head], T.float32(initial))


@T.macro
def _bring_sums(target: Any, source: Any, first: Any, of_row: OfRow, columns: int) -> None:
    base, parts, (owner, query, head) = of_row
    for n, d in T.Parallel(*target.shape):
        inside = T.And(first + n < parts, d < columns)
        target[n, d] = T.if_then_else(inside, source[base + first + n, owner, query, head, d], T.float32(0))


@T.macro
def _reduce(kind: str, tile: Any, target: Any) -> None:
    if kind == "sum":
        T.reduce_sum(tile, target, dim=1)
    else:
        T.fill(target, LEAST[kind])
        REDUCE[kind](tile, target, dim=1, clear=False)
