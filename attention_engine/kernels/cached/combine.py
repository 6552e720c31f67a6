"""Joins the parts of rows by the merge that was derived: a block has one query and head.

The merge's reductions over parts are reductions of a tile of one row, which holds as many parts as there may be; what
is behind the last part holds states as they begin, which change nothing. The sums of weights times values are then
added, each times its part's factor, several parts side by side, and the program's epilogue ends the row.
"""

from __future__ import annotations

from collections.abc import Callable
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
from attention_engine.plan import cached_buffers
from attention_engine.plan.cached_buffers import Cache

THREADS = 128
SIDE_BY_SIDE = 16  # parts whose sums are read at once: few blocks run, and each would wait for one after the other
STEPS = 20  # of a search among a million requests
Place: TypeAlias = tuple[Any, Any, Any]
OfRow: TypeAlias = tuple[Any, Any, tuple[Any, Any, Any]]  # its first part, how many, its other indices in parts
LEAST = {"max": -3e38, "min": 3e38}


def combine(problem: Problem, merge: Merge, most: int, cache: Cache, overlaps: bool) -> Any:
    """The PrimFunc: (custom..., kv_lengths, [q_starts], part_o, part_<state>..., o, rows...).

    overlaps: it is launched while the parts are computed, and waits for them.
    """
    sizes = Sizes(problem)
    parameters = sizes.declare(cached_buffers.joining(problem, cache, merge))
    dim_v = padded(problem.dim_v)

    @T.macro
    def body(buffers: Any) -> None:
        batches = 1 if cache.packed else sizes.batch
        with T.Kernel(problem.heads, sizes.q, batches, threads=THREADS) as (head, query, owner):
            batch, place = find_place(cache, sizes, buffers, owner, query)
            factors = T.alloc_shared([1, most], FLOAT)
            ahead = T.alloc_fragment([SIDE_BY_SIDE, dim_v], FLOAT)
            sums = T.alloc_fragment([SIDE_BY_SIDE, dim_v], FLOAT)
            output = T.alloc_fragment([dim_v], FLOAT)
            T.fill(sums, 0)
            if overlaps:
                T.pdl_sync()  # it was launched while the parts run: from here on all of them are there
            first, parts, holder = parts_of_request(cache, sizes, buffers, owner)
            of_row = first, parts, (holder, query, head)
            row = one_row(problem, merge, most, sizes, buffers, (batch, head, place), (owner, query, head), holder)
            _bring_sums(ahead, buffers["part_o"], 0, of_row, problem.dim_v)
            row.bring(first, parts)
            row.join()
            row.write_factors(factors, parts)
            for step in T.serial(T.ceildiv(parts, SIDE_BY_SIDE)):
                for n, d in T.Parallel(SIDE_BY_SIDE, dim_v):
                    sums[n, d] = sums[n, d] + factors[0, step * SIDE_BY_SIDE + n] * ahead[n, d]
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


def parts_of_request(cache: Cache, sizes: Sizes, buffers: Any, owner: Any) -> tuple[Any, Any, Any]:
    """A request's first part, how many it has, and the second index of parts."""
    if not cache.dealt:
        return 0, sizes.spell(cached_buffers.PARTS), owner
    starts = buffers[cached_buffers.PART_STARTS]
    first = name_value(starts[owner])
    return first, name_value(starts[owner + 1] - first), 0


def find_place(cache: Cache, sizes: Sizes, buffers: Any, owner: Any, query: Any) -> tuple[Any, Any]:
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


def one_row(
    problem: Problem, merge: Merge, most: int, sizes: Sizes, buffers: Any, at: Place, row: Place, holder: Any
) -> JoinedRows:  # fmt: skip
    """A row alone. at, row: as those of JoinedRows; holder: its first index in parts."""
    of_parts = (holder, *row[1:])
    return JoinedRows(problem, merge, (1, most), sizes, buffers, lambda _: at, lambda _: row, lambda _: of_parts)


