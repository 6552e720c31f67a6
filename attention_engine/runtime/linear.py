"""LinearAttentionEngine: a user's linear attention as a torch.nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import Arch
from attention_engine.errors import (
    AttentionEngineError,
    DevicesDiffer,
    LengthsDiffer,
    NotATensor,
    NotFloating,
    NotYetSupported,
    WrongRank,
    WrongSequences,
    WrongShape,
)
from attention_engine.frontend.custom_io import CustomIO, CustomSpec
from attention_engine.frontend.frames import brief, warn
from attention_engine.frontend.meta import Meta, check_linear_metas
from attention_engine.frontend.mods import trace_mods
from attention_engine.frontend.signatures import Backend, Layout, LinearMod
from attention_engine.ir.expr import Type
from attention_engine.ir.linear import LinearProblem, LinearProgram, LinearTiles
from attention_engine.ir.packing import Packing
from attention_engine.passes.pack_mods import VALID, pack_mods
from attention_engine.plan.targets import Target
from attention_engine.runtime import linear_op, op
from attention_engine.runtime.attentions import ATTENTIONS, Given
from attention_engine.runtime.captured import axes_now, check_captured, sizes_of, tensors_now
from attention_engine.runtime.doubts import growth_of
from attention_engine.runtime.inputs import (
    ORDERS,
    backend_for,
    check_custom,
    check_flag,
    check_options,
    check_qkv,
    check_ranks,
    check_tuning,
    follow_autocast,
    guess_types,
    heads_of,
    is_cast,
    order_custom,
    refuse_dtensor,
    share_keys,
    type_of,
)
from attention_engine.runtime.linear_op import LinearAttention
from attention_engine.runtime.linear_packed import (
    chunked_specs,
    cut_custom,
    find_chunks,
    of_no_rows,
    of_rows,
    refuse_both,
    run_packed,
)
from attention_engine.runtime.linear_program_kernels import LinearProgramKernels
from attention_engine.runtime.linear_shown import RANKS, LinearShown
from attention_engine.runtime.linear_tuning import LinearAsked
from attention_engine.runtime.names import declared, either, explains_names
from attention_engine.runtime.packed import check_starts, sizes_of_packed
from attention_engine.runtime.program_kernels import Direct
from attention_engine.runtime.tuning import Tuning, choose

Step = Callable[..., tuple[Tensor, Tensor]]
PACKED = 8  # of a variant: of packed sequences
ROWS = {
    "bshd": "(batch, length, heads) or (batch, length, heads, dim)",
    "bhsd": "(batch, heads, length) or (batch, heads, length, dim)",
}


class LinearAttentionEngine(LinearShown):
    """A linear attention, from its maths: h_t = exp(a_t) h_{t-1} + k_t^T v_t, o_t = q_t h_t for each head.

    Args:
        qkv_meta: three `meta_tensor(B, H, S, D)` for q, k, v. The heads are v's, and those of q and of k divide them:
            head h reads query head h // (heads / query heads). Left out: heads, dims and dtype are those of each call.
        q_mod, k_mod, v_mod: `(x, custom) -> x`, elementwise, on the entries of q, k and v; None leaves them.
        decay_mod: the same on decay, the log of what a token keeps of the state, or of a channel of it.
        custom_io: the custom inputs. "seq_len" and "seq_len_kv" are the same here, and "heads" are v's.
        layout, device, backend, tune, tune_file, tune_bwd, tune_file_bwd: as AttentionEngine's.
        deterministic: every gradient is the same in every run, asked for or not.

    Raises:
        BadMeta: qkv_meta doesn't describe a linear attention.
        HeadsDoNotGroup: heads of q or k don't divide those of v.
        UnknownOption: an option has a value that means nothing.
        NotYetSupported: this version can't do it.

    >>> metas = [meta_tensor(1, 2, None, 16, dtype=torch.float32)] * 3
    >>> retention = LinearAttentionEngine(metas, decay_mod=lambda a, custom: -a.exp())
    >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
    >>> o, state = retention(q, k, v, torch.zeros(1, 8, 2), output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 8, 2, 16]), torch.Size([1, 2, 16, 16]))
    """

    ORDINARY: ClassVar[int] = RANKS["token"]  # a variant is the rank of the decay, 0 without one, and PACKED more
    TURNED: ClassVar[int] = 4

    @explains_names
    def __init__(
        self, qkv_meta: Sequence[Meta] | None = None, q_mod: LinearMod | None = None,
        k_mod: LinearMod | None = None, v_mod: LinearMod | None = None,
        decay_mod: LinearMod | None = None, custom_io: CustomIO | None = None, *,
        layout: Layout = "bshd", device: Arch | None = None, backend: Backend = "auto", tune: bool = False,
        tune_file: str | None = None, tune_bwd: bool = False, tune_file_bwd: str | None = None,
        deterministic: bool = False, custom_fwd_inputs: CustomIO | None = None, tune_filename: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_meta = None if qkv_meta is None else check_linear_metas(qkv_meta)
        given = either("custom_io", custom_io, "custom_fwd_inputs", custom_fwd_inputs)
        self.custom_io = declared(given, ("q_mod", "k_mod", "v_mod", "decay_mod"))
        tune_file = either("tune_file", tune_file, "tune_filename", tune_filename)
        check_options(backend, layout, None, device, (1, 1))
        check_flag("deterministic", deterministic)
        check_tuning(backend, tune=tune, tune_bwd=tune_bwd, tune_file=tune_file, tune_file_bwd=tune_file_bwd)
        self.tuning = Tuning((tune, tune_bwd), (tune_file, tune_file_bwd or tune_file))
        self.mods = {"q": q_mod, "k": k_mod, "v": v_mod, "decay": decay_mod}
        self.layout, self.device, self.deterministic = layout, device, deterministic
        self.backend = "tilelang" if backend == "tl" else backend
        self._begin()
        self._types = guess_types(list(self.custom_io.specs), lambda types: self._trace(types, True))
        self._has_traced()

    def _trace_functions(self, types: Mapping[str, Type], variant: int) -> LinearProgram:
        io = self._io(variant)
        program = trace_mods(self.mods, io, types, variant % PACKED > 0)
        return program if variant < PACKED else pack_mods(program, of_rows(io.in_order))

    def _io(self, variant: int) -> CustomIO:
        if variant < PACKED:
            return self.custom_io
        return self.custom_io.with_more([CustomSpec(VALID, ("batch", "seq_len"))], Packing.ALIKE)

    def _specs(self, variant: int) -> list[CustomSpec]:
        specs = super()._specs(variant)
        return specs if variant < PACKED else chunked_specs(specs)

    def _options(self, variant: int) -> str:
        return str(variant)

    def _register(
        self, key: str, program: LinearProgram, specs: Sequence[CustomSpec], backend: str, variant: int
    ) -> None:
        program_kernels = None
        if backend != "reference":
            program_kernels = self._program_kernels(
                program, specs, backend == "interpret", variant % PACKED == RANKS["channel"]
            )
        ATTENTIONS[key] = LinearAttention(key, program, specs, program_kernels)

    def _program_kernels(
        self, program: LinearProgram, specs: Sequence[CustomSpec], interpret: bool, per_channel: bool
    ) -> LinearProgramKernels:
        def choose_tiles(
            problem: LinearProblem, target: Target, lengths: tuple[int, int], place: str, tiles: LinearTiles,
            backward: bool, wanted: tuple[str, ...], custom: Sequence[Tensor],
        ) -> LinearTiles:  # fmt: skip
            asked = LinearAsked(program, specs, problem, target, lengths, place, wanted)
            chosen: LinearTiles = choose(tuning, asked, tiles, backward, custom)
            return chosen

        tuning = self.tuning
        if not per_channel:
            packed = any(spec.name == VALID for spec in specs)  # trials draw no chunks of sequences
            chosen = choose_tiles if tuning.matters and not packed else None
            return LinearProgramKernels(program, specs, interpret, self.device, choose=chosen)
        if any(tuning.measure):
            raise NotYetSupported(
                "this version tunes no linear attention with a decay for each channel.\n"
                "  Leave tune and tune_bwd out: default tiles are used."
            )
        return LinearProgramKernels(program, specs, interpret, self.device, per_channel=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
                initial_state: Tensor | None = None, output_final_state: bool = False,
                cu_seqlens: Tensor | None = None, **named: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """o, like v; with output_final_state (o, the state after the last token: (B, H, D, DV), fp32).

        q, k, v: (batch, length, heads, dim) and decay (batch, length, heads), or (batch, heads, length, dim) and
        (batch, heads, length) with layout="bhsd". A decay with q's last dim as its own is one for each channel: for
        each row of the state. No decay is a decay of 0 before decay_mod. initial_state:
        (B, H, D, DV), the state before the first token. custom: in CustomIO's order, or by name. cu_seqlens: int32
        (N + 1), where each of N sequences begins, and the last ends: tensors are (rows, heads, dim), or have a batch of
        1 before, and states are (N, H, D, DV). Raises BadInput for tensors that don't fit.
        """
        try:
            check_flag("output_final_state", output_final_state)
            refuse_dtensor("q", q, "a linear engine takes none")
            captured = self._captured
            tensors = order_custom(self.custom_io, custom, named)
            tensors = [*tensors, *tensors_now(captured)] if captured else tensors
            if cu_seqlens is not None:
                return self._call_packed(q, k, v, decay, tensors, initial_state, output_final_state, cu_seqlens)
            return self._call(q, k, v, decay, tensors, initial_state, output_final_state)
        except AttentionEngineError as error:
            if is_compiling():  # the compiler follows what is raised, but no traceback
                raise
            raise brief(error) from error.__cause__

    if TYPE_CHECKING:  # how an engine is called

        @overload
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
                    initial_state: Tensor | None = None, output_final_state: Literal[False] = False,
                    cu_seqlens: Tensor | None = None, **named: Tensor) -> Tensor: ...  # fmt: skip

        @overload
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
                    initial_state: Tensor | None = None, output_final_state: Literal[True],
                    cu_seqlens: Tensor | None = None, **named: Tensor) -> tuple[Tensor, Tensor]: ...  # fmt: skip

        @overload
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
                    initial_state: Tensor | None = None, output_final_state: bool,
                    cu_seqlens: Tensor | None = None,
                    **named: Tensor) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip

        def __call__(self, *args: Any, **named: Any) -> Any: ...

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tensors: Sequence[Tensor],
        initial_state: Tensor | None, output_final_state: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """A call with these custom inputs, and these tensors in place of the captured ones behind them."""
        output, *last = self._held(False, output_final_state, q, k, v, decay, initial_state, tensors)
        output = output.transpose(1, 2) if self.layout == "bhsd" else output
        return (output, last[0]) if output_final_state else output

    def _call_packed(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tensors: Sequence[Tensor],
        initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """A call of packed sequences, of (rows, heads, dim) or with a batch of 1."""
        refuse_both(self.custom_io.in_order)
        single = isinstance(q, Tensor) and q.ndim == 3
        if single:
            q, k, v = (t.unsqueeze(0) if isinstance(t, Tensor) else t for t in (q, k, v))
            decay = decay.unsqueeze(0) if isinstance(decay, Tensor) else decay
        check_ranks(self.layout, q, k, v)
        turned = self.layout == "bhsd" and not single
        q, k, v, decay = self._tokens_first(q, k, v, decay, turned)
        if q.shape[0] != 1:
            raise WrongSequences(f"q has a batch of {q.shape[0]}. With cu_seqlens all sequences are rows of one batch.")
        starts, count = check_starts("cu_seqlens", cu_seqlens, q[0]), len(self.custom_io.specs)
        key = self._check(q, k, v, decay, initial_state, tensors, starts.shape[0] - 1)
        specs, attention = list(self.custom_io.in_order), ATTENTIONS[key]
        assert isinstance(attention, LinearAttention)
        final: Tensor | None
        if starts.shape[0] == 1 or q.shape[1] == 0:
            output, final = of_no_rows(q, k, v, decay, initial_state, starts.shape[0] - 1)
        else:
            chunks = find_chunks(starts, q.shape[1])
            valid = chunks.valid.view(chunks.count, -1).to(torch.float32)
            custom = [*cut_custom(specs, tensors[:count], chunks), valid, *tensors[count:]]
            cut = [None if t is None else chunks.cut(t[0]) for t in (q, k, v, decay)]
            output, final = run_packed(
                attention.program, key, chunks, cut, initial_state, attention.named(custom), output_final_state
            )
        output = output if single else output.unsqueeze(0)
        output = output.transpose(1, 2) if turned else output
        return output if final is None or not output_final_state else (output, final)

    def step(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, *custom: Tensor,
             state: Tensor | None = None, **named: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        """One token of decoding: (o, the next state). Tensors have a length of 1, or no length dim; None starts.

        The given state is left as it is. Custom inputs are this token's: an axis "seq_len" has length 1.
        """
        captured = self._captured
        tensors = order_custom(self.custom_io, custom, named)
        tensors = [*tensors, *tensors_now(captured)] if captured else tensors
        single = isinstance(q, Tensor) and q.ndim == 3
        if single:
            axis = ORDERS[self.layout].split(", ").index("length")
            q, k, v = (t.unsqueeze(axis) if isinstance(t, Tensor) else t for t in (q, k, v))
            decay = decay.unsqueeze(axis) if isinstance(decay, Tensor) and decay.ndim in (2, 3) else decay
        output, last = self._held(True, True, q, k, v, decay, state, tensors)
        if single:
            return output[:, 0], last
        return output.transpose(1, 2) if self.layout == "bhsd" else output, last

    def _held(
        self, steps: bool, returns: bool, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None,
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """The results of a call, held against the description unless one like it was. steps: one token of decoding."""
        form, alone = (steps, returns, decay is None, state is None), not is_compiling()
        given = (q, k, v, decay, state, *tensors)
        present = [t for t in given if t is not None] if alone else []
        if alone:
            found = self._repeat(form, returns, given, present)
            if found is not None:
                return found
        check_ranks(self.layout, q, k, v)
        alone = alone and not is_cast(q) and (q.shape[0] == 1 or 1 not in (k.shape[0], v.shape[0]))
        q, k, v, decay = self._tokens_first(q, k, v, decay)
        if steps and q.shape[1] != 1:
            raise LengthsDiffer(f"step takes one token, and q has a length of {q.shape[1]}. Call the engine for more.")
        key = self._check(q, k, v, decay, state, tensors)
        inner = (q, k, v, decay, state, *tensors)
        direct = None
        if alone and op.unwatched():  # nothing that others look at may be kept, nor fakes
            program_kernels = ATTENTIONS[key].program_kernels
            direct = (
                program_kernels.direct(q, k, v, decay, state, tensors, steps, returns)
                if program_kernels is not None
                else None
            )
            self._remember(form, present, key, direct)
            if q.device.type == "cpu":  # on a GPU to look would be to wait: there check() says it
                self._warn_of_growth(key, q, k, v, decay, tensors)
        if not steps:
            self._begin_backward(key, inner)
        return self._run(key, form, returns, inner, direct)

    def _warn_of_growth(
        self, key: str, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, tensors: Sequence[Tensor]
    ) -> None:  # fmt: skip
        """Warns, at the first call of its kind, where log decays are above 0: often they are factors, not logs."""
        attention = ATTENTIONS[key]
        assert isinstance(attention, LinearAttention)
        custom = dict(zip((spec.name for spec in attention.specs), tensors, strict=True))
        if grown := growth_of(attention.program, q, k, v, decay, custom):
            warn(grown, UserWarning)

    def _run(self, key: str, form: Any, returns: bool, given: Given, direct: Direct | None) -> tuple[Tensor, ...]:
        known = direct is not None and op.unwatched()
        if form[0] and not known and not op.follows(given) and not op.in_forward_mode(*given):
            q, k, v, decay, state, *tensors = given
            run: Step = linear_op.step if op.skips_dispatch(ATTENTIONS[key]) else op.STEP
            return run(q, k, v, decay, state, tensors, key)
        return op.run(key, returns, given, direct)

    def _tokens_first(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, turned: bool | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The tensors as (batch, length, heads, ...), keys and values for every batch, cast as autocast asks."""
        if decay is not None and not isinstance(decay, Tensor):
            raise NotATensor(f"decay is {type(decay).__name__}. Give a tensor {ROWS[self.layout]}, or None.")
        if decay is not None and decay.ndim not in (3, 4):
            raise WrongRank(f"decay has {decay.ndim} dimensions, {tuple(decay.shape)}. Give {ROWS[self.layout]}.")
        q, k, v = follow_autocast(q, k, v)
        if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
            k, v = share_keys(q, k, v)
        if not (self.layout == "bhsd" if turned is None else turned):
            return q, k, v, decay
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return q, k, v, None if decay is None else decay.transpose(1, 2)

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None, custom: Sequence[Tensor],
        sequences: int | None = None,
    ) -> str:  # fmt: skip
        """Holds a call against the description; the key of the attention that runs it. sequences: that are packed."""
        batch = v.shape[0] if sequences is None else sequences
        backend = backend_for(self.backend, q.device)
        check_qkv(self.qkv_meta, self.layout, backend != "reference", q, k, v, linear=True)
        self._note_call((heads_of(q), heads_of(k), heads_of(v)), q.dtype)
        rank = 0 if decay is None else getattr(decay, "ndim", 3)
        for name, tensor, shape in (
            ("decay", decay, (*v.shape[:3], *((q.shape[3],) if rank == 4 else ()))),
            ("the state", state, (batch, v.shape[2], q.shape[3], v.shape[3])),
        ):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise NotATensor(f"{name} is {type(tensor).__name__}. Give a floating tensor.")
            if not tensor.is_floating_point():
                raise NotFloating(f"{name} is {tensor.dtype}. Give a floating tensor.")
            if tuple(tensor.shape) != shape:
                raise WrongShape(f"{name} has shape {tuple(tensor.shape)}. With these q, k and v it must be {shape}.")
            if tensor.device != q.device:
                raise DevicesDiffer(f"{name} is on '{tensor.device}' and q on '{q.device}'. Put them on one device.")
        count = len(self.custom_io.specs)
        check_custom(self.custom_io.specs.values(), custom[:count], v, v, batch=batch)
        check_captured(self._captured, custom[count:], q)
        names = [*self.custom_io.specs, *[c.name for c in self._captured]]
        types = tuple((n, type_of(t)) for n, t in zip(names, custom, strict=True))
        if sequences is None:
            return self._key(backend, types, rank, axes_now(self._captured, custom[count:], sizes_of(v, v)))
        axes = axes_now(self._captured, custom[count:], sizes_of_packed(v))
        return self._key(backend, (*types, (VALID, Type.FLOAT)), rank + PACKED, axes)
