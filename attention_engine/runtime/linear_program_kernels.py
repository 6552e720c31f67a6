"""Runs the kernels of a linear attention on tensors: picks them by the tensors' problem, and runs their plan.

Tensors are (batch, length, heads, dim) here; decay is (batch, length, heads) or, with a decay for each channel, (batch,
length, heads, dim); a state is (batch, heads, dim, dim_v), fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import LinearKernels, begin_all
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.expr import Expr
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTiles
from attention_engine.ir.verify import checked
from attention_engine.plan.launches import Launch, Step
from attention_engine.plan.targets import Target
from attention_engine.plan.verify import verify_steps
from attention_engine.reference.evaluate import Evaluator, add_at
from attention_engine.reference.linear import token_indices
from attention_engine.runtime.arguments import ALIGNED, MOST_PLANS, as_parameter, stride_steps, with_strides
from attention_engine.runtime.ends import settle_at_exit
from attention_engine.runtime.program_kernels import CUSTOM_NAMES, NAMES, Direct, allows_tf32, stride_unit
from attention_engine.runtime.run import Kept, Memory, Ready, sum_parts, tensor_of
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.linear_channels import default_channel_tiles
from attention_engine.tuner.problems import bucket


@dataclass(frozen=True)
class LinearGradients:
    """Gradients, each None where it wasn't wanted or doesn't exist; custom: by name, fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    initial: Tensor | None
    custom: dict[str, Tensor]


@dataclass(frozen=True)
class Pieces:
    """How many pieces the tokens of a call are walked along in, and how many tokens each has, the last one's aside."""

    count: int
    length: int


