"""Draws as packed calls: the batches of a draw as sequences behind one another, held against the same plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.check import Outcome, names_of, run_names


def can_be_packed(names: dict[str, Any]) -> bool:
    """Places are those of the draw where keys are as many as queries, and nothing has a number for each row."""
    rows = {"seq_len", "seq_len_kv"}
    return names["SQ"] == names["SK"] and not any(rows & set(axes) for axes in names["AXES"].values())


def run_packed(text: str, backend: str, unlike: bool, device: str = "cpu") -> Outcome | None:
    """What comes of a script whose call is packed; None where it can't be. unlike: keys have starts of their own."""
    names = names_of(text)
    if not can_be_packed(names):
        return None
    build = names["engine"]
    names["engine"] = lambda backend: _packed(build(backend), names["LAYOUT"] == "bhsd", unlike)
    return run_names(names, backend, device)


def _packed(engine: Any, turned: bool, unlike: bool) -> Callable[..., Any]:
    """The engine, which makes a packed call of a plain one."""

    def call(q: Tensor, k: Tensor, v: Tensor, return_rowscales: bool = False, **custom: Tensor) -> Any:
        if turned:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        batch, length, heads, _ = q.shape
        cu = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length
        found = engine(
            *(t.reshape(batch * length, *t.shape[2:]) for t in (q, k, v)), cu_seqlens_q=cu,
            cu_seqlens_k=cu.clone() if unlike else None, return_rowscales=return_rowscales, **custom,
        )  # fmt: skip
        o, rows = found if return_rowscales else (found, {})
        o = o.view(batch, length, *o.shape[1:])
        o = o.transpose(1, 2) if turned else o
        rows = {name: row.view(heads, batch, length).transpose(0, 1) for name, row in rows.items()}
        return (o, rows) if return_rowscales else o

    return call
