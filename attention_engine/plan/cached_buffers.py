"""Attention to a cache: how keys and values lie there, and the arguments of each kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attention_engine.ir.merge import Merge
from attention_engine.ir.problem import Problem
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.plan import attention_buffers as buffers
from attention_engine.plan.buffers import BATCH, KEYS, QUERIES, Arguments, Buffer, Role, ceil_div, length

PARTS, PAGES, PAGES_OF_A_REQUEST = length("parts"), length("pages"), length("pages_of_a_request")
PART_STARTS, PART_REQUESTS, DONE = "part_starts", "part_requests", "done"


@dataclass(frozen=True)
class Cache:
    """How keys and values lie, as far as kernels are made for it.

    page: keys of a page; 0: each request's keys lie one after the other. shared: values are the first columns of keys.
    starts: is it given where queries start? packed: do the queries of all requests lie one after the other, as many
    of each as cu_seqlens_q says? dealt: are parts dealt to requests by their lengths, which the device knows?
    """

    page: int = 0
    shared: bool = False
    starts: bool = False
    packed: bool = False
    dealt: bool = False

    def of_queries(self, found: Buffer) -> Buffer:
        """A tensor of queries: packed ones are those of one batch."""
        if not self.packed:
            return found
        return replace(found, shape=tuple(1 if size is BATCH else size for size in found.shape))


@dataclass(frozen=True)
class Parts:
    """What becomes of the parts that blocks leave.

    overlaps: the kernel that joins them starts beside the last of them. joined: the merge by which the last block joins
    them itself; None: another kernel does. rows: of a tile, whose blocks count together, where they join; at_once: of
    these, how many are joined at once.
    """

    overlaps: bool = False
    joined: Merge | None = None
    rows: int = 0
    at_once: int = 0


def caches(problem: Problem, cache: Cache) -> Arguments:
    """The caches of keys and of values."""
    found = []
    for name, dim in (("k", problem.dim), *([] if cache.shared else [("v", problem.dim_v)])):
        if not cache.page:
            found.append(buffers.strided(name, KEYS, problem.kv_heads, dim, problem))
            continue
        names = tuple(f"{name}_stride_{axis}" for axis in ("page", "key", "head"))
        shape = (PAGES, cache.page, problem.kv_heads, dim)
        found.append(Buffer(name, shape, problem.dtype, Role.GIVEN, strides=names, unit=problem.stride_unit))
    return tuple(found)


def places(cache: Cache) -> Arguments:
    """Where keys and queries are."""
    found = [Buffer("kv_lengths", (BATCH,), "int32", Role.GIVEN)]
    if cache.page:
        strides = ("page_table_stride",)  # tables are often a corner of a larger one
        found.append(Buffer("page_table", (BATCH, PAGES_OF_A_REQUEST), "int32", Role.GIVEN, strides=strides))
    if cache.starts:
        found.append(Buffer("q_starts", (BATCH,), "int32", Role.GIVEN))
    if cache.packed:
        found.append(Buffer("cu_seqlens_q", (BATCH + 1,), "int32", Role.GIVEN))
    return tuple(found)


def results(problem: Problem, cache: Cache, rows: tuple[str, ...]) -> Arguments:
    """The output and the returned rows."""
    found = (buffers.output(problem), *(buffers.row(f"row_{name}", problem) for name in rows))
    return tuple(map(cache.of_queries, found))


def parts(problem: Problem, cache: Cache, states: tuple[str, ...]) -> Arguments:
    """What parts leave: sums of weights times values, and states."""
    one_of = 1 if cache.dealt else BATCH  # a part that was dealt has a place that says whose it is
    rows = (PARTS, one_of, QUERIES, problem.heads)
    found = (Buffer("part_o", (*rows, problem.dim_v)), *(Buffer(f"part_{name}", rows) for name in states))
    return tuple(map(cache.of_queries, found))


def dealing() -> Arguments:
    """Of the kernel that deals parts to requests: each request's first part, and whose each part is."""
    starts, requests = (BATCH + 1,), (PARTS,)
    lengths = Buffer("kv_lengths", (BATCH,), "int32", Role.GIVEN)
    return (lengths, Buffer(PART_STARTS, starts, "int32"), Buffer(PART_REQUESTS, requests, "int32"))


def counters(problem: Problem, rows: int) -> Buffer:
    """How many parts of a block's rows are done: 0 before a launch, and again behind it."""
    return Buffer(DONE, (BATCH, ceil_div(QUERIES * problem.group, rows) * problem.kv_heads), "int32", Role.ZEROED)


def walk(problem: Problem, cache: Cache, schedule: ForwardSchedule, of: Parts | None) -> Arguments:
    """Of the kernel that walks over a cache."""
    given = (
        cache.of_queries(buffers.strided("q", QUERIES, problem.heads, problem.dim, problem)), *caches(problem, cache),
        *buffers.custom_inputs(problem), *places(cache), *(dealing()[1:] if cache.dealt else ()),
    )  # fmt: skip
    names = tuple(name for name, _ in schedule.rows)
    if of is None:
        return (*given, *results(problem, cache, names))
    found = (*given, *parts(problem, cache, names))
    if of.joined is None:
        return found
    return (*found, counters(problem, of.rows), *results(problem, cache, tuple(name for name, _ in of.joined.finals)))


def joining(problem: Problem, cache: Cache, merge: Merge) -> Arguments:
    """Of the kernel that joins parts."""
    rows = tuple(name for name, _ in merge.finals)
    return (
        *buffers.custom_inputs(problem), *places(replace(cache, page=0)),  # which lie apart, and nobody here reads
        *(dealing()[1:2] if cache.dealt else ()),
        *parts(problem, cache, merge.read), *results(problem, cache, rows),
    )  # fmt: skip
