"""How a part's sums become those of the whole: the same keys, met with the whole's row numbers in place of the part's.

A sum over keys of b(x; y), y a row's numbers, is asked with y' of the whole where the part has it with its own y. Each
body is terms (factor of y) * (factor of the key). Where there is one term, the sum is multiplied with a ratio; where
there are several, the bodies of all sums span them, and linear equations say how many of each sum to take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attention_engine.ir.expr import Expr, Op, const, is_const, make, substitute, topological, var
from attention_engine.ir.program import ROW
from attention_engine.passes.polynomials import Polynomial, Row, solve
from attention_engine.passes.separate import ONE, ZERO, Term, reads
from attention_engine.passes.simplify import add, factors, mul, recip, simplify

Context = Mapping[Expr, Expr]  # what the row's numbers are, in a part or in the whole
EXPONENTIALS = (Op.EXP, Op.EXP2)


class NoSpan(Exception):
    """A sum's body, met with other row numbers, is no mixture of the sums' bodies."""


def at(expr: Expr, context: Context) -> Expr:
    """The expression where the row's numbers are these."""
    return simplify(substitute(expr, dict(context)))[0]


def ratio(d: Expr, part: Context, whole: Context) -> Expr:
    """d of the whole over d of a part. Exponents are subtracted before they are raised: no exponential overflows that
    the whole row's would not."""
    found: list[Expr] = []
    exponents: dict[Op, Expr] = {}
    for factor in factors(d):
        if factor.op in EXPONENTIALS:
            step = add(at(factor.args[0], whole), mul(const(-1.0), at(factor.args[0], part)))
            exponents[factor.op] = add(exponents.get(factor.op, ZERO), step)
        elif factor.op is Op.RECIP:
            found += [at(factor.args[0], part), recip(at(factor.args[0], whole))]
        elif factor.op is not Op.CONST:
            found += [at(factor, whole), recip(at(factor, part))]
    found += [make(op, step) for op, step in exponents.items() if not is_const(step, 0)]
    return without_shared(mul(ONE, *found))


def without_shared(expr: Expr) -> Expr:
    """c * x / c as x: c may be 0."""
    done: dict[Expr, Expr] = {}
    for node in topological(expr):
        if node.op is Op.MUL:
            have = [f for a in node.args for f in factors(done[a])]
            for inverse in [f for f in have if f.op is Op.RECIP]:
                wanted = factors(inverse.args[0])
                if all(have.count(f) >= wanted.count(f) for f in wanted):
                    for f in (inverse, *wanted):
                        have.remove(f)
            done[node] = mul(ONE, *have)
        else:
            done[node] = simplify(substitute(node, {a: done[a] for a in node.args}))[0] if node.args else node
    return done[expr]


def shared_ratio(terms: Sequence[Term], part: Context, whole: Context) -> Expr | None:
    """The ratio of all terms' factors of the row, where it is one."""
    found = {ratio(d, part, whole) for d, _ in terms}
    return found.pop() if len(found) == 1 else None


def transfer(bodies: Sequence[Sequence[Term]], which: int, part: Context, whole: Context) -> dict[int, Expr]:
    """How many of each sum of a part make up sum number `which` of the whole: {number of a sum: its factor}. Raises
    NoSpan."""
    mine = bodies[which]
    alone = shared_ratio(mine, part, whole)
    if alone is not None:
        return {which: alone}
    keys = sorted({key for _, key in mine}, key=lambda key: key.digest)
    outside = _exponential_of(mine)
    used = [
        n for n, body in enumerate(bodies) if {k for _, k in body} <= set(keys) and _exponential_of(body) is outside
    ]
    if outside is None or not used:
        raise NoSpan
    steps = _Steps(part, whole)
    equations: list[Row] = []
    for key in keys:
        now = [steps.now(_rest(bodies[n], key)) for n in used]
        equations.append([*now, steps.then(_rest(mine, key))])
    found = solve(equations)
    if found is None:
        raise NoSpan
    factor = ratio(outside, part, whole)
    return {n: mul(factor, steps.end(c)) for n, c in zip(used, found, strict=True) if not is_const(c, 0)}


def _exponential_of(body: Sequence[Term]) -> Expr | None:
    """The exponentials that all terms' factors of the row have; None where they differ."""
    found = {mul(ONE, *(f for f in factors(d) if f.op in EXPONENTIALS)) for d, _ in body}
    return found.pop() if len(found) == 1 else None


def _rest(body: Sequence[Term], key: Expr) -> Expr:
    """What a body has of a key, without the exponential."""
    (d,) = [d for d, k in body if k is key] or [ZERO]
    return mul(ONE, *(f for f in factors(d) if f.op not in EXPONENTIALS))


class _Steps:
    """Row factors as polynomials: those of the whole as the part's and a step from there.

    So what is subtracted in the end are the numbers themselves, not large powers of them.
    """

    def __init__(self, part: Context, whole: Context) -> None:
        self.part, self.whole = part, whole
        self.steps: dict[Expr, Expr] = {}
        self.atoms: set[Expr] = set()

    def now(self, d: Expr) -> Polynomial:
        return Polynomial.of(d, self._now)

    def then(self, d: Expr) -> Polynomial:
        return Polynomial.of(d, self._then)

    def _now(self, atom: Expr) -> Polynomial:
        self.atoms.add(atom)
        return Polynomial({(atom,): 1.0})

    def _then(self, atom: Expr) -> Polynomial:
        now = self._now(atom)
        if not reads(atom, set(self.part)) or at(atom, self.part) is at(atom, self.whole):
            return now
        step = self.steps.setdefault(atom, var(f"step{len(self.steps)}", ROW))
        return now + Polynomial({(step,): 1.0})

    def end(self, expr: Expr) -> Expr:
        """Of the states of the part and the whole."""
        table = {atom: at(atom, self.part) for atom in self.atoms}
        for atom, step in self.steps.items():
            table[step] = add(at(atom, self.whole), mul(const(-1.0), at(atom, self.part)))
        return at(expr, table)
