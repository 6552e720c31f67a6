"""Runs one draw and holds its numbers against plain torch: what a worker of the soak does."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tests.gpu.soak import cached, linear_yardstick, yardstick
from tests.gpu.soak.draws import Draw
from tests.gpu.soak.parts import SCORES
from tests.gpu.soak.programs import Linear, Program
from tests.gpu.soak.yardstick import Inputs

Named = dict[str, Tensor]
Change = Callable[[Named], None] | None
THIN_ROWS = 8  # in every batch and head
FACTOR = 1.1  # of eager PyTorch's mean error
FEW, FACTOR_FEW = 4096, 3.0  # of a few numbers that are not 0: the mean of their errors is mostly luck
FLOOR = 0.05  # of a unit in the last place, for results that eager PyTorch has exactly by chance (a row of one key)
ORDER = 3e-4  # of a sum of 10^7 terms in fp32, which atomics add in any order: a table's entry has as many
AGAIN, AGAIN_SECONDS = 40, 1.0  # how often passes run again on a GPU at most, and for how long
ROW_FACTOR = 8.0  # of what a row may be off: no row of the whole may be wrong in a mean that hides it


@dataclass(frozen=True)
class Outcome:
    """outcome: "right", "wrong", "error" or "no room"; worst: the largest error over what is allowed; of: its name."""

    outcome: str
    worst: float = 0.0
    of: str = ""
    milliseconds: float = 0.0
    detail: str = ""

    def spelled(self) -> dict[str, object]:
        return asdict(self)


def run(
    draw: Draw, backend: str = "tilelang", device: str = "cuda", change: Change = None,
    judging: Callable[[], None] = lambda: None,
) -> Outcome:  # fmt: skip
    """Forward and backward, many times; then the yardstick.

    change: writes on results, so that a fault is found. judging: called when our kernels are done.
    """
    try:
        run_it = _linear if draw.of.linear else _cached if isinstance(draw.of, cached.Cached) else _softmax
        return run_it(draw, backend, device, change, judging)
    except torch.OutOfMemoryError as error:
        return Outcome("no room", detail=str(error).splitlines()[0])


# ---- attention


def inputs_of(draw: Draw, device: str) -> Inputs:
    """The tensors of a draw."""
    program, generator = draw.of, torch.Generator(device).manual_seed(draw.seed)
    assert isinstance(program, Program)
    q_size = (draw.batch, draw.queries, program.heads)
    k_size = (draw.batch, draw.kv_length, program.kv_heads)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.float32).to(program.dtype)

    sizes = program.sizes(draw.batch, draw.queries, draw.kv_length, draw.packing, draw.documents)
    q, k, v = made(*q_size, program.dim), made(*k_size, program.dim), made(*k_size, program.values_dim)
    given = Inputs(q, k, v, program.custom(sizes, generator), made(*q_size, program.values_dim))
    if program.rows:
        size = (draw.batch, program.heads, draw.queries)
        given.d_rows["lse"] = torch.randn(size, generator=generator, device=device)
    return given


def softmax_results(program: Program, given: Inputs, backend: str) -> tuple[Named, Iterator[Named]]:
    """Outputs and gradients, and then what each further run of a pass has: the forward pass alone, gradients."""
    with torch.no_grad():
        alone, _ = program.run(backend, given.q, given.k, given.v, given.custom)
    leaves = {"q": given.q, "k": given.k, "v": given.v} | {n: given.custom[n] for n in program.learned}
    leaves = {n: x.detach().requires_grad_() for n, x in leaves.items()}
    custom = given.custom | {n: leaves[n] for n in program.learned}
    o, rows = program.run(backend, leaves["q"], leaves["k"], leaves["v"], custom)
    outputs, arriving = [o], [given.d_o]
    if program.rows:
        outputs, arriving = [o, rows["lse"]], [given.d_o, torch.where(rows["lse"].isfinite(), given.d_rows["lse"], 0.0)]
    passes = _passes(leaves, outputs, arriving)
    found = {"o": o.detach()} | {n: x.detach() for n, x in rows.items()} | next(passes)
    return found, itertools.chain([{"o": alone}], passes)


def _passes(leaves: Named, outputs: list[Tensor], arriving: list[Tensor]) -> Iterator[Named]:
    """The gradients that one backward pass after another has."""
    while True:
        made = torch.autograd.grad(outputs, list(leaves.values()), arriving, retain_graph=True)
        yield {f"d{n}": g for n, g in zip(leaves, made, strict=True)}


def _unlike_again(ours: Named, passes: Iterator[Named], exactly: bool, device: str) -> list[str]:
    """What further runs have otherwise. On a GPU a race may spoil one pass in a hundred, so that there are many."""
    most, end = (AGAIN, time.monotonic() + AGAIN_SECONDS) if device.startswith("cuda") else (2, math.inf)
    for number, again in enumerate(itertools.islice(passes, most), 2):
        if found := _unlike(ours, again, exactly):
            return [f"in run {number}: {', '.join(found)}"]
        if number > 3 and time.monotonic() > end:
            break
    return []


def _softmax(draw: Draw, backend: str, device: str, change: Change, judging: Callable[[], None]) -> Outcome:
    program, given = draw.of, inputs_of(draw, device)
    assert isinstance(program, Program)
    started = time.perf_counter()
    ours, passes = softmax_results(program, given, backend)
    _wait(device)
    spent = time.perf_counter() - started
    faults = _odd(ours) + _unlike_again(ours, passes, program.deterministic, device)
    del passes
    judging()
    if change:
        change(ours)
    measured = _samples(draw, program, given, ours, device) if not faults else []
    return _judged(faults, measured, spent)


def _samples(draw: Draw, program: Program, given: Inputs, ours: Named, device: str) -> list[Measured]:
    """A few rows of every head, and all of a few key heads."""
    rng = random.Random(draw.seed)
    places = {0, draw.queries - 1, *(rng.randrange(draw.queries) for _ in range(THIN_ROWS))}
    rows = torch.tensor(sorted(places), device=device)
    thin = [yardstick.sampled_rows(program, given, rows, double) for double in (True, False)]
    mine = {"o": ours["o"][:, rows].transpose(1, 2), "dq": ours["dq"][:, rows].transpose(1, 2)}
    if "lse" in thin[0]:
        mine["lse"] = ours["lse"][:, :, rows]
    found = [Measured.of(n, mine[n], thin[0][n], thin[1][n], program.dtype, _rounding(thin[0], n)) for n in mine]
    batches = list(range(draw.batch)) if program.learned else [rng.randrange(draw.batch)]
    last = program.kv_heads - 1
    for kv_head in {last} if program.learned else {last, rng.randrange(program.kv_heads)}:
        exact, eager = (yardstick.whole_head(program, given, batches, kv_head, double) for double in (True, False))
        rounding = {n: _rounding(exact, n) for n in exact}
        heads = slice(kv_head * program.group, (kv_head + 1) * program.group)
        mine = {n: ours[n][batches][:, :, heads].transpose(1, 2) for n in ("o", "dq")}
        mine |= {n: ours[n][batches][:, :, kv_head] for n in ("dk", "dv")}
        if "lse" in exact:
            mine["lse"] = ours["lse"][batches][:, heads]
        for name in program.learned:  # of these heads alone: others' gradients are others' sums
            axis = SCORES[program.score].axes[name].index("heads")
            own = (*[slice(None)] * axis, heads)
            mine[f"d{name}"] = ours[f"d{name}"][own]
            for made in (exact, eager):
                made[f"d{name}"] = made[f"d{name}"][own]
        found += [Measured.of(n, mine[n], exact[n], eager[n], program.dtype, rounding[n]) for n in mine]
    return found


def _rounding(exact: Named, name: str) -> Tensor | None:
    return exact.get(yardstick.ROUNDING.get(name, ""))


# ---- linear attention


def linear_inputs(draw: Draw, device: str) -> Named:
    """The tensors of a draw, and the gradients that arrive, "d_o" and "d_last"."""
    program = draw.of
    assert isinstance(program, Linear)
    generator = torch.Generator(device).manual_seed(draw.seed)
    b, t, h = draw.batch, draw.queries, program.heads

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    q, k = (made(b, t, program.q_heads, program.dim) for _ in range(2))
    found = {"q": q * program.dim**-0.5, "k": k, "v": made(b, t, h, program.dim_v), "d_o": made(b, t, h, program.dim_v)}
    found = {n: x.to(program.dtype) for n, x in found.items()}
    if program.decay:
        size = (b, t, h, program.dim) if program.decay == "channel" else (b, t, h)
        found["decay"] = -torch.rand(size, generator=generator, device=device) * 0.3
    else:  # sums over all tokens grow
        found["k"] = (found["k"] * t**-0.5).to(program.dtype)
    if program.states:
        found |= {n: made(b, h, program.dim, program.dim_v) for n in ("initial_state", "d_last")}
    if program.mods:
        found["dt"] = torch.rand(b, h, t, generator=generator, device=device) + 0.5
    return found


def linear_results(program: Linear, given: Named, backend: str) -> tuple[Named, Iterator[Named]]:
    """Outputs and gradients, and then what each further backward pass has."""
    leaves = {n: x.detach().requires_grad_() for n, x in given.items() if not n.startswith("d_")}
    found = program.engine(backend)(**leaves, output_final_state=program.states)
    outputs = dict(zip(("o", "last"), found)) if program.states else {"o": found}
    passes = _passes(leaves, list(outputs.values()), [given[f"d_{n}"] for n in outputs])
    return {n: x.detach() for n, x in outputs.items()} | next(passes), passes


def _linear(draw: Draw, backend: str, device: str, change: Change, judging: Callable[[], None]) -> Outcome:
    program = draw.of
    assert isinstance(program, Linear)
    given = linear_inputs(draw, device)
    started = time.perf_counter()
    ours, passes = linear_results(program, given, backend)
    _wait(device)
    spent = time.perf_counter() - started
    faults = _odd(ours) + _unlike_again(ours, passes, True, device)
    del passes
    judging()
    if change:
        change(ours)
    measured: list[Measured] = []
    rng = random.Random(draw.seed)
    last = (draw.batch - 1, program.q_heads - 1)
    for batch, group in () if faults else {last, (rng.randrange(draw.batch), rng.randrange(program.q_heads))}:
        exact, eager = (linear_yardstick.results(program, given, batch, group, double) for double in (True, False))
        mine = linear_yardstick.of_group(program, ours, batch, group)
        measured += [Measured.of(n, mine[n], exact[n], eager[n], program.dtype) for n in exact]
    return _judged(faults, measured, spent)


# ---- attention to a cache


def _cached(draw: Draw, backend: str, device: str, change: Change, judging: Callable[[], None]) -> Outcome:
    with torch.no_grad():
        faults, worst, name, spent = cached.measure(draw, backend, device, change, judging)
    return Outcome("wrong" if faults else "right", worst, name, 1000 * spent, "\n".join(faults))


# ---- the rule


@dataclass(frozen=True)
class Measured:
    """How far a result is from the exact one, over what the rule allows: in the mean, and the worst row."""

    name: str
    ratio: float
    row_ratio: float
    said: str

    @classmethod
    def of(
        cls, name: str, ours: Tensor, exact: Tensor, eager: Tensor, dtype: torch.dtype, rounding: Tensor | None = None
    ) -> Measured:
        """Rows are the last axis; where a log is -inf for plain torch, ours must be.

        rounding: what the rounding of the output alone changes, which a row may be off too.
        """
        assert ours.shape == exact.shape == eager.shape, (name, ours.shape, exact.shape, eager.shape)
        nothing = exact == -math.inf
        if bool((nothing != (ours == -math.inf)).any()):
            return cls(name, math.inf, math.inf, "-inf where plain torch has a number, or a number where it has -inf")
        ours, exact, eager = (torch.where(nothing, 0.0, x.double()) for x in (ours, exact, eager))
        off, limit, size = (ours - exact).abs(), (eager - exact).abs(), exact.abs()
        unit = torch.finfo(dtype).eps
        floor = FLOOR * unit * (size.mean() + FLOOR)
        allowed = (FACTOR_FEW if int((size > 0).sum()) < FEW else FACTOR) * limit.mean() + floor
        ratio = float((off.mean() / allowed).nan_to_num(math.inf))
        of_row = torch.maximum(limit.mean(-1), limit.mean())
        if rounding is not None:
            of_row = torch.maximum(of_row, rounding.abs().mean(-1))
        by_row = ROW_FACTOR * (of_row + unit * size.mean(-1) + floor)
        rows = (off.mean(-1) / by_row).nan_to_num(math.inf)
        place = torch.unravel_index(rows.argmax(), rows.shape) if rows.ndim else ()
        said = f"{name}: error {off.mean():.2e}, eager {limit.mean():.2e}, {ratio:.2f} of what is allowed"
        said += f"; worst row {tuple(int(n) for n in place)} of {tuple(rows.shape)}: {float(rows.max()):.2f}"
        return cls(name, ratio, float(rows.max()), said)

    @property
    def worst(self) -> float:
        return max(self.ratio, self.row_ratio)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _odd(ours: Named) -> list[str]:
    """Results that are not numbers; the log of a row that keeps nothing is -inf."""
    fine = {n: (x.isfinite() | (x == -math.inf)).all() if n == "lse" else x.isfinite().all() for n, x in ours.items()}
    return [f"{n} has values that are not finite" for n, all_fine in fine.items() if not bool(all_fine)]


def _unlike(ours: Named, again: Named, exactly: bool) -> list[str]:
    """What a second run has otherwise. Atomics may add in another order; nothing of the forward pass may differ."""
    found = []
    for name, second in again.items():
        first = ours[name]
        same = bool(torch.equal(first, second))
        if not same and not exactly and name != "o":
            gap, part = (first.float() - second.float()).abs().mean(), max(0.1 * torch.finfo(first.dtype).eps, ORDER)
            same = bool(gap <= part * first.float().abs().mean() + 1e-6)
        found += [] if same else [f"{name} is another"]
    return found


def _judged(faults: list[str], measured: list[Measured], seconds: float) -> Outcome:
    worst = max(measured, key=lambda m: m.worst, default=None)
    wrong = faults + [m.said for m in measured if not m.worst <= 1]
    outcome = "wrong" if wrong else "right"
    ratio, name = (worst.worst, worst.name) if worst else (math.inf, "")
    return Outcome(outcome, ratio, name, 1000 * seconds, "\n".join(wrong))
