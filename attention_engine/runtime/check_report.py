"""What `engine.check()` returns: a table of errors, and in words what was run, what is not ok and what mends it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from textwrap import wrap

import torch
from torch import Tensor

FAR = 1e29  # a row this far from 0 is as it began: it kept nothing
WIDTH = 112
REMEDIES = {
    "formula": "Mend your method as its line below says, or leave it out: then it is derived.",
    "range": "fp16 ends at 65504: try bfloat16 or float32, or scores that are scaled down.",
    "infinite": "Look for a log, a division or a root of 0 in your functions, and for decays above 0.",
    "reference": "No kernel ran: a function of yours loses digits, perhaps in a difference of large numbers.",
    "kernels": 'Check with backend="reference". If that is ok, please report it with print(engine.program()).',
}


@dataclass(frozen=True)
class CheckRow:
    """One tensor: mean |ours - float64|, mean |eager - float64|, where ours is worst, and ours, float64's and eager's
    number there.

    terms: of a tensor of few numbers that are sums of many terms, what eager's errors of those terms come to as a rule,
    where they don't happen to cancel (check_terms.py). Else 0. undefined: at how many of its entries, and of how many,
    float64 has NaN, so that nothing could be compared.
    """

    name: str
    error: float
    eager: float
    worst: tuple[int, ...]
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)
    terms: float = 0.0
    undefined: tuple[int, int] = (0, 0)

    @property
    def ratio(self) -> float:
        """Our error over eager's (or over what eager's come to, if that is more); 1 where both are 0."""
        yardstick = max(self.eager, self.terms)
        return 1.0 if self.error == yardstick else self.error / max(yardstick, 1e-300)

    def ok(self, limit: float) -> bool:
        """Is our error within the limit, and was anything compared?"""
        return not self.is_nan and (self.ratio <= limit or self.error < 1e-12)

    @property
    def is_nan(self) -> bool:
        """Has float64 nothing but NaN?"""
        nan, entries = self.undefined
        return nan == entries > 0


@dataclass(frozen=True)
class Formula:
    """A method the user wrote, beside what is derived: how far a result is off in float64, over the result's size."""

    method: str
    name: str
    distance: float

    @property
    def ok(self) -> bool:
        """Equal but for rounding."""
        return self.distance <= 1e-9

    def __str__(self) -> str:
        verdict = "agrees with" if self.ok else "is NOT"
        return f"{self.name} by your `{self.method}` {verdict} the derived one: off by {self.distance:.1e} of its size"


@dataclass(frozen=True, repr=False)
class CheckReport:
    """A table of CheckRows, which it prints as. `ok`: every ratio is within the limit of the dtype, and so are the
    user's own formulas.

    notes: what else was looked at, or could not be; and what may be a mistake: those begin with "warning:". backend:
    "tilelang", "interpret" or "reference"; ran: what ran in words; tensors: their shapes and dtypes.
    """

    rows: tuple[CheckRow, ...]
    limit: float
    formulas: tuple[Formula, ...] = ()
    notes: tuple[str, ...] = ()
    backend: str = ""
    ran: str = ""
    tensors: str = ""

    @property
    def ok(self) -> bool:
        return all(row.ok(self.limit) for row in self.rows) and all(formula.ok for formula in self.formulas)

    def __repr__(self) -> str:
        heads = [("backend", self.ran), ("tensors", self.tensors)]
        head = [
            line
            for name, words in heads
            if words
            for line in wrap(f"{name:9}{words}", WIDTH, subsequent_indent=" " * 9)
        ]
        widest = max([14, *(len(row.name) + 1 for row in self.rows)])
        table = [f"{'':{widest}}{'error':>10} {'eager':>10} {'ratio':>7}  worst at"]
        table += [f"{r.name:{widest}}{r.error:10.2e} {r.eager:10.2e} {r.ratio:7.2f}  {r.worst}" for r in self.rows]
        summed = [r.name for r in self.rows if r.terms > r.eager]
        if summed:
            table += wrap(
                f"{', '.join(summed)}: sums of many terms, whose errors happen to cancel in eager's; the ratio is to "
                "what they come to as a rule.", WIDTH, subsequent_indent="  ",
            )  # fmt: skip
        verdict = "ok" if self.ok else "NOT ok"
        law = f"{verdict}: the limit is {self.limit:g} x the error of eager PyTorch in the same dtype"
        return "\n".join([*head, *table, *self._faults(), *map(str, self.formulas), *self.notes, law])

    def _faults(self) -> list[str]:
        """The reason of each row that is not ok, and under them what to do."""
        lines, remedies = [], dict.fromkeys(["formula"] if any(not f.ok for f in self.formulas) else [])
        for row in self.rows:
            nan, entries = row.undefined
            if nan:
                verdict, end = ("NOT ok", "") if row.is_nan else ("warning", ", which were not compared")
                lines += [f"{verdict}: {row.name} is NaN in float64 at {nan} of {entries} entries{end}."]
                remedies["infinite"] = None
            if row.ok(self.limit) or row.is_nan:
                continue
            ours, exact, eager = row.numbers
            place = f" at {row.worst}" if row.worst else ""
            lost = not math.isfinite(ours)
            far = "" if lost else f", {row.ratio:.3g} x eager's error"
            lines += [
                f"NOT ok: {row.name}{place} is {ours:.7g}, where float64 has {exact:.7g} and eager {eager:.7g}{far}."
            ]
            if lost:
                remedies["range" if "float16" in self.tensors.replace("bfloat16", "") else "infinite"] = None
            elif not remedies:
                remedies["reference" if self.backend == "reference" else "kernels"] = None
        return [*lines, *(f"  {REMEDIES[name]}" for name in remedies)]


def check_row(name: str, ours: Tensor, exact: Tensor, eager: Tensor, terms: float = 0.0) -> CheckRow:
    """One row of the table; what is infinite in float64, or as a row begins, is left out."""
    finite = exact.abs() < FAR
    zero = torch.zeros((), dtype=torch.float64, device=exact.device)
    ours, exact, eager = ours.detach().double(), exact.detach(), eager.detach().double()
    distance = torch.where(finite, (ours - exact).abs(), zero)
    theirs = torch.where(finite, (eager - exact).abs(), zero)
    if distance.numel() == 0:
        return CheckRow(name, 0.0, 0.0, ())
    undefined = int(exact.isnan().sum()), exact.numel()
    flat = int(distance.nan_to_num(nan=float("inf")).argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), distance.shape)) if distance.ndim else ()
    there = tuple(float(t.expand(distance.shape).reshape(-1)[flat]) for t in (ours, exact, eager))
    mean = float(theirs.nan_to_num(nan=float("inf")).mean())
    return CheckRow(name, float(distance.mean()), mean, worst, (there[0], there[1], there[2]), terms, undefined)


def spell_tensors(tensors: dict[str, Tensor]) -> str:
    """Names, shapes and dtypes: those of one shape and dtype together."""
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault((tuple(tensor.shape), tensor.dtype), []).append(name)
    return "; ".join(
        f"{', '.join(names)} {shape} {str(dtype).removeprefix('torch.')}" for (shape, dtype), names in kinds.items()
    )
