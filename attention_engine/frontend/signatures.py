"""The types of what users give: options with few values, the axes of custom inputs, and the functions they write.

A function may be annotated with `SymbolicTensor` (a value of every pair), `SymbolicArray` (one of a row, a head or
nothing), `Symbol` (either) and `CustomInputs`, or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from attention_engine.frontend.symbols import SymbolicArray, SymbolicTensor

if TYPE_CHECKING:
    from attention_engine.frontend.custom_io import CustomInputs

Layout: TypeAlias = Literal["bshd", "bhsd"]
Backend: TypeAlias = Literal["auto", "tilelang", "tl", "reference", "interpret"]
Form: TypeAlias = Literal["tilelang", "cuda", "hip", "cutedsl"]
MaskValue: TypeAlias = Literal["-inf", "0"]
DecayOf: TypeAlias = Literal["token", "channel"]  # whose a decay is
AxisName: TypeAlias = Literal["batch", "heads", "seq_len", "seq_len_kv"]
DeclaredAxis: TypeAlias = int | AxisName


class Index(Protocol):
    """What masks compute with: symbolic values, and tensors where a mask is written out."""

    def __sub__(self, other: Index | int, /) -> Index: ...

    def __floordiv__(self, other: Index | int, /) -> Index: ...

    def __mod__(self, other: Index | int, /) -> Index: ...

    def __ge__(self, other: Index | int, /) -> Index: ...

    def __le__(self, other: Index | int, /) -> Index: ...

    def __lt__(self, other: Index | int, /) -> Index: ...

    def __and__(self, other: Index, /) -> Index: ...

    def __or__(self, other: Index, /) -> Index: ...

    def abs(self) -> Index: ...


class ScoreMod(Protocol):
    """What a score becomes: a symbolic value or a number."""

    def __call__(
        self, score: SymbolicTensor, custom: CustomInputs, b: SymbolicArray, h: SymbolicArray, q_idx: SymbolicArray,
        kv_idx: SymbolicTensor, /,
    ) -> object: ...  # fmt: skip


class PlainMaskMod(Protocol):
    """Is a pair kept? A condition."""

    def __call__(
        self, b: SymbolicArray, h: SymbolicArray, q_idx: SymbolicArray, kv_idx: SymbolicTensor, /
    ) -> object: ...


class CustomMaskMod(Protocol):
    """The same of a mask that reads custom inputs."""

    def __call__(
        self, b: SymbolicArray, h: SymbolicArray, q_idx: SymbolicArray, kv_idx: SymbolicTensor, custom: CustomInputs, /
    ) -> object: ...


MaskMod: TypeAlias = PlainMaskMod | CustomMaskMod


class PlainLinearMod(Protocol):
    """What an entry of q, k, v or decay becomes in a linear attention."""

    def __call__(self, x: SymbolicArray, /) -> object: ...


class CustomLinearMod(Protocol):
    """The same of a function that reads custom inputs."""

    def __call__(self, x: SymbolicArray, custom: CustomInputs, /) -> object: ...


LinearMod: TypeAlias = PlainLinearMod | CustomLinearMod
