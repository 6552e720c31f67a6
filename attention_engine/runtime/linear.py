"""LinearAttentionEngine: a user's linear attention as a torch.nn.Module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernel
from attention_engine.errors import BadInput, NoDevice, NotYetSupported, UnknownOption
from attention_engine.frontend.captured import Captured
from attention_engine.frontend.custom_io import CustomIO, CustomSpec
from attention_engine.frontend.meta import Meta, check_linear_metas
from attention_engine.frontend.mods import trace_mods
from attention_engine.ir.expr import Type
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTiles
from attention_engine.plan.targets import Target
from attention_engine.runtime import linear_op as op
from attention_engine.runtime import transforms  # noqa: F401 - registers what transforms need
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.captured import Axes, axes_now, capturing, check_captured, sizes_of, specs_of, tensors_now
from attention_engine.runtime.check import CheckReport
from attention_engine.runtime.explain import explain_linear
from attention_engine.runtime.inputs import (
    ORDERS,
    backend_for,
    check_custom,
    check_lengths,
    check_options,
    check_ranks,
    check_tuning,
    check_type,
    follow_autocast,
    guess_types,
    order_custom,
    share_keys,
    stand_ins,
    type_of,
)
from attention_engine.runtime.linear_check import compare_linear
from attention_engine.runtime.linear_launch import LinearLauncher
from attention_engine.runtime.linear_tuning import LinearAsked
from attention_engine.runtime.tuning import Tuning, choose
from attention_engine.runtime.watching import in_forward_mode

ROWS = {
    "bshd": "(batch, length, heads) or (batch, length, heads, dim)",
    "bhsd": "(batch, heads, length) or (batch, heads, length, dim)",
}

USUAL = (1, 1024)  # batch and length of metas that don't say
RANKS = {None: 0, "token": 3, "channel": 4}  # of the decay tensor, by who has one


class LinearAttentionEngine(torch.nn.Module):
    """A linear attention, from its maths: h_t = exp(a_t) h_{t-1} + k_t^T v_t, o_t = q_t h_t for each head.

    qkv_meta: three `meta_tensor(B, H, S, D)` for q, k, v; the heads are v's, and those of q and of k divide them (head
    h reads query head h // (heads / query heads)). q_mod, k_mod, v_mod, decay_mod: (x, custom) -> x, elementwise, on
    the entries of q, k, v and decay (the log of what a token keeps of the state, or of a channel of it: its rows);
    None leaves them. custom_io: its
    "seq_len" and "seq_len_kv" are the same here, "heads" are v's. layout, device, backend: as AttentionEngine's. Every
    gradient is the same in every run, so `deterministic` asks for what there is anyway.

    Raises BadMeta, HeadsDoNotGroup, UnknownOption, NotYetSupported, and what tracing finds wrong in the mods.
    """

    def __init__(
        self, qkv_meta: Sequence[Meta], q_mod: Callable[..., Any] | None = None,
        k_mod: Callable[..., Any] | None = None, v_mod: Callable[..., Any] | None = None,
        decay_mod: Callable[..., Any] | None = None, custom_io: CustomIO | None = None, *,
        layout: str = "bshd", device: Arch | None = None, backend: str = "auto", tune: bool = False,
        tune_filename: str | None = None, tune_bwd: bool = False, deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_meta = check_linear_metas(qkv_meta)
        self.custom_io = custom_io if custom_io is not None else CustomIO()
        check_options(backend, layout, None, device, (1, 1))
        check_tuning(backend, tune=tune, tune_bwd=tune_bwd, tune_filename=tune_filename)
        self.tuning = Tuning((tune, tune_bwd), (tune_filename, tune_filename))
        check_type("custom_io", self.custom_io, CustomIO)
        self.mods = {"q": q_mod, "k": k_mod, "v": v_mod, "decay": decay_mod}
        self.layout, self.device, self.deterministic = layout, device, deterministic
        self.backend = "tilelang" if backend == "tl" else backend
        self._keys: dict[object, str] = {}
        self._first: tuple[Captured, ...] | None = None
        self._types = guess_types(list(self.custom_io.specs), lambda types: self._trace(types, True))

    def __getstate__(self) -> dict[str, Any]:
        """What was given; what tracing found stays in its process, and with the objects that it was found in."""
        return {n: value for n, value in super().__getstate__().items() if n not in ("_keys", "_first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keys, self._first = {}, None

    def _trace(self, types: Mapping[str, Type], decay_given: bool) -> LinearProgram:
        return self._traced(types, decay_given)[0]

    def _traced(self, types: Mapping[str, Type], decay_given: bool) -> tuple[LinearProgram, tuple[Captured, ...]]:
        with capturing(tuple(self.custom_io.specs), types) as capture:
            program = trace_mods(self.mods, self.custom_io, types, decay_given)
        return replace(program, custom=(*program.custom, *capture.names)), tuple(capture.captured.values())

    @property
    def _captured(self) -> tuple[Captured, ...]:
        """The tensors that the mods captured, in the order met."""
        self._has_traced()
        assert self._first is not None
        return self._first

    @torch.compiler.assume_constant_result
    def _has_traced(self) -> bool:
        """True. A copy traces when first asked, as the objects that its mods read must be whole."""
        if self._first is None:
            self._first = self._traced(self._types, True)[1]
        return True

    def _specs(self, v: Tensor, captured: Sequence[Tensor]) -> list[CustomSpec]:
        """The custom inputs, and the captured tensors as such."""
        axes = axes_now(self._captured, captured, sizes_of(v, v))
        return [*self.custom_io.specs.values(), *specs_of(self._captured, axes)]

    @torch.compiler.assume_constant_result  # torch.compile asks for the key and looks no further
    def _key(self, backend: str, types: tuple[tuple[str, Type], ...], decay_rank: int, axes: Axes) -> str:
        """The key of the attention that runs these calls; registered when first needed. decay_rank: 0 without one;
        axes: of captured tensors."""
        variant = (backend, types, decay_rank, axes)
        if variant not in self._keys:
            program = self._trace(dict(types), decay_rank > 0)
            specs = [*self.custom_io.specs.values(), *specs_of(self._captured, axes)]
            device = self.device.name if self.device else ""
            options = f"{backend} {device} {decay_rank} {[(s.name, s.axes) for s in specs]} {self.tuning}"
            key = program.fingerprint + hashlib.blake2b(options.encode(), digest_size=6).hexdigest()
            if key not in op.LINEAR_ATTENTIONS:
                launcher = None
                if backend != "reference":
                    launcher = self._launcher(program, specs, backend == "interpret", decay_rank == 4)
                op.LINEAR_ATTENTIONS[key] = op.LinearAttention(program, specs, launcher)
            self._keys[variant] = key
        return self._keys[variant]

    def _launcher(
        self, program: LinearProgram, specs: Sequence[CustomSpec], interpret: bool, per_channel: bool
    ) -> LinearLauncher:
        def choose_tiles(
            problem: LinearProblem, target: Target, lengths: tuple[int, int], place: str, tiles: LinearTiles,
            backward: bool, wanted: tuple[str, ...], custom: Sequence[Tensor],
        ) -> LinearTiles:  # fmt: skip
            asked = LinearAsked(program, specs, problem, target, lengths, place, wanted)
            chosen: LinearTiles = choose(tuning, asked, tiles, backward, custom)
            return chosen

        tuning = self.tuning
        if not per_channel:
            chosen = choose_tiles if tuning.matters else None
            return LinearLauncher(program, specs, interpret, self.device, choose=chosen)
        if any(tuning.measure):
            raise NotYetSupported(
                "this version tunes no linear attention with a decay for each channel.\n"
                "  Leave tune and tune_bwd out: default tiles are used."
            )
        return LinearLauncher(program, specs, interpret, self.device, per_channel=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
                initial_state: Tensor | None = None, output_final_state: bool = False,
                **named: Tensor) -> Any:  # fmt: skip
        """o, like v; with output_final_state (o, the state after the last token: (B, H, D, DV), fp32).

        q, k, v: (batch, length, heads, dim) and decay (batch, length, heads), or (batch, heads, length, dim) and
        (batch, heads, length) with layout="bhsd". A decay with q's last dim as its own is one for each channel: for
        each row of the state. No decay is a decay of 0 before decay_mod. initial_state:
        (B, H, D, DV), the state before the first token. custom: in CustomIO's order, or by name. Raises BadInput for
        tensors that don't fit.
        """
        tensors = order_custom(self.custom_io, custom, named)
        return self._call(q, k, v, decay, [*tensors, *tensors_now(self._captured)], initial_state, output_final_state)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tensors: Sequence[Tensor],
        initial_state: Tensor | None, output_final_state: bool,
    ) -> Any:  # fmt: skip
        """A call with these custom inputs, and these tensors in place of the captured ones behind them."""
        q, k, v, decay = self._tokens_first(q, k, v, decay)
        key = self._check(q, k, v, decay, initial_state, tensors)
        output, last = op.run(key, q, k, v, decay, initial_state, tensors, output_final_state)
        output = output.transpose(1, 2) if self.layout == "bhsd" else output
        return (output, last) if output_final_state else output

    def step(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
             state: Tensor | None = None, **named: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One token of decoding: (o, the next state). Tensors have a length of 1, or no length dim; None starts.

        The given state is left as it is. Custom inputs are this token's: an axis "seq_len" has length 1.
        """
        tensors = [*order_custom(self.custom_io, custom, named), *tensors_now(self._captured)]
        single = isinstance(q, Tensor) and q.ndim == 3
        if single:
            axis = ORDERS[self.layout].split(", ").index("length")
            q, k, v = (t.unsqueeze(axis) if isinstance(t, Tensor) else t for t in (q, k, v))
            decay = decay.unsqueeze(axis) if isinstance(decay, Tensor) and decay.ndim in (2, 3) else decay
        q, k, v, decay = self._tokens_first(q, k, v, decay)
        if q.shape[1] != 1:
            raise BadInput(f"step takes one token, and q has a length of {q.shape[1]}. Call the engine for more.")
        key = self._check(q, k, v, decay, state, tensors)
        given = (q, k, v, decay, state, *tensors)
        if op.follows(*given) or in_forward_mode(*given):
            output, last = op.run(key, q, k, v, decay, state, tensors, True)
        else:
            output, last = op.STEP(q, k, v, decay, state, tensors, key)
        if single:
            return output[:, 0], last
        return output.transpose(1, 2) if self.layout == "bhsd" else output, last

    def _tokens_first(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors as (batch, length, heads, ...), keys and values for every batch, cast as autocast asks."""
        check_ranks(self.layout, q, k, v)
        if decay is not None and not isinstance(decay, Tensor):
            raise BadInput(f"decay is {type(decay).__name__}. Give a tensor {ROWS[self.layout]}, or None.")
        if decay is not None and decay.ndim not in (3, 4):
            raise BadInput(f"decay has {decay.ndim} dimensions, {tuple(decay.shape)}. Give {ROWS[self.layout]}.")
        q, k, v = follow_autocast(q, k, v)
        if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
            k, v = share_keys(q, k, v)
        if self.layout == "bshd":
            return q, k, v, decay
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return q, k, v, None if decay is None else decay.transpose(1, 2)

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: Sequence[Tensor]
    ) -> str:
        """Holds a call against the description; the key of the attention that runs it."""
        backend = backend_for(self.backend, q.device)
        self._check_qkv(backend != "reference", q, k, v)
        rank = 0 if decay is None else getattr(decay, "ndim", 3)
        for name, tensor, shape in (
            ("decay", decay, (*v.shape[:3], *((q.shape[3],) if rank == 4 else ()))),
            ("the state", state, (v.shape[0], v.shape[2], q.shape[3], v.shape[3])),
        ):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                raise BadInput(f"{name} is {tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__}. "
                               "Give a floating tensor.")  # fmt: skip
            if tuple(tensor.shape) != shape:
                raise BadInput(f"{name} has shape {tuple(tensor.shape)}. With these q, k and v it must be {shape}.")
            if tensor.device != q.device:
                raise BadInput(f"{name} is on '{tensor.device}' and q on '{q.device}'. Put them on one device.")
        count = len(self.custom_io.specs)
        check_custom(self.custom_io.specs.values(), custom[:count], v, v)
        check_captured(self._captured, custom[count:], q)
        names = [*self.custom_io.specs, *[c.name for c in self._captured]]
        types = tuple((n, type_of(t)) for n, t in zip(names, custom, strict=True))
        return self._key(backend, types, rank, axes_now(self._captured, custom[count:], sizes_of(v, v)))

    def _check_qkv(self, kernels: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, tensor, meta in zip("qkv", (q, k, v), self.qkv_meta, strict=True):
            if tuple(tensor.shape[2:]) != (meta.heads, meta.dim):
                raise BadInput(
                    f"{name} has {tensor.shape[2]} heads of dim {tensor.shape[3]}, and the engine was built for "
                    f'{meta.heads} of {meta.dim}.\n  Its shape must be {ORDERS[self.layout]}, layout="{self.layout}".'
                )
            if tensor.device != q.device:
                raise BadInput(f"q is on '{q.device}' and {name} on '{tensor.device}'. Put them on one device.")
            if tensor.dtype != q.dtype or not tensor.is_floating_point():
                raise BadInput(f"q is {q.dtype} and {name} is {tensor.dtype}. Give one floating dtype.")
            if tensor.shape[:2] != q.shape[:2]:
                raise BadInput(
                    f"q has batch {q.shape[0]} and length {q.shape[1]}, {name} has {tensor.shape[0]} and "
                    f"{tensor.shape[1]}. They must be equal, but k and v may have one batch for all."
                )
        if kernels:
            check_lengths(q.shape[1])
        cast = q.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(q.device.type)
        built = self.qkv_meta[0].dtype_name
        if kernels and not cast and str(q.dtype).removeprefix("torch.") != built:
            raise BadInput(
                f"q, k and v are {q.dtype}, and the engine was built for {built}. Convert them, or build another."
            )

    def check(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
        initial_state: Tensor | None = None, **named: Tensor,
    ) -> CheckReport:  # fmt: skip
        """Compares outputs, the last state and gradients with float64; prints a table and returns it."""
        tensors = order_custom(self.custom_io, custom, named)
        report = compare_linear(self, q, k, v, decay, tensors, initial_state)
        print(report)  # noqa: T201 - a table to read is what this method is for
        return report

    def source(self, kernel: str = "forward", form: str = "tilelang", *, decay: str | None = "token") -> str:
        """A kernel as text, by the name that `compile_for` returns; "forward" is the one that makes the output.

        form: "tilelang", or "cuda" for what is compiled (for `device`, else for this machine's GPU). decay: for calls
        with a decay of each "token" or "channel", or with none.
        """
        if form not in ("tilelang", "cuda"):
            raise UnknownOption(f'form is {form!r}. Choose "tilelang" or "cuda".')
        device = self.device
        if device is None and torch.cuda.is_available():
            device = detect(torch.device("cuda"))
        if device is None and form == "cuda":
            raise NoDevice(
                "there is no GPU to compile for. Say which: LinearAttentionEngine(..., "
                "device=attention_engine.arch.H100())."
            )
        kernels = self._planned(device, decay, starts=True)
        forward = next(each for name, each in kernels.items() if name in ("forward walk", "forward output"))
        found = {"forward": forward, **kernels}
        if kernel not in found:
            raise UnknownOption(f"no kernel is called {kernel!r}. Choose {', '.join(map(repr, found))}.")
        return found[kernel].source(form)

    def compile_for(self, device: Arch, *, decay: str | None = "token") -> list[str]:
        """Compiles the kernels of calls at the metas' lengths for a GPU, which need not be here; their names.

        They are kept on disk: a machine with that GPU and the same cache folder (ATTENTION_ENGINE_CACHE_DIR) then needs
        no nvcc. decay: as for source(). Custom inputs are taken as fp32, all gradients as asked for, with and without
        states. Raises NoCudaCompiler, TileDoesNotFit.
        """
        found: dict[str, None] = {}
        for starts in (False, True):
            for name, kernel in self._planned(device, decay, starts).items():
                _ = kernel.compiled
                found[name] = None
        return list(found)

    def _planned(self, device: Arch | None, per: str | None, starts: bool) -> dict[str, Kernel]:
        """The kernels of forward, backward and step at the metas' lengths, by name, in the order of their launches.

        device: None for the interpreter. per: whose the decay is, "token", "channel", or None for no tensor. starts:
        with an initial state, the last one and its gradient. Custom inputs are taken as fp32 (or bool).
        """
        if per not in RANKS:
            raise UnknownOption(f"decay is {per!r}. Choose 'token', 'channel' or None.")
        place, held = torch.device("meta"), tensors_now(self._captured)
        specs = self._specs(torch.empty(1, 1, self.qkv_meta[2].heads, 1, device=place), held)
        (batch, length), dtype = self._usual(), getattr(torch, self.qkv_meta[0].dtype_name)
        q, k, v = (torch.empty(batch, length, m.heads, m.dim, dtype=dtype, device=place) for m in self.qkv_meta)
        decay = torch.empty((*v.shape[:3], q.shape[3])[: RANKS[per]], device=place) if per else None
        custom = stand_ins(list(self.custom_io.specs.values()), self._types, place)
        custom += [torch.empty(t.shape, dtype=t.dtype, device=place) for t in held]
        program = self._trace(self._types, per is not None)
        launcher = LinearLauncher(program, specs, device is None, device, per_channel=per == "channel")
        kernels = launcher.kernels(q, k, v, launcher.decay_of(decay, v), [as_parameter(c) for c in custom])
        wanted = frozenset([*(["decay"] if per else []), *(s.name for s in specs)])
        forward = kernels.plan.forward_steps(batch, length, starts, starts)
        backward = kernels.plan.backward_steps(batch, length, wanted, starts, starts)
        return kernels.named((*forward, *backward, *kernels.plan.step_steps(starts)))

    def _usual(self) -> tuple[int, int]:
        """Batch and length of the metas, or usual ones."""
        hints = zip((self.qkv_meta[0].batch, self.qkv_meta[0].length), USUAL, strict=True)
        batch, length = (n if isinstance(n, int) else usual for n, usual in hints)
        return batch, length

    def program(self) -> str:
        """The traced mods as numbered lines."""
        return str(self._trace(self._types, True))

    def explain(self) -> str:
        """Which tile each kernel runs with for the metas' sizes, where it comes from, and why others fell.

        Decays and custom inputs are taken as fp32, and all their gradients as wanted.
        """
        return explain_linear(self._asked(), self.tuning)

    def _asked(self) -> LinearAsked:
        """The problem that the metas describe."""
        interpret = self.device is None and not torch.cuda.is_available()
        place = torch.device("cuda" if self.device is None and not interpret else "cpu")
        dtype, held = getattr(torch, self.qkv_meta[0].dtype_name), tensors_now(self._captured)
        q, k, v = (torch.empty(1, 1, m.heads, m.dim, dtype=dtype, device=place) for m in self.qkv_meta)
        specs = self._specs(v, held)
        custom = [torch.empty(1, device=place) for _ in self.custom_io.specs]
        custom += [torch.empty(1, dtype=t.dtype, device=place) for t in held]
        program = self._trace(self._types, True)
        launcher = self._launcher(program, specs, interpret, per_channel=False)
        problem = launcher.problem(q, k, v, launcher.decay_of(torch.empty(1, 1, 1, device=place), v), custom)
        wanted = ("decay", *(s.name for s in specs))
        return LinearAsked(program, specs, problem, launcher.target(q), self._usual(), str(place), wanted)

    def __repr__(self) -> str:
        parts = ["(" + ", ".join(map(repr, self.qkv_meta)) + ")"]
        parts += [f"{n}_mod={getattr(m, '__qualname__', repr(m))}" for n, m in self.mods.items() if m is not None]
        if self.custom_io.specs:
            parts.append(f"custom_io={self.custom_io!r}")
        plain = {"layout": "bshd", "backend": "auto", "device": None}
        parts += [f"{n}={getattr(self, n)!r}" for n, value in plain.items() if getattr(self, n) != value]
        return f"LinearAttentionEngine({', '.join(parts)})"
