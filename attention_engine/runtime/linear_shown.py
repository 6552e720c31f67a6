"""What a LinearAttentionEngine shows of itself: its program, kernels, tiles and costs, and a check against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_engine.arch import Arch, check_gpu
from attention_engine.codegen.compile import Resources
from attention_engine.compiler import Kernel, compile_all
from attention_engine.errors import UnknownOption, as_given
from attention_engine.frontend.frames import briefly
from attention_engine.frontend.signatures import DecayOf, Form
from attention_engine.ir.linear import LinearProgram
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.captured import axes_now, specs_of, tensors_now
from attention_engine.runtime.check_report import CheckReport
from attention_engine.runtime.cost import LinearCost, linear_cost_of
from attention_engine.runtime.described import (
    line_of,
    linear_in_lines,
    linear_in_one_line,
    linear_places_of,
    name_of,
)
from attention_engine.runtime.engine import Engine, device_to_show, gpu_of, gpu_to_compile_for, kernel_of
from attention_engine.runtime.explain import explain_linear
from attention_engine.runtime.inputs import check_ranks, order_custom, stand_ins, type_of
from attention_engine.runtime.linear_check import check_linear_call
from attention_engine.runtime.linear_program_kernels import LinearProgramKernels
from attention_engine.runtime.linear_tuning import LinearAsked
from attention_engine.runtime.program_text import Part, program_text
from attention_engine.runtime.small_call import draw
from attention_engine.runtime.source_text import titled

USUAL = (1, 1024)  # batch and length of metas that don't say
RANKS = {None: 0, "token": 3, "channel": 4}  # of the decay tensor, by who has one


class LinearShown(Engine):
    """The half of a LinearAttentionEngine that looks at it; the other half runs calls.

    decay, in what follows: whose a call's decay is, each "token"'s or each "channel"'s; None: there is none.
    """

    mods: dict[str, Callable[..., Any] | None]

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tensors: Sequence[Tensor],
        initial_state: Tensor | None, output_final_state: bool,
    ) -> Any:  # fmt: skip
        raise NotImplementedError

    def _tokens_first(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        raise NotImplementedError

    @briefly
    def check(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, decay: Tensor | None = None,
        *custom: Tensor, initial_state: Tensor | None = None, **named: Tensor,
    ) -> CheckReport:  # fmt: skip
        """Compares the output, the last state and every gradient with float64; print what it returns.

        As `AttentionEngine.check`: without q, k and v they are drawn at random, and with backend="auto" and CPU tensors
        the kernels run on the interpreter, on the first tokens alone.
        """
        drawn = draw(self) if q is None or k is None or v is None else [q, k, v]
        tensors = order_custom(self.custom_io, custom, named)
        report = check_linear_call(self, drawn[0], drawn[1], drawn[2], decay, tensors, initial_state)
        self._note_asked(*drawn)
        return report

    @briefly
    def cost(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
        initial_state: Tensor | None = None, output_final_state: bool = False, device: Arch | None = None,
        **named: Tensor,
    ) -> LinearCost:  # fmt: skip
        """FLOPs of the products with the state that a call with these tensors makes, and bytes that must move, forward
        and backward; it prints as a table, with the time that a GPU needs at least, as `AttentionEngine.cost`'s."""
        order_custom(self.custom_io, custom, named)
        check_ranks(self.layout, q, k, v)
        q, k, v, decay = self._tokens_first(q, k, v, decay)
        return linear_cost_of(q, k, v, decay, initial_state, output_final_state, gpu_of(self, device))

    @briefly
    def source(
        self, kernel: str = "forward", form: Form = "tilelang", *, decay: DecayOf | None = "token",
        device: Arch | None = None,
    ) -> str:  # fmt: skip
        """A kernel as text, by the name that `compile_for` returns; "forward" is the one that makes the output.

        form: "tilelang", or "cuda" for what is compiled (for `device`, else the engine's, else this machine's GPU);
        "hip" and "cutedsl" as `AttentionEngine.source` takes them. Raises UnknownOption, NoDevice, NotLowered.
        """
        kernels = self._planned(device_to_show(self, form, device), decay, starts=True)
        forward = next(each for name, each in kernels.items() if name in ("forward walk", "forward output"))
        text = kernel_of({"forward": forward, **kernels}, kernel).source(form)
        return titled(kernel, text, linear_places_of(self)) if form == "tilelang" else text

    @briefly
    def compile_for(self, device: Arch, *custom: Tensor, decay: DecayOf | None = "token", **named: Tensor) -> list[str]:
        """Compiles the kernels of calls at the metas' lengths for a GPU, which need not be here; their names.

        They are kept on disk: a machine with that GPU and the same cache folder (ATTENTION_ENGINE_CACHE_DIR) then needs
        no nvcc. custom: as a call gets them, on any device, with requires_grad where their gradients will be asked for;
        without any they are taken as fp32, all gradients as asked for. With and without states. Raises NoCudaCompiler,
        TileDoesNotFit, CustomInputMissing.
        """
        check_gpu(device)
        given = order_custom(self.custom_io, custom, named) if custom or named else []
        found = self._all_kernels(device, decay, given)
        compile_all([kernel for _, kernel in found])
        return list(dict.fromkeys(name for name, _ in found))

    @briefly
    def resources(self, device: Arch | None = None, *, decay: DecayOf | None = "token") -> dict[str, Resources]:
        """Registers, spills and shared memory of each kernel, as ptxas reports them, by its name; of calls with states.

        device: a GPU that need not be here; None: this machine's. Compiles what isn't compiled yet. Raises
        NoCudaCompiler, TileDoesNotFit.
        """
        kernels = self._planned(gpu_to_compile_for(self, device), decay, starts=True)
        compile_all(kernels.values())
        return {name: kernel.resources for name, kernel in kernels.items()}

    def _all_kernels(
        self, device: Arch, per: str | None, given: Sequence[Tensor] = (), fixed: bool = False
    ) -> list[tuple[str, Kernel]]:  # fmt: skip
        """The kernels of calls without states and with them, by names that both have. fixed: as `_planned` takes it."""
        return [each for starts in (False, True) for each in self._planned(device, per, starts, given, fixed).items()]

    def _planned(
        self, device: Arch | None, per: str | None, starts: bool, given: Sequence[Tensor] = (), fixed: bool = False
    ) -> dict[str, Kernel]:
        """The kernels of forward, backward and step at the metas' lengths, by name, in the order of their launches,
        with the tiles that are known without measuring.

        device: None for the interpreter. per: whose the decay is. starts: with an initial state, the last one and its
        gradient. given: custom inputs. fixed: no gradient is asked for beyond those of q, k and v.
        """
        asked = self._asked_of(device, per, given)
        asked = replace(asked, wanted=()) if fixed else asked
        forward, backward, step = (asked.kernels_as_known(self.tuning, of) for of in ("forward", "backward", "step"))
        sizes, wanted = asked.lengths, frozenset(asked.wanted)
        return {
            **forward.named(forward.plan.forward_steps(*sizes, starts, starts)),
            **backward.named(backward.plan.backward_steps(*sizes, wanted, starts, starts)),
            **step.named(step.plan.step_steps(starts)),
        }

    def program(self) -> str:
        """The traced mods as numbered lines, each with the function that it is of; in a notebook they are drawn."""
        places = {n: f"{line_of(m)} {name_of(m)}" for n, m in self.mods.items() if m is not None and line_of(m)}
        law = "h = exp(decay) h + k^T v;  o = q h;  x: the tensor's own entry"
        return program_text([Part(law, tuple(self._program.named()), places=places)])

    @briefly
    def explain(self, *, decay: DecayOf | None = "token") -> str:
        """Which tile each kernel runs with for the metas' sizes, where it comes from, and why others fell.

        Decays and custom inputs are taken as fp32, and all their gradients as wanted.
        """
        return explain_linear(self._asked(decay), self.tuning)

    def _asked(self, per: str | None = "token") -> LinearAsked:
        """The problem that the metas describe, on the engine's GPU or this machine's."""
        return self._asked_of(device_to_show(self, "tilelang"), per)

    def _asked_of(self, device: Arch | None, per: str | None, given: Sequence[Tensor] = ()) -> LinearAsked:
        """The problem that the metas describe, and a call's custom inputs: fp32 ones, unless there are some."""
        if per not in RANKS:
            raise UnknownOption(f"decay is {as_given(per)}. Choose 'token', 'channel' or None.")
        place, held = torch.device("meta"), tensors_now(self._captured)
        metas = self._metas()
        dtype = getattr(torch, metas[0].dtype_name)
        q, k, v = (torch.empty(1, 1, m.heads, m.dim, dtype=dtype, device=place) for m in metas)
        decay = torch.empty((*v.shape[:3], q.shape[3])[: RANKS[per]], device=place) if per else None
        declared = list(self.custom_io.specs.values())
        types, tensors = self._types, list(given) or stand_ins(declared, self._types, place)
        if given:
            types = {s.name: type_of(t) for s, t in zip(declared, given, strict=True)}
        sizes = {"batch": None, "heads": v.shape[2], "seq_len": None, "seq_len_kv": None}
        specs = [*declared, *specs_of(self._captured, axes_now(self._captured, held, sizes))]
        wanted = ["decay"] if per else []
        wanted += [s.name for s, t in zip(specs, [*tensors, *held], strict=True) if t.requires_grad]
        custom = [as_parameter(torch.empty((1,) * t.ndim, dtype=t.dtype, device=place)) for t in [*tensors, *held]]
        program: LinearProgram = self._trace(types, RANKS[per])
        program_kernels = LinearProgramKernels(program, specs, device is None, device, per_channel=per == "channel")
        problem = program_kernels.problem(q, k, v, program_kernels.decay_of(decay, v), custom)
        on = "cpu" if device is None else "cuda"
        return LinearAsked(program, specs, problem, program_kernels.target(q), self._usual(), on, tuple(wanted))

    def _usual(self) -> tuple[int, int]:
        """Batch and length of the metas, or usual ones."""
        hints = zip((self._metas()[0].batch, self._metas()[0].length), USUAL, strict=True)
        batch, length = (n if isinstance(n, int) else usual for n, usual in hints)
        return batch, length

    def __repr__(self) -> str:
        return linear_in_one_line(self)

    def __str__(self) -> str:
        return linear_in_lines(self)
