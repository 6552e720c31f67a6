"""engine.check() of a packed call: one batch of rows, of the program that pack_documents.py makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from attention_engine.errors import NotInterpretable
from attention_engine.ir.expr import Type
from attention_engine.ir.program import Program
from attention_engine.passes.drop_weights import SEED
from attention_engine.runtime.check import compare
from attention_engine.runtime.check_report import CheckReport
from attention_engine.runtime.dropout import seed_tensor
from attention_engine.runtime.inputs import type_of
from attention_engine.runtime.packed import pack
from attention_engine.runtime.packed_call import call_packed
from attention_engine.runtime.shown import Shown
from attention_engine.runtime.small_call import to_run

MOST_ROWS = 192  # of a call that the interpreter checks
Starts = tuple[Tensor, Tensor | None]


class PackedView:
    """An engine as a check asks it, whose calls, of one batch of rows, are packed."""

    layout, block_mask = "bshd", None

    def __init__(self, engine: Shown, starts: Starts) -> None:
        self._engine, self._starts = engine, starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], captured: Sequence[Tensor], blocks: None,
        return_rowscales: bool, named: Mapping[str, Tensor], seed: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        found = call_packed(self._engine, q[0], k[0], v[0], custom, captured, self._starts, None, True, named, seed)
        assert isinstance(found, tuple)
        return found[0][None], {name: row[None] for name, row in found[1].items()}

    def _dense_program(self, tensors: Sequence[Tensor], blocks: None) -> tuple[Program, list[str], list[Tensor]]:
        engine, (q, k, v) = self._engine, tensors[:3]
        rows = pack(q[0], k[0], v[0], *self._starts)
        names = [*engine.custom_io.specs, *[c.name for c in engine._captured]]
        types = {n: type_of(t) for n, t in zip(names, tensors[3:], strict=True)} | dict.fromkeys(rows.names, Type.INT)
        seeds = [seed_tensor(0, q.device)] if engine._drops else []
        program = engine._trace(types, engine._variant(dim=q.shape[3], packing=rows.packing))
        return program, [*names, *rows.names, *[SEED for _ in seeds]], [*rows.tables, *seeds]


def check_packed(
    engine: Shown, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], starts: Starts
) -> CheckReport:  # fmt: skip
    """The report on a packed call; on the interpreter, on its first rows. Raises what a call raises."""
    pack(q, k, v, *starts)
    runs, lacking = to_run(engine, q)
    whole = [q, k, v, *custom]
    if runs is not engine:
        first, cut = _first_rows(engine, whole, starts)
        try:
            return _compare(runs, *first, cut=cut)
        except NotInterpretable as refusal:
            lacking = str(refusal)
    return _compare(engine, whole, starts, lacking=lacking)


def _compare(engine: Shown, tensors: Sequence[Tensor], starts: Starts, **how: Any) -> CheckReport:
    q, k, v, *custom = tensors
    view = cast(Shown, PackedView(engine, starts))
    return compare(view, q[None], k[None], v[None], custom, None, **how)


def _first_rows(
    engine: Shown, tensors: Sequence[Tensor], starts: Starts
) -> tuple[tuple[list[Tensor], Starts], list[str]]:  # fmt: skip
    """The first rows of a call, and which tensors were cut."""
    q, k, v, *custom = tensors
    given: dict[str, tuple[Tensor, Sequence[object]]]
    given = {"q": (q, ("seq_len",)), "k": (k, ("seq_len_kv",)), "v": (v, ("seq_len_kv",))}
    given |= {s.name: (t, s.axes) for s, t in zip(engine.custom_io.in_order, custom, strict=True)}
    found, cut = [], []
    for name, (tensor, axes) in given.items():
        small = tensor
        for n, axis in enumerate(axes):
            if axis in ("seq_len", "seq_len_kv") and small.shape[n] > MOST_ROWS:
                small = small.narrow(n, 0, MOST_ROWS)
        cut += [f"{name} of {tuple(tensor.shape)}"] if small.shape != tensor.shape else []
        found.append(small)
    begins, begins_k = (None if s is None else s.clamp(max=MOST_ROWS) for s in starts)
    assert begins is not None
    return (found, (begins, begins if starts[1] is starts[0] else begins_k)), cut
