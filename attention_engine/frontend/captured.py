"""Tensors that a user's functions capture: each becomes a custom input, which every call reads anew.

Tracing notes where a tensor was met: a number of it, or an entry at symbolic indices. What torch made of captured
tensors on the way (`temperature.exp()`, `table[0]`) is noted as a computation, which every call repeats, so that its
value and its gradient are those of the call.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from attention_engine.errors import TensorInMod, WrongIndex
from attention_engine.frontend.custom_io import AxisSpec, CustomInput, CustomSpec, counted
from attention_engine.frontend.frames import is_torchs, where_from
from attention_engine.frontend.symbols import Symbol, SymbolicTensor, wrap
from attention_engine.ir.expr import Expr, Type
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H

_HERE = Path(__file__).resolve().parent
_BETWEEN = (str(_HERE), str(_HERE.parent / "runtime"))  # files of ours that stand between a user's line and a tensor
_LENGTHS = {B: ("batch",), H: ("heads",), Q_IDX: ("seq_len",), KV_IDX: ("seq_len_kv",)}

DRAWS = frozenset({
    "rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "randint_like", "bernoulli",
    "multinomial", "poisson", "dropout", "alpha_dropout", "gumbel_softmax",
})  # fmt: skip
_NUMBERS = itertools.count()


class Fixed:
    """The tensor object that tracing found."""

    def __init__(self, tensor: Any, name: str) -> None:
        self.tensor, self.name, self.key = tensor, name, f"tensor {id(tensor)}"

    def now(self) -> Any:
        """The tensor to read in this call."""
        return self.tensor


class Attribute:
    """A tensor that is an attribute of a user's object: another one that took its place since is seen."""

    def __init__(self, tensor: Any, owner: Any, name: str) -> None:
        self.owner, self.name, self.key = owner, name, f"tensor {id(tensor)}"

    def now(self) -> Any:
        """The tensor to read in this call."""
        return getattr(self.owner, self.name)


class Computed:
    """What torch made of captured tensors; every call makes it again."""

    def __init__(self, function: Callable[..., Any], args: Any, named: Any, part: int | None) -> None:
        self.function, self.args, self.named, self.part = function, args, named, part
        of: Any = getattr(function, "__self__", None)
        kind = getattr(function, "__name__", "")
        self.attribute = of.__name__ if kind == "__get__" else None  # as t.mT: compilers can't follow its getter
        self.name = "_".join([*_names(args), (self.attribute or kind).strip("_")])
        spelt = [f"{k}={_spell(v)}" for k, v in named.items()]
        drawn = f" drawn {next(_NUMBERS)}" * (kind in DRAWS)  # two draws of one kind are two
        self.key = f"{function!r} {of!r} {_spell(args)} {spelt} {part}{drawn}"

    def now(self) -> Any:
        """The tensor to read in this call."""
        args = each_source(self.args, lambda source: source.now())
        if self.attribute is not None:
            return getattr(args[0], self.attribute)
        found = self.function(*args, **each_source(self.named, lambda source: source.now()))
        return found if self.part is None else found[self.part]


Source = Fixed | Attribute | Computed