@dataclass
class LinearProgramKernels:
    """The kernels of one program on one kind of device, for every problem that comes.

    tiles: those to use, whatever the problem; choose(problem, target, (batch, length), device, default tiles, backward,
    wanted gradients beyond q, k, v, custom inputs): which tiles a direction runs with, where they may differ.
    per_channel: for calls with a decay for each channel.
    """

    program: LinearProgram
    specs: Sequence[CustomSpec]
    interpret: bool
    device: Arch | None
    tiles: LinearTiles | None = None
    choose: Callable[..., LinearTiles] | None = None
    per_channel: bool = False
    _kernels: dict[object, LinearKernels] = field(default_factory=dict)
    _ready: dict[object, Ready] = field(default_factory=dict)
    _kept: Kept = field(default_factory=Kept)

    def target(self, tensor: Tensor) -> Target:
        """What the kernels must be compiled for, of the device."""
        return "interpret" if self.interpret else self.device or detect(tensor.device)

    def problem(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor]
    ) -> LinearProblem:  # fmt: skip
        """What the kernels must be compiled for."""
        dims = (v.shape[2], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        shapes = tuple(
            (s.name, CUSTOM_NAMES[c.dtype], tuple(s.axes) or (1,)) for s, c in zip(self.specs, custom, strict=True)
        )
        tf32 = q.dtype is torch.float32 and allows_tf32()
        decay_dtype = "" if decay is None else NAMES[decay.dtype]
        unit = stride_unit(*dims[3:])
        return LinearProblem(*dims, NAMES[q.dtype], decay_dtype, tf32, unit, shapes, self.per_channel)

    def kernels(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor],
        direction: str = "step", wanted: frozenset[str] = frozenset(),
    ) -> LinearKernels:  # fmt: skip
        """The kernels for these tensors; direction: "step", "forward" or "backward" with the wanted gradients."""
        dims = (v.shape[2], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        decay_dtype = None if decay is None else decay.dtype
        key: tuple[object, ...] = (*dims, q.dtype, decay_dtype, q.device, allows_tf32(), *(c.dtype for c in custom))
        choose = None if direction == "step" else self.choose
        if choose is not None:
            key = (*key, bucket(q.shape[0]), bucket(q.shape[1]), direction, wanted)
        if key not in self._kernels:
            problem, target = self.problem(q, k, v, decay, custom), self.target(q)
            tiles = self.tiles or self.default_tiles(problem, target)
            if choose is not None:
                sizes, names = (q.shape[0], q.shape[1]), tuple(sorted(wanted))
                back = direction == "backward"
                tiles = choose(problem, target, sizes, str(q.device), tiles, back, names, custom)
            self._kernels[key] = LinearKernels(self.program, problem, tiles, target)
        return self._kernels[key]

    def default_tiles(self, problem: LinearProblem, target: Target) -> LinearTiles:
        """The tiles of a problem that nothing is known of."""
        if self.per_channel:
            return default_channel_tiles(problem, target)
        return default_linear_tiles(self.program, problem, target)

    def decay_of(self, decay: Tensor | None, v: Tensor) -> Tensor | None:
        """The decay tensor that kernels get; where the mod alone makes decays, zeros that tell them the length."""
        if decay is not None:
            return decay.float() if decay.dtype is torch.float64 else decay
        if not self.program.decays:
            return None
        return torch.zeros(1, 1, 1, device=v.device).expand(v.shape[:3])

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        ends: bool = True,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The output, contiguous, and the last state (an empty tensor unless `ends`)."""
        custom, decay = [as_parameter(c) for c in custom], self.decay_of(decay, v)
        kernels = self.kernels(q, k, v, decay, custom, "forward")
        starts = initial is not None
        memory = self.memory_of(kernels, {"q": q, "k": k, "v": v}, decay, custom, {"initial": initial})
        self._run(
            kernels, ("forward", starts, ends), v, custom, memory,
            lambda: kernels.plan.forward_steps(v.shape[0], v.shape[1], starts, ends),
        )  # fmt: skip
        return tensor_of(memory, "o"), tensor_of(memory, "last") if ends else v.new_empty(0, dtype=torch.float32)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One token, length 1: the output and the next state."""
        custom, decay = [as_parameter(c) for c in custom], self.decay_of(decay, v)
        kernels = self.kernels(q, k, v, decay, custom)
        starts = state is not None
        memory = self.memory_of(kernels, {"q": q, "k": k, "v": v}, decay, custom, {"initial": state})
        self._run(kernels, ("step", starts), v, custom, memory, lambda: kernels.plan.step_steps(starts))
        return tensor_of(memory, "o"), tensor_of(memory, "last")

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        d_output: Tensor, d_last: Tensor | None, wanted: frozenset[str],
    ) -> LinearGradients:  # fmt: skip
        """Gradients of everything; wanted: which of "decay" and the custom inputs are asked for."""
        read_decay, custom = decay is not None, [as_parameter(c) for c in custom]
        decay = self.decay_of(decay, v)
        kernels = self.kernels(q, k, v, decay, custom, "backward", wanted)
        settle_at_exit(v.device)
        starts, ends, plan = initial is not None, d_last is not None, kernels.plan
        tensors, given = {"q": q, "k": k, "v": v, "do": d_output}, {"initial": initial, "d_last": d_last}
        memory = self.memory_of(kernels, tensors, decay, custom, given)
        sizes = v.shape[0], v.shape[1]
        self._run(
            kernels, ("backward", starts, ends, wanted), v, custom, memory,
            lambda: plan.backward_steps(*sizes, wanted, starts, ends),
        )  # fmt: skip
        found = self.custom_gradients(plan.reads_of(*sizes, wanted), v, custom, memory)
        of_decay = tensor_of(memory, "d_decay") if read_decay and plan.of_decay(wanted) else None
        of_initial = tensor_of(memory, "d_initial") if starts else None
        dq, dk, dv = (tensor_of(memory, f"d{name}") for name in "qkv")
        return LinearGradients(dq, dk, dv, of_decay, of_initial, found)

    def begin_backward(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, custom: Sequence[Tensor], wanted: frozenset[str]
    ) -> None:  # fmt: skip
        """Starts compiling what the backward pass of these tensors will launch; not where tiles are to be measured."""
        if self.interpret or self.choose is not None or not (q.numel() and k.numel() and v.numel()):
            return
        given = [as_parameter(c) for c in custom]
        kernels = self.kernels(q, k, v, self.decay_of(decay, v), given, "backward", wanted)
        begin_all(kernels.of_backward(v.shape[0], v.shape[1], wanted).values())

    def memory_of(
        self, kernels: LinearKernels, tensors: dict[str, Tensor], decay: Tensor | None, custom: Sequence[Tensor],
        states: dict[str, Tensor | None],
    ) -> Memory:  # fmt: skip
        """What a call's launches are given."""
        unit = kernels.problem.stride_unit
        memory: Memory = {name: with_strides(t, unit) for name, t in tensors.items()}
        memory |= {f"custom_{s.name}": c for s, c in zip(self.specs, custom, strict=True)}
        memory |= {name: s.to(torch.float32).contiguous() for name, s in states.items() if s is not None}
        if decay is not None:
            memory["decay"] = [*_decay_steps(decay), decay]
        return memory

    def _run(
        self, kernels: LinearKernels, form: tuple[object, ...], v: Tensor, custom: Sequence[Tensor], memory: Memory,
        steps: Callable[[], Sequence[Step]],
    ) -> None:  # fmt: skip
        """Runs the steps of a form of call on the tensors in memory."""
        self.ready_for(kernels, form, v, custom, steps)(memory)

    def ready_for(
        self, kernels: LinearKernels, form: tuple[object, ...], v: Tensor, custom: Sequence[Tensor],
        steps: Callable[[], Sequence[Step]], pieces: Pieces | None = None, done: Collection[Launch] = (),
    ) -> Ready:  # fmt: skip
        """The steps of a form of call, but for those that are done, ready for tensors of these shapes."""
        key = (kernels, form, v.shape[:2], v.device, *[c.shape for c in custom])
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= MOST_PLANS:
                self._ready.clear()
            lengths, numbers = {"batch": v.shape[0], "length": v.shape[1]}, dict[str, int]()
            if pieces is not None:
                lengths, numbers = {**lengths, "pieces": pieces.count}, {"piece_length": pieces.length}
            left = [step for step in checked(verify_steps, steps()) if step not in done]
            ready = self._ready[key] = Ready(left, kernels.kernel, lengths, numbers, v.device, self._kept, done)
        return ready

    def direct(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, custom: Sequence[Tensor],
        steps: bool, ends: bool,
    ) -> Direct | None:  # fmt: skip
        """`step` or `forward` of all tensors with these shapes, strides and dtypes, nothing left to look up.

        None where a call must look at more: torch's switch for tf32, strides that don't fit, or no entries.
        """
        unit = stride_unit(q.shape[3], v.shape[3])
        strides = [stride_steps(t.shape, t.stride(), unit) for t in (q, k, v)]
        if q.dtype is torch.float32 or None in strides or not (q.numel() and k.numel() and v.numel()):
            return None
        params, of_decay = [as_parameter(c) for c in custom], self.decay_of(decay, v)
        kernels, starts = self.kernels(q, k, v, of_decay, params, "step" if steps else "forward"), initial is not None
        plan, batch, length = kernels.plan, v.shape[0], v.shape[1]
        if steps:
            ready = self.ready_for(kernels, ("step", starts), v, params, lambda: plan.step_steps(starts))
        else:
            made = ("forward", starts, ends)
            ready = self.ready_for(kernels, made, v, params, lambda: plan.forward_steps(batch, length, starts, ends))
        return _Direct(self, ready, strides, of_decay, ends, steps).run

    def custom_gradients(
        self, reads: Sequence[tuple[Expr, str, bool]], v: Tensor, custom: Sequence[Tensor], memory: Memory
    ) -> dict[str, Tensor]:
        """Adds what tokens contribute, (batch, heads, padded length), to the entries that they read."""
        if not reads:
            return {}
        tensors, found = {s.name: c for s, c in zip(self.specs, custom, strict=True)}, dict[str, Tensor]()
        batch, length, heads = v.shape[:3]
        evaluate = Evaluator(token_indices(batch, heads, length, v.device), tensors, torch.float32, v.device)
        for read, place, in_parts in reads:
            row = tensor_of(memory, place)
            row = sum_parts(row, row.dtype) if in_parts else row
            shape, total = tensors[read.name].shape, found.get(read.name)
            total = torch.zeros(shape, dtype=torch.float32, device=v.device) if total is None else total
            found[read.name] = add_at(total, read, row[:, :, :length, None], evaluate)
        return found


