"""LinearAttentionEngine.check(): outputs and gradients beside the recurrence in float64, and beside eager PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_engine.reference.linear import recur
from attention_engine.reference.linear_pairs import attend_pairs
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.check import LIMITS, CheckReport, check_row, product_as_kernels
from attention_engine.runtime.doubts import linear_doubts_of
from attention_engine.runtime.inputs import type_of

if TYPE_CHECKING:
    from attention_engine.runtime.linear_shown import LinearShown

Run = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def compare_linear(
    engine: LinearShown, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor],
    initial_state: Tensor | None,
) -> CheckReport:  # fmt: skip
    """The engine, the recurrence in float64 and all pairs at once in the tensors' dtype, on the same gradients."""
    specs = [*engine.custom_io.specs, *[c.name for c in engine._captured]]
    custom = [*custom, *tensors_now(engine._captured)]
    given = {"q": q, "k": k, "v": v, "decay": decay, "initial_state": initial_state, **dict(zip(specs, custom))}
    inputs = {n: t.detach() for n, t in given.items() if t is not None}
    types = {n: type_of(t) for n, t in zip(specs, custom, strict=True)}
    program = engine._trace(types, decay is not None)

    def maths(function: Callable[..., tuple[Tensor, Tensor]]) -> Run:
        def run(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            first = engine._tokens_first(tensors["q"], tensors["k"], tensors["v"], tensors.get("decay"))
            output, last = function(program, *first, {n: tensors[n] for n in specs}, tensors.get("initial_state"))
            return output if engine.layout == "bshd" else output.transpose(1, 2), last

        return run

    def run_engine(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = engine._call(
            tensors["q"], tensors["k"], tensors["v"], tensors.get("decay"), [tensors[n] for n in specs],
            tensors.get("initial_state"), True,
        )  # fmt: skip
        return found

    ours = _results(run_engine, inputs, inputs)
    double = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    exact = _results(maths(recur), double, inputs)
    pairs = functools.partial(attend_pairs, product=product_as_kernels(q))
    eager = _results(maths(pairs), inputs, inputs)
    rows = tuple(check_row(n, ours[n], exact[n], eager[n]) for n in ours)
    first = engine._tokens_first(q.detach(), k.detach(), v.detach(), None if decay is None else decay.detach())
    with torch.no_grad():
        notes = tuple(linear_doubts_of(program, *first, {n: inputs[n] for n in specs}))
    return CheckReport(rows, LIMITS.get(q.dtype, 10.0), notes=notes)


def _results(run: Run, tensors: Mapping[str, Tensor], seeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output, the last state, and the gradients of all floating tensors; those that arrive are alike for all."""
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    output, last = run(leaves)
    make = torch.Generator(output.device).manual_seed(0)
    d_output = torch.randn(output.shape, generator=make, device=output.device).to(seeds["v"].dtype)
    d_last = torch.randn(last.shape, generator=make, device=last.device)
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    arriving = [d_output.to(output.dtype), d_last.to(last.dtype)]
    found = torch.autograd.grad([output, last], list(wanted.values()), arriving, allow_unused=True)
    gradients = {f"d{n}": torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found)}
    return {"o": output.detach(), "last state": last.detach(), **gradients}
