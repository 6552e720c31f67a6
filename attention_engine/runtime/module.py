"""AttentionEngine: a user's attention as a torch.nn.Module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import Arch
from attention_engine.errors import (
    OptionsClash,
)
from attention_engine.frontend.captured import Captured
from attention_engine.frontend.custom_io import CustomIO, CustomSpec
from attention_engine.frontend.meta import Lengths, Meta, check_metas, hints_of
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Type
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Program
from attention_engine.library import OnlineSoftmax
from attention_engine.passes.check_cuts import check_online
from attention_engine.passes.maths import Maths, analyse
from attention_engine.plan.attention import Tiles
from attention_engine.plan.choice import hints_matter
from attention_engine.plan.targets import Target
from attention_engine.runtime import op, parts, transforms  # noqa: F401 - registers what transforms need
from attention_engine.runtime.captured import (
    Axes,
    axes_now,
    capturing,
    check_captured,
    sizes_of,
    specs_of,
    tensors_now,
)
from attention_engine.runtime.inputs import (
    BLOCKS,
    backend_for,
    check_blocks,
    check_custom,
    check_options,
    check_qkv,
    check_ranks,
    check_scale,
    check_tuning,
    check_type,
    follow_autocast,
    guess_types,
    is_cast,
    order_custom,
    share_keys,
    signature,
    type_of,
)
from attention_engine.runtime.launch import Launcher
from attention_engine.runtime.seen import Again, Seen
from attention_engine.runtime.shown import Shown
from attention_engine.runtime.tuning import Asked, Tuning, choose
from attention_engine.runtime.watching import unwatched, watched

MOST_SEEN = 4096
OF_THIS_PROCESS = ("_first", "_keys", "_seen", "_again")


class AttentionEngine(Shown):
    """An attention, from its maths.

    qkv_meta: three `meta_tensor(B, H, S, D)` for q, k, v. custom_fwd_inputs: a CustomIO. score_mod(score, custom, b, h,
    q_idx, kv_idx): elementwise on q . k (fp32) times scale. scale: a number; None is dim ** -0.5 where there is no
    score_mod, and 1 where there is one, which scales itself. mask_mod(b, h, q_idx, kv_idx[, custom]): True keeps;
    applied after score_mod, and a masked pair takes no part in anything. mask_value: None, "-inf" or "0", which mean
    the same. online_func: an OnlineFunc; None is library.OnlineSoftmax(). block_mask: a callable is a mask_mod; a
    tensor, int8 or bool (B or 1, H or 1, ceil(Sq/bq), ceil(Skv/bkv)) with block_size=(bq, bkv), says which blocks
    exist. layout: of the tensors in a call, "bshd" or "bhsd". device: an Arch to compile for, or None: the tensors'
    own. backend: "auto" (kernels on CUDA tensors, the reference on CPU tensors), "tilelang", "reference", or
    "interpret" (the kernels on CPU tensors). deterministic: gradients that are bitwise the same in every run.
    tune: at the first call of each new problem (a dtype, a power of two of the lengths, ...) tiles of the forward
    kernel are compiled and measured, in processes of their own and on random q, k, v; tune_bwd: those of the backward
    kernels. tune_file: where what was found is kept, and looked up; a file that holds the problem spares measuring,
    also without tune. tune_file_bwd: another one for the backward kernels.

    Raises BadMeta, HeadsDoNotGroup, UnknownOption, NotOnline, and what tracing finds wrong in the functions.
    """

    def __init__(
        self, qkv_meta: Sequence[Meta], custom_fwd_inputs: CustomIO | None = None,
        score_mod: Callable[..., Any] | None = None, mask_mod: Callable[..., Any] | None = None,
        online_func: OnlineFunc | None = None, mask_value: str | None = None, *, scale: float | None = None,
        block_mask: Callable[..., Any] | Tensor | None = None, block_size: tuple[int, int] = (128, 128),
        layout: str = "bshd", device: Arch | None = None, backend: str = "auto", tune: bool = False,
        tune_file: str | None = None, tune_bwd: bool = False, tune_file_bwd: str | None = None,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_meta = check_metas(qkv_meta)
        self.custom_io = custom_fwd_inputs if custom_fwd_inputs is not None else CustomIO()
        check_options(backend, layout, mask_value, device, block_size)
        check_scale(scale)
        check_tuning(backend, tune=tune, tune_bwd=tune_bwd, tune_file=tune_file, tune_file_bwd=tune_file_bwd)
        check_type("custom_fwd_inputs", self.custom_io, CustomIO)
        check_type("online_func", online_func, OnlineFunc, optional=True)
        if callable(block_mask) and not isinstance(block_mask, Tensor):
            if mask_mod is not None:
                raise OptionsClash(
                    "block_mask is a function and mask_mod is given too. A function is a mask_mod: join them with\n"
                    "  attention_engine.library.and_masks."
                )
            mask_mod, block_mask = block_mask, None
        check_type("block_mask", block_mask, Tensor, optional=True)
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.online_func = online_func if online_func is not None else OnlineSoftmax()
        usual = self.qkv_meta[0].dim ** -0.5 if score_mod is None else 1.0
        self.scale = usual if scale is None else float(scale)
        self.layout, self.device, self.deterministic = layout, device, deterministic
        self.backend = "tilelang" if backend == "tl" else backend
        self.block_size = (block_size[0], block_size[1])
        self.tuning = Tuning((tune, tune_bwd), (tune_file, tune_file_bwd or tune_file))
        self.register_buffer("block_mask", block_mask, persistent=False)
        self._keys: dict[object, str] = {}
        self._seen: dict[object, Seen] = {}  # by the signatures of calls that passed every check
        self._again: Again | None = None  # the last of them
        self._types = guess_types(list(self.custom_io.specs), lambda types: self._trace(types, None))
        self._first: tuple[Program, tuple[Captured, ...]] | None = self._traced(self._types, None)
        check_online(self._program)

    def __getstate__(self) -> dict[str, Any]:
        """What was given; the traced program's nodes are one of a kind in a process, so they stay in theirs."""
        return {n: value for n, value in super().__getstate__().items() if n not in OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._keys, self._seen, self._again, self._first = {}, {}, None, None

    @property
    def _program(self) -> Program:
        return self._whole()[0]

    @property
    def _captured(self) -> tuple[Captured, ...]:
        """The tensors that the functions captured, in the order met."""
        return self._whole()[1]

    def _whole(self) -> tuple[Program, tuple[Captured, ...]]:
        """What tracing found."""
        self._has_traced()
        assert self._first is not None
        return self._first

    def _has_traced(self) -> bool:
        """True. A copy traces when first asked, as the objects that its functions read must be whole."""
        if self._first is None:
            self._first = self._traced(self._types, None)
        return True

    _has_traced._dynamo_marked_constant = True  # type: ignore[attr-defined] # as _key is

    def _trace(self, types: Mapping[str, Type], blocks: tuple[bool, bool] | None) -> Program:
        return self._traced(types, blocks)[0]

    def _traced(
        self, types: Mapping[str, Type], blocks: tuple[bool, bool] | None
    ) -> tuple[Program, tuple[Captured, ...]]:
        io = self._io(blocks)
        with capturing(tuple(io.specs), types) as capture:
            program = trace(self.score_mod, self._mask(blocks), self.online_func, io, types, self.scale)
        return replace(program, custom=(*program.custom, *capture.names)), tuple(capture.captured.values())

    def _io(self, blocks: tuple[bool, bool] | None) -> CustomIO:
        if blocks is None:
            return self.custom_io
        io = CustomIO()
        axes = (1 if blocks[0] else "batch", 1 if blocks[1] else "heads", "q_blocks", "kv_blocks")
        io.specs = MappingProxyType({**self.custom_io.specs, BLOCKS: CustomSpec(BLOCKS, axes)})
        io.in_order = tuple(io.specs.values())
        return io

    def _mask(self, blocks: tuple[bool, bool] | None) -> Callable[..., Any] | None:
        """The user's mask and, with an outside block mask, the existence of the pair's block."""
        if blocks is None:
            return self.mask_mod
        q_block, kv_block = self.block_size
        inner = self.mask_mod

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, custom: Any) -> Any:
            at = (0 if blocks[0] else b, 0 if blocks[1] else h, q_idx // q_block, kv_idx // kv_block)
            exists = custom[BLOCKS][at] != 0
            if inner is None:
                return exists
            from attention_engine.frontend.tracing import call

            return exists & call(inner, "b, h, q_idx, kv_idx", [b, h, q_idx, kv_idx], custom)

        return mask

    def _backend_for(self, device: torch.device) -> str:
        """Which backend runs on this device; NoDevice where the one asked for can't."""
        return backend_for(self.backend, device)

    def _key(
        self, backend: str, types: tuple[tuple[str, Type], ...], blocks: tuple[bool, bool] | None, axes: Axes
    ) -> str:
        """The key of the attention that runs these calls; registered when first needed. axes: of captured tensors."""
        variant = (backend, types, blocks, axes)
        if variant not in self._keys:
            program = self._trace(dict(types), blocks)
            specs = [*self._io(blocks).specs.values(), *specs_of(self._captured, axes)]
            device = self.device.name if self.device else ""
            hints = hints_of(self.qkv_meta) if hints_matter(*(m.dim for m in self.qkv_meta[1:])) else ""
            inputs = [(s.name, s.axes) for s in specs]
            options = f"{backend} {device} {self.deterministic} {inputs} {self.tuning}{hints}"
            key = program.fingerprint + hashlib.blake2b(options.encode(), digest_size=6).hexdigest()
            if key not in op.ATTENTIONS:
                maths = analyse(program)
                launcher, trained = None, None
                if backend != "reference":
                    launcher = self._launcher(maths, specs, backend == "interpret")
                if maths.bent is not None and launcher is not None:
                    trained, inner = f"{key} trained", maths.bent.maths
                    of_inner = self._launcher(inner, specs, backend == "interpret")
                    op.ATTENTIONS[trained] = op.Attention(inner, specs, of_inner, bend=maths.bent.bend)
                op.ATTENTIONS[key] = op.Attention(maths, specs, launcher, trained)
            self._keys[variant] = key
        return self._keys[variant]

    def _launcher(self, maths: Maths, specs: Sequence[CustomSpec], interpret: bool) -> Launcher:
        def choose_tiles(
            wanted: tuple[str, ...], problem: Problem, target: Target, lengths: Lengths,
            device: torch.device, tiles: Tiles, backward: bool, custom: Sequence[Tensor],
        ) -> Tiles:  # fmt: skip
            asked = Asked(maths.wanting(wanted), specs, problem, target, deterministic, lengths, str(device), wanted)
            return choose(tuning, asked, tiles, backward, custom)

        tuning, deterministic, hints = self.tuning, self.deterministic, hints_of(self.qkv_meta)
        chosen = choose_tiles if tuning.matters else None
        return Launcher(maths, specs, interpret, self.device, self.deterministic, choose=chosen, hints=hints)

    # torch.compile asks for the key and looks no further; torch.compiler.assume_constant_result sets this too, after
    # a second's import of the compiler
    _key._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, block_mask: Tensor | None = None,
                return_rowscales: bool = False, **named: Tensor) -> Any:  # fmt: skip
        """o, like q with v's head dim; with return_rowscales (o, {name: row (B, H, Sq), fp32}).

        q, k, v: (batch, length, heads, dim), or (batch, heads, length, dim) with layout="bhsd". custom: in CustomIO's
        order, or by name; what the functions captured is read where it is. Raises BadInput for tensors that don't fit.
        """
        captured = tensors_now(self._captured)
        return self._call(q, k, v, custom, captured, block_mask, return_rowscales, named)

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], captured: Sequence[Tensor],
        block_mask: Tensor | None, return_rowscales: bool, named: Mapping[str, Tensor],
    ) -> Any:  # fmt: skip
        """A call with these tensors in place of the captured ones."""
        asked, given = None, custom
        if block_mask is None and not named and self._buffers["block_mask"] is None and not is_compiling():
            custom = (*custom, *captured)
            again = self._again
            alike = again is not None and again.count == 3 + len(custom) and again.fits(q, k, v, *custom)
            if again is not None and alike and not watched():
                if self.layout == "bhsd":
                    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                wanted = again.requires_grad and torch.is_grad_enabled()
                found = op.run_unwatched(again.key, q, k, v, custom, return_rowscales, again.direct, wanted)
                return self._results(*found, return_rowscales)
            asked = signature(q, k, v, *custom)
            seen = self._seen.get(asked)
            if seen is not None and not torch.is_autocast_enabled(seen.device):  # as a call that all checks let pass
                self._again = seen.again(q, k, v, *custom) if unwatched() else None
                if self.layout == "bhsd":
                    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                found = op.run(seen.key, q, k, v, custom, return_rowscales, seen.direct)
                return self._results(*found, return_rowscales)
        tensors = order_custom(self.custom_io, given, named)
        check_ranks(self.layout, q, k, v)
        cast, q, k, v = is_cast(q), *follow_autocast(q, k, v)
        if self.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
            (k, v), asked = share_keys(q, k, v), None  # what is seen is not what runs
        backend = self._backend_for(q.device)
        check_qkv(self.qkv_meta, self.layout, backend != "reference", q, k, v)
        blocks = self._blocks(block_mask, q, k)
        tensors = tensors if blocks is None else [*tensors, blocks]
        variant = None if blocks is None else (blocks.shape[0] == 1, blocks.shape[1] == 1)
        specs = self._io(variant).in_order
        check_custom(specs, tensors, q, k)
        axes: Axes = ()
        if captured:
            check_captured(self._captured, captured, q)
            axes = axes_now(self._captured, captured, sizes_of(q, k))
        names = [*[s.name for s in specs], *[c.name for c in self._captured]]
        tensors = [*tensors, *captured]
        types = tuple((n, type_of(t)) for n, t in zip(names, tensors, strict=True))
        key = self._key(backend, types, variant, axes)
        if backend != "reference" and v.shape[3] > parts.WIDEST:
            return self._results(*parts.run(key, q, k, v, tensors, return_rowscales), return_rowscales)
        if asked is not None and not cast and unwatched():  # nothing that others look at may be kept, nor fakes
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            launcher = op.ATTENTIONS[key].launcher
            direct = launcher.direct(q, k, v, tensors) if launcher is not None else None
            self._seen[asked] = Seen(key, q.device.type, direct)
        return self._results(*op.run(key, q, k, v, tensors, return_rowscales), return_rowscales)

    def _results(self, output: Tensor, rows: Sequence[Tensor], return_rowscales: bool) -> Any:
        output = output.transpose(1, 2) if self.layout == "bhsd" else output
        if not return_rowscales:
            return output
        return output, dict(zip((n for n, _ in self._program.finals), rows, strict=True))

    def _blocks(self, given: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """The block mask of a call: its own, or the engine's."""
        blocks = given if given is not None else self.block_mask
        return None if blocks is None else check_blocks(blocks, self.block_size, q, k)
