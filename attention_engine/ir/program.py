"""What a user's attention is, once traced: expressions of a score, a mask, row states, weights and an output."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from attention_engine.ir.expr import Axis, Expr, Extremum, Op, Type, VarKind, const, make, topological, var
from attention_engine.ir.pretty import lines

PAIR = (Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.KEY)
ROW = (Axis.BATCH, Axis.HEAD, Axis.QUERY)

B = var("b", [Axis.BATCH], Type.INT, VarKind.INDEX)
H = var("h", [Axis.HEAD], Type.INT, VarKind.INDEX)
Q_IDX = var("q_idx", [Axis.QUERY], Type.INT, VarKind.INDEX)
KV_IDX = var("kv_idx", [Axis.KEY], Type.INT, VarKind.INDEX)

STARTS = "_starts"  # the custom input, int32 (1 or batch, 4), that says where a launch's b, h, q_idx and kv_idx start
QUERY_PLACES = "_query_places"  # the custom input, int32 (queries,), that says where each query of a launch stands
OF_QUERIES, OF_KEYS = "_of_queries_", "_of_keys_"  # and a custom input's name: a launch's own rows of it
PLACES = "_packed_places"  # the same of packed sequences: where each begins and ends (packing.NUMBERS)

PRODUCT = var("qk", PAIR)  # q . k, fp32, unscaled
SCORE = var("score", PAIR)  # what score_mod made of it
OUTPUT = var("o", [*ROW, Axis.CHANNEL])  # sum of weights times v, so far
WEIGHT = var("weight", PAIR)  # the final weight of a pair: o = sum of weight * v
WEIGHT_GRADIENT = var("dweight", PAIR)  # dO . v
DELTA = var("delta", ROW)  # dO . o, one number a row


def start_of(index: Expr, by_batch: bool = False) -> Expr:
    """Where an index starts: what is added to the one that counts a launch's own entries. by_batch: of each batch."""
    row = B if by_batch else const(0, Type.INT)
    return make(Op.LOAD, row, const((B, H, Q_IDX, KV_IDX).index(index), Type.INT), arg=STARTS, dtype=Type.INT)


def place_of_query() -> Expr:
    """Where a query stands, as a launch's table says."""
    return make(Op.LOAD, Q_IDX, arg=QUERY_PLACES, dtype=Type.INT)


def is_start(node: Expr) -> bool:
    """Is it where an index starts? The same number for all pairs of a batch and head."""
    return node.op is Op.LOAD and node.name in (STARTS, PLACES)


@functools.lru_cache(maxsize=256)  # read for every tile of a row on which a law is tried
def state_variable(name: str) -> Expr:
    """A row state as the tile finds it (in an epilogue: as the last tile left it)."""
    return var(name, ROW, kind=VarKind.STATE)


def final_variable(name: str) -> Expr:
    """A row at its end: one that the epilogue returned, or that is kept for the backward pass."""
    return var(name, ROW, kind=VarKind.FINAL)


def final_gradient(name: str) -> Expr:
    """The gradient that arrives at a returned row."""
    return var(name, ROW, kind=VarKind.ARRIVING)


def digest_of_parts(parts: Iterable[str]) -> str:
    """A name of the parts, which hold names that users gave: other parts, another name."""
    lines = (part.replace("\\", "\\\\").replace("\n", "\\n") for part in parts)  # a part is one line
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=10).hexdigest()


@dataclass(frozen=True)
class State:
    """A number carried along a row: its name, its first value, and its next one (of SCORE and the states)."""

    name: str
    initial: float
    update: Expr

    @property
    def variable(self) -> Expr:
        return state_variable(self.name)


@dataclass(frozen=True)
class Program:
    """One attention.

    score (of PRODUCT), mask (bool, of the indices; None keeps all), states, weights (of SCORE and the states), rescale
    (of the states: the factor for the output so far), output (of OUTPUT and the states), finals (name -> row, of the
    states), and what the user wrote of the backward pass: `forward`, the final weight of SCORE and the finals, and
    `backward`, the gradient of SCORE, of WEIGHT_GRADIENT, WEIGHT, the finals and DELTA. dropped (bool, of the indices;
    None: nowhere): where a weight that its row knows meets no value, by chance (passes/drop_weights.py).
    """

    score: Expr
    mask: Expr | None
    states: tuple[State, ...]
    weights: Expr
    rescale: Expr
    output: Expr
    finals: tuple[tuple[str, Expr], ...]
    forward: Expr | None = None
    backward: Expr | None = None
    custom: tuple[str, ...] = ()
    dropped: Expr | None = None

    def named(self) -> Iterator[tuple[str, Expr]]:
        """Every expression of the program with what it is."""
        yield "score", self.score
        if self.mask is not None:
            yield "keep", self.mask
        for state in self.states:
            yield f"next.{state.name}", state.update
        yield "weights", self.weights
        yield "rescale", self.rescale
        yield "output", self.output
        for name, row in self.finals:
            yield f"final.{name}", row
        if self.forward is not None:
            yield "user.forward", self.forward
        if self.backward is not None:
            yield "user.backward", self.backward
        if self.dropped is not None:
            yield "dropped", self.dropped

    def map(self, change: Callable[[Expr], Expr]) -> Program:
        """The program with each of its expressions changed."""

        def optional(root: Expr | None) -> Expr | None:
            return None if root is None else change(root)

        return replace(
            self,
            score=change(self.score),
            mask=optional(self.mask),
            states=tuple(replace(s, update=change(s.update)) for s in self.states),
            weights=change(self.weights),
            rescale=change(self.rescale),
            output=change(self.output),
            finals=tuple((name, change(row)) for name, row in self.finals),
            forward=optional(self.forward),
            backward=optional(self.backward),
            dropped=optional(self.dropped),
        )

    def returning(self, rows: tuple[tuple[str, Expr], ...]) -> Program:
        """The forward pass alone, with these rows (of the states) returned."""
        return replace(self, finals=rows, forward=None, backward=None)

    @property
    def fingerprint(self) -> str:
        """A name of the program that is the same in every process: equal programs, equal fingerprints."""
        parts = [f"{name} {expr.digest}" for name, expr in self.named()]
        parts += [f"initial {s.name} {s.initial!r}" for s in self.states] + [f"custom {c}" for c in self.custom]
        return digest_of_parts(parts)

    def loads(self) -> list[Expr]:
        """The reads of custom inputs, each once."""
        return [n for n in topological(*(e for _, e in self.named())) if n.op is Op.LOAD]

    def __str__(self) -> str:
        start = [f"state.{s.name} = {s.initial}" for s in self.states]
        names = list(self.named())
        return "\n".join(["# before the first tile", *start, "# each tile, then the end of the row", *lines(names)])


