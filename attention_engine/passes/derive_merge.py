"""How the parts of a row join, derived from the forward pass alone.

Law M. `online_fwd` on a whole part as one tile makes its states of row reductions rho = red over x of b(x; y), y the
row's numbers that a body reads (states, other reductions), and its weights p(x; y). For parts that are joined, with y'
the numbers of the whole,

    max, min     rho' = max, min over parts of rho                  of bodies that read no y
    sums         rho' = sum over parts of T(y, y') rho              where b(x; y') = T(y, y') b(x; y) for every key
    the output   o'   = sum over parts of t(y, y') o                where p(x; y') = t(y, y') p(x; y)

and the states of the whole are the updates, of rho'. A part keeps its states, not rho: the updates are solved for it.
What is first said of one initial state a part is thereby counted once in the whole. Where several formulas are possible
(an extreme that no state holds may be any number), each is tried, and check_merge.py says which is right.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import get_args

from attention_engine.errors import NoMerge
from attention_engine.ir.expr import Expr, Extremum, Op, const, is_const, make, substitute, topological, var
from attention_engine.ir.merge import Merge, part_variable, returned_by_part, whole_variable
from attention_engine.ir.pretty import formula
from attention_engine.ir.program import OUTPUT, PRODUCT, ROW, Program
from attention_engine.ir.verify import checked, verify_merge
from attention_engine.passes.check_merge import find_difference
from attention_engine.passes.differentiate import differentiate
from attention_engine.passes.empty_rows import guard_empty_rows, output_factor
from attention_engine.passes.polynomials import Polynomial, Row, solve
from attention_engine.passes.separate import ZERO, Inseparable, Term, reads, separate
from attention_engine.passes.simplify import add, mul, recip, reduce, simplify, split_coefficient, terms
from attention_engine.passes.transfer import Context, NoSpan, at, shared_ratio, transfer, without_shared

MOST_TRIED = 32  # formulas of one program
WITHOUT = "Decoding then walks each row in one part."


def derive_merge(program: Program) -> Merge:
    """The merge of a program that passed check_online. Raises NoMerge, with what stood in the way."""
    guarded = guard_empty_rows(program)
    bare = dataclasses.replace(guarded.returning(guarded.finals), score=PRODUCT, mask=None)
    return dataclasses.replace(_of_row_function(bare), program=guarded)


def merge_by_combine(program: Program, scale: Expr, where: str = "") -> Merge:
    """The merge by the user's own `combine`: `scale`, of the rows that parts return (`returned_by_part`), is what their
    outputs are multiplied with. where: what a message begins with. Raises NoMerge."""
    guarded = guard_empty_rows(program)
    end: dict[Expr, Expr] = {s.variable: part_variable(s.name) for s in guarded.states}
    rows = {returned_by_part(name): substitute(row, end) for name, row in guarded.finals}
    finish = output_factor(guarded)
    if finish is None:
        raise refusal(f"{where}combine multiplies outputs, and the epilogue is no factor of the output.")
    try:
        states = derive_merge(program).states
    except NoMerge:
        states = ()
    whole: dict[Expr, Expr] = {s.variable: whole_variable(s.name) for s in guarded.states}
    finals = tuple((name, substitute(row, whole)) for name, row in guarded.finals) if states else ()
    factor = mul(*simplify(substitute(finish, end), substitute(scale, rows)))
    merge = checked(verify_merge, Merge(guarded, states, factor, OUTPUT, finals, finished=True))
    difference = find_difference(merge)
    if difference is not None:
        raise refusal(f"{where}combine does not make the row of its parts:\n  {difference}")
    return merge


@functools.lru_cache(maxsize=256)
def _of_row_function(program: Program) -> Merge:
    """The merge of what a program does with scores, wherever these come from."""
    wrong: str | None = None
    for merge in itertools.islice(_Derivation(program).merges(), MOST_TRIED):
        difference = find_difference(checked(verify_merge, merge))
        if difference is None:
            return merge
        wrong = wrong or difference
    raise refusal(f"no formula joins the parts of a row. That which was tried is wrong:\n  {wrong}")


def refusal(what: str) -> NoMerge:
    """The error, with what it means."""
    return NoMerge(f"{what}\n  {WITHOUT}")


class _Derivation:
    """One program's forward pass over a part as one tile, solved for the part's reductions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = [s.name for s in program.states]
        self.updates, self.weights = _as_one_tile(program)
        self.reductions = [n for n in topological(*self.updates.values(), self.weights) if n.op is Op.REDUCE]
        self.rho = {r: var(f"rho{n}", ROW) for n, r in enumerate(self.reductions)}
        self.sums = [r for r in self.reductions if r.reduction == "sum"]
        self.rows = {*self.rho.values(), *map(whole_variable, self.names)}
        self.updates = {n: substitute(e, dict(self.rho)) for n, e in self.updates.items()}

    def merges(self) -> Iterator[Merge]:
        """Each merge that may be right."""
        part: dict[Expr, Expr] = {whole_variable(n): part_variable(n) for n in self.names}
        self._solve(part)
        unknown = [r for r in self.reductions if self.rho[r] not in part]
        free = [r for r in unknown if r.reduction != "sum"]
        stuck = [n for n in self.names if self._is_stuck(n, part)]
        guesses = itertools.product(*([*map(part_variable, self.names), ZERO] for _ in free))
        for guessed in guesses:
            of_part = {**part, **{self.rho[r]: g for r, g in zip(free, guessed, strict=True)}}
            self._solve(of_part)
            kinds: tuple[Extremum, ...]
            for kinds in itertools.product(get_args(Extremum), repeat=len(stuck)):
                extremes = {n: reduce(kind, part_variable(n)) for n, kind in zip(stuck, kinds, strict=True)}
                yield self._merge(of_part, extremes)

    def _is_stuck(self, name: str, part: Context) -> bool:
        """Is the state made of extremes alone that can't be taken back? It may still be an extreme over parts."""
        read = [r for r in self.reductions if reads(self.updates[name], {self.rho[r]})]
        return bool(read) and all(r.reduction != "sum" and self.rho[r] not in part for r in read)

    def _solve(self, part: dict[Expr, Expr]) -> None:
        """Adds the reductions of a part, of its states, as far as the updates tell them."""
        kinds = {variable: r.reduction for r, variable in self.rho.items()}
        found = True
        while found:
            found = False
            for name, update in self.updates.items():
                unknown = [v for v in kinds if v not in part and reads(update, {v})]
                if len(unknown) == 1:
                    value = _solved(update, unknown[0], part_variable(name), kinds[unknown[0]])
                    if value is not None:
                        part[unknown[0]] = at(value, part)
                        found = True
            found = found or self._solve_together(part)

    def _solve_together(self, part: dict[Expr, Expr]) -> bool:
        """Sums that several states hold mixed: as many linear equations."""
        sums = [self.rho[r] for r in self.sums if self.rho[r] not in part]
        mixed = {n: e for n, e in self.updates.items() if reads(e, set(sums))}
        unknown = [v for v in sums if any(reads(e, {v}) for e in mixed.values())]
        if len(unknown) < 2 or len(mixed) < len(unknown):
            return False
        equations: list[Row] = []
        for name, update in mixed.items():
            slopes = [at(slope, part) for slope in differentiate(update, unknown)]
            rest = at(at(update, dict.fromkeys(unknown, ZERO)), part)
            if any(reads(slope, self.rows) for slope in (*slopes, rest)):
                return False
            other = add(part_variable(name), mul(const(-1.0), rest))
            equations.append([*map(Polynomial.of, slopes), Polynomial.of(other)])
        found = solve(equations)
        if found is None or any(is_const(value, 0) for value in found):
            return False
        part.update(zip(unknown, found, strict=True))
        return True

    def _merge(self, part: Context, extremes: Mapping[str, Expr]) -> Merge:
        """The merge where a part's reductions are these."""
        lacking = [r for r in self.sums if self.rho[r] not in part]
        if lacking:
            raise refusal(f"no row state tells {formula(lacking[0])} of a part. Keep it as a row state of its own.")
        whole: dict[Expr, Expr] = {}
        for r in self.reductions:
            if r.reduction != "sum":
                if reads(r.args[0], self.rows | set(self.reductions)):
                    raise refusal(f"{formula(r)} is an extreme of what reads other row values.")
                whole[self.rho[r]] = reduce(r.reduction, part[self.rho[r]])
        bodies = [self._terms(r.args[0]) for r in self.sums]
        weights = self._terms(self.weights)
        waiting = list(self.sums)
        while waiting:  # each after those that its body reads
            r = next(r for r in waiting if not reads(r.args[0], set(waiting)))
            waiting.remove(r)
            try:
                row = transfer(bodies, self.sums.index(r), part, whole)
            except NoSpan:
                raise refusal(
                    f"{formula(r)} of all parts is not made of the sums of each. Keep one more sum as a row state."
                ) from None
            body = add(ZERO, *(mul(factor, part[self.rho[self.sums[n]]]) for n, factor in row.items()))
            whole[self.rho[r]] = reduce("sum", body)
        factor = shared_ratio(weights, part, whole)
        if factor is None:
            raise refusal(f"the weights {formula(self.weights)} are no factor of the row times a factor of the key.")
        return self._built(self._states(whole, extremes), factor)

    def _terms(self, body: Expr) -> list[Term]:
        try:
            return separate(substitute(body, dict(self.rho)), self.rows)
        except Inseparable as error:
            names = {v: formula(r) for r, v in self.rho.items()}
            raise refusal(
                f"{formula(error.node, names)} is no sum of factors of the row's values times factors of the key."
            ) from None

    def _states(self, whole: Context, extremes: Mapping[str, Expr]) -> tuple[tuple[str, Expr], ...]:
        """The states of the whole, each after those that it reads."""
        found = {n: extremes.get(n) or _joined(at(e, whole)) for n, e in self.updates.items()}
        order: list[tuple[str, Expr]] = []
        while found:
            waiting = set(map(whole_variable, found))
            ready = [n for n, e in found.items() if not reads(e, waiting)]
            if not ready:
                raise refusal(f"the row states {', '.join(found)} of all parts are made of one another.")
            order.append((ready[0], found.pop(ready[0])))
        return tuple(order)

    def _built(self, states: tuple[tuple[str, Expr], ...], factor: Expr) -> Merge:
        program = self.program
        end: dict[Expr, Expr] = {s.variable: whole_variable(s.name) for s in program.states}
        finals = tuple((n, substitute(e, end)) for n, e in program.finals)
        return Merge(program, states, factor, substitute(program.output, end), finals)


