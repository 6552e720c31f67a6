"""Calls with DTensors: sharded over batches or heads, each rank attends alone to what it holds.

A rank's b and h are those of the whole attention, by the starts of runtime/moved.py; where no function asks for them,
the rank runs the kernels of a plain call. Custom inputs come with what a rank holds where every read asks for its own
batch or head, and whole elsewhere. DTensors bring gradients of what is whole to one sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attention_engine.errors import HeadsDoNotDivide, OptionsClash, WrongPlacement
from attention_engine.ir.program import STARTS, B, H
from attention_engine.passes.starts import Moved, own_rows, with_starts
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.inputs import check_qkv, check_ranks, order_custom
from attention_engine.runtime.moved import Portion, call_portion

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from attention_engine.runtime.module import AttentionEngine

INDICES = {"batch": B, "heads": H}
DIMS = {"bshd": {"batch": 0, "heads": 2}, "bhsd": {"batch": 0, "heads": 1}}  # of q, k and v
WIDTHS = {"bshd": {1: "tokens", 3: "a head's entries"}, "bhsd": {2: "tokens", 3: "a head's entries"}}
Own: TypeAlias = frozenset[tuple[str, str, int]]  # (axis, custom input, dimension)
KNOWN: WeakKeyDictionary[Any, dict[object, tuple[Own, bool]]] = WeakKeyDictionary()  # by engine, then axes


@dataclass(frozen=True)
class Shares:
    """Over what each dimension of a mesh is split: "batch", "heads", or None, where all of its ranks do the same."""

    mesh: Any
    of_dims: tuple[str | None, ...]

    def count(self, axis: str) -> int:
        """How many parts an axis is in."""
        return math.prod(self.mesh.size(n) for n, each in enumerate(self.of_dims) if each == axis)

    def rank(self, axis: str) -> int:
        """Which of them this rank has."""
        found = 0
        for n, each in enumerate(self.of_dims):
            if each == axis:
                found = found * self.mesh.size(n) + self.mesh.get_local_rank(n)
        return found

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that are split."""
        return tuple(axis for axis in INDICES if axis in self.of_dims)

    def local(self, tensor: Tensor, dims: Mapping[str, int]) -> Tensor:
        """This rank's part of a tensor, split in these dimensions. What comes whole has a gradient that ranks add up;
        so has a plain tensor, which is taken to be the same on all ranks."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        wanted = [Shard(dims[axis]) if axis and axis in dims else Replicate() for axis in self.of_dims]
        arriving = [
            placement if isinstance(placement, Shard) or axis is None else Partial()
            for axis, placement in zip(self.of_dims, wanted, strict=True)
        ]
        if list(tensor.placements) != wanted:
            tensor = tensor.redistribute(self.mesh, wanted)
        found: Tensor = tensor.to_local(grad_placements=arriving)
        return found

    def whole(self, part: Tensor, dims: Mapping[str, int]) -> DTensor:
        """Ranks' parts as one DTensor."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() if axis is None else Shard(dims[axis]) for axis in self.of_dims]
        return DTensor.from_local(part, self.mesh, placements, run_check=False)


