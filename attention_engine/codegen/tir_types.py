"""TIR as the interpreter reads it: what each class of nodes holds, for who checks types.

Nodes are told apart by the names of their classes (tir_nodes.py), so that reading a program imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Node(Protocol):
    """Any part of a program. Its wrapper in Python is made anew at each access: `handle_of` says which node it is."""

    def __chandle__(self) -> int:
        """Where the node lies."""


class Expression(Node, Protocol):
    """What has a value of a type; a constant is a number, too."""

    dtype: object

    def __int__(self) -> int:
        """The number of an integer constant; others raise."""


class Variable(Expression, Protocol):
    """Var, SizeVar: a number, or where the memory of buffers starts."""

    name: str


class Constant(Expression, Protocol):
    """IntImm, FloatImm."""

    value: float


class Text(Expression, Protocol):
    """StringImm."""

    value: str


class Pair(Expression, Protocol):
    """Add, Min, LT, And ...: what is made of two."""

    a: Expression
    b: Expression


class Negation(Expression, Protocol):
    """Not."""

    a: Expression


class Conversion(Expression, Protocol):
    """Cast."""

    value: Expression


class Let(Expression, Protocol):
    """The body, in which a variable has a value."""

    var: Variable
    value: Expression
    body: Expression


class Selection(Expression, Protocol):
    """Select."""

    condition: Expression
    true_value: Expression
    false_value: Expression


class Operation(Protocol):
    """What a call calls."""

    name: str


Annotations = Mapping[str, object]


class Call(Expression, Protocol):
    """Call: of an intrinsic, or of an operation on tiles."""

    op: Operation
    args: Sequence[Expression]
    annotations: Annotations


class Buffer(Node, Protocol):
    """A buffer; several may lie in one memory."""

    name: str
    dtype: object
    data: Variable
    shape: Sequence[Expression]
    strides: Sequence[Expression]

    def scope(self) -> object:
        """Which kind of memory."""


class Access(Node, Protocol):
    """BufferLoad, BufferStore: one element of a buffer."""

    buffer: Buffer
    indices: Sequence[Expression]


class Load(Access, Expression, Protocol):
    """BufferLoad."""


class Store(Access, Protocol):
    """BufferStore."""

    value: Expression


class Range(Protocol):
    """From min on."""

    min: Expression
    extent: Expression


class Region(Expression, Protocol):
    """BufferRegion."""

    buffer: Buffer
    region: Sequence[Range]


class Statement(Node, Protocol):
    """What does something."""


class Sequel(Statement, Protocol):
    """SeqStmt."""

    seq: Sequence[Statement]


class Block(Statement, Protocol):
    """SBlock."""

    annotations: Annotations
    alloc_buffers: Sequence[Buffer]
    body: Statement


class Realized(Statement, Protocol):
    """SBlockRealize."""

    block: Block


class Declaration(Statement, Protocol):
    """AllocBuffer, DeclBuffer."""

    buffer: Buffer


class Wrapped(Statement, Protocol):
    """AttrStmt."""

    body: Statement


class Assertion(Statement, Protocol):
    """AssertStmt."""

    condition: Expression


class Bind(Statement, Protocol):
    """A variable gets its value."""

    var: Variable
    value: Expression


class Evaluate(Statement, Protocol):
    """An expression for what it does."""

    value: Expression


class Condition(Statement, Protocol):
    """IfThenElse."""

    condition: Expression
    then_case: Statement
    else_case: Statement | None


class While(Statement, Protocol):
    """A loop without a count."""

    condition: Expression
    body: Statement


class For(Statement, Protocol):
    """A loop; its kind is a tirx.ForKind."""

    loop_var: Variable
    min: Expression
    extent: Expression
    kind: int
    step: Expression | None
    body: Statement


class Printed(Protocol):
    """A kernel that can be read."""

    def script(self) -> str:
        """As TileLang prints it."""


class Function(Printed, Protocol):
    """PrimFunc."""

    attrs: Mapping[str, object]

    params: Sequence[Variable]
    buffer_map: Mapping[Variable, Buffer]
    body: Statement

    def with_body(self, body: Statement) -> Function:
        """The same with another body."""