def _as_one_tile(program: Program) -> tuple[dict[str, Expr], Expr]:
    """The states' updates and the weights where a part is one tile. A state that stands whole in another formula is
    named there: as it was traced, and once more after initial values went in."""
    start: dict[Expr, Expr] = {s.variable: const(s.initial) for s in program.states}
    names = [s.name for s in program.states]
    found = [*(s.update for s in program.states), program.weights]
    for first in (True, False):
        stands = {e: whole_variable(n) for n, e in zip(names, found, strict=False) if _is_made(e)}
        named = [substitute(e, {k: w for k, w in stands.items() if k is not e or n == len(names)})
                 for n, e in enumerate(found)]  # fmt: skip
        found = list(simplify(*(substitute(e, start) if first else e for e in named)))
    return dict(zip(names, found[:-1], strict=True)), found[-1]


def _is_made(update: Expr) -> bool:
    return any(n.op is Op.REDUCE for n in topological(update))


def _solved(update: Expr, unknown: Expr, value: Expr, kind: str) -> Expr | None:
    """What `unknown`, which stands in it once, is where the update has this value; None where that can't be told."""
    while update is not unknown:
        holding = [n for n, a in enumerate(update.args) if reads(a, {unknown})]
        if len(holding) != 1:
            return None
        inner = update.args[holding[0]]
        others = [a for n, a in enumerate(update.args) if n != holding[0]]
        match update.op:
            case Op.ADD:
                value = add(value, *(mul(const(-1.0), a) for a in others))
            case Op.MUL:
                value = mul(value, *map(recip, others))
            case Op.RECIP:
                value = recip(value)
            case Op.EXP | Op.EXP2 | Op.LOG | Op.LOG2:
                value = simplify(make(_INVERSE[update.op], value))[0]
            case Op.SQRT:
                value = mul(value, value)
            case Op.RSQRT:
                value = recip(mul(value, value))
            case Op.MAXIMUM | Op.MINIMUM if update.op.value.startswith(kind):
                pass  # max(c, max over parts of max(c, rho)) is max(c, max over parts of rho)
            case Op.DETACH | Op.CAST:
                pass
            case _:
                return None
        update = inner
    return value


_INVERSE = {Op.EXP: Op.LOG, Op.EXP2: Op.LOG2, Op.LOG: Op.EXP, Op.LOG2: Op.EXP2}


def _joined(expr: Expr) -> Expr:
    """Sums over parts that are added as one sum: what cancels in each part then leaves no rounding of large sums."""
    sums, rest = [], []
    for term in terms(without_shared(expr)):
        number, factor = split_coefficient(term)
        if factor is not None and factor.op is Op.REDUCE and factor.reduction == "sum":
            sums.append(mul(const(float(number)), factor.args[0]))
        else:
            rest.append(term)
    return add(reduce("sum", add(*sums)), *rest) if len(sums) > 1 else without_shared(expr)
