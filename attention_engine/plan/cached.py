"""What a call launches whose keys and values lie in a cache: one part of a row's keys a block, then what joins parts.

Tensors are (batch, length, heads, dim), or caches (pages, keys of a page, heads, dim). Lengths, tables and starts are
read on the device alone: nothing here depends on their entries, and nothing is compiled for batches, lengths, queries
or numbers of parts.
"""

from __future__ import annotations

from dataclasses import replace
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
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan.buffers import Buffer, Role
from attention_engine.plan.cached_buffers import PART_REQUESTS, PART_STARTS, Cache, Parts, dealing, joining, walk
from attention_engine.plan.forms import Tile
from attention_engine.plan.launches import Launch, Step
from attention_engine.plan.rules import DISABLE_WARP_SPECIALIZATION, HELD_BARRIERS, NO_STORAGE_SYNC, UNIFORM_GROUPS
from attention_engine.plan.targets import Target, as_arch, places_of
from attention_engine.plan.verify import verify_steps

MOST_PARTS = 128  # which the kernel that joins them holds as one tile
ROWS = 64  # of a tile: what a warpgroup multiplies at once
JOINED = 512  # entries of rows that a block joins at once: a row of threads, 16 bytes each
JOINED_ELSEWHERE = 256  # 512 take 255 registers at head dim 64 on an A100, and some programs spill; 256 take 193
MOST_JOINED = 8  # rows of a block that it joins itself: of 16 a block for each row is 2 % faster
BUSY = 0.8  # of the GPU's SMs: where so many have work, a row is not cut
NEAR_BEST = 0.85  # of the best share of an SM's time that numbers of parts leave it busy
FEWEST_TILES = 4  # a row of fewer tiles is not cut
SHAPES = ((64, 64, 128, 2), (64, 64, 128, 1), (64, 32, 128, 2), (64, 32, 128, 1), (64, 16, 128, 1), (32, 16, 64, 1))
# At head dims above 64 where products are mma's. Compiled for sm_80 and sm_120a at 128, 64 keys: 255 registers, and
# softcap and trees spilled 8 to 176 bytes; 32 keys: 156 to 220, nothing, and shared memory for two blocks an SM.
CROWDED_SHAPES = SHAPES[2:]
SHARED_SHAPES = ((64, 64, 256, 0), (64, 32, 256, 0), (64, 16, 256, 0))  # pipelined, weights in shared memory would race
LATENT = Tile(64, 64, 256, 2)  # of keys that are values too, on Hopper
PLACED = Tile(64, 64, 160, 3)  # of keys that come by TMA: two blocks share an SM
BARRIERS = 1024  # bytes that they take at most, as tiles begin at a multiple of them
ROWS_HANDED = 2816  # bytes for row values that one warpgroup hands another, and barriers
MOST_REQUESTS = 1024  # whose parts are dealt by their lengths, which one block adds up
WIDE = 128  # tiles: in wider caches lengths may differ by so much that one request would be walked alone at last
DEALT = (
    4  # blocks more than rows, for each that the GPU runs at once: a model of blocks in turns gives 0.9 of even ones
)
LEAST_DEALT = 32  # tiles of a part that is dealt
EXACT_SHAPES = ((64, 64, 128, 0), (64, 32, 128, 0), (64, 16, 128, 0), (32, 16, 64, 0))  # fp32 tiles are made in place


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


def comes_by_tma(problem: Problem, cache: Cache, target: Target, joined: bool = False) -> bool:
    """Do keys and values come by the kernel that TMA copies for (kernels/cached/placed.py)? joined: of parts that join
    themselves, whose first tiles it asks for early.

    Other keys without pages come by TileLang's pipeline as fast, and a launch makes no descriptors of tensors.
    """
    if cache.shared or not isinstance(target, Arch) or target.capability != (9, 0) or problem.stride_unit != 8:
        return False
    whole = problem.dim % 64 == 0 and problem.dim_v % 64 == 0  # columns that TMA lays out together
    fits = 2 * (shared_bytes(problem, cache, PLACED) + BARRIERS) <= target.shared_memory_per_block
    lies = joined if cache.page == 0 else cache.page % PLACED.kv == 0 or PLACED.kv % cache.page == 0
    return whole and fits and lies and problem.dtype != "float32"


