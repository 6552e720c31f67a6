"""What of a mask is read from memory by the query alone, or by the key alone, becomes a variable.

A pair's values are then made of what its row reads and what its column reads: a tile has 64 times as many pairs as
rows and columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from attention_engine.ir.expr import Axis, Expr, Op, VarKind, substitute, topological, var
from attention_engine.passes.row_values import largest

SIDES = frozenset({Axis.QUERY, Axis.KEY})


@dataclass(frozen=True)
class PartedMask:
    """A mask of variables of one side each, and what these stand for. Put in their place, they make the mask again."""

    mask: Expr
    parts: tuple[tuple[Expr, Expr], ...]

    @cached_property
    def of_queries(self) -> tuple[tuple[Expr, Expr], ...]:
        """Those that the query says."""
        return tuple((v, e) for v, e in self.parts if Axis.QUERY in e.axes)

    @cached_property
    def of_keys(self) -> tuple[tuple[Expr, Expr], ...]:
        """Those that the key says."""
        return tuple((v, e) for v, e in self.parts if Axis.KEY in e.axes)


def part_mask(mask: Expr | None) -> PartedMask | None:
    """A mask in its parts; None where nothing is read by one side alone."""
    if mask is None:
        return None
    parts = largest([mask], _is_read_by_one_side)
    made = {node: var(f"cut{n}", node.axes, node.dtype, VarKind.CUT) for n, node in enumerate(parts)}
    return PartedMask(substitute(mask, made), tuple((v, node) for node, v in made.items())) if made else None


def _is_read_by_one_side(node: Expr) -> bool:
    sides = node.axes & SIDES
    return len(sides) == 1 and any(n.op is Op.LOAD and n.axes & sides for n in topological(node))
