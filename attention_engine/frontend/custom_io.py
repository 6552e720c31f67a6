"""Extra tensors that a user's maths reads: their declaration, and what a mod sees of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn, cast

from attention_engine.errors import BadCustomInput, UnknownAxis, UnknownCustomInput, WrongIndex, did_you_mean
from attention_engine.frontend.frames import where_from
from attention_engine.frontend.signatures import AxisName, DeclaredAxis
from attention_engine.frontend.symbols import Symbol, SymbolicTensor, convert, lift, wrap
from attention_engine.ir.expr import Expr, Op, Type, const, make, topological
from attention_engine.ir.packing import Packing
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H

AxisSpec = int | str
INDEX: dict[AxisName, Expr] = {"batch": B, "heads": H, "seq_len": Q_IDX, "seq_len_kv": KV_IDX}


@dataclass(frozen=True)
class CustomSpec:
    """One custom input: its name and, for each dimension, a length, 1, "batch", "heads", "seq_len" or "seq_len_kv"."""

    name: str
    axes: tuple[AxisSpec, ...]


def _is_axis(axis: object) -> bool:
    return axis in INDEX if isinstance(axis, str) else type(axis) is int and axis > 0


class CustomIO:
    """Declares custom inputs: tensors that are given with a call, and that functions read as `custom["name"]`.

    One CustomIO may serve many engines: nothing writes on it.

    Args:
        input_tensors: names, in the order of the tensors in a call, each with its axes. An axis is a length, 1,
            "batch", "heads", "seq_len" (of queries) or "seq_len_kv" (of keys).

    Raises:
        UnknownAxis: an axis is none of these.

    >>> io = CustomIO({"slopes": ("heads",), "bias": (1, "heads", "seq_len", "seq_len_kv")})
    >>> engine = AttentionEngine(
    ...     custom_io=io,
    ...     score_mod=lambda s, custom, b, h, q, kv: s + custom["bias"] - custom["slopes"] * (q - kv).abs(),
    ... )
    >>> engine(*torch.randn(3, 1, 8, 2, 16), slopes=torch.ones(2), bias=torch.zeros(1, 2, 8, 8)).shape
    torch.Size([1, 8, 2, 16])
    """

    packing: Packing | None = None  # of one that is traced for packed sequences

    def __init__(self, input_tensors: Mapping[str, Sequence[DeclaredAxis]] | None = None) -> None:
        specs = {}
        if input_tensors is not None and not isinstance(input_tensors, Mapping):
            raise BadCustomInput(
                f"{where_from()}CustomIO was given {type(input_tensors).__name__}. Give a dict of axes: "
                "CustomIO({'slopes': ('heads',)})."
            )
        for name, axes in (input_tensors or {}).items():
            if not isinstance(name, str):
                raise BadCustomInput(f"{where_from()}a custom input is called {name!r}. Names are text: {str(name)!r}.")
            if isinstance(axes, (str, int)) or axes is None:
                raise UnknownAxis(
                    f"{where_from()}custom input '{name}': axes are {axes!r}. Write a tuple: '{name}': ({axes!r},)."
                )
            for axis in axes:
                if not _is_axis(axis):
                    raise UnknownAxis(
                        f"{where_from()}custom input '{name}': {axis!r} is no axis.{did_you_mean(axis, INDEX)}\n"
                        f"  Use a positive int, or one of {', '.join(map(repr, INDEX))}."
                    )
            specs[name] = CustomSpec(name, tuple(axes))
        self.specs: Mapping[str, CustomSpec] = MappingProxyType(specs)
        self.in_order = tuple(specs.values())  # calls read these: torch.compile reads no proxy where a dict changed

    def __reduce__(self) -> tuple[type[CustomIO], tuple[dict[str, tuple[AxisSpec, ...]]]]:
        return CustomIO, ({s.name: s.axes for s in self.specs.values()},)

    def with_more(self, specs: Sequence[CustomSpec], packing: Packing | None = None) -> CustomIO:
        """The same with more behind."""
        io = CustomIO()
        io.specs = MappingProxyType({**self.specs, **{s.name: s for s in specs}})
        io.in_order = tuple(io.specs.values())
        if packing is not None:
            io.packing = packing
        return io

    def __repr__(self) -> str:
        return f"CustomIO({ {s.name: s.axes for s in self.specs.values()} })"


def counted(count: int, what: str) -> str:
    """The count with its noun."""
    return f"{count} {what if count == 1 else {'index': 'indices'}.get(what, what + 's')}"


class CustomInput:
    """What a mod sees of one custom input: a value (at this b, h, q, kv), which can also be read at other indices."""

    def __init__(self, spec: CustomSpec, dtype: Type, untyped: Collection[str] = ()) -> None:
        """untyped: custom inputs of which only a call's tensors will say whether they are integers. Tracing has one
        integer type, INT; which need 64 bits is told afterwards (passes/widths.py)."""
        self.called = f"custom input '{spec.name}'"
        self.spec, self.dtype, self.untyped = spec, Type.INT if dtype is Type.LONG else dtype, untyped

    def read(self, indices: Sequence[object]) -> Expr:
        """The read at these indices, one a dimension."""
        if len(indices) != len(self.spec.axes):
            raise WrongIndex(
                f"{where_from()}{self.called} has {counted(len(self.spec.axes), 'dimension')} {self.spec.axes}, and is "
                f"read with {counted(len(indices), 'index')}. Give one index for each dimension."
            )
        exprs = [lift(i) for i in indices]
        for expr in exprs:
            guessed = any(n.op is Op.LOAD and n.name in self.untyped for n in topological(expr))
            if expr.dtype is Type.FLOAT and not guessed:
                raise BadCustomInput(
                    f"{where_from()}{self.called} is read at {expr}, which is a float. Write // instead of /, or "
                    "x.to(int).\n  Indices are integers; so is what a custom input of integers holds."
                )
        return make(Op.LOAD, *(convert(e, Type.INT) for e in exprs), arg=self.spec.name, dtype=self.dtype)

    def value(self) -> Expr:
        """The read at the place that the axes name."""
        indices = []
        for axis in self.spec.axes:
            if isinstance(axis, str):
                indices.append(INDEX[cast(AxisName, axis)])
            elif axis == 1:
                indices.append(const(0))
            else:
                places = ", ".join("..." for _ in self.spec.axes)
                raise WrongIndex(
                    f"{where_from()}custom input '{self.spec.name}' has an axis of length {axis}, which no loop runs "
                    f"over.\n  Read it at an index, custom['{self.spec.name}'][{places}], or name its loop where it is "
                    f"declared: CustomIO({{'{self.spec.name}': axes}})\n  with {', '.join(map(repr, INDEX))}."
                )
        return make(Op.LOAD, *indices, arg=self.spec.name, dtype=self.dtype)


class CustomRead(SymbolicTensor):
    """A custom input as a symbol: its value in arithmetic, other entries by index."""

    __slots__ = ("_input", "_packed")

    def __init__(self, source: CustomInput, packed: bool = False) -> None:
        self._input, self._packed = source, packed

    @property
    def expr(self) -> Expr:  # type: ignore[override]
        return self._input.value()

    def of_length(self, length: int) -> CustomRead:
        """Itself; BadCustomInput where its last dimension is declared with another number of entries."""
        last = self._input.spec.axes[-1]
        if isinstance(last, int) and last != length:
            raise BadCustomInput(
                f"{where_from()}{self._input.called} is declared with {last} entries in its last dimension, and "
                f"{length} are read: {self._input.spec.name!r}: (..., {length})."
            )
        return self

    def get_reduce(self, kind: str) -> Symbol:
        """The reduction over the keys of a row, where the value depends on the key."""
        return wrap(self.expr).get_reduce(kind)  # type: ignore[no-any-return]

    def __getitem__(self, indices: object) -> Symbol:  # type: ignore[override]
        listed = indices if isinstance(indices, tuple) else (indices,)
        rows = [axis for axis in self._input.spec.axes if axis in ("seq_len", "seq_len_kv")]
        if rows and self._packed:
            raise WrongIndex(
                f"{where_from()}{self._input.called} has the axis {rows[0]!r}: in a call with cu_seqlens_q that counts "
                f"packed rows, and an index is a place in a sequence.\n  Read it at its own row, "
                f"custom[{self._input.spec.name!r}], or declare a size in place of {rows[0]!r}."
            )
        return wrap(self._input.read(listed))


class CustomInputs:
    """The custom inputs inside a mod: custom["name"], or custom.input_tensors["name"]."""

    item = numel = None  # what is asked of a value that meets a symbol: they are no number

    def __init__(self, io: CustomIO, dtypes: Mapping[str, Type]) -> None:
        self._io, self._dtypes = io, dtypes

    @property
    def input_tensors(self) -> CustomInputs:
        """This mapping itself, for code that was written so."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnknownCustomInput(f"{where_from()}custom inputs are read by name in brackets: custom[{name!r}].")

    def __contains__(self, name: object) -> bool:
        return name in self._io.specs

    def __getitem__(self, name: str) -> CustomRead:
        spec = self._io.specs.get(name)
        if spec is None:
            known, meant = ", ".join(map(repr, self._io.specs)) or "none", did_you_mean(name, self._io.specs)
            between = "\n  " if meant else " "
            raise UnknownCustomInput(
                f"{where_from()}no custom input is called {name!r}.{meant} Declared: {known}.{between}"
                f"Declare it, CustomIO({{{str(name)!r}: axes}}), or give create_mask and show_mask {name}=tensor."
                f"\n  A tensor of your own needs neither: tensor[h, q_idx]."
            )
        untyped = self._io.specs.keys() - self._dtypes.keys()
        source = CustomInput(spec, self._dtypes.get(name, Type.FLOAT), untyped)
        return CustomRead(source, self._io.packing is not None)
