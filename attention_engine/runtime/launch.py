"""Runs a program's kernels on tensors: picks them by the tensors' problem, allocates results, launches.

Tensors are (batch, length, heads, dim) here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernels, Target, Tiles, places_of
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.frontend.meta import Lengths
from attention_engine.ir.problem import STAGED_UNIT, Problem, padded, padded_rows
from attention_engine.ir.program import Backward
from attention_engine.passes.by_hand import ALL_UNITS, pairs_of_a_unit, units_ahead
from attention_engine.passes.maths import Maths
from attention_engine.passes.read_places import ReadPlace, place_of_read
from attention_engine.runtime.custom_gradients import CustomGradients
from attention_engine.runtime.plans import MOST_PLANS, Direct, LaunchPlan, as_parameter, template, with_strides
from attention_engine.runtime.tile_maps import TileMaps
from attention_engine.tuner.defaults import default_tiles
from attention_engine.tuner.problems import bucket

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
CUSTOM_NAMES = {
    **NAMES,
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int8: "int8",
}


def allows_tf32() -> bool:
    """May fp32 products be rounded to tf32, by torch's own switch?"""
    return torch.backends.cuda.matmul.allow_tf32


def stride_unit(*dims: int) -> int:
    """The unit that strides are counted in: 8 elements where head dims allow it."""
    return 8 if all(d % 8 == 0 for d in dims) else 1


Choose = Callable[
    [tuple[str, ...], Problem, Target, Lengths, torch.device, Tiles, bool, Sequence[Tensor]], Tiles
]


