"""`show_mask` and `show_scores`: which pairs a mask keeps and what they score, counted into cells of a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attention_engine.errors import BadInput, CustomInputMissing, UnknownArgument, UnknownOption
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.signatures import Layout, MaskMod, ScoreMod
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Op, const, substitute, topological
from attention_engine.ir.program import KV_IDX, PRODUCT, Q_IDX, B, H, Program
from attention_engine.library import OnlineSoftmax
from attention_engine.reference.dense import attend
from attention_engine.reference.evaluate import Evaluator
from attention_engine.runtime.blocks import BlockList, GivenBlocks
from attention_engine.runtime.captured import capturing, tensors_now
from attention_engine.runtime.described import name_of
from attention_engine.runtime.inputs import check_ranks, order_custom, type_of
from attention_engine.runtime.masks import TracedMask, io_of, trace_mask
from attention_engine.runtime.pictures import MaskPicture, Panel, ScorePicture

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

CELLS = 48  # rows and columns of a panel at most
PANELS = 4  # batches and heads of a picture, where nobody says which
MOST_PAIRS = 1 << 26  # of a panel that are looked at one by one; of more, SAMPLES queries and keys of each cell are
SAMPLES = 64
USUAL_LENGTH = 64  # of a mask where nothing names another
LONGEST_ROWS = 2048  # queries and keys of which weights are drawn: each row is made whole
Choice = int | Sequence[int] | None


def show_mask(
    mask_mod: MaskMod, B: int | None = None, H: int | None = None, Sq: int = USUAL_LENGTH,
    Skv: int | None = None, *, batch: Choice = None, head: Choice = None, tile: tuple[int, int] | None = None,
    **custom: Tensor,
) -> MaskPicture:  # fmt: skip
    """A picture of a mask: SVG in a notebook, block characters where it is printed.

    B, H, Sq, Skv: batch, heads, queries and keys (Skv: as many as queries, unless it is given). batch, head: which to
    draw, an index or several; None: the first few that differ. tile: (queries, keys) of tiles, drawn as frames: which
    a kernel visits, and which of them it tests pair by pair. custom: custom inputs of the mask, by name. Long masks are
    drawn in cells of several pairs, each the share of those that are kept.

    Example:
        >>> print(show_mask(library.causal, Sq=4))
        causal
        62.5 % kept of 4 queries x 4 keys
        ██ kept  ·· masked
        ██······
        ████····
        ██████··
        ████████
        >>> picture = show_mask(library.document(), 1, None, 64, documents=document_ids([20, 44]))
    """
    sizes = (B, H, Sq, Sq if Skv is None else Skv)
    return draw_mask(trace_mask(mask_mod, sizes, custom), name_of(mask_mod), *sizes[2:], batch, head, tile)


def show_scores(
    q: Tensor, k: Tensor, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    online_func: OnlineFunc | None = None, *, scale: float | None = None, weights: bool = False,
    batch: Choice = None, head: Choice = None, layout: Layout = "bshd", **custom: Tensor,
) -> ScorePicture:  # fmt: skip
    """A picture of the scores of q and k after score_mod, and of the pairs that the mask keeps.

    q, k: (batch, length, heads, dim), or (batch, heads, length, dim) with layout="bhsd". weights: what online_func
    makes of each row (None: softmax) in place of its scores. The other arguments are those of `AttentionEngine` and of
    `show_mask`.

    Example:
        >>> q, k = torch.randn(2, 1, 16, 4, 8)
        >>> slopes = 0.5 ** torch.arange(1.0, 5.0)
        >>> picture = show_scores(q, k, library.alibi(0.125), library.causal, slopes=slopes, weights=True)
    """
    check_ranks(layout, q, k, k)
    q, k = (t if layout == "bhsd" else t.transpose(1, 2) for t in (q, k))
    usual = q.shape[3] ** -0.5 if score_mod is None else 1.0
    io = io_of(custom, (*q.shape[:3], k.shape[2]))
    types = {name: type_of(tensor) for name, tensor in custom.items()}
    online = online_func if online_func is not None else OnlineSoftmax()
    with capturing(tuple(custom), types) as capture:
        program = trace(score_mod, mask_mod, online, io, types, usual if scale is None else float(scale))
    held = zip(capture.names, tensors_now(list(capture.captured.values())), strict=True)
    names = [name_of(f) for f in (score_mod, mask_mod) if f is not None]
    title = ", ".join([*names, *([f"{type(online).__name__}()"] if weights else [])]) or "q . k"
    return draw_scores(program, {**custom, **dict(held)}, title, q, k, weights, batch, head)


def draw_mask(
    mask: TracedMask, title: str, queries: int, keys: int, batch: Choice, head: Choice, tile: tuple[int, int] | None
) -> MaskPicture:
    """The picture of a mask of these lengths."""
    chosen, others = _choose(mask.batch, mask.heads, batch, head)
    cell = _cell_of(queries, tile and tile[0]), _cell_of(keys, tile and tile[1])
    device = next((t.device for t in mask.tensors.values()), torch.device("cpu"))
    exact, panels, kept = queries * keys <= MOST_PAIRS, [], []
    for b, h in chosen:
        rows, weighed = [], 0.0
        for query, key, spans in _bands(queries, keys, cell, exact, device):
            batch_at, head_at = (torch.tensor(n, device=device).view(1, 1, 1, 1) for n in (b, h))
            found = mask.at(batch_at, head_at, query.view(1, 1, -1, 1), key.view(1, 1, 1, -1))[0, 0].double()
            shares = found.mean(0) if len(query) else found.sum(0)
            row = torch.segment_reduce(shares, "mean", lengths=_counts(key, keys, cell[1]))
            rows.append(tuple(row.tolist()))
            weighed += float((row * _widths(keys, cell[1], device)).sum()) * spans
        panels.append(Panel(_label(mask.batch, mask.heads, b, h), tuple(rows)))
        kept.append(weighed / max(queries * keys, 1))
    share = sum(kept) / max(len(kept), 1)
    return MaskPicture(title, tuple(panels), queries, keys, cell, others, share, tile, exact)


def draw_scores(
    program: Program, custom: Mapping[str, Tensor], title: str, q: Tensor, k: Tensor, weights: bool,
    batch: Choice, head: Choice,
) -> ScorePicture:  # fmt: skip
    """The picture of the scores of q and k, (batch, heads, length, dim)."""
    custom = {name: tensor.detach() for name, tensor in custom.items()}
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // max(k.shape[1], 1)
    chosen, others = _choose(q.shape[0], q.shape[1], batch, head)
    cell, panels = (_cell_of(queries, None), _cell_of(keys, None)), []
    if weights and max(queries, keys) > LONGEST_ROWS:
        raise BadInput(
            f"weights of {queries} queries and {keys} keys were asked for, and rows are drawn up to "
            f"{LONGEST_ROWS} keys.\n  Give fewer queries and keys, or leave weights out."
        )
    exact = weights or queries * keys <= MOST_PAIRS
    for b, h in chosen:
        place = {B: const(b), H: const(h)}
        q_one, k_one = (t[b : b + 1, n : n + 1].detach().float() for t, n in ((q, h), (k, h // group)))
        whole = _weights(program, place, custom, q_one, k_one) if weights else None
        rows = []
        for query, key, _ in _bands(queries, keys, cell, exact, q.device):
            indices = {Q_IDX: query.view(1, 1, -1, 1), KV_IDX: key.view(1, 1, 1, -1)}
            product = q_one[:, :, query] @ k_one[:, :, key].transpose(-1, -2)
            at = {
                **indices,
                **{axis: torch.tensor(n, device=q.device).view(1, 1, 1, 1) for axis, n in ((B, b), (H, h))},
            }
            evaluate = Evaluator({**at, PRODUCT: product}, custom, torch.float32, q.device)
            shape = (len(query), len(key))
            found = evaluate(program.score).expand(1, 1, *shape)[0, 0] if whole is None else whole[query]
            keep = None if program.mask is None else evaluate(program.mask).expand(1, 1, *shape)[0, 0]
            found = found if keep is None else torch.where(keep, found, torch.nan)
            parts = found.double().split(_counts(key, keys, cell[1]).tolist(), 1)
            rows.append(tuple(float(part.nanmean()) for part in parts))
        panels.append(Panel(_label(q.shape[0], q.shape[1], b, h), tuple(rows)))
    numbers = [x for p in panels for row in p.rows for x in row if x == x and abs(x) != float("inf")]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    return ScorePicture(title, tuple(panels), queries, keys, cell, others, weights, low, high)


def _weights(program: Program, place: Mapping[Any, Any], custom: Mapping[str, Tensor], q: Tensor, k: Tensor) -> Tensor:
    """The final weights of one head, (queries, keys): its output where each key's value is a row of the identity."""

    def put(expr: Any) -> Any:
        return None if expr is None else substitute(expr, dict(place))

    states = tuple(replace(s, update=put(s.update)) for s in program.states)
    alone = replace(
        program, score=put(program.score), mask=put(program.mask), states=states, weights=put(program.weights),
        rescale=put(program.rescale), output=put(program.output), finals=(), forward=None, backward=None,
    )  # fmt: skip
    identity = torch.eye(k.shape[2], device=q.device)[None, None]
    return attend(alone, q, k, identity, custom)[0][0, 0]


