"""LinearAttentionEngine.check(): outputs and gradients beside the recurrence in float64, and beside eager PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_engine.errors import NotInterpretable
from attention_engine.ir.linear import LinearProgram
from attention_engine.ir.program import Q_IDX, B, H
from attention_engine.reference.linear import recur
from attention_engine.reference.linear_pairs import attend_pairs
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.check import LIMITS, product_as_kernels
from attention_engine.runtime.check_report import CheckReport, check_row, spell_tensors
from attention_engine.runtime.check_terms import Zeros, errors_of_terms, make_zeros, summed, with_zeros
from attention_engine.runtime.doubts import linear_doubts_of
from attention_engine.runtime.inputs import backend_for, check_ranks, type_of
from attention_engine.runtime.small_call import cut_call, spell_run, to_run

if TYPE_CHECKING:
    from attention_engine.runtime.linear_shown import LinearShown

FIRST = ("q", "k", "v", "decay", "initial_state")
Run = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


def check_linear_call(
    engine: LinearShown, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor],
    initial_state: Tensor | None,
) -> CheckReport:  # fmt: skip
    """The report on a call, which on a CPU with backend="auto" the kernels run, on the interpreter."""
    check_ranks(engine.layout, q, k, v)
    runs, lacking = to_run(engine, q)
    whole = (q, k, v, decay, initial_state, *custom)
    if runs is engine:
        return compare_linear(engine, q, k, v, decay, custom, initial_state, lacking=lacking)
    order = ["batch", "seq_len", None, None] if engine.layout == "bshd" else ["batch", None, "seq_len", None]
    states: list[object] = ["batch", None, None, None]
    given = {n: (t, order) for n, t in (("q", q), ("k", k), ("v", v), ("decay", decay)) if t is not None}
    axes = {s.name: [s.axes[n] for n in range(len(s.axes))] for s in engine.custom_io.in_order}
    small, cut = cut_call(
        {n: (t, of[: t.ndim]) for n, (t, of) in given.items()}
        | ({} if initial_state is None else {"initial_state": (initial_state, states)})
        | {n: (t, axes[n]) for n, t in zip(axes, custom, strict=True)}
    )
    rest = [small[n] for n in axes]
    try:
        return compare_linear(
            runs, small["q"], small["k"], small["v"], small.get("decay"), rest, small.get("initial_state"), cut=cut,
            doubted=whole,
        )  # fmt: skip
    except NotInterpretable as refusal:
        return compare_linear(engine, q, k, v, decay, custom, initial_state, lacking=str(refusal))


def compare_linear(
    engine: LinearShown, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor],
    initial_state: Tensor | None, *, lacking: str = "", cut: Sequence[str] = (),
    doubted: Sequence[Tensor | None] = (),
) -> CheckReport:  # fmt: skip
    """The engine, the recurrence in float64 and all pairs at once in the tensors' dtype, on the same gradients.

    lacking, cut, doubted: as of `compare`.
    """
    specs = [*engine.custom_io.specs, *[c.name for c in engine._captured]]
    held = tensors_now(engine._captured)
    custom = [*custom, *held]
    given = {"q": q, "k": k, "v": v, "decay": decay, "initial_state": initial_state, **dict(zip(specs, custom))}
    inputs = {n: t.detach() for n, t in given.items() if t is not None}
    types = {n: type_of(t) for n, t in zip(specs, custom, strict=True)}
    program = engine._trace(types, decay is not None)

    def maths(function: Callable[..., tuple[Tensor, Tensor]], program: LinearProgram = program) -> Run:
        def run(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            first = engine._tokens_first(tensors["q"], tensors["k"], tensors["v"], tensors.get("decay"))
            rest = {n: t for n, t in tensors.items() if n not in FIRST}
            output, last = function(program, *first, rest, tensors.get("initial_state"))
            return output if engine.layout == "bshd" else output.transpose(1, 2), last

        return run

    def run_engine(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = engine._call(
            tensors["q"], tensors["k"], tensors["v"], tensors.get("decay"), [tensors[n] for n in specs],
            tensors.get("initial_state"), True,
        )  # fmt: skip
        return found

    ours = _results(run_engine, inputs, inputs)
    exact = _results(maths(recur), _double(inputs), inputs)
    pairs = functools.partial(attend_pairs, product=product_as_kernels(q))
    eager = _results(maths(pairs), inputs, inputs)
    few = summed({n: inputs[n] for n in specs})
    terms = {}
    if few:
        parted, zeros = _with_zeros(program, few)
        length = 1 if engine.layout == "bshd" else 2
        sizes = {B: v.shape[0], H: v.shape[3 - length], Q_IDX: v.shape[length]}

        def gradients(dtype: torch.dtype) -> dict[str, list[Tensor]]:
            own = _double(inputs) if dtype is torch.float64 else inputs
            made = make_zeros(zeros, sizes, dtype, q.device)
            run = maths(recur if dtype is torch.float64 else pairs, parted)
            found = _results(run, {**own, **{n: z.detach() for n, z in made.items()}}, inputs)
            return {"": [found[f"d{n}"] for n in zeros]}

        numbers = {n: inputs[n].numel() for n in few}
        terms = {f"d{n}": e for (n, _), e in errors_of_terms(numbers, zeros, gradients, q.dtype).items()}
    rows = tuple(check_row(n, ours[n], exact[n], eager[n], terms.get(n, 0.0)) for n in ours)
    backend = backend_for(engine.backend, q.device)
    return CheckReport(
        rows, LIMITS.get(q.dtype, 10.0), notes=_doubts(engine, program, doubted or list(given.values()), specs, held),
        backend=backend, ran=spell_run(backend, q.device, cut, lacking), tensors=spell_tensors(inputs),
    )  # fmt: skip


def _doubts(
    engine: LinearShown, program: LinearProgram, whole: Sequence[Tensor | None], specs: Sequence[str],
    held: Sequence[Tensor],
) -> tuple[str, ...]:  # fmt: skip
    """Warnings of a call: q, k, v, decay, initial state, custom inputs."""
    q, k, v, decay, _, *custom = (None if t is None else t.detach() for t in whole)
    assert q is not None and k is not None and v is not None
    inputs = dict(zip(specs, [*(t for t in custom if t is not None), *held], strict=False))
    with torch.no_grad():
        return tuple(linear_doubts_of(program, *engine._tokens_first(q, k, v, decay), inputs))


def _double(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def _with_zeros(program: LinearProgram, few: Sequence[str]) -> tuple[LinearProgram, Zeros]:
    """The program with a zero at each read of these tensors, one for every token and head."""
    zeros: Zeros = {}
    q, k, v, decay = with_zeros([e for _, e in program.named()], few, (B, H, Q_IDX), zeros)
    return replace(program, q=q, k=k, v=v, decay=decay), zeros


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
