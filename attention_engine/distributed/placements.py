"""Which custom inputs come as a rank's own tokens, and which come whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from attention_engine.distributed.layout import Run
from attention_engine.errors import WrongCustomShape
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.program import KV_IDX, Q_IDX, Program
from attention_engine.passes.starts import own_rows

QUERIES, KEYS = "seq_len", "seq_len_kv"


@dataclass(frozen=True)
class Placement:
    """Of one custom input: the dimension that holds this rank's queries, or its keys; None where there is none.

    columns: the dimension of which every read asks the key's own entry, held by whom it may.

    Own rows are those that every read asks at exactly the query's index, or the key's. A tensor of pairs has own rows
    and all columns. All other dimensions come whole.
    """

    spec: CustomSpec
    queries: int | None
    keys: int | None
    columns: int | None = None

    def shape(self, sizes: Mapping[str, int], own: Mapping[str, int]) -> tuple[int, ...]:
        """What its shape must be. sizes: of the whole attention, by axis; own: this rank's queries and keys."""
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in self.spec.axes]
        for axis, dim in ((QUERIES, self.queries), (KEYS, self.keys)):
            if dim is not None:
                shape[dim] = own[axis]
        return tuple(shape)

    def check(self, tensor: Tensor, sizes: Mapping[str, int], own: Mapping[str, int]) -> None:
        """WrongCustomShape unless the tensor has that shape."""
        expected = self.shape(sizes, own)
        if tuple(tensor.shape) == expected or (tensor.ndim == 0 and expected in ((), (1,))):
            return
        held = "queries" if self.queries is not None else "keys" if self.keys is not None else ""
        why = f"with this rank's {held}, as each is read at its own index" if held else "whole"
        raise WrongCustomShape(
            f"custom input {self.spec.name!r} has shape {tuple(tensor.shape)}. Its axes {self.spec.axes} ask for "
            f"{expected}: it comes {why}."
        )


def of_block(
    tensors: Sequence[Tensor], placed: Sequence[Placement], run: Run, first: int, count: int
) -> list[Tensor]:  # fmt: skip
    """Custom inputs, or what has their shapes, of a run of this rank's queries and of `count` keys from `first` on.
    Those behind the declared ones are whole."""
    found = list(tensors)
    for n, placement in enumerate(placed):
        if placement.queries is not None:
            found[n] = found[n].narrow(placement.queries, run.at, run.count)
        if placement.columns is not None:
            found[n] = found[n].narrow(placement.columns, first, count)
    return found


def placements(program: Program, specs: Sequence[CustomSpec]) -> list[Placement]:
    """Those of all declared custom inputs."""
    own = own_rows(program, {spec.name: spec.axes for spec in specs}, (Q_IDX, KV_IDX))
    found = []
    for spec in specs:
        dims = {axis: n for n, axis in enumerate(spec.axes) if (spec.name, n) in own and isinstance(axis, str)}
        queries = dims.get(QUERIES)
        found.append(Placement(spec, queries, dims.get(KEYS) if queries is None else None, dims.get(KEYS)))
    return found