def call_sharded(
    engine: AttentionEngine, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], named: Mapping[str, Tensor],
    return_rowscales: bool, dropout_seed: int | Tensor | None, refused: Mapping[str, object],
) -> Any:  # fmt: skip
    """What an engine gives of DTensors: a DTensor. refused: arguments that such a call can't take, by name."""
    for name, value in refused.items():
        if value is not None:
            raise OptionsClash(f"q is a DTensor, and a call with {name} takes none. Give each rank its own tensors.")
    tensors = order_custom(engine.custom_io, custom, named)
    check_ranks(engine.layout, q, k, v, sharded=True)
    shares = shares_of(engine.layout, q, k, v)
    if engine.qkv_meta is not None:
        turned = [t if engine.layout == "bshd" else t.transpose(1, 2) for t in (q, k, v)]
        kernels = engine._backend_for(q.device) != "reference"
        check_qkv(engine.qkv_meta, engine.layout, kernels, turned[0], turned[1], turned[2])
    dims = DIMS[engine.layout]
    batch, heads = q.shape[0], q.shape[dims["heads"]]
    sizes = {"batch": batch, "heads": heads}
    own, moves = _reads(engine, shares)
    of_q = shares.local(q, {axis: dims[axis] for axis in shares.axes})
    of_k, of_v = (_keys(shares, t, batch, dims) for t in (k, v))
    parts = [_own(shares, t, spec.name, own, sizes) for spec, t in zip(engine.custom_io.in_order, tensors, strict=True)]
    held = [shares.local(t, {}) for t in tensors_now(engine._captured)]
    if moves or engine._drops or (engine.qkv_meta is not None and "heads" in shares.axes):
        starts = [shares.rank(axis) * sizes[axis] // shares.count(axis) for axis in INDICES]
        at = torch.tensor([[*starts, 0, 0]], dtype=torch.int32, device=of_q.device)
        part = Portion(at, shares.axes, sizes)
        found = call_portion(engine, part, of_q, of_k, of_v, parts, None, return_rowscales, dropout_seed, held)
    else:
        found = engine._call(of_q, of_k, of_v, parts, held, None, return_rowscales, {})
    output, rows = found if return_rowscales else (found, {})
    output = shares.whole(output, dims)
    of_rows = {"batch": 0, "heads": 1}
    return (output, {n: shares.whole(r, of_rows) for n, r in rows.items()}) if return_rowscales else output


def shares_of(layout: str, q: Tensor, k: Tensor, v: Tensor) -> Shares:
    """How ranks share q, k and v; WrongPlacement, HeadsDoNotDivide where they can't attend alone."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    axes, found = {dim: axis for axis, dim in DIMS[layout].items()}, []
    given: list[tuple[str, DTensor]] = []
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not isinstance(tensor, DTensor):
            raise WrongPlacement(f"q is a DTensor, and {name} is none. Give all three as DTensors of one mesh.")
        given.append((name, tensor))
        if tensor.device_mesh != given[0][1].device_mesh:
            raise WrongPlacement(f"q and {name} are DTensors of two meshes. Give all three on one mesh.")
    mesh = given[0][1].device_mesh
    for n in range(mesh.ndim):
        split: dict[str, str] = {}
        for name, tensor in given:
            placement = tensor.placements[n]
            if isinstance(placement, Replicate):
                continue
            if type(placement) is not Shard:
                raise WrongPlacement(
                    f"{name} is {placement} over {_called(mesh, n)}. Give Shard(dim) of batch or heads, or Replicate: "
                    f"{name}.redistribute(placements=...)."
                )
            dim = placement.dim % 4
            if dim not in axes:
                _refuse_width(layout, name, dim, _called(mesh, n))
            split[name] = axes[dim]
        if len(set(split.values())) > 1:
            both = ", ".join(f"{name} over {axis}" for name, axis in split.items())
            raise WrongPlacement(f"{_called(mesh, n)} shards {both}. Shard all of them over one, or replicate some.")
        found.append(next(iter(split.values()), None))
    shares = Shares(mesh, tuple(found))
    heads, count = q.shape[DIMS[layout]["heads"]], shares.count("heads")
    if heads % count:
        raise HeadsDoNotDivide(f"{heads} query heads can't be shared evenly among {count} ranks. Use a multiple.")
    if q.shape[0] % shares.count("batch"):
        raise WrongPlacement(
            f"a batch of {q.shape[0]} can't be shared evenly among {shares.count('batch')} ranks. Use a multiple."
        )
    return shares


def _refuse_width(layout: str, name: str, dim: int, where: str) -> None:
    what = WIDTHS[layout][dim]
    hint = (
        "  A sequence that ranks share needs attention_engine.distributed.ContextParallel(engine, mesh), which takes "
        "each rank's own tokens."
        if what == "tokens"
        else f"  Redistribute it first, over heads or batches: {name}.redistribute(placements=...)."
    )
    raise WrongPlacement(
        f"{name} is sharded over {what} (dimension {dim}) by {where}, and no rank could attend alone.\n{hint}"
    )


def _called(mesh: Any, n: int) -> str:
    names = mesh.mesh_dim_names
    return f"the mesh's dimension {names[n]!r}" if names else f"dimension {n} of the mesh"


def _keys(shares: Shares, tensor: Tensor, batch: int, dims: Mapping[str, int]) -> Tensor:
    """The keys, or the values, that this rank's query heads read. Key heads that ranks don't divide stay whole, and
    each rank picks those that it reads, as often as heads begin anew."""
    at, heads, count = dims["heads"], tensor.shape[dims["heads"]], shares.count("heads")
    split = {axis: dims[axis] for axis in shares.axes}
    if tensor.shape[0] == 1 and batch != 1:  # one for all batches
        split.pop("batch", None)
    if heads % count == 0:
        return shares.local(tensor, split)
    split.pop("heads")
    times = count // math.gcd(heads, count)
    each = heads * times // count
    first = shares.rank("heads") * each
    picked = [n // times for n in range(first, first + each)]
    whole = shares.local(tensor, split)
    if picked == list(range(picked[0], picked[0] + each)):
        return whole.narrow(at, picked[0], each)
    return whole.index_select(at, torch.tensor(picked, device=whole.device))


def _own(
    shares: Shares, tensor: Tensor, name: str, own: Own, sizes: Mapping[str, int]
) -> Tensor:  # fmt: skip
    """What this rank reads of a custom input."""
    dims: dict[str, int] = {}
    narrowed: list[tuple[str, int]] = []
    for axis, n in sorted((axis, n) for axis, each, n in own if each == name):
        if axis in shares.axes and n < tensor.ndim and tensor.shape[n] == sizes[axis]:  # else a check will tell
            if axis in dims:
                narrowed.append((axis, n))
            else:
                dims[axis] = n
    part = shares.local(tensor, dims)
    for axis, n in narrowed:
        count = sizes[axis] // shares.count(axis)
        part = part.narrow(n, shares.rank(axis) * count, count)
    return part


def _reads(engine: AttentionEngine, shares: Shares) -> tuple[Own, bool]:
    """The dimensions that every read asks at its own batch or head; and whether anything else asks for either: then a
    rank must know where its own stand in the whole."""
    known = KNOWN.setdefault(engine, {})
    if shares.axes not in known:
        program, axes = engine._program, {spec.name: spec.axes for spec in engine.custom_io.in_order}
        indices = tuple(INDICES[axis] for axis in shares.axes)
        dims = own_rows(program, axes, indices)
        moved = with_starts(program, Moved(indices, False, dims))
        split = {(name, n) for name, each in axes.items() for n, axis in enumerate(each) if axis in shares.axes}
        reads = split != dims or any(load.name == STARTS for load in moved.loads())
        known[shares.axes] = frozenset((str(axes[name][n]), name, n) for name, n in dims), reads
    return known[shares.axes]