def row_variable(name: str) -> Expr:
    """A row that the backward's main kernel reads."""
    return var(name, ROW, kind=VarKind.ROW)


def made_variable(name: str, axes: Iterable[Axis] = ROW) -> Expr:
    """A row that a forward schedule computes on its way."""
    return var(name, axes, kind=VarKind.MADE)


@dataclass(frozen=True)
class Extreme:
    """A row's extreme that gets a gradient: its number, "max" or "min", and what of a pair it is the extreme of.

    value: of PRODUCT. Two rows are known of it before the others of the backward pass, and kept with them by these
    names: the extreme itself, and how many kept pairs reach it. They are made of the very products that the pairs are
    then held against, so that these meet it to the last bit.
    """

    number: int
    kind: Extremum
    value: Expr
    names: tuple[str, str]

    @property
    def of_pair(self) -> Expr:
        """The variable that stands for `value`."""
        return var(f"extreme{self.number}", PAIR, kind=VarKind.EXTREME)

    @property
    def row(self) -> Expr:
        """The extreme of the row."""
        return final_variable(self.names[0])

    @property
    def count(self) -> Expr:
        """How many pairs reach it, at least 1."""
        return final_variable(self.names[1])


@dataclass(frozen=True)
class Backward:
    """The backward pass of a program, as the kernels need it.

    saved: rows that the forward pass keeps, of the final states. rows: what the main kernel reads for each row, of the
    saved rows (by final_variable of their names), DELTA and final_gradient. weights: the final weight, of PRODUCT and
    row variables (row_variable of their names). product_gradient: the gradient of PRODUCT, of WEIGHT, WEIGHT_GRADIENT
    and the same. pair_gradients: for a read of a custom input in score_mod, what a pair adds to its gradient.
    row_gradients: for a read of one by online_fwd or the epilogue, what a row adds to it (of saved rows, DELTA ...).
    undifferentiated: returned rows whose gradient is not derived, with the reason. exact_delta: delta must be the row
    sum of weight * dweight, as dO . o of an output that was rounded is not near enough. score: where scores may be far
    from 0 (reach.py), the score that `weights` then takes as SCORE: it is computed whole before a row's number is taken
    from it, as the forward pass does. None: `weights` is of PRODUCT. extremes: those whose variables gradients read.
    """

    saved: tuple[tuple[str, Expr], ...]
    rows: tuple[tuple[str, Expr], ...]
    weights: Expr
    product_gradient: Expr
    pair_gradients: tuple[tuple[Expr, Expr], ...]
    row_gradients: tuple[tuple[Expr, Expr], ...]
    undifferentiated: tuple[tuple[str, str], ...] = ()
    exact_delta: bool = False
    score: Expr | None = None
    extremes: tuple[Extreme, ...] = ()

    @property
    def given_rows(self) -> list[str]:
        """The rows that those of the main kernel are made of, by name: saved ones, then what is found of extremes."""
        return [*(name for name, _ in self.saved), *(name for e in self.extremes for name in e.names)]

    def named(self) -> Iterator[tuple[str, Expr]]:
        """Every expression with what it is."""
        for name, row in self.saved:
            yield f"saved.{name}", row
        for name, row in self.rows:
            yield name, row
        if self.score is not None:
            yield "score", self.score
        for extreme in self.extremes:
            yield f"{extreme.of_pair}, {extreme.kind}", extreme.value
        yield "weight", self.weights
        yield "d_qk", self.product_gradient
        for load, gradient in (*self.pair_gradients, *self.row_gradients):
            yield f"d_{load}", gradient

    def __str__(self) -> str:
        return "\n".join(["# backward: dweight = dO . v, delta = dO . o", *lines(self.named(), prefix="g")])