def each_source(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with every source in it (of tuples, lists and dicts) changed."""
    if isinstance(value, (Fixed, Attribute, Computed)):
        return change(value)
    if isinstance(value, (tuple, list)):
        return tuple([each_source(v, change) for v in value]) if isinstance(value, tuple) else [
            each_source(v, change) for v in value
        ]  # fmt: skip
    return {k: each_source(v, change) for k, v in value.items()} if isinstance(value, dict) else value


def _names(value: Any) -> list[str]:
    found: list[str] = []
    each_source(value, lambda source: found.append(source.name))
    return found


def _spell(value: Any) -> str:
    return repr(each_source(value, lambda source: source.key))


class Captured:
    """One captured tensor: its name, where a call finds it, what it held when its functions were traced, and the
    indices it is read at, dimension by dimension.

    A number has no dimensions, whatever the shape of its tensor.
    """

    def __init__(self, name: str, source: Source, rank: int, dtype: Type) -> None:
        self.name, self.source, self.rank, self.dtype = name, source, rank, dtype
        self.indices: list[set[Expr]] = [set() for _ in range(rank)]

    def axes(self, shape: Sequence[int], sizes: Mapping[str, int | None]) -> tuple[AxisSpec, ...]:
        """The axes of a tensor of this shape: "heads" where it is read at h alone and is as long, and so on; else a
        length that kernels are told at run time. A size of None fits any length."""
        axes: list[AxisSpec] = []
        for n, (length, indices) in enumerate(zip(shape, self.indices, strict=True)):
            names = [name for variable, (name,) in _LENGTHS.items() if variable in indices]
            plain = (indices <= _LENGTHS.keys() and set(names) <= {"seq_len", "seq_len_kv"}) or len(indices) == 1
            fits = [name for name in names if sizes[name] in (None, length)] if plain else []
            axes.append(fits[0] if fits else f"size{n}")
        return tuple(axes)


class Capture:
    """What one tracing of a user's functions captured, in the order met."""

    def __init__(self, declared: Sequence[str], types: Mapping[str, Type]) -> None:
        """declared: names that are taken; types: what captured tensors hold, by name, where it isn't as found."""
        self.captured: dict[str, Captured] = {}
        self._declared, self._types = tuple(declared), types
        self._computed: dict[int, tuple[Any, Computed]] = {}  # by id; the tensor is held, so that its id stays its own
        self._inputs: dict[str, CustomInput] = {}
        self._held: list[Any] = []
        self.reads_numbers = False  # did a function make a Python number of a tensor? It stays as it was then
        self.wide: set[str] = set()  # the names of those that hold int64

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.captured.values())

    def number(self, tensor: Any) -> Expr:
        """The tensor's one number."""
        shape = tuple(tensor.shape)
        if tensor.is_complex():
            raise TensorInMod(f"{where_from()}a complex {type(tensor).__name__} meets a symbolic value. Use its parts.")
        if any(n != 1 for n in shape):
            places = ", ".join({1: ["h"], 2: ["q_idx", "kv_idx"], 3: ["h", "q_idx", "kv_idx"]}.get(
                len(shape), ["b", "h", "q_idx", "kv_idx"]))  # fmt: skip
            name = "tensor" if (found := self._source(tensor).name) == "captured" else found
            raise TensorInMod(
                f"{where_from()}a {type(tensor).__name__} of shape {shape} meets a symbolic value, which is one "
                f"number. Read it at an index: {name}[{places}]."
            )
        return self._input(tensor, 0).read(())

    def at(self, tensor: Any, index: Any) -> Symbol:
        """tensor[index], with symbols among the indices."""
        tensor, listed = self._read_known(tensor, list(index) if isinstance(index, tuple) else [index])
        if len(listed) > tensor.ndim:
            raise WrongIndex(
                f"{where_from()}captured tensor '{self._source(tensor).name}' has "
                f"{counted(tensor.ndim, 'dimension')} {tuple(tensor.shape)}, and is read with "
                f"{counted(len(listed), 'index')}. Give one index for each dimension."
            )
        listed += [slice(None)] * (tensor.ndim - len(listed))
        read = CapturedRead(self._input(tensor, tensor.ndim), tuple(tensor.shape), tuple(listed))
        return read if read.open else wrap(read.expr)

    def _read_known(self, tensor: Any, listed: list[Any]) -> tuple[Any, list[Any]]:
        """The tensor, read by torch at the indices that are known; symbols and whole slices are left."""
        if any(isinstance(part, Symbol) for i in listed if isinstance(i, slice) for part in (i.start, i.stop, i.step)):
            raise WrongIndex(
                f"{where_from()}a slice of a tensor starts or ends at a symbolic value. A pair reads one entry: "
                f"{self._source(tensor).name}[{'kv_idx' if tensor.ndim == 1 else 'q_idx, kv_idx'}]."
            )
        if any(i is Ellipsis for i in listed):
            gap = next(n for n, i in enumerate(listed) if i is Ellipsis)
            listed[gap : gap + 1] = [slice(None)] * (tensor.ndim - len(listed) + 1)
        known = tuple(slice(None) if _is_symbolic(i) else i for i in listed)
        if all(isinstance(i, slice) and i == slice(None) for i in known):
            return tensor, listed
        if any(i is None or (not isinstance(i, slice) and _is_tensor(i) and i.ndim) for i in known):
            shown = tuple(listed) if len(listed) > 1 else listed[0]
            raise WrongIndex(f"{where_from()}a tensor is read at {shown}. Read it at integers and symbols alone.")
        left = [i for i in listed if _is_symbolic(i) or isinstance(i, slice)]
        return tensor[known], [i if _is_symbolic(i) else slice(None) for i in left]

    def compute(self, function: Callable[..., Any], args: Any, named: Any, result: Any) -> None:
        """Notes that torch made the result, a tensor or several, of these arguments."""
        several = isinstance(result, (tuple, list))
        for part, tensor in enumerate(result if several else [result]):
            if _is_tensor(tensor) and id(tensor) not in self._computed:
                made = Computed(function, self._sources(args), self._sources(named), part if several else None)
                self._computed[id(tensor)] = tensor, made

    def _sources(self, value: Any) -> Any:
        """Arguments with the sources of their tensors in place of them."""
        if _is_tensor(value):
            return self._source(value)
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._sources, value)) if type(value) in (tuple, list) else value
        return {k: self._sources(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _source(self, tensor: Any) -> Source:
        if id(tensor) in self._computed:
            return self._computed[id(tensor)][1]
        self._held.append(tensor)
        return find_source(tensor)

    def _input(self, tensor: Any, rank: int) -> CustomInput:
        source = self._source(tensor)
        key = f"{source.key} {rank}"
        if key not in self.captured:
            name = self._free_name(source.name)
            dtype = self._types.get(name, type_of(tensor))
            self.captured[key] = Captured(name, source, rank, dtype)
            spec = CustomSpec(name, tuple(f"size{n}" for n in range(rank)))
            self.wide |= {name} if dtype is Type.LONG else set()
            self._inputs[key] = CustomInput(spec, dtype, self._declared)
        return _Noting(self._inputs[key], self.captured[key])

    def _free_name(self, hint: str) -> str:
        base = re.sub(r"\W", "_", hint) or "captured"
        taken = {*self._declared, *self.names}
        return next(n for n in itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2))) if n not in taken)