@dataclass
class Launcher:
    """The kernels of one program on one kind of device, for every problem that comes.

    tiles: those to use, whatever the problem; choose(wanted, problem, target, (batch, queries, keys), device,
    default tiles, backward, custom inputs): which tiles a direction runs with, where they may differ from the defaults.
    hints: batch, queries and keys that calls will likely have, for defaults.
    """

    maths: Maths
    specs: Sequence[CustomSpec]
    interpret: bool
    device: Arch | None
    deterministic: bool
    tiles: Tiles | None = None
    choose: Choose | None = None
    hints: Lengths | None = None
    _kernels: dict[object, Kernels] = field(default_factory=dict)
    _plans: dict[object, LaunchPlan] = field(default_factory=dict)
    _maps: TileMaps = field(default_factory=TileMaps)

    def problem(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Problem:
        """What the kernels must be compiled for."""
        shapes = []
        for spec, tensor in zip(self.specs, custom, strict=True):
            axes = spec.axes if spec.axes else (1,)
            shapes.append((spec.name, CUSTOM_NAMES[tensor.dtype], tuple(axes)))
        tf32 = q.dtype is torch.float32 and allows_tf32()
        dim, dim_v = q.shape[3], v.shape[3]
        staged = self.staged(q, v, custom)
        unit = stride_unit(dim, dim_v)
        return Problem(q.shape[2], k.shape[2], dim, dim_v, NAMES[q.dtype], tf32, unit, tuple(shapes), staged)

    @cached_property
    def _biases(self) -> list[int]:
        """The numbers of the custom inputs that pairs read each at its own entry."""
        axes = {spec.name: (number, tuple(spec.axes)) for number, spec in enumerate(self.specs)}
        reads = [(read, *axes[read.name]) for read in self.maths.program.loads()]
        return sorted({n for read, n, of_read in reads if place_of_read(read, of_read) is ReadPlace.PAIR})

    def staged(self, q: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[str, ...]:
        """The biases whose tiles are copied ahead: of 16 bits, with rows of whole 16 bytes, where tiles have room."""
        if not self._biases or q.dtype.itemsize != 2 or max(q.shape[3], v.shape[3]) > 128:
            return ()
        target = self.target(q)
        if isinstance(target, Arch) and not target.has_wgmma:
            return ()
        fits = [n for n in self._biases if custom[n].dtype.itemsize == 2 and custom[n].shape[-1] % STAGED_UNIT == 0]
        return tuple(self.specs[n].name for n in fits[:1] if custom[n].data_ptr() % 16 == 0)

    def target(self, tensor: Tensor) -> Target:
        """What the kernels must be compiled for, of the device."""
        if self.interpret:
            return "interpret"
        return self.device or detect(tensor.device)

    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], wanted: Collection[str] = (),
        backward: bool = False,
    ) -> Kernels:  # fmt: skip
        """The kernels for these tensors, in one direction; wanted: the custom inputs whose gradients are asked for."""
        lengths = (bucket(q.shape[1]), bucket(k.shape[1]), backward) if self.choose is not None else ()
        tf32 = q.dtype is torch.float32 and allows_tf32()
        key = (
            tuple(wanted), self.staged(q, v, custom), q.dtype, q.shape[2:], k.shape[2], v.shape[3], q.device, tf32,
            *lengths, *[c.dtype for c in custom],
        )  # fmt: skip
        found = self._kernels.get(key)
        if found is None:
            problem, target, maths = self.problem(q, k, v, custom), self.target(q), self.maths.wanting(wanted)
            tiles = self.tiles or default_tiles(problem, maths, target, self.hints)
            if self.choose is not None:
                sizes = (q.shape[0], q.shape[1], k.shape[1])
                tiles = self.choose(tuple(wanted), problem, target, sizes, q.device, tiles, backward, custom)
            found = self._kernels[key] = Kernels(maths, problem, tiles, target, self.deterministic)
        return found

    def plan(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], wanted: Collection[str] = (),
        backward: bool = False,
    ) -> LaunchPlan:  # fmt: skip
        """The kernels for these tensors, in one direction, with all that their shapes and strides say."""
        tf32 = q.dtype is torch.float32 and allows_tf32()
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, tf32, backward,
            self.staged(q, v, custom) if custom else (), *wanted, *[c.dtype for c in custom],
        )  # fmt: skip
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            kernels = self.kernels(q, k, v, custom, wanted, backward)
            found = self._plans[key] = LaunchPlan.make(kernels, q, k, v, len(self.maths.forward_schedule.rows))
        return found

    def direct(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Direct | None:
        """The forward pass of all tensors with these shapes, strides and dtypes, nothing left to look up.

        None where a call must look at more: torch's switch for tf32, where a bias lies, a tile map, or no entries.
        """
        if q.dtype is torch.float32 or self._biases or not (q.numel() and k.numel() and v.numel()):
            return None
        plan = self.plan(q, k, v, [as_parameter(c) for c in custom])
        return None if plan.kernels.tile_plan.mapped else plan.direct()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output, contiguous, and every row that the program returns or saves, fp32 (batch, heads, queries)."""
        custom = [as_parameter(c) for c in custom] if custom else custom
        plan = self.plan(q, k, v, custom)
        output, rows = plan.results()
        maps = self._maps(plan.kernels, plan.kernels.tiles.forward, True, q, k, custom)
        plan.kernels.forward.run(*plan.inputs(q, k, v, custom), *maps, output, *rows)
        return output, rows

    def leaves_range(self, q: Tensor) -> bool:
        """May final weights leave the range of the queries' dtype?"""
        return q.dtype is torch.float16 and not self.maths.backward_fits_half

    def forward_in_range(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same by fp32 kernels, and in fp32, where final weights may leave fp16's range."""
        tensors = (q.float(), k.float(), v.float()) if self.leaves_range(q) else (q, k, v)
        return self.forward(*tensors, custom)

    def _saved(self, backward: Backward, rows: Sequence[Tensor]) -> list[Tensor]:
        """Of the rows that the forward pass returned, those that the backward pass wants."""
        by_name = dict(zip((n for n, _ in self.maths.forward_schedule.rows), rows, strict=True))
        return [by_name[n].contiguous() for n, _ in backward.saved]

    def _extremes(
        self, kernels: Kernels, over_keys: bool, inputs: Sequence[int | Tensor], q: Tensor, k: Tensor,
        custom: Sequence[Tensor],
    ) -> list[Tensor]:  # fmt: skip
        """The rows of extremes that a kernel over keys, or those over queries, are to meet: (batch, heads, queries)."""
        backward = kernels.maths.backward
        if backward is None or not backward.extremes:
            return []
        like = template((q.shape[0], q.shape[2], q.shape[1]), torch.float32, q.device)
        found = [torch.empty_like(like) for extreme in backward.extremes for _ in extreme.names]
        maps = self._maps(kernels, kernels.tile_of_extremes(over_keys), True, q, k, custom)
        kernels.extremes(over_keys).run(*inputs, *maps, *found)
        return found

    @staticmethod
    def _sums_of_dq(kernels: Kernels, q: Tensor, k: Tensor, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """The sums of dQ, so many queries a head, and counters: where blocks over keys add to those, and use these."""
        workspace, counters = [], []
        batch, _, heads, dim = q.shape
        if not kernels.over_queries:
            size = (batch * heads, length * padded(dim))
            workspace = [torch.empty_like(template(size, torch.float32, q.device))]
            if kernels.tiles.backward.specialised:
                counters = [torch.empty_like(template((batch * k.shape[2] + 1, 2), torch.int32, q.device))]
        return workspace, counters

    @staticmethod
    def _order(kernels: Kernels, batch: int, queries: int, keys: int) -> tuple[list[int], list[int]]:
        """How blocks over keys are ordered, for a launch: pairs_of_a_unit, where there are such, and units_ahead."""
        tile, places = kernels.tiles.backward, places_of(kernels.target)
        pairs = pairs_of_a_unit(kernels.problem, tile, batch, queries, keys, places)
        together = [pairs] if kernels.longest_first else []
        return together, [units_ahead(tile, keys, places, *together)]

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], output: Tensor, rows: Sequence[Tensor],
        d_output: Tensor, d_finals: Mapping[str, Tensor], wanted: Collection[str],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k, v, contiguous, and of the wanted custom inputs that are read, by name.

        Where final weights may leave fp16's range, fp32 kernels make them.
        """
        given = (custom, output, rows, d_output, d_finals, wanted)
        if not self.leaves_range(q):
            return self._backward(q, k, v, *given)
        wide = (custom, output.float(), rows, d_output.float(), d_finals, wanted)
        dq, dk, dv, found = self._backward(q.float(), k.float(), v.float(), *wide)
        return dq.half(), dk.half(), dv.half(), found

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], output: Tensor, rows: Sequence[Tensor],
        d_output: Tensor, d_finals: Mapping[str, Tensor], wanted: Collection[str],
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        given, custom = custom, [as_parameter(c) for c in custom] if custom else custom
        plan = self.plan(q, k, v, custom, wanted, backward=True)
        kernels = plan.kernels
        backward = kernels.maths.backward
        if backward is None:
            assert self.maths.refusal is not None
            raise self.maths.refusal
        output, kept = output.contiguous(), self._saved(backward, rows)
        finals = tuple(n for n in d_finals if n in dict(self.maths.program.finals)) if d_finals else ()
        batch, queries, heads, _ = q.shape
        length = padded_rows(queries, kernels.row_pad)
        inputs = plan.inputs(q, k, v, custom)
        saved = [*kept, *self._extremes(kernels, True, inputs, q, k, custom)]
        gradient = with_strides(d_output, plan.unit)
        made = template((batch, heads, length), torch.float32, q.device)
        delta, *row_values = [torch.empty_like(made) for _ in range(1 + len(backward.rows))]
        together, ahead = self._order(kernels, batch, queries, k.shape[1])
        workspace, counters = self._sums_of_dq(kernels, q, k, length)
        arriving = [d_finals[n].to(torch.float32).contiguous() for n in finals]
        kernels.preprocess(finals).run(
            *inputs, output, *gradient, *saved, *arriving, delta, *row_values, *workspace, *counters,
            *([*together, *ahead] if counters else []),
        )
        again = kernels.preprocess(finals, delta_given=True)
        if backward.exact_delta:
            exact = q.new_empty(batch, heads, queries, dtype=torch.float32)
            maps = self._maps(kernels, kernels.tiles.queries, True, q, k, custom)
            kernels.exact_delta.run(*inputs, *maps, *gradient, *row_values, exact)
            again.run(*inputs, exact, *saved, *arriving, delta, *row_values)
        dq, dk, dv = [torch.empty_like(template(t.shape, t.dtype, t.device)) for t in (q, k, v)]
        tensors = dict(zip((s.name for s in self.specs), custom, strict=True))
        gradients = CustomGradients(kernels, q, k, tensors) if custom else None
        maps = self._maps(kernels, kernels.tiles.backward, False, q, k, custom)
        sums = gradients.sums_over_keys() if gradients else []
        order = [*together, *(ahead if counters else [])]
        if kernels.makes_delta:
            order += [ALL_UNITS if finals else ahead[0], output]
        stores_dq = kernels.stores_dq
        order += [dq] if stores_dq else []
        kernels.backward.run(*inputs, *maps, *gradient, *row_values, dk, dv, *order, *workspace, *counters, *sums)
        if kernels.finds_twice:
            saved = [*kept, *self._extremes(kernels, False, inputs, q, k, custom)]
            again.run(*inputs, delta[..., :queries].contiguous(), *saved, *arriving, delta, *row_values)
        if kernels.over_queries:
            sums = gradients.sums_over_queries() if gradients else []
            maps = self._maps(kernels, kernels.tiles.queries, True, q, k, custom)
            kernels.backward_queries.run(*inputs, *maps, *gradient, *row_values, dq, *sums)
        else:
            order = [*together, *(ahead if stores_dq else [])]
            kernels.postprocess.run(dq, *workspace, *counters, *(order if counters else []))
        if gradients is None:
            return dq, dk, dv, {}
        gradients.walk_pairs([*inputs, *gradient, *row_values])
        found = gradients.collect(dict(zip(backward.given_rows, saved, strict=True)), delta, d_finals)
        named = {s.name: found[s.name].view(c.shape) for s, c in zip(self.specs, given, strict=True) if s.name in found}
        return dq, dk, dv, named
