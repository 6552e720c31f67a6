"""What a call launches whose keys and values lie in a cache: one part of a row's keys a block, then what joins parts.

Tensors are (batch, length, heads, dim), or caches (pages, keys of a page, heads, dim). Lengths, tables and starts are
read on the device alone: nothing here depends on their entries, and nothing is compiled for batches, lengths, queries
or numbers of parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from attention_engine.arch import Arch
from attention_engine.errors import NoMerge, TileDoesNotFit
from attention_engine.ir.expr import Expr
from attention_engine.ir.merge import Merge
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.program import Program
from attention_engine.ir.verify import checked
from attention_engine.passes.cached_places import at_own_rows
from attention_engine.passes.derive_merge import derive_merge, merge_by_combine
from attention_engine.passes.half_range import bound_weights, weights_fit
from attention_engine.passes.schedule import ForwardSchedule, schedule_forward
from attention_engine.passes.steps import ReduceStep
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan import attention_buffers as buffers
from attention_engine.plan.buffers import BATCH, KEYS, QUERIES, Arguments, Buffer, Role, length
from attention_engine.plan.forms import Tile
from attention_engine.plan.launches import Launch, Step
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION, HELD_BARRIERS, NO_STORAGE_SYNC, UNIFORM_GROUPS
from attention_engine.plan.targets import Target, as_arch, places_of
from attention_engine.plan.verify import verify_steps

PARTS, PAGES, PAGES_OF_A_REQUEST = length("parts"), length("pages"), length("pages_of_a_request")
PART_STARTS, PART_REQUESTS = "part_starts", "part_requests"
MOST_PARTS = 128  # which the kernel that joins them holds as one tile
ROWS = 64  # of a tile: what a warpgroup multiplies at once
BUSY = 0.8  # of the GPU's SMs: where so many have work, a row is not cut
NEAR_BEST = 0.85  # of the best share of an SM's time that numbers of parts leave it busy
FEWEST_TILES = 4  # a row of fewer tiles is not cut
SHAPES = ((64, 64, 128, 2), (64, 64, 128, 1), (64, 32, 128, 2), (64, 32, 128, 1), (64, 16, 128, 1), (32, 16, 64, 1))
# At head dims above 64 where products are mma's. Compiled for sm_80 and sm_120a at 128, 64 keys: 255 registers, and
# softcap and trees spilled 8 to 176 bytes; 32 keys: 156 to 220, nothing, and shared memory for two blocks an SM.
CROWDED_SHAPES = SHAPES[2:]
SHARED_SHAPES = ((64, 64, 256, 0), (64, 32, 256, 0), (64, 16, 256, 0))  # pipelined, weights in shared memory would race
LATENT = Tile(64, 64, 256, 2)  # of keys that are values too, on Hopper
PLACED = Tile(64, 64, 160, 3)  # of pages, by TMA: two blocks share an SM
BARRIERS = 1024  # bytes that they take at most, as tiles begin at a multiple of them
ROWS_HANDED = 2816  # bytes for row values that one warpgroup hands another, and barriers
MOST_REQUESTS = 1024  # whose parts are dealt by their lengths, which one block adds up
WIDE = 128  # tiles: in wider caches lengths may differ by so much that one request would be walked alone at last
DEALT = (
    4  # blocks more than rows, for each that the GPU runs at once: a model of blocks in turns gives 0.9 of even ones
)
LEAST_DEALT = 32  # tiles of a part that is dealt
EXACT_SHAPES = ((64, 64, 128, 0), (64, 32, 128, 0), (64, 16, 128, 0), (32, 16, 64, 0))  # fp32 tiles are made in place


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


def walk(problem: Problem, cache: Cache, schedule: ForwardSchedule, in_parts: bool) -> Arguments:
    """Of the kernel that walks over a cache."""
    given = (
        cache.of_queries(buffers.strided("q", QUERIES, problem.heads, problem.dim, problem)), *caches(problem, cache),
        *buffers.custom_inputs(problem), *places(cache), *(dealing()[1:] if cache.dealt else ()),
    )  # fmt: skip
    names = tuple(name for name, _ in schedule.rows)
    return (*given, *(parts if in_parts else results)(problem, cache, names))


def joining(problem: Problem, cache: Cache, merge: Merge) -> Arguments:
    """Of the kernel that joins parts."""
    rows = tuple(name for name, _ in merge.finals)
    return (
        *buffers.custom_inputs(problem), *places(replace(cache, page=0)),  # which lie apart, and nobody here reads
        *(dealing()[1:2] if cache.dealt else ()),
        *parts(problem, cache, merge.read), *results(problem, cache, rows),
    )  # fmt: skip


def shared_bytes(problem: Problem, cache: Cache, tile: Tile) -> int:
    """The shared memory that a tile takes at least."""
    dim, dim_v = padded(problem.dim), 0 if cache.shared else padded(problem.dim_v)
    size = {"float32": 4}.get(problem.dtype, 2) * (2 if problem.splits else 1)
    weights = tile.q * tile.kv if cache.shared or problem.dtype == "float32" else 0
    return (tile.q * dim + max(tile.stages, 1) * tile.kv * (dim + dim_v) + weights) * size


def tile_of(problem: Problem, cache: Cache, target: Target) -> Tile:
    """The largest tile that fits. Raises TileDoesNotFit."""
    arch = as_arch(target)
    shapes = EXACT_SHAPES if problem.dtype == "float32" else SHARED_SHAPES if cache.shared else SHAPES
    if shapes is SHAPES and not arch.has_wgmma and max(problem.tile_dims) > 64:
        shapes = CROWDED_SHAPES
    widest = 512 if cache.shared else 256
    for shape in shapes:
        tile = Tile(*shape)
        if cache.shared and not by_columns(problem, cache):
            tile = replace(tile, threads=tile.threads // 2)
        if shared_bytes(problem, cache, tile) <= arch.shared_memory_per_block and problem.dim_v <= widest:
            return tile
    raise TileDoesNotFit(problem.dim, problem.dim_v, problem.dtype, f"have no tile for a cache on {arch.name}")


def value_columns(problem: Problem, cache: Cache) -> int:
    """The columns of the output as a block holds them; of keys that are values too, whole 128 bytes, as wgmma reads."""
    own = padded(problem.dim_v)
    return min(padded(problem.dim), -(-own // 64) * 64) if cache.shared else own


def by_columns(problem: Problem, cache: Cache) -> bool:
    """Do warps share the columns of the products, not the rows? Where keys are values too, and these are wide."""
    return cache.shared and value_columns(problem, cache) > 128


def placed_by_hand(problem: Problem, cache: Cache, target: Target) -> bool:
    """Do keys that are values too go by the kernel for Hopper (kernels/cached/latent.py)?

    Tiles come whole, by TMA, in pieces of 64 columns: each from one page, and from addresses that 16 bytes divide.
    """
    if not cache.shared or not isinstance(target, Arch) or target.capability != (9, 0) or problem.stride_unit != 8:
        return False
    in_pieces = problem.dim % 64 == 0 and problem.dim_v % 128 == 0 and problem.dim_v <= 512
    fits = shared_bytes(problem, cache, LATENT) + ROWS_HANDED <= target.shared_memory_per_block
    return in_pieces and fits and problem.dtype != "float32" and cache.page % LATENT.kv == 0


def comes_by_tma(problem: Problem, cache: Cache, target: Target) -> bool:
    """Do keys and values come out of their pages by the kernel that TMA copies for (kernels/cached/placed.py)?

    Without pages TileLang's pipeline is as fast, and a launch makes no descriptors of tensors.
    """
    if cache.shared or not isinstance(target, Arch) or target.capability != (9, 0) or problem.stride_unit != 8:
        return False
    whole = problem.dim % 64 == 0 and problem.dim_v % 64 == 0  # columns that TMA lays out together
    fits = 2 * (shared_bytes(problem, cache, PLACED) + BARRIERS) <= target.shared_memory_per_block
    lies = cache.page > 0 and (cache.page % PLACED.kv == 0 or PLACED.kv % cache.page == 0)
    return whole and fits and lies and problem.dtype != "float32"


def choose_parts(rows: int, keys: int, tile: Tile, target: Target) -> int:
    """How many parts each row is cut into, from shapes alone.

    rows: tiles of rows in all requests and key heads; keys: the most that a request may have. The least number that
    leaves SMs nearly as busy as the best does: each part costs a little.
    """
    tiles, sms = -(-keys // tile.kv), places_of(target)
    if rows >= BUSY * sms or tiles <= FEWEST_TILES:
        return 1
    most = min(MOST_PARTS, sms, tiles)
    busy = {}
    for count in range(1, most + 1):
        waves = rows * count / sms
        busy[count] = waves / -(-rows * count // sms)
    best = max(busy.values())
    return next(count for count, share in busy.items() if share >= NEAR_BEST * best)


class CachedPlan:
    """The launches of one program for one problem, kind of cache and target."""

    def __init__(
        self, program: Program, problem: Problem, cache: Cache, target: Target, scale: Expr | None = None
    ) -> None:  # fmt: skip
        """scale: what the user's `combine` multiplies the outputs of parts with, of the rows that they return."""
        axes = {name: axes for name, _, axes in problem.custom}
        program = at_own_rows(program, axes)
        bounded = problem.dtype == "float16" and not weights_fit(program)
        self.program = bound_weights(program) if bounded else program
        self.problem, self.cache, self.target, self.scale = problem, cache, target, scale
        self.by_hand = placed_by_hand(problem, cache, target)
        self.by_tma = comes_by_tma(problem, cache, target)
        self.tile = LATENT if self.by_hand else PLACED if self.by_tma else tile_of(problem, cache, target)

    @cached_property
    def _merge(self) -> Merge | NoMerge:
        try:
            if self.scale is None:
                return derive_merge(self.program)
            merge = merge_by_combine(self.program, self.scale)
        except NoMerge as error:
            return error
        known = len(merge.finals) == len(self.program.finals)
        return (
            merge if known else NoMerge("`combine` joins outputs alone, and the rows that are returned have no merge.")
        )

    @property
    def merge(self) -> Merge | None:
        """What joins parts; None where none was found, and rows are not cut."""
        return self._merge if isinstance(self._merge, Merge) else None

    @property
    def overlaps(self) -> bool:
        """Does the kernel that joins parts start beside the last of them? GPUs before Hopper can't have it wait."""
        return as_arch(self.target).capability >= (9, 0)

    @cached_property
    def whole(self) -> Launch:
        """The output and the rows, of whole rows."""
        return self._walk("decode", schedule_forward(self.program), False)

    @cached_property
    def part(self) -> Launch:
        """Parts of rows."""
        return self._part("decode parts", self.cache)

    @cached_property
    def combine(self) -> Launch:
        """The output and the rows, of parts."""
        return self._combine("combine", self.cache)

    @cached_property
    def dealt(self) -> tuple[Launch, Launch, Launch]:
        """The same of parts that are dealt to requests by their lengths, which comes first."""
        cache, arguments = replace(self.cache, dealt=True), dealing()
        given = (self.tile.kv, LEAST_DEALT, MOST_PARTS)
        deal = Launch("deal", "cached.deal.deal", given, arguments, frozenset([PART_STARTS, PART_REQUESTS]))
        return deal, self._part("decode dealt parts", cache), self._combine("combine dealt parts", cache)

    def _part(self, name: str, cache: Cache) -> Launch:
        assert self.merge is not None, "rows that are not cut have no parts"
        return self._walk(name, schedule_forward(self.merge.part_program), True, cache)

    def _walk(self, name: str, schedule: ForwardSchedule, in_parts: bool, cache: Cache | None = None) -> Launch:
        cache = cache or self.cache
        arguments = walk(self.problem, cache, schedule, in_parts)
        made = [a.place for a in arguments if isinstance(a, Buffer) and a.role is Role.MADE]
        writes = frozenset(made) - {PART_STARTS, PART_REQUESTS}
        given = (schedule, self.tile, cache, in_parts, in_parts and self.overlaps)
        by_hand = (UNIFORM_GROUPS, HELD_BARRIERS)
        if self.by_hand:
            return Launch(name, "cached.latent.latent", given, arguments, writes, by_hand)
        if self.by_tma:
            return Launch(name, "cached.placed.placed", given, arguments, writes, (*by_hand, NO_STORAGE_SYNC))
        return Launch(name, "cached.decode.decode", given, arguments, writes, (DISABLE_WARP_SPECIALIZATION,))

    def _combine(self, name: str, cache: Cache) -> Launch:
        assert self.merge is not None, "rows that are not cut have no parts"
        arguments = joining(self.problem, cache, self.merge)
        writes = frozenset(["o", *(f"row_{name}" for name, _ in self.merge.finals)])
        kind = Cache(starts=cache.starts, packed=cache.packed, dealt=cache.dealt)
        given = (self.merge, MOST_PARTS, kind, self.overlaps)
        return Launch(name, "cached.combine.combine", given, arguments, writes)

    def steps(self, count: int, dealt: bool = False) -> tuple[Step, ...]:
        """What a call launches whose rows are cut into so many parts; dealt: all requests together have so many."""
        steps: tuple[Step, ...] = self.dealt if dealt else (self.whole,) if count == 1 else (self.part, self.combine)
        return checked(verify_steps, steps)

    @property
    def may_deal(self) -> bool:
        """May parts be dealt by lengths? Not where a mask's bounds say how many tiles a row has."""
        from_below = any(bound.kv > 0 for bound in plan_tiles(self.program.mask).bounds.bounds)
        return self.merge is not None and not self.cache.packed and not from_below

    @property
    def every_step(self) -> tuple[Step, ...]:
        """What calls may launch, of any number of parts."""
        if self.merge is None:
            return self.steps(1)
        return (*self.steps(1), *self.steps(2), *(self.steps(2, True) if self.may_deal else ()))

    def dealt_parts(self, batch: int, queries: int, keys: int, asked: int | None) -> int:
        """How many parts the requests of a call have together, which are dealt by lengths; 0: they are not. From shapes
        alone: where blocks are many, and lengths may differ much."""
        tiles, sms = -(-keys // self.tile.kv), places_of(self.target)
        few = batch > MOST_REQUESTS or queries * self.problem.group > self.tile.q or tiles <= WIDE
        if self.cache.shared:  # a fifth to a half slower where lengths are even: heads' sums are wide, and joined
            return 0
        if asked is not None or few or self.problem.kv_heads * batch < BUSY * sms or not self.may_deal:
            return 0
        at_once = sms * (1 if self.cache.shared else 2)
        return batch + -(-DEALT * at_once // self.problem.kv_heads)

    def parts_of(self, batch: int, queries: int, keys: int, asked: int | None) -> int:
        """How many parts each row of a call is cut into; queries: of each request, or all that are packed.

        Raises NoMerge where as many as were asked for can't join.
        """
        if asked is not None:
            if asked > 1 and isinstance(self._merge, NoMerge):
                raise self._merge
            return asked
        if self.merge is None:
            return 1
        blocks = -(-queries * self.problem.group // self.tile.q)
        blocks = max(blocks, batch) if self.cache.packed else batch * blocks
        rows = self.problem.kv_heads * blocks
        found = choose_parts(rows, keys, self.tile, self.target)
        pairs = self.reduces_more and not (self.by_tma or self.by_hand) and rows * found <= places_of(self.target)
        return 2 * found if pairs and 2 * found <= MOST_PARTS and 4 * found <= -(-keys // self.tile.kv) else found

    @cached_property
    def reduces_more(self) -> bool:
        """Is a tile reduced that is neither scores nor weights? A block then computes for longer than its keys take to
        come, where it has an SM to itself: two of them share one better. Not where a warp of its own copies."""
        return any(isinstance(s, ReduceStep) and s.source is not None for s in schedule_forward(self.program).steps)
