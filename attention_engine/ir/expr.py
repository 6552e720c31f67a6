"""One interned, immutable node for every expression, and the closed set of operations it may hold."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from typing import Literal, NamedTuple, cast
from weakref import WeakValueDictionary


class _Word(Enum):
    """An enumeration whose members are hashed as the objects that they are: Enum's own hash is a function in Python."""

    __hash__ = object.__hash__


class Type(_Word):
    """What kind of number an expression is (float is fp32 in kernels).

    Integers are torch's int64 and wrap as it does. Functions are traced with INT for all of them; passes/widths.py
    leaves it to those that 32 bits hold, whatever the indices and inputs are, and makes the others LONG.
    """

    BOOL = "bool"
    INT = "int"
    LONG = "long"
    FLOAT = "float"


class Axis(_Word):
    """The loops of attention that a value can depend on, in the order of a full tensor."""

    BATCH = "b"
    HEAD = "h"
    QUERY = "q"
    KEY = "kv"
    CHANNEL = "d"


class VarKind(_Word):
    """What a variable stands for. ir/verify.py says where each kind may be read."""

    GIVEN = "given"  # what each attention has one of: q . k, the score, the output so far, delta ...
    INDEX = "index"  # where a pair stands: its batch, head, query or key
    PLACE = "place"  # a part of an index: as tiles, threads and registers divide it
    STATE = "state"  # a row state
    FINAL = "final"  # a row at its end: one that is returned, or kept for the backward pass
    ARRIVING = "arriving"  # the gradient that arrives at a returned row
    ROW = "row"  # a row that the pairs of the backward pass read
    EXTREME = "extreme"  # what of a pair a row's extreme is taken of, where that gets a gradient
    BLOCK = "block"  # a number of a batch and a head that a schedule computes before its loop
    MADE = "made"  # a row that a forward schedule computes on its way
    CUT = "cut"  # what of a mask depends on the query alone, or on the key alone
    PART = "part"  # a row state of each part of a row: its keys count parts
    WHOLE = "whole"  # a row state of parts that were merged

    @property
    def prefix(self) -> str:
        """What a variable's name is written behind."""
        return PREFIXES.get(self, "")


# Users name these; the others have names that the package gives. The latter hold no dot, so that none is written alike.
PREFIXES = {VarKind.STATE: "state.", VarKind.FINAL: "final.", VarKind.ARRIVING: "dfinal.", VarKind.PART: "part.",
            VarKind.WHOLE: "whole."}  # fmt: skip


class Variable(NamedTuple):
    """A variable's own datum. Two variables of one name and different kinds are two."""

    kind: VarKind
    name: str
    axes: frozenset[Axis]

    @property
    def written(self) -> str:
        """The name as it is printed, and as digests have it."""
        return self.kind.prefix + self.name


class Op(_Word):
    """Every operation. An operation is one row in each table of meaning (tests count the rows)."""

    CONST = "const"
    VAR = "var"
    LOAD = "load"  # arg: the custom input's name; args: one integer index for each of its axes
    REDUCE = "reduce"  # arg: a Reduction, over the kept keys of a row
    ADD = "add"
    MUL = "mul"
    RECIP = "recip"
    FLOORDIV = "floordiv"
    MOD = "mod"
    POW = "pow"
    MAXIMUM = "maximum"  # arg, here and below: how much of a tie's gradient the first operand gets (None: half)
    MINIMUM = "minimum"
    EXP = "exp"
    EXP2 = "exp2"
    EXPM1 = "expm1"
    LOG = "log"
    LOG2 = "log2"
    LOG1P = "log1p"
    SOFTPLUS = "softplus"  # log(1 + exp(x))
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    ERF = "erf"
    SIN = "sin"
    COS = "cos"
    ATAN = "atan"
    ABS = "abs"
    FLOOR = "floor"
    ROUND = "round"  # halves to the even neighbour
    LESS = "less"
    LESS_EQUAL = "less_equal"
    EQUAL = "equal"
    AND = "and"
    OR = "or"
    NOT = "not"
    BIT_AND = "bitwise_and"  # of integers, as the four below
    BIT_OR = "bitwise_or"
    BIT_XOR = "bitwise_xor"
    SHIFT_LEFT = "bitwise_left_shift"
    SHIFT_RIGHT = "bitwise_right_shift"  # which keeps the sign
    CHANCE = "chance"  # random bits, of a seed and a pair's batch, head, query and key: ir/chance.py
    WHERE = "where"
    CAST = "cast"  # arg: the Type to become
    DETACH = "detach"  # the value itself, a constant to the gradient