def _choose(batches: int, heads: int, batch: Choice, head: Choice) -> tuple[list[tuple[int, int]], int]:
    """The (batch, head) pairs to draw, and how many are left out because nobody asked for them."""

    def listed(name: str, size: int, given: Choice) -> list[int]:
        if size == 1:  # all are alike
            return [0]
        if given is None:
            return list(range(size))
        wanted = [given] if isinstance(given, int) else list(given)
        if bad := [n for n in wanted if not 0 <= n < size]:
            raise UnknownOption(f"{name}={bad[0]} is asked for, and there are {size}. Choose 0 to {size - 1}.")
        return wanted

    every = list(itertools.product(listed("batch", batches, batch), listed("head", heads, head)))
    shown = every if batch is not None and head is not None else every[:PANELS]
    return shown, len(every) - len(shown)


def _label(batches: int, heads: int, b: int, h: int) -> str:
    parts = [f"batch {b}"] if batches > 1 else []
    return ", ".join([*parts, *([f"head {h}"] if heads > 1 else [])])


def _cell_of(length: int, tile: int | None) -> int:
    """Queries (or keys) of a cell: a power of two, by which CELLS are enough; with a tile, the next divisor of it."""
    size = 1
    while -(-length // size) > CELLS:
        size *= 2
    if tile is None:
        return size
    found = next((n for n in range(min(size, tile), 0, -1) if tile % n == 0), 0)
    if found == 0 or -(-length // found) > 4 * CELLS:
        raise UnknownOption(f"tiles of {tile} can't be drawn for a length of {length}. Give larger powers of two.")
    return found


def _bands(
    queries: int, keys: int, cell: tuple[int, int], exact: bool, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """The queries of each row of cells, the keys to look at, and how many queries the row stands for."""
    make = torch.Generator().manual_seed(0)

    def of(first: int, length: int, size: int) -> Tensor:
        count = min(size, length - first)
        if exact or count <= SAMPLES:
            return torch.arange(first, first + count)
        return first + torch.randperm(count, generator=make)[:SAMPLES].sort().values

    for top in range(0, queries, cell[0]):
        key = torch.cat([of(left, keys, cell[1]) for left in range(0, keys, cell[1])]) if keys else torch.arange(0)
        yield of(top, queries, cell[0]).to(device), key.to(device), min(cell[0], queries - top)


def _widths(keys: int, size: int, device: torch.device) -> Tensor:
    """How many keys each column of cells stands for."""
    return torch.tensor([min(size, keys - left) for left in range(0, keys, size)], device=device)


def _counts(key: Tensor, keys: int, size: int) -> Tensor:
    """How many of the keys that are looked at are in each column of cells."""
    return torch.bincount(key // size, minlength=-(-keys // size))


def mask_of_engine(
    engine: Shown, given: Sequence[Tensor], named: Mapping[str, Tensor], block_mask: GivenBlocks | None,
    sizes: Sequence[int | None],
) -> tuple[TracedMask, int, int]:  # fmt: skip
    """An engine's mask, with these custom inputs and blocks, and how many queries and keys it is drawn for.

    sizes: batch, heads, queries and keys as the caller says; None: those of the custom inputs, else of the metas.
    """
    if any(isinstance(each, int) for each in given):
        raise UnknownArgument("sizes are given by name: show_mask(Sq=64, Skv=64). What comes first is custom inputs.")
    tensors = _given(engine, given, named)
    batch, heads, queries, keys = _sizes(engine, tensors, sizes)
    known, device = engine.qkv_meta or engine._called, _device(tensors, block_mask)
    key_heads = known[1].heads if known and known[0].heads == heads else heads
    q = torch.empty(batch, queries, heads, 0, device=device)
    k = torch.empty(batch, keys, key_heads, 0, device=device)
    blocks = engine._blocks(block_mask, q, k)
    variant = engine._variant(blocks)
    held = tensors_now(engine._captured)
    every = {**tensors, **dict(zip((c.name for c in engine._captured), held, strict=True))}
    if blocks is not None:
        every[blocks.name] = blocks.map
    types = {**engine._types, **{name: type_of(tensor) for name, tensor in every.items()}}
    condition = engine._trace(types, variant).mask
    for node in topological(condition) if condition is not None else ():
        if node.op is Op.LOAD and node.name not in every:
            raise CustomInputMissing(f"the mask reads custom input {node.name!r}. Give it: {node.name}=tensor.")
    return TracedMask(condition, every, (batch, heads, queries, keys)), queries, keys


def _given(engine: Shown, given: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Custom inputs by name; a mask needs those alone that it reads."""
    specs = list(engine.custom_io.specs)
    if len(given) + len(named) >= len(specs) or not named.keys() <= set(specs):
        return dict(zip(specs, order_custom(engine.custom_io, given, named), strict=True))
    return {**dict(zip(specs, given, strict=False)), **named}


def _sizes(engine: Shown, tensors: Mapping[str, Tensor], sizes: Sequence[int | None]) -> tuple[int, int, int, int]:
    said = {
        axis: tensors[name].shape[n]
        for name, spec in engine.custom_io.specs.items()
        if name in tensors
        for n, axis in enumerate(spec.axes)
        if isinstance(axis, str)
    }
    metas = engine.qkv_meta
    hints = (metas[0].batch, metas[0].heads, metas[0].length) if metas else (None, None, None)
    keys_hint = None if metas is None or metas[0].length == metas[1].length else metas[1].length

    def first(*known: object) -> int:
        return next(n for n in known if isinstance(n, int))

    batch, heads, queries = (
        first(asked, said.get(name), hint, usual)
        for name, asked, hint, usual in zip(("batch", "heads", "seq_len"), sizes, hints, (1, 1, USUAL_LENGTH))
    )
    keys = first(sizes[3], said.get("seq_len_kv"), keys_hint, queries)
    return batch, heads, queries, keys


def _device(tensors: Mapping[str, Tensor], blocks: GivenBlocks | None) -> torch.device:
    blocks = blocks.indices if isinstance(blocks, BlockList) else blocks
    first = next(iter([*([] if blocks is None else [blocks]), *tensors.values()]), None)
    return torch.device("cpu") if first is None else first.device
