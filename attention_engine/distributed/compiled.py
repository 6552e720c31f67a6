"""Calls inside torch.compile: two ops that a compiler can't look into, so that a graph holds for every length.

An op's key names a ContextParallel of this process. Which tokens a rank holds, and whether all ranks ask for the same,
is found out when the op runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_engine.errors import UnknownProgram
from attention_engine.reference.dense import compute_dtype
from attention_engine.runtime.attentions import outside_autocast

if TYPE_CHECKING:
    from attention_engine.distributed.module import ContextParallel

LIBRARY = torch.library.Library("attention_engine_distributed", "DEF")
KNOWN: WeakValueDictionary[str, ContextParallel] = WeakValueDictionary()
GIVEN = "Tensor q, Tensor k, Tensor v, Tensor[] custom, Tensor[] held, Tensor? seed"


def _find(key: str) -> ContextParallel:
    found = KNOWN.get(key)
    if found is None:
        raise UnknownProgram(
            f"no ContextParallel with the key {key} is alive in this process.\n"
            "  A graph that was compiled with one runs as long as it is kept."
        )
    return found


def _forward(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], held: list[Tensor], seed: Tensor | None, wanted: list[int],
    rows: bool, key: str,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """wanted: the tensors that will want gradients, which may decide how a call runs."""
    _, output, found = _followed((q, k, v, *custom, *held), len(custom), seed, wanted, rows, key)
    return output.detach(), [row.detach() for row in found]


def _followed(
    given: Sequence[Tensor], custom: int, seed: Tensor | None, wanted: Sequence[int], rows: bool, key: str
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """The given tensors as leaves of autograd, and what a call gives of them."""
    with torch.set_grad_enabled(bool(wanted)):
        leaves = [t.detach().requires_grad_(n in wanted) for n, t in enumerate(given)]
        q, k, v, *rest = leaves
        output, found = _run(q, k, v, rest[:custom], rest[custom:], seed, rows, key)
    return leaves, output, found


@outside_autocast
def _run(
    q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], held: Sequence[Tensor], seed: Tensor | None, rows: bool,
    key: str,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    output, found = _find(key).attend_tokens(q, k, v, custom, held, rows, seed)
    return output.contiguous(), [row.contiguous() for row in found.values()]


def _forward_fake(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], held: list[Tensor], seed: Tensor | None, wanted: list[int],
    rows: bool, key: str,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Of the shapes and dtypes that a call returns."""
    output = q.new_empty(q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    count, by_kernels = _find(key).rows_of(q.device)
    wide = torch.float32 if by_kernels else compute_dtype(q, *[t for t in custom if t.is_floating_point()])
    size = q.shape[0], q.shape[2], q.shape[1]
    return output, [q.new_empty(size, dtype=wide) for _ in range(count if rows else 0)]


def _backward(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], held: list[Tensor], seed: Tensor | None,
    arriving: list[Tensor], given: list[int], wanted: list[int], rows: bool, key: str,
) -> list[Tensor]:  # fmt: skip
    """Gradients of those of (q, k, v, *custom, *held) that are wanted. given: which results gradients arrive at.

    The forward pass runs once more, as what it keeps is autograd's, and no op can hand that on.
    """
    leaves, output, found = _followed((q, k, v, *custom, *held), len(custom), seed, wanted, rows, key)
    with torch.enable_grad():
        made = [(output, *found)[n] for n in given]
        asked = [leaves[n] for n in wanted]
        gradients = torch.autograd.grad(made, asked, arriving, allow_unused=True)
    return [
        torch.zeros_like(t, memory_format=torch.contiguous_format) if g is None else g.contiguous()
        for g, t in zip(gradients, asked, strict=True)
    ]


def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, custom: list[Tensor], held: list[Tensor], seed: Tensor | None,
    arriving: list[Tensor], given: list[int], wanted: list[int], rows: bool, key: str,
) -> list[Tensor]:  # fmt: skip
    leaves = [q, k, v, *custom, *held]
    return [leaves[n].new_empty(leaves[n].shape) for n in wanted]


def _define(name: str, schema: str, run: Any, fake: Any) -> Any:
    LIBRARY.define(name + schema)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attention_engine_distributed::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.attention_engine_distributed, name).default


FORWARD = _define(
    "forward", f"({GIVEN}, int[] wanted, bool rows, str key) -> (Tensor, Tensor[])", _forward, _forward_fake
)
BACKWARD = _define(
    "backward", f"({GIVEN}, Tensor[] arriving, int[] given, int[] wanted, bool rows, str key) -> Tensor[]",
    _backward, _backward_fake,
)  # fmt: skip


class _Compiled(torch.autograd.Function):
    """(key, return rows?, how many custom inputs, seed, q, k, v, custom inputs, what functions capture...)."""

    @staticmethod
    def forward(ctx: Any, key: str, rows: bool, custom: int, seed: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rest = given
        wanted = [n for n in range(len(given)) if ctx.needs_input_grad[4 + n]]
        output, found = FORWARD(q, k, v, rest[:custom], rest[custom:], seed, wanted, rows, key)
        ctx.save_for_backward(*given, *([] if seed is None else [seed]))
        ctx.key, ctx.rows, ctx.custom, ctx.count = key, rows, custom, len(given)
        ctx.set_materialize_grads(False)
        return (output, *found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *arriving: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *rest = ctx.saved_tensors[: ctx.count]
        seed = ctx.saved_tensors[ctx.count] if len(ctx.saved_tensors) > ctx.count else None
        wanted = [n for n in range(ctx.count) if ctx.needs_input_grad[4 + n]]
        given = [n for n, d in enumerate(arriving) if d is not None]
        made = BACKWARD(
            q, k, v, rest[: ctx.custom], rest[ctx.custom :], seed, [d for d in arriving if d is not None], given,
            wanted, ctx.rows, ctx.key,
        )  # fmt: skip
        found: list[Tensor | None] = [None] * ctx.count
        for n, gradient in zip(wanted, made, strict=True):
            found[n] = gradient
        return None, None, None, None, *found


def attend(
    key: str, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], held: Sequence[Tensor], rows: bool,
    seed: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """A call's output and, if asked for, its rows; tensors are (batch, length, heads, dim)."""
    given = (q, k, v, *custom, *held)
    if torch.is_grad_enabled() and any([t.requires_grad for t in given]):
        return list(_Compiled.apply(key, rows, len(custom), seed, *given))  # type: ignore[no-untyped-call]
    output, found = FORWARD(q, k, v, list(custom), list(held), seed, [], rows, key)
    return [output, *found]
