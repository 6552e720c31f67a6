"""torch's scaled_dot_product_attention, served by this package where it is faster: `with patch() as log: ...`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import detect
from attention_engine.errors import AttentionEngineError
from attention_engine.flex.sdpa import scaled_dot_product_attention

F = torch.nn.functional
OURS, TORCHS = "attention_engine", "torch"
FEW_PAIRS = 512 * 512  # queries times keys: below, launches take longer than the work
WIDEST = 256  # head dim
MOST_KINDS = 1000  # of calls that a log tells apart


@dataclass(frozen=True)
class Kind:
    """Calls that are alike: who served them, and why."""

    served_by: str
    reason: str
    query: tuple[int, ...]
    key: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[int, ...] | None
    is_causal: bool


@dataclass
class Log:
    """Which calls went where, and why: kinds of calls with how many there were of each. Printed, it is a table.

    Calls of a compiled function are counted when it is compiled, not when it runs.
    """

    kinds: dict[Kind, int] = field(default_factory=dict)

    def count(self, served_by: str) -> int:
        """How many calls "attention_engine" or "torch" served."""
        return sum(n for kind, n in self.kinds.items() if kind.served_by == served_by)

    def __str__(self) -> str:
        rows = [
            f"{n:6}  {kind.served_by:16}  q {kind.query}  k {kind.key}  {str(kind.dtype).removeprefix('torch.')}"
            + f"  mask {kind.mask}" * (kind.mask is not None) + "  causal" * kind.is_causal + f"  ({kind.reason})"
            for kind, n in sorted(self.kinds.items(), key=lambda item: -item[1])
        ]  # fmt: skip
        return "\n".join([f"{' calls':6}  {'served by':16}", *rows]) if rows else "no call yet"

    def _note(self, kind: Kind) -> None:
        if kind in self.kinds or len(self.kinds) < MOST_KINDS:
            self.kinds[kind] = self.kinds.get(kind, 0) + 1


@contextlib.contextmanager
def patch(everywhere: bool = False) -> Iterator[Log]:
    """Within, torch.nn.functional.scaled_dot_product_attention is this package's, or torch's where that is faster.

    everywhere: take each call that can be served, also where torch's is faster (on a CPU, of few pairs). What can't be
    served goes to torch. Modules that imported the function by its name, before, keep torch's.

        with patch() as log:
            model(tokens)
        print(log)
    """
    torchs, log = F.scaled_dot_product_attention, Log()

    def served(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        given = (query, key, value, attn_mask, dropout_p, is_causal)
        reason = cannot(query, key, value, attn_mask, is_causal) or ("" if everywhere else slower(query, key))
        run, who = (torchs, TORCHS) if reason else (scaled_dot_product_attention, OURS)
        named: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        try:
            found: Tensor = run(*given, **named)
        except AttentionEngineError as error:
            if is_compiling():
                raise
            found, who, reason = torchs(*given, **named), TORCHS, f"{type(error).__name__}: {error}".splitlines()[0]
        if not is_compiling():
            mask = None if attn_mask is None else tuple(attn_mask.shape)
            log._note(Kind(who, reason, tuple(query.shape), tuple(key.shape), query.dtype, mask, is_causal))
        return found

    F.scaled_dot_product_attention = served
    try:
        yield log
    finally:
        F.scaled_dot_product_attention = torchs


def cannot(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> str:
    """Why this package can't serve a call; "" where it can."""
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (query, key, value)) and not is_compiling():
        return "tensors of a class of their own"
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        return "unlike dtypes"
    if query.ndim < 3:
        return "no heads"
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"head dims above {WIDEST}"
    return "attn_mask beside is_causal" if is_causal and attn_mask is not None else ""


def slower(query: Tensor, key: Tensor) -> str:
    """Why torch's would be faster; "" where it isn't."""
    if query.device.type != "cuda":
        return "on a CPU torch's is faster"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return "in fp32 torch's is faster"
    if query.shape[-2] * key.shape[-2] < FEW_PAIRS:
        return "few pairs"
    return "" if _is_measured(query.device) else "measured on Hopper GPUs alone"


@functools.lru_cache
def _is_measured(device: torch.device) -> bool:
    return detect(device).capability[0] == 9


_is_measured._dynamo_marked_constant = True  # type: ignore[attr-defined] # a compiler asks once, and looks no further
