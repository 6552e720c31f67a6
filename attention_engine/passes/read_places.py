"""Which place each read of a custom input has, and by which sum its gradient is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from attention_engine.ir.expr import Axis, Expr, Op, Type, VarKind, substitute, var
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.passes.simplify import add, simplify

STEP = var("_step", [Axis.QUERY, Axis.KEY], Type.INT, VarKind.PLACE)


class ReadPlace(Enum):
    """What the place of a read depends on, beside batch and head."""

    ROW = "the query, or nothing: a row sums it over its keys"
    KEY = "the key: a block of keys sums it over the queries"
    DIAGONAL = "query - key: a tile sums it along its diagonals"
    PAIR = "each pair has its own entry, in the order of the loops"
    SCATTERED = "anything else"


def place_of_read(load: Expr, axes: tuple[int | str, ...]) -> ReadPlace:
    """The place of a read of a custom input with these axes."""
    if Axis.KEY not in load.axes:
        return ReadPlace.ROW
    if Axis.QUERY not in load.axes:
        return ReadPlace.KEY
    if _is_pair(load, axes):
        return ReadPlace.PAIR
    return ReadPlace.DIAGONAL if _is_diagonal(load) else ReadPlace.SCATTERED


def _is_pair(load: Expr, axes: tuple[int | str, ...]) -> bool:
    """Is it [b, h, q_idx, kv_idx], of which the first two may be missing or 0?"""
    order = {B: "batch", H: "heads", Q_IDX: "seq_len", KV_IDX: "seq_len_kv"}
    places = [(list(order).index(a), order[a] == axis) for a, axis in zip(load.args, axes, strict=True) if a in order]
    others = [(a, axis) for a, axis in zip(load.args, axes, strict=True) if a not in order]
    if not all(a.op is Op.CONST and a.value == 0 and axis == 1 for a, axis in others):
        return False
    numbers = [n for n, _ in places]
    return numbers[-2:] == [2, 3] and numbers == sorted(set(numbers)) and all(fits for _, fits in places)


def _is_diagonal(load: Expr) -> bool:
    """Does the place stay where it is when query and key both move by a step?"""
    moved = {Q_IDX: add(Q_IDX, STEP), KV_IDX: add(KV_IDX, STEP)}
    return simplify(substitute(load, moved))[0] is simplify(load)[0]


Gradients = tuple[tuple[Expr, Expr], ...]  # (read, what a pair adds to its gradient)


@dataclass(frozen=True)
class CustomSums:
    """What the backward pass sums for custom inputs, beside what rows sum up (row_sums.py).

    of_keys, diagonals, scattered: by the kernel over keys, in registers, along the diagonals of its tiles, and by an
    atomic a pair. pairs: by a kernel of its own, which stores each entry once. by_rows: the same kernel's tiles, which
    the caller scatters in a fixed order. ordered: diagonals are added in the same order in every run.
    """

    of_keys: Gradients = ()
    diagonals: Gradients = ()
    scattered: Gradients = ()
    pairs: Gradients = ()
    by_rows: Gradients = ()
    ordered: bool = False


def plan_custom_sums(gradients: Gradients, axes: Mapping[str, tuple[int | str, ...]], ordered: bool) -> CustomSums:
    """The sums for these reads; ordered: gradients shall be the same in every run."""
    found: dict[ReadPlace, list[tuple[Expr, Expr]]] = {place: [] for place in ReadPlace}
    for read, expr in gradients:
        found[place_of_read(read, axes[read.name])].append((read, expr))
    others = tuple(found[ReadPlace.SCATTERED])
    return CustomSums(
        of_keys=tuple(found[ReadPlace.KEY]),
        diagonals=tuple(found[ReadPlace.DIAGONAL]),
        scattered=() if ordered else others,
        pairs=tuple(found[ReadPlace.PAIR]),
        by_rows=others if ordered else (),
        ordered=ordered,
    )
