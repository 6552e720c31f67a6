"""The kernels of calls with a cache, for who looks at them or compiles them ahead; what such calls do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_engine.arch import Arch
from attention_engine.compiler import CachedKernels, Kernel
from attention_engine.errors import NoMerge
from attention_engine.frontend.meta import lengths_of
from attention_engine.plan.cached import BUSY, FEWEST_TILES, CachedPlan
from attention_engine.plan.targets import places_of
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.cached import CachedAttention
from attention_engine.runtime.cached_inputs import CachedCall
from attention_engine.runtime.captured import axes_now, specs_of, tensors_now
from attention_engine.runtime.inputs import stand_ins, type_of
from attention_engine.tuner.problems import gpu_name

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

DEALT = ("deal", "decode dealt parts", "combine dealt parts")
NAMES = ("decode", "decode joined parts", "decode parts", "combine", *DEALT)
USUAL = (1, 1, 8192)  # requests, queries and keys of metas that don't say


def cached_kernels(engine: Shown, device: Arch | None, page: int = 0) -> dict[str, Kernel]:
    """What calls with a cache launch, by name."""
    return kernels_of_caches(engine, device, page).every


def kernels_of_caches(
    engine: Shown, device: Arch | None, page: int = 0, custom: Sequence[Tensor] = (), starts: bool = False,
    shared: bool = False, packed: bool = False,
) -> CachedKernels:  # fmt: skip
    """The kernels of calls with a cache, for the heads, dims and dtype that the engine knows.

    device: None, the interpreter. page: keys of a page; 0: a request's keys lie one after the other. custom: as a call
    brings them; without any they are fp32. starts: is it given where queries start? shared: are values the first
    columns of keys? packed: do queries lie one after the other (cu_seqlens_q)?
    """
    metas = engine._metas()
    dtype = getattr(torch, metas[0].dtype_name)
    q, k, v = (torch.empty(1, page or 1, m.heads, m.dim, dtype=dtype) for m in metas)
    one = torch.ones(1, dtype=torch.int32)
    declared = list(engine.custom_io.specs.values())
    held = tensors_now(engine._captured)
    given = [*(custom or stand_ins(declared, engine._types, torch.device("cpu"))), *held]
    sizes = {"batch": None, "heads": q.shape[2], "seq_len": None, "seq_len_kv": None}
    specs = [*declared, *specs_of(engine._captured, axes_now(engine._captured, held, sizes))]
    types = {s.name: type_of(t) for s, t in zip(specs, given, strict=True)}
    program = engine._trace(types, engine._variant(None, q.shape[3], drops=""))
    attention = CachedAttention(program, specs, True, device is None, device, engine._combine_of(program))
    table = one[None] if page else None
    call = CachedCall(
        q[:, :1], k, None if shared else v, v.shape[3], one, table, one if starts else None, None, given,
        torch.zeros(2, dtype=torch.int32) if packed else None,
    )  # fmt: skip
    return attention.kernels(call, [as_parameter(t) for t in given])


def explain_cached(engine: Shown, kernels: CachedKernels) -> str:
    """What a call with a cache launches for the metas' lengths: parts, grid, bytes, and what its kernels take."""
    plan, problem, cache, tile = kernels.plan, kernels.problem, kernels.plan.cache, kernels.plan.tile
    batch, queries, keys = lengths_of(engine._metas(), USUAL)
    queries = queries if queries < keys else 1  # of metas that were made for training
    rows = batch * problem.kv_heads * -(-queries * problem.group // tile.q)
    count, tiles = plan.parts_of(batch, queries, keys, None), -(-keys // tile.kv)
    lies = f"pages of {cache.page}" if cache.page else "a row"
    lines = [
        f"{problem.dtype}, {batch} requests of {queries} queries and at most {keys} keys in {lies}, "
        f"on {gpu_name(kernels.target)}",
        f"tiles: {tile.q} rows ({problem.group} heads share a key head) x {tile.kv} keys, {tile.threads} threads, "
        f"{tile.stages} stages",
    ]  # fmt: skip
    dealt = plan.dealt_parts(batch, queries, keys, None)
    lines.append(_parts_in_words(plan, dealt, count, queries, tiles, rows))
    if dealt:
        grid, held_parts = f"{dealt} x {problem.kv_heads} = {dealt * problem.kv_heads}", dealt
    else:
        grid, held_parts = f"{count} x {rows // batch} x {batch} = {count * rows}", batch * count
    lines.append(f"grid: {grid} blocks, whatever the lengths are")
    size = 4 if problem.dtype == "float32" else 2
    held = batch * keys * problem.kv_heads * (problem.dim + (0 if cache.shared else problem.dim_v)) * size
    states = 0 if plan.merge is None or held_parts == batch else len(plan.merge.read) + problem.dim_v
    between = queries * held_parts * problem.heads * states * 4
    lines.append(
        f"bytes: {_spell(held)} of keys and values where all requests have {keys}, {_spell(between)} of parts until "
        "they are joined"
    )
    return "\n".join([*lines, *(_of_kernel(name, kernel) for name, kernel in kernels.every.items())])


def _parts_in_words(plan: CachedPlan, dealt: int, count: int, queries: int, tiles: int, rows: int) -> str:
    places, joins = places_of(plan.target), plan.joins(queries)
    if isinstance(plan._merge, NoMerge):
        return f"parts: rows are not cut, as parts have no merge: {plan._merge}"
    if dealt:
        return (
            f"parts: at most {dealt} of all requests together, which `deal` deals to them by their lengths, as those "
            f"may differ by {tiles} tiles; `combine dealt parts` joins them"
        )
    if count == 1:
        few = f"{tiles} tiles of keys are few" if tiles <= FEWEST_TILES else f"{rows} blocks are work for {places} SMs"
        return f"parts: rows are not cut, as {few} ({FEWEST_TILES} tiles or less, {BUSY:g} of the SMs or more)"
    who = "the last block of a row's parts" if joins else "`combine`"
    return f"parts: {count} of each row, the least number that leaves {places} SMs busy; {who} joins them"


def _spell(size: int) -> str:
    return f"{size / 1e6:.3g} MB"


def _of_kernel(name: str, kernel: Kernel) -> str:
    if isinstance(kernel.target, str):
        return f"{name}: runs on the interpreter, which takes no registers"
    if not kernel.is_compiled:
        return f"{name}: not compiled yet; `resources` compiles it and says what it takes"
    found = kernel.resources
    return (
        f"{name}: {found.registers} registers, {found.spill_stores} B spilled, {found.shared_bytes} B of shared memory"
    )
