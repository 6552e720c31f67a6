"""Runs a program's kernels on tensors: picks them by the tensors' problem, and runs their plan.

Tensors are (batch, length, heads, dim) here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernels, begin_all
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.frontend.meta import Lengths
from attention_engine.ir.problem import STAGED_UNIT, Problem
from attention_engine.ir.program import PLACES, Backward
from attention_engine.passes.maths import Maths
from attention_engine.passes.read_places import ReadPlace, place_of_read
from attention_engine.plan.attention import Tiles
from attention_engine.plan.attention_buffers import SEQUENCE_TILES, place_of_gradient
from attention_engine.plan.buffers import own_length
from attention_engine.plan.targets import Target
from attention_engine.runtime.arguments import (
    ALIGNED,
    MOST_PLANS,
    as_parameter,
    goes_straight,
    placed,
    stride_steps,
    with_strides,
)
from attention_engine.runtime.custom_gradients import CustomGradients
from attention_engine.runtime.ends import settle_at_exit
from attention_engine.runtime.packed_shared import share_results
from attention_engine.runtime.run import Kept, Memory, Ready, tensor_of
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
    return bool(torch.backends.cuda.matmul.allow_tf32)


def stride_unit(*dims: int) -> int:
    """The unit that strides are counted in: 8 elements where head dims allow it."""
    return 8 if all(d % 8 == 0 for d in dims) else 1


Choose = Callable[[tuple[str, ...], Problem, Target, Lengths, torch.device, Tiles, bool, Sequence[Tensor]], Tiles]
Direct = Callable[..., tuple[Tensor, ...]]  # a launch that is known: of what a call is made of, the op's results


class Bound:
    """One direction of a program, for tensors of one signature: its kernels, its steps, and strides in order."""

    def __init__(
        self, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], kept: Kept,
        finals: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        """finals: of a backward pass, the returned rows that gradients arrive at; None: forward."""
        self.kernels, self.unit, plan = kernels, kernels.problem.stride_unit, kernels.plan
        self.strides = [stride_steps(t.shape, t.stride(), self.unit) for t in (q, k, v)]
        lengths = {"batch": q.shape[0], "q_length": q.shape[1], "kv_length": k.shape[1]}
        steps, numbers = plan.forward_steps, {}
        if finals is not None:
            steps = plan.backward_steps(finals)
            numbers = plan.numbers(q.shape[0], q.shape[1], k.shape[1], finals)
            settle_at_exit(q.device)
        own = {
            own_length(name, axis).name: size
            for (name, _, axes), tensor in zip(kernels.problem.custom, custom, strict=True)
            for axis, size in zip(axes, tensor.shape, strict=True) if isinstance(axis, str)
        }  # fmt: skip
        self.ready = Ready(steps, kernels.kernel, {**lengths, **own}, numbers, q.device, kept)
        self.rows = [f"row_{name}" for name, _ in kernels.maths.forward_schedule.rows]
        self.custom = [f"custom_{name}" for name, _, _ in kernels.problem.custom]

    def memory(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Memory:
        """What every kernel reads; copies of tensors whose strides or addresses don't fit."""
        found: Memory = dict(zip(self.custom, custom, strict=True))
        for name in self.kernels.problem.staged:
            (tensor,) = [c for c, place in zip(custom, self.custom, strict=True) if place == f"custom_{name}"]
            found[f"custom_{name}"] = [*(s // STAGED_UNIT for s in tensor.stride()[:-1]), tensor]
        of_q, of_k, of_v = self.strides
        aligned = self.unit == 1 or not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED
        if aligned and of_q is not None and of_k is not None and of_v is not None:
            found["q"], found["k"], found["v"] = (*of_q, q), (*of_k, k), (*of_v, v)
        else:
            found |= {name: with_strides(t, self.unit) for name, t in (("q", q), ("k", k), ("v", v))}
        return found

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], into: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, contiguous, and the rows. into: memory for the output."""
        memory = self.memory(q, k, v, [as_parameter(c) for c in custom] if custom else custom)
        if into is not None:
            memory["o"] = into
        self.ready(memory)
        return tensor_of(memory, "o"), [tensor_of(memory, row) for row in self.rows]

    def direct(self) -> Direct:
        """`forward` with all that it looks up bound beforehand: a twentieth of a call's host time. Tiles of masks, and
        of packed sequences, are listed before."""
        of_q, of_k, of_v = self.strides
        if of_q is None or of_k is None or of_v is None or self.kernels.problem.staged:
            return self._flat
        if not self.kernels.plan.lists_no_keys:
            return self._direct_steps((of_q, of_k, of_v))
        run, empty_like = self.kernels.forward.run, torch.empty_like
        output, *rows = self.ready.results(["o", *self.rows])
        misaligned = 0 if self.unit == 1 else ALIGNED - 1
        if self.kernels.tiles.forward.within_sequences:
            return self._direct_within(output, rows, misaligned)

        def launch(q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> tuple[Tensor, ...]:
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & misaligned:
                return self._flat(q, k, v, *custom)
            found = (empty_like(output), *[empty_like(row) for row in rows])
            run(*of_q, q, *of_k, k, *of_v, v, *map(as_parameter, custom), *found)
            return found

        return launch

    def _direct_steps(self, strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> Direct:
        """The same of a forward pass of several launches, which list the tiles of a mask first."""
        given = [*zip("qkv", strides, strict=True), *[(place, ()) for place in self.custom]]
        steps = self.ready.by_number(given, ["o", *self.rows])
        if steps is None:
            return self._flat
        misaligned = 0 if self.unit == 1 else ALIGNED - 1

        def launch(q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> tuple[Tensor, ...]:
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & misaligned:
                return self._flat(q, k, v, *custom)
            return steps(q, k, v, *map(as_parameter, custom))

        return launch

    def _direct_within(self, output: Tensor, rows: Sequence[Tensor], misaligned: int) -> Direct:
        """The same of packed sequences whose blocks lie in one each."""
        (of_q, of_k, of_v), empty_like = self.strides, torch.empty_like
        assert of_q is not None and of_k is not None and of_v is not None, "`direct` asked"
        run, list_tiles = self.kernels.forward.run, self.kernels.kernel(self.kernels.plan.sequence_tiles).run
        (tiles,) = self.ready.results([SEQUENCE_TILES])
        name = f"custom_{PLACES}"
        places, key = self.custom.index(name), (tiles.shape, list_tiles)

        def launch(q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> tuple[Tensor, ...]:
            if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & misaligned:
                return self._flat(q, k, v, *custom)

            def make() -> dict[str, Tensor]:
                listed = empty_like(tiles)
                list_tiles(q.shape[1], k.shape[1], custom[places], listed)
                return {SEQUENCE_TILES: listed}

            listed = share_results({name: custom[places]}, key, make)[SEQUENCE_TILES]
            found = (empty_like(output), *[empty_like(row) for row in rows])
            run(*of_q, q, *of_k, k, *of_v, v, *map(as_parameter, custom), listed, *found)
            return found

        return launch

    def _flat(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor) -> tuple[Tensor, ...]:
        output, rows = self.forward(q, k, v, custom)
        return (output, *rows)


@dataclass
class ProgramKernels:
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
    _bound: dict[object, Bound] = field(default_factory=dict)
    # the kernels of backward passes that were begun
    _begun: set[int] = field(default_factory=set)
    _kept: Kept = field(default_factory=Kept)

    def of(self, maths: Maths) -> ProgramKernels:
        """The same of other maths."""
        given = self.tiles, self.choose, self.hints
        return ProgramKernels(maths, self.specs, self.interpret, self.device, self.deterministic, *given)

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

    def _sizes(self, q: Tensor, k: Tensor, custom: Sequence[Tensor]) -> Lengths:
        """Batch, queries and keys; of packed sequences their number, and those of one in the mean. Shapes say it: the
        device is not asked."""
        places = next((t for spec, t in zip(self.specs, custom, strict=True) if spec.name == PLACES), None)
        number = max(q.shape[0] if places is None else places.shape[0] - 1, 1)
        return number, -(-q.shape[0] * q.shape[1] // number), -(-k.shape[0] * k.shape[1] // number)

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

    def bound(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], wanted: Collection[str] = (),
        finals: tuple[str, ...] | None = None,
    ) -> Bound:  # fmt: skip
        """The kernels for these tensors, in one direction, with all that their shapes and strides say.

        finals: of a backward pass, the returned rows that gradients arrive at; None: forward.
        """
        tf32 = q.dtype is torch.float32 and allows_tf32()
        key = (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, tf32, finals,
            self.staged(q, v, custom) if custom else (), *wanted, *[(c.dtype, c.shape) for c in custom],
        )  # fmt: skip
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= MOST_PLANS:
                self._bound.clear()
            kernels = self.kernels(q, k, v, custom, wanted, finals is not None)
            if finals is not None:
                kernels = kernels.of_call(*self._sizes(q, k, custom))
            found = self._bound[key] = Bound(kernels, q, k, v, custom, self._kept, finals)
        return found

    def direct(self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]) -> Direct | None:
        """The forward pass of all tensors with these shapes, strides and dtypes, nothing left to look up.

        None where a call must look at more: torch's switch for tf32, where a bias lies, or no entries.
        """
        if q.dtype is torch.float32 or self._biases or not (q.numel() and k.numel() and v.numel()):
            return None
        bound = self.bound(q, k, v, [as_parameter(c) for c in custom])
        return bound.direct()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], into: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, contiguous, and every row that the program returns or saves, fp32 (batch, heads, queries). into:
        where the output goes; None: new memory."""
        custom = [as_parameter(c) for c in custom] if custom else custom
        straight = into if goes_straight(into) else None
        output, rows = self.bound(q, k, v, custom).forward(q, k, v, custom, straight)
        return placed(output, into), rows

    def begin_backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], wanted: Collection[str]
    ) -> None:  # fmt: skip
        """Starts compiling what the forward pass of these tensors will launch, then what the backward pass will; not
        where tiles are still to be measured, nor for fp32 kernels in place of fp16 ones."""
        if self.interpret or self.choose is not None or self.leaves_range(q) or self.maths.backward is None:
            return
        if q.numel() and k.numel() and v.numel():
            custom = [as_parameter(c) for c in custom]
            self.bound(q, k, v, custom)
            kernels = self.kernels(q, k, v, custom, wanted, True).of_call(*self._sizes(q, k, custom))
            if id(kernels) not in self._begun:
                self._begun.add(id(kernels))
                begin_all((kernels.backward, *kernels.of_backward.values()))  # a step waits for the longest of them

    def leaves_range(self, q: Tensor) -> bool:
        """May final weights leave the range of the queries' dtype?"""
        return q.dtype is torch.float16 and not self.maths.backward_fits_half

    def forward_in_range(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The same by fp32 kernels, and in fp32, where final weights may leave fp16's range."""
        tensors = (q.float(), k.float(), v.float()) if self.leaves_range(q) else (q, k, v)
        return self.forward(*tensors, custom)

    def _saved(self, backward: Backward, rows: Sequence[Tensor]) -> Memory:
        """Of the rows that the forward pass returned, those that the backward pass wants."""
        by_name = dict(zip((n for n, _ in self.maths.forward_schedule.rows), rows, strict=True))
        return {f"saved_{n}": by_name[n].contiguous() for n, _ in backward.saved}

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], output: Tensor, rows: Sequence[Tensor],
        d_output: Tensor, d_finals: Mapping[str, Tensor], wanted: Collection[str], into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """Gradients of q, k, v, contiguous, and of the wanted custom inputs that are read, by name. into: where that of
        q goes; None: new memory.

        Where final weights may leave fp16's range, fp32 kernels make them.
        """
        given = (custom, output, rows, d_output, d_finals, wanted)
        if not self.leaves_range(q):
            dq, dk, dv, found = self._backward(q, k, v, *given, into if goes_straight(into) else None)
            return placed(dq, into), dk, dv, found
        wide = (custom, output.float(), rows, d_output.float(), d_finals, wanted)
        dq, dk, dv, found = self._backward(q.float(), k.float(), v.float(), *wide)
        if self.maths.in_blocks:
            return placed(dq, into), dk, dv, found
        return placed(dq.half(), into), dk.half(), dv.half(), found

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], output: Tensor, rows: Sequence[Tensor],
        d_output: Tensor, d_finals: Mapping[str, Tensor], wanted: Collection[str], into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        given, custom = custom, [as_parameter(c) for c in custom] if custom else custom
        finals = tuple(n for n in d_finals if n in dict(self.maths.program.finals)) if d_finals else ()
        bound = self.bound(q, k, v, custom, wanted, finals)
        kernels, backward = bound.kernels, bound.kernels.maths.backward
        assert backward is not None
        memory = bound.memory(q, k, v, custom)
        memory |= {"o": output.contiguous(), "do": with_strides(d_output, bound.unit), **self._saved(backward, rows)}
        memory |= {place_of_gradient(n): d_finals[n].to(torch.float32).contiguous() for n in finals}
        if into is not None:
            memory["dq"] = into
        bound.ready(memory)
        dq, dk, dv = (tensor_of(memory, f"d{name}") for name in "qkv")
        if not custom:
            return dq, dk, dv, {}
        tensors = dict(zip((s.name for s in self.specs), custom, strict=True))
        found = CustomGradients(kernels, q, k, tensors, memory).collect(d_finals)
        named = {s.name: found[s.name].view(c.shape) for s, c in zip(self.specs, given, strict=True) if s.name in found}
        return dq, dk, dv, named