LEAVES = frozenset({Op.CONST, Op.VAR})
INTEGERS = frozenset({Type.INT, Type.LONG})
Number = bool | int | float
Argument = Number | str | Type | Variable | None
Extremum = Literal["max", "min"]
Reduction = Literal["sum", Extremum]  # what a row may be reduced to: ir/verify.py refuses others


class Expr:
    """A value, built by `make`: two equal expressions are the same object, so `is` compares and dicts may hold them.

    Attributes: op, args (operands), arg (the operation's own datum), dtype (Type), axes (the loops it depends on),
    digest (a name of its structure that is the same in every process).
    """

    __slots__ = ("__weakref__", "arg", "args", "axes", "digest", "dtype", "op")
    op: Op
    args: tuple[Expr, ...]
    arg: Argument
    dtype: Type
    axes: frozenset[Axis]
    digest: str

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an expression is never written on: {name}")

    def __copy__(self) -> Expr:
        return self

    def __deepcopy__(self, memo: object) -> Expr:
        return self

    def __reduce__(self) -> tuple[Callable[..., Expr], tuple[object, ...]]:
        return _restore, (self.op, self.args, self.arg, self.dtype)

    def __add__(self, other: Expr | Number) -> Expr:
        return make(Op.ADD, self, as_expr(other, self.dtype))

    def __mul__(self, other: Expr | Number) -> Expr:
        return make(Op.MUL, self, as_expr(other, self.dtype))

    def __neg__(self) -> Expr:
        return make(Op.MUL, const(-1, self.dtype), self)

    def __sub__(self, other: Expr | Number) -> Expr:
        return self + -as_expr(other, self.dtype)

    def __truediv__(self, other: Expr | Number) -> Expr:
        return self * make(Op.RECIP, as_expr(other, Type.FLOAT))

    def __repr__(self) -> str:
        from attention_engine.ir.pretty import formula

        return formula(self)

    @property
    def value(self) -> Number:
        """The number of a constant."""
        assert self.op is Op.CONST and isinstance(self.arg, (bool, int, float))
        return self.arg

    @property
    def name(self) -> str:
        """The name of a variable, as it is written, or of a custom input."""
        if isinstance(self.arg, Variable):
            return self.arg.written
        assert self.op is Op.LOAD and isinstance(self.arg, str)
        return self.arg

    @property
    def reduction(self) -> Reduction:
        """What a reduction makes of its row."""
        assert self.op is Op.REDUCE
        return cast(Reduction, self.arg)

    @property
    def bare_name(self) -> str:
        """The name of a variable without what is written before it: "m" of state.m."""
        assert isinstance(self.arg, Variable)
        return self.arg.name

    @property
    def kind(self) -> VarKind | None:
        """What a variable stands for; None where the expression is none."""
        return self.arg.kind if isinstance(self.arg, Variable) else None


_nodes: WeakValueDictionary[str, Expr] = WeakValueDictionary()
_lock = threading.Lock()

_TRUTHS = frozenset({Op.LESS, Op.LESS_EQUAL, Op.EQUAL, Op.AND, Op.OR, Op.NOT})


def dtype_of(op: Op, args: tuple[Expr, ...], arg: Argument = None, dtype: Type | None = None) -> Type:
    """The type of an operation on these operands, unless one is given."""
    if dtype is not None:
        return dtype
    if op is Op.CAST:
        assert isinstance(arg, Type)
        return arg
    if op in _TRUTHS:
        return Type.BOOL
    if op is Op.WHERE:
        return args[1].dtype
    return args[0].dtype


def _axes(op: Op, args: tuple[Expr, ...], arg: Argument) -> frozenset[Axis]:
    if op is Op.VAR:
        assert isinstance(arg, Variable)
        return arg.axes
    axes = frozenset[Axis]().union(*(a.axes for a in args))
    return axes - {Axis.KEY} | {Axis.BATCH, Axis.HEAD, Axis.QUERY} if op is Op.REDUCE else axes


def _spell(arg: Argument) -> str:
    if isinstance(arg, Variable):
        return arg.written + ":" + "".join(a.value for a in Axis if a in arg.axes)
    return arg.value if isinstance(arg, Type) else repr(arg)