@dataclass
class JoinedRows:
    """A few rows, their parts' states in tiles of these rows, and what is known of the whole so far.

    shape: the rows, and the most parts. at: a row's batch, head and the place of its query. row: its first indices in
    results; of_parts: in parts; exists: is it there? wait: of threads for what others wrote to shared memory, where
    TileLang doesn't. known: row values, each a fragment of the rows. held: reductions of the merge, as the variables
    that hold them.
    """

    problem: Problem
    merge: Merge
    shape: tuple[int, int]
    sizes: Sizes
    buffers: Any
    at: Callable[[Any], tuple[Any, Any, Any]]
    row: Callable[[Any], tuple[Any, Any, Any]]
    of_parts: Callable[[Any], tuple[Any, Any, Any]]
    exists: Callable[[Any], Any] = lambda _: True
    wait: Callable[[], None] = lambda: None
    parts: dict[Expr, Any] = field(default_factory=dict)
    known: dict[Expr, Any] = field(default_factory=dict)
    held: dict[Expr, Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tile = T.alloc_fragment([*self.shape], FLOAT)
        self.parts = {
            part_variable(name): named(f"part_of_{name}", T.alloc_fragment([*self.shape], FLOAT))
            for name in self.merge.read
        }

    def bring(self, first: Any, parts: Any) -> None:
        """The parts' states."""
        initial = {state.name: finite(state.initial) for state in self.merge.program.states}
        for name in self.merge.read:
            source, target = self.buffers[f"part_{name}"], self.parts[part_variable(name)]
            _bring(source, target, (first, parts), self.of_parts, initial[name])

    def splice(self, i: Any, values: dict[Expr, Any]) -> Splice:
        """Splices at a row."""
        batch, head, place = self.at(i)
        inside = ((batch, self.sizes.batch), (head, self.problem.heads))
        at = {B: batch, H: head, Q_IDX: place, **{v: fragment[i] for v, fragment in self.known.items()}, **values}
        return Splice(at, reader(self.buffers, inside), self.problem.approximate)

    def _over_parts(self, target: Any, expr: Expr) -> None:
        def entry(i: Any, n: Any) -> None:
            assign([(target, expr)], self.splice(i, {v: f[i, n] for v, f in self.parts.items()}), i, n)

        over_pairs(*self.shape, entry)

    def join(self) -> None:
        """The states of the whole rows, one after the other."""
        for name, expr in self.merge.states:
            (expr,) = in_exp2(expr)
            for node in topological(expr):
                if node.op is Op.REDUCE and node not in self.held:
                    self._reduce(node)
            self._keep(whole_variable(name), substitute(expr, self.held))

    def _reduce(self, node: Expr) -> None:
        self._over_parts(self.tile, substitute(node.args[0], self.held))
        found = var(f"joined{len(self.held)}", ROW)
        fragment = named(f"joined{len(self.held)}", T.alloc_fragment([self.shape[0]], FLOAT))
        _reduce(str(node.arg), self.tile, fragment)
        self.held[node], self.known[found] = found, fragment

    def _keep(self, variable: Expr, expr: Expr) -> None:
        fragment = named(variable.name, T.alloc_fragment([self.shape[0]], FLOAT))

        def entry(i: Any) -> None:
            assign([(fragment, expr)], self.splice(i, {}), i)

        over_rows(self.shape[0], entry)
        self.known[variable] = fragment

    def write_factors(self, factors: Any, parts: Any) -> None:
        """What each part's sum is multiplied with; 0 behind the last part, where a factor may be 0 / 0."""
        (factor,) = in_exp2(self.merge.factor)
        for node in topological(factor):
            if node.op is Op.REDUCE and node not in self.held:
                self._reduce(node)
        factor = substitute(factor, self.held)

        def entry(i: Any, n: Any) -> None:
            (value,) = self.splice(i, {v: f[i, n] for v, f in self.parts.items()})(factor)
            store(factors, T.if_then_else(n < parts, T.cast(value, FLOAT), T.float32(0)), i, n)

        over_pairs(*self.shape, entry)

    def shared_rows(self, expr: Expr) -> dict[Expr, tuple[Any, int]]:
        """The rows' values that it reads, where every thread can read them: TileLang finds no layout for several
        fragments of one entry beside the output's, nor for rows beside an output that is one row of threads."""
        read = [node for node in topological(expr) if node in self.known]
        if len(read) < 2 and self.shape[0] == 1:
            return {}
        values = T.alloc_shared([max(len(read), 1), self.shape[0]], FLOAT)
        for place, variable in enumerate(read):

            def entry(i: Any, place: int = place, fragment: Any = self.known[variable]) -> None:
                store(values, fragment[i], place, i)

            over_rows(self.shape[0], entry)
        return {variable: (values, place) for place, variable in enumerate(read)}

    def finish(self, output: Any) -> None:
        """The epilogue, on the sum of all parts."""
        final, *rows = in_exp2(self.merge.output, *(row for _, row in self.merge.finals))
        dim_v = padded(self.problem.dim_v)
        shared = self.shared_rows(final)
        self.wait()

        def entry(x: Any) -> None:
            i, d = (0, x) if self.shape[0] == 1 else (x // dim_v, x % dim_v)
            row = self.row(i)
            held = {v: values[place, i] for v, (values, place) in shared.items()}
            (value,) = self.splice(i, {OUTPUT: output[x], **held})(final)
            inside = T.And(self.exists(i), d < self.problem.dim_v)
            _store_inside(inside, self.buffers["o"], T.cast(value, self.problem.dtype), (*row, d))

        over_rows(self.shape[0] * dim_v, entry)
        for (name, _), row in zip(self.merge.finals, rows, strict=True):
            target = self.buffers[f"row_{name}"]

            def row_entry(i: Any, row: Expr = row, target: Any = target) -> None:
                owner, query, head = self.row(i)
                (value,) = self.splice(i, {})(row)
                _store_inside(self.exists(i), target, value, (owner, head, query))

            over_rows(self.shape[0], row_entry)


@T.macro
def _store_inside(inside: Any, target: Any, value: Any, at: tuple[Any, ...]) -> None:
    if inside:
        store(target, value, *at)


@T.macro
def _bring(source: Any, target: Any, parts: tuple[Any, Any], row: Callable[[Any], Any], initial: float) -> None:
    base, count = parts
    for i, n in T.Parallel(*target.shape):
        owner, query, head = row(i)
        target[i, n] = T.if_then_else(n < count, source[base + n, owner, query, head], T.float32(initial))


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