def joined_at_once(problem: Problem, target: Target) -> int:
    """How many rows the last block of their parts joins at once; at head dim 128 four, whatever the GPU."""
    few = padded(problem.dim_v) < 128 and as_arch(target).capability != (9, 0)
    return max(1, (JOINED_ELSEWHERE if few else JOINED) // padded(problem.dim_v))


def joins_itself(problem: Problem, cache: Cache, tile: Tile) -> bool:
    """Can the last block of a row's parts join them? A warp has a row, or several; not where their sums are wide."""
    return padded(problem.dim_v) in (32, 64, 128) and tile.q == ROWS and not (cache.shared or cache.packed)


def choose_parts(rows: int, keys: int, tile: Tile, target: Target) -> int:
    """How many parts each row is cut into, from shapes alone.

    rows: tiles of rows in all requests and key heads; keys: the most that a request may have. The least number that
    leaves SMs nearly as busy as the best does, as each part costs a little; and as many more as run at once with them.
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
    least = next(count for count, share in busy.items() if share >= NEAR_BEST * best)
    return min(most, -(-rows * least // sms) * sms // rows)


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
        self.joined_by_tma = comes_by_tma(problem, cache, target, joined=True)
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
        return self._walk("decode", schedule_forward(self.program), None)

    @cached_property
    def part(self) -> Launch:
        """Parts of rows."""
        return self._part("decode parts", self.cache)

    @cached_property
    def joined(self) -> Launch | None:
        """Parts of rows, of which the last joins all; None where another kernel does."""
        if self.merge is None or not joins_itself(self.problem, self.cache, self.tile):
            return None
        at_once = joined_at_once(self.problem, self.target)
        parts = Parts(joined=self.merge, rows=self.tile.q, at_once=at_once)
        return self._walk("decode joined parts", schedule_forward(self.merge.part_program), parts)

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
        return self._walk(name, schedule_forward(self.merge.part_program), Parts(self.overlaps), cache)

    def _walk(
        self, name: str, schedule: ForwardSchedule, of: Parts | None, cache: Cache | None = None
    ) -> Launch:  # fmt: skip
        cache = cache or self.cache
        arguments = walk(self.problem, cache, schedule, of)
        made = [a.place for a in arguments if isinstance(a, Buffer) and a.role is Role.MADE]
        writes = frozenset(made) - {PART_STARTS, PART_REQUESTS}
        by_tma = self.by_tma or (of is not None and of.joined is not None and self.joined_by_tma)
        given = (schedule, PLACED if by_tma else self.tile, cache, of)
        by_hand = (UNIFORM_GROUPS, HELD_BARRIERS)
        if self.by_hand:
            return Launch(name, "cached.latent.latent", given, arguments, writes, by_hand)
        if by_tma:
            return Launch(name, "cached.placed.placed", given, arguments, writes, (*by_hand, NO_STORAGE_SYNC))
        return Launch(name, "cached.decode.decode", given, arguments, writes, (DISABLE_WARP_SPECIALIZATION,))

    def _combine(self, name: str, cache: Cache) -> Launch:
        assert self.merge is not None, "rows that are not cut have no parts"
        arguments = joining(self.problem, cache, self.merge)
        writes = frozenset(["o", *(f"row_{name}" for name, _ in self.merge.finals)])
        kind = Cache(starts=cache.starts, packed=cache.packed, dealt=cache.dealt)
        given = (self.merge, MOST_PARTS, kind, self.overlaps)
        return Launch(name, "cached.combine.combine", given, arguments, writes)

    def steps(self, count: int, dealt: bool = False, queries: int = 1) -> tuple[Step, ...]:
        """What a call launches whose rows are cut into so many parts; dealt: all requests together have so many.
        queries: of each request; where they are few, the last block of a row's parts joins them."""
        steps: tuple[Step, ...] = self.dealt if dealt else (self.whole,) if count == 1 else (self.part, self.combine)
        if not dealt and count > 1 and self.joined is not None and self.joins(queries):
            steps = (self.joined,)
        return checked(verify_steps, steps)

    def joins(self, queries: int) -> bool:
        """Does the last block of a row's parts join them, where each request has so many queries?"""
        return self.joined is not None and queries * self.problem.group <= MOST_JOINED

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
        in_parts = dict.fromkeys([*self.steps(2), *self.steps(2, queries=MOST_JOINED + 1)])
        return (*self.steps(1), *in_parts, *(self.steps(2, True) if self.may_deal else ()))

    def dealt_parts(self, batch: int, queries: int, keys: int, asked: int | None) -> int:
        """How many parts the requests of a call have together, which are dealt by lengths; 0: they are not. From shapes
        alone: where blocks are many, and lengths may differ much."""
        tiles, sms = -(-keys // self.tile.kv), places_of(self.target)
        unfit = batch > MOST_REQUESTS or queries * self.problem.group > self.tile.q or tiles <= WIDE
        if self.cache.shared:  # a fifth to a half slower where lengths are even: heads' sums are wide, and joined
            return 0
        if asked is not None or unfit or self.problem.kv_heads * batch < BUSY * sms or not self.may_deal:
            return 0
        at_once = 2 * sms
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
        return choose_parts(rows, keys, self.tile, self.target)
