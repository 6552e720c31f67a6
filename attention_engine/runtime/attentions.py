"""What the keys of the torch.library ops stand for, in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from attention_engine.errors import UnknownProgram
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.runtime.inputs import is_cast

Kind = TypeVar("Kind", bound="Attention")
Rest = ParamSpec("Rest")
Result = TypeVar("Result")
Given: TypeAlias = Sequence[Tensor | None]  # what a call is made of: q, k, v, what else the family has, custom inputs


class Attention:
    """One traced program with the way it runs: what a key of the ops stands for.

    forward_op, backward_op: the names of its ops; forward and backward: what they do, without torch's dispatcher. form:
    does a call return more than the output (rows, the last state)? counts: how many of the forward op's results it then
    returns, False and True. trained: the key of what runs in its place when gradients are wanted (None: itself). keeps:
    does the backward pass ask for what the forward pass made?
    """

    engine: ClassVar[str]  # the class that users know
    forward_op: ClassVar[str]
    backward_op: ClassVar[str]
    forward: ClassVar[Callable[..., Any]]
    backward: ClassVar[Callable[..., Any]]
    keeps: ClassVar[bool]
    key: str
    specs: Sequence[CustomSpec]
    by_kernels: bool  # or by the reference?
    counts: tuple[int, int]
    program_kernels: Any  # of its kernels; None: the reference
    trained: str | None = None

    @property
    def reads_batch(self) -> bool:
        """Does the program tell one batch from another?"""
        raise NotImplementedError

    def named(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """Custom inputs by name."""
        return {s.name: c for s, c in zip(self.specs, custom, strict=True)}

    # ---- what the op adapter asks

    def arguments(self, form: bool, given: Given) -> tuple[Any, ...]:
        """Of the forward op."""
        raise NotImplementedError

    def densely(self, form: bool, given: Given) -> tuple[Tensor, ...]:
        """The results of a call by the reference, which torch differentiates forward too."""
        raise NotImplementedError

    def arrived(self, given: Given, kept: Sequence[Tensor], arriving: Given) -> list[Tensor | None]:
        """The gradients that arrive at a call's results, the output's in any case; raises what has none."""
        raise NotImplementedError

    def backward_arguments(
        self, given: Given, kept: Sequence[Tensor], arriving: Given, wanted: Sequence[bool]
    ) -> tuple[Any, ...]:
        """Of the backward op, whose results are the gradients of `given`, the custom inputs' as a list."""
        raise NotImplementedError

    def begin_backward(self, given: Given) -> None:
        """Starts compiling the kernels of the backward pass of a call, as far as they are known before it."""
        raise NotImplementedError

    def differentiable(self, given: Given, arriving: Given) -> list[Tensor | None]:
        """Gradients of `given` by the reference, which can be differentiated too."""
        raise NotImplementedError


ATTENTIONS: dict[str, Attention] = {}  # a plain one: torch.compile guards on the key alone


def find(key: str, kind: type[Kind]) -> Kind:
    """What an op was called with; UnknownProgram where a graph came from another process."""
    found = ATTENTIONS.get(key)
    if not isinstance(found, kind):
        raise UnknownProgram(
            f"no attention with the key {key} has been built in this process.\n"
            f"  Build the same {kind.engine} and call it once before an exported or loaded graph runs."
        )
    return found


def outside_autocast(run: Callable[Concatenate[Tensor, Rest], Result]) -> Callable[Concatenate[Tensor, Rest], Result]:
    """q, k, v were cast where the engine was called; the reference's own products keep their dtype."""

    @functools.wraps(run)
    def plain(q: Tensor, /, *rest: Rest.args, **named: Rest.kwargs) -> Result:
        if not is_cast(q):
            return run(q, *rest, **named)
        with torch.autocast(q.device.type, enabled=False):
            return run(q, *rest, **named)

    return plain