def _decay_steps(decay: Tensor) -> list[int]:
    """The strides of a decay tensor as kernels take them."""
    return [s if n > 1 else 1 for n, s in zip(decay.shape, decay.stride(), strict=True)]


class _Direct:
    """A forward pass or a step of tensors of one signature."""

    def __init__(
        self, program_kernels: LinearProgramKernels, ready: Ready, strides: Sequence[tuple[int, ...] | None],
        decay: Tensor | None, ends: bool, steps: bool,
    ) -> None:  # fmt: skip
        self.program_kernels, self.ready, self.ends, self.steps = program_kernels, ready, ends, steps
        self.strides, self.of_decay = strides, None if decay is None else _decay_steps(decay)
        self.custom = [f"custom_{s.name}" for s in program_kernels.specs]

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None, *custom: Tensor
    ) -> tuple[Tensor, ...]:
        """The output and, where it ends with one, the state."""
        program_kernels, (of_q, of_k, of_v) = self.program_kernels, self.strides
        assert of_q is not None and of_k is not None and of_v is not None
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNED:
            if self.steps:
                return program_kernels.step(q, k, v, decay, initial, custom)
            return program_kernels.forward(q, k, v, decay, initial, custom, self.ends)
        memory: Memory = {"q": (*of_q, q), "k": (*of_k, k), "v": (*of_v, v)}
        if custom:
            memory |= zip(self.custom, map(as_parameter, custom), strict=True)
        if initial is not None:
            memory["initial"] = initial.to(torch.float32).contiguous()
        if self.of_decay is not None:
            of_decay = program_kernels.decay_of(decay, v)
            assert of_decay is not None
            memory["decay"] = (*self.of_decay, of_decay)
        self.ready(memory)
        output = tensor_of(memory, "o")
        return (output, tensor_of(memory, "last")) if self.ends else (output,)
