"""engine.check() of a call with a cache: whole rows, and rows in parts, beside float64 and eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attention_engine.errors import NoMerge, NotInterpretable
from attention_engine.runtime.cached import CachedAttention, prepare
from attention_engine.runtime.cached_inputs import CachedCall
from attention_engine.runtime.check import LIMITS, products_as_kernels
from attention_engine.runtime.check_report import CheckReport, CheckRow, check_row, spell_tensors
from attention_engine.runtime.small_call import MOST, spell_run, to_run

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

PARTS = 3  # of each row, beside whole ones


class Given(NamedTuple):
    """The tensors of a call of with_cache, as the user gave them."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    custom: Sequence[Tensor]
    lengths: Tensor
    table: Tensor | None
    starts: Tensor | None
    cu: Tensor | None


def check_cached(engine: Shown, given: Given) -> CheckReport:
    """The report; on the interpreter, on the first requests and keys. Raises what a call raises."""
    runs, lacking = to_run(engine, given.q)
    with torch.no_grad():
        _prepared(engine, given, 1)
        if runs is not engine:
            small = _first(engine, given)
            pairs = zip(Given._fields, small, given, strict=True)
            cut = [f"{n} of {tuple(b.shape)}" for n, a, b in pairs
                   if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape]  # fmt: skip
            try:
                return _compare(runs, small, cut)
            except NotInterpretable as refusal:
                lacking = str(refusal)
        return _compare(engine, given, (), lacking)


def _prepared(engine: Shown, given: Given, parts: int) -> tuple[CachedCall, CachedAttention]:
    places = given.lengths, given.table, given.starts
    return prepare(engine, (given.q, given.k, given.v), given.custom, places, given.cu, parts)


def _compare(engine: Shown, given: Given, cut: Sequence[str], lacking: str = "") -> CheckReport:
    call, attention = _prepared(engine, given, 1)
    wide = replace(
        call, q=call.q.double(), k=call.k.double(), v=None if call.v is None else call.v.double(),
        custom=[c.double() if c.is_floating_point() else c for c in call.custom],
    )  # fmt: skip
    exact, exact_rows = attention.by_reference(wide, torch.float64)
    with products_as_kernels(call.q):
        eager, eager_rows = attention.by_reference(call, call.q.dtype)
    rows: list[CheckRow] = []
    notes = []
    for parts, words in ((1, ""), (PARTS, f" in {PARTS} parts")):
        try:
            found, found_rows = attention(replace(call, parts=parts), None)
        except NoMerge as reason:
            notes.append(f"rows are not cut, as parts have no merge: {reason}")
            continue
        every = zip(
            ["o", *attention.rows], [found, *found_rows], [exact, *exact_rows], [eager, *eager_rows], strict=True
        )
        rows += [check_row(f"{name}{words}", ours, wanted, plain) for name, ours, wanted, plain in every]
    backend = engine._backend_for(call.q.device)
    named = {n: t for n, t in given._asdict().items() if isinstance(t, Tensor)}
    return CheckReport(
        tuple(rows), LIMITS.get(call.q.dtype, 10.0), (), tuple(notes), backend,
        spell_run(backend, call.q.device, cut, lacking), spell_tensors(named),
    )  # fmt: skip


def _first(engine: Shown, given: Given) -> Given:
    """The first requests, queries and keys of a call."""
    requests, queries, keys = (MOST[axis] for axis in ("batch", "seq_len", "seq_len_kv"))
    along = 2 if engine.layout == "bhsd" else 1
    lengths = given.lengths[:requests]
    if given.table is None:
        k, v = (None if t is None else _cut(_cut(t, 0, requests), along, keys) for t in (given.k, given.v))
        table, capacity = None, min(keys, given.k.shape[along])
    else:
        k, v, page = given.k, given.v, given.k.shape[along]
        table = given.table[:requests, : -(-keys // page)]
        capacity = table.shape[1] * page
    assert k is not None, "keys are given"
    cu = None if given.cu is None else given.cu[: requests + 1].clamp(max=queries)
    most = queries if cu is None else int(cu[-1]) if len(cu) else 0
    q = _cut(_cut(given.q, 0, requests), along, most) if cu is None else given.q[:most]
    sizes = {"batch": requests, "seq_len": most, "seq_len_kv": capacity}
    custom = []
    for spec, tensor in zip(engine.custom_io.in_order, given.custom, strict=True):
        for n, axis in enumerate(spec.axes):
            tensor = _cut(tensor, n, sizes[axis]) if isinstance(axis, str) and axis in sizes else tensor
        custom.append(tensor)
    starts = None if given.starts is None else given.starts[:requests]
    return Given(q, k, v, custom, lengths.clamp(max=capacity), table, starts, cu)


def _cut(tensor: Tensor, axis: int, most: int) -> Tensor:
    return tensor.narrow(axis, 0, min(most, tensor.shape[axis]))