def make(op: Op, *args: Expr, arg: Argument = None, dtype: Type | None = None) -> Expr:
    """The one node for this operation on these operands."""
    kind = dtype_of(op, args, arg, dtype)
    text = f"{op.value} {_spell(arg)} {kind.value} {' '.join(a.digest for a in args)}"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    with _lock:
        node = _nodes.get(digest)
        if node is None:
            node = Expr()
            fields = {"op": op, "args": args, "arg": arg, "dtype": kind, "axes": _axes(op, args, arg), "digest": digest}
            for field, value in fields.items():
                object.__setattr__(node, field, value)
            _nodes[digest] = node
        elif op is Op.VAR and node.arg != arg:
            raise ValueError(f"two variables are written alike: {node.arg} and {arg}")
        return node


def _restore(op: Op, args: tuple[Expr, ...], arg: Argument, dtype: Type) -> Expr:
    """The node of a pickle: this process's own."""
    return make(op, *args, arg=arg, dtype=dtype)


def const(value: Number, dtype: Type | None = None) -> Expr:
    """A number. Without a dtype the Python type says which."""
    kind = dtype or (Type.BOOL if isinstance(value, bool) else Type.INT if isinstance(value, int) else Type.FLOAT)
    value = in_64_bits(int(value)) if kind in INTEGERS else {Type.BOOL: bool, Type.FLOAT: float}[kind](value)
    return make(Op.CONST, arg=value, dtype=kind)


def in_64_bits(value: int) -> int:
    """What int64 arithmetic makes of an integer: its last 64 bits, with a sign."""
    return (value + 2**63) % 2**64 - 2**63


def var(name: str, axes: Iterable[Axis], dtype: Type = Type.FLOAT, kind: VarKind = VarKind.GIVEN) -> Expr:
    """A named value that the surroundings supply."""
    if "." in name and kind not in PREFIXES:
        raise ValueError(f"{name!r} may be written like a name of the user's: a variable of this kind has no dot")
    return make(Op.VAR, arg=Variable(kind, name, frozenset(axes)), dtype=dtype)


def as_expr(value: Expr | Number, dtype: Type) -> Expr:
    """A Python number as a constant of this type; an expression as it is."""
    return value if isinstance(value, Expr) else const(value, dtype)


def is_const(expr: Expr, value: Number | None = None) -> bool:
    """Is it a constant (this one, where a value is given)?"""
    return expr.op is Op.CONST and (value is None or expr.arg == value)


def is_finite_const(expr: Expr) -> bool:
    """Is it a constant that is neither infinite nor NaN?"""
    return expr.op is Op.CONST and math.isfinite(expr.value)


def topological(*roots: Expr, closed: frozenset[Op] = frozenset(), known: Collection[Expr] = frozenset()) -> list[Expr]:
    """Every node below the roots once, operands before users; the insides of `closed` operations, and of these nodes,
    are left out."""

    def inside(node: Expr) -> Iterator[Expr]:
        return iter(() if node.op in closed or node in known else node.args)

    order: dict[Expr, None] = {}
    stack: list[tuple[Expr, Iterator[Expr]]] = []
    entered: set[Expr] = set()
    for root in roots:
        if root in entered:
            continue
        entered.add(root)
        stack.append((root, inside(root)))
        while stack:
            node, rest = stack[-1]
            child = next(rest, None)
            if child is None:
                order[node] = None
                stack.pop()
            elif child not in entered:
                entered.add(child)
                stack.append((child, inside(child)))
    return list(order)


def rebuild(expr: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation on other operands."""
    if args == expr.args:
        return expr
    return make(expr.op, *args, arg=expr.arg, dtype=expr.dtype if expr.op in (Op.LOAD, Op.CAST) else None)


def transform(roots: Iterable[Expr], change: Callable[[Expr], Expr]) -> list[Expr]:
    """Rebuilds the roots from the leaves up; `change` sees each node, its operands already changed, once."""
    roots = list(roots)
    done: dict[Expr, Expr] = {}
    for node in topological(*roots):
        done[node] = change(rebuild(node, tuple(done[a] for a in node.args)))
    return [done[r] for r in roots]


def substitute(expr: Expr, table: dict[Expr, Expr]) -> Expr:
    """The expression with every node that the table holds replaced; replacements are not searched again."""
    done: dict[Expr, Expr] = {}
    for node in topological(expr):
        done[node] = table[node] if node in table else rebuild(node, tuple(done[a] for a in node.args))
    return done[expr]


def count_uses(*roots: Expr, known: Collection[Expr] = frozenset()) -> dict[Expr, int]:
    """How many operands (and roots) name each node, but for what stands inside known ones."""
    uses: dict[Expr, int] = {}
    for node in topological(*roots, known=known):
        for child in () if node in known else node.args:
            uses[child] = uses.get(child, 0) + 1
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    return uses
