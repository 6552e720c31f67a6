"""Lists of blocks as a mask knows them: a read of a map of blocks, which a call's lists become."""

from __future__ import annotations

from dataclasses import dataclass

from attention_engine.ir.expr import Expr, Op
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H

BLOCK_LIST = "_block_list"  # the custom input: (B or 1, lists of heads or 1, blocks of queries, blocks of keys), int8


@dataclass(frozen=True)
class ListedBlocks:
    """The blocks outside of which a mask keeps no pair: queries and keys of a block; is there a list for each batch;
    how many heads share one (0: all of them)."""

    q: int
    kv: int
    by_batch: bool
    sharing: int


def listed_blocks(mask: Expr | None) -> ListedBlocks | None:
    """The blocks that a mask reads of lists; None where it reads none."""
    found = [blocks for part in _conjuncts(mask) if (blocks := _blocks_of(part)) is not None]
    return found[0] if len(found) == 1 else None


def without_blocks(mask: Expr) -> list[Expr]:
    """The other conditions of a mask that reads lists: a pair must meet them all."""
    return [part for part in _conjuncts(mask) if _blocks_of(part) is None]


def _conjuncts(mask: Expr | None) -> list[Expr]:
    if mask is None:
        return []
    return [c for a in mask.args for c in _conjuncts(a)] if mask.op is Op.AND else [mask]


def _blocks_of(condition: Expr) -> ListedBlocks | None:
    """Of `map[b, h // sharing, q_idx // q, kv_idx // kv] != 0`."""
    if condition.op is not Op.NOT or condition.args[0].op is not Op.EQUAL:
        return None
    reads = [_bare(side) for side in condition.args[0].args]
    reads = [side for side in reads if side.op is Op.LOAD and side.name == BLOCK_LIST]
    if len(reads) != 1:
        return None
    batch, head, query, key = (_divided(index) for index in reads[0].args)
    shared = batch[0].op is Op.CONST, head[0].op is Op.CONST
    known = (shared[0] or batch == (B, 1)) and (shared[1] or head[0] is H)
    if not known or query[0] is not Q_IDX or key[0] is not KV_IDX:
        return None
    return ListedBlocks(query[1], key[1], not shared[0], 0 if shared[1] else head[1])


def _divided(index: Expr) -> tuple[Expr, int]:
    """What of an index is divided, and by how much."""
    index = _bare(index)
    if index.op is Op.FLOORDIV and index.args[1].op is Op.CONST:
        return _bare(index.args[0]), int(index.args[1].value)
    return index, 1


def _bare(expr: Expr) -> Expr:
    """An integer in whatever width."""
    return _bare(expr.args[0]) if expr.op is Op.CAST else expr