class _Noting(CustomInput):
    """A captured tensor that notes the indices it is read at."""

    def __init__(self, source: CustomInput, captured: Captured) -> None:
        super().__init__(source.spec, source.dtype, source.untyped)
        self.called, self.captured = f"captured tensor '{source.spec.name}'", captured

    def read(self, indices: Sequence[object]) -> Expr:
        found = super().read(indices)
        for seen, index in zip(self.captured.indices, found.args, strict=True):
            seen.add(index)
        return found


class CapturedRead(SymbolicTensor):
    """A captured tensor read at some of its dimensions; the others are still to be read, or have length 1."""

    __slots__ = ("_indices", "_input", "_shape")

    def __init__(self, source: CustomInput, shape: tuple[int, ...], indices: tuple[Any, ...]) -> None:
        self._input, self._shape, self._indices = source, shape, indices

    @property
    def open(self) -> list[int]:
        """The dimensions that are not read yet."""
        return [n for n, i in enumerate(self._indices) if isinstance(i, slice)]

    @property
    def expr(self) -> Expr:  # type: ignore[override]
        if long := [self._shape[n] for n in self.open if self._shape[n] != 1]:
            raise WrongIndex(
                f"{where_from()}captured tensor '{self._input.spec.name}' of shape {self._shape} is read at some of "
                f"its dimensions, and one of length {long[0]} is left.\n  Read it at an index for each dimension."
            )
        return self._input.read([0 if isinstance(i, slice) else i for i in self._indices])

    def get_reduce(self, kind: str) -> Symbol:
        """The reduction over the keys of a row, where the value depends on the key."""
        return wrap(self.expr).get_reduce(kind)  # type: ignore[no-any-return]

    def __getitem__(self, indices: object) -> Symbol:  # type: ignore[override]
        listed = list(indices) if isinstance(indices, tuple) else [indices]
        if len(listed) > len(self.open):
            raise WrongIndex(
                f"{where_from()}{self._input.called} has {counted(len(self._shape), 'dimension')} {self._shape}, and "
                f"is read with {counted(len(self._shape) - len(self.open) + len(listed), 'index')}. Give one index for "
                "each dimension."
            )
        filled = list(self._indices)
        for n, index in zip(self.open, listed, strict=False):
            filled[n] = index
        read = CapturedRead(self._input, self._shape, tuple(filled))
        return read if read.open else wrap(read.expr)


def _is_tensor(value: object) -> bool:
    return hasattr(type(value), "requires_grad")


def _is_symbolic(index: object) -> bool:
    return isinstance(index, Symbol) or (_is_tensor(index) and index.ndim == 0)  # type: ignore[attr-defined]


def type_of(tensor: Any) -> Type:
    """What a tensor holds."""
    if tensor.is_floating_point():
        return Type.FLOAT
    return {"torch.bool": Type.BOOL, "torch.int64": Type.LONG}.get(str(tensor.dtype), Type.INT)


# ---- where a tensor stands in the user's code


def find_source(tensor: Any) -> Fixed | Attribute:
    """The tensor as an attribute of an object that the user's running function sees, or the object itself."""
    frame = _users_frame()
    if frame is None:
        return Fixed(tensor, "captured")
    seen = {n: frame.f_globals[n] for n in frame.f_code.co_names if n in frame.f_globals} | dict(frame.f_locals)
    for value in seen.values():
        for owner, attributes in _attributes(value):
            for name, held in attributes.items():
                if held is tensor:
                    return Attribute(tensor, owner, name)
    return Fixed(tensor, next((n for n, value in seen.items() if value is tensor), "captured"))


def _users_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_BETWEEN) and not is_torchs(name):
            return frame
        frame = frame.f_back
    return None


def _attributes(value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Objects with their attributes: a module and all modules in it, or any other object."""
    if isinstance(value, (Symbol, type)) or callable(getattr(type(value), "numel", None)):
        return
    if hasattr(type(value), "named_parameters"):
        for module in value.modules():
            yield module, {**module._parameters, **module._buffers, **vars(module)}
    elif isinstance(held := getattr(value, "__dict__", None), dict) and not callable(getattr(value, "__code__", None)):
        yield value, held
