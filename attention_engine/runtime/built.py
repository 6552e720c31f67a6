"""What calls of an AttentionEngine run: its functions traced for each kind of call, and who launches the kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attention_engine.frontend.captured import Captured
from attention_engine.frontend.custom_io import CustomIO, CustomSpec
from attention_engine.frontend.meta import Lengths, hints_of
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Type
from attention_engine.ir.packing import SEQUENCE_Q, Packing
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import Program
from attention_engine.passes.drop_weights import drop_weights
from attention_engine.passes.maths import Maths, analyse
from attention_engine.plan.attention import Tiles
from attention_engine.plan.choice import hints_matter
from attention_engine.plan.targets import Target
from attention_engine.runtime.attention_op import PairAttention
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.blocks import Blocks, CallBlocks, name_of, place_in_map, spec_of
from attention_engine.runtime.dropout import SPEC
from attention_engine.runtime.inputs import backend_for
from attention_engine.runtime.packed import count_sequences, tables_of
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.runtime.shown import Shown
from attention_engine.runtime.tuning import Asked, choose

# A call's blocks, q's head dim where it makes the scale, how sequences are packed, and with which probability weights
# are dropped (as text: a compiler may take a number for one that changes). Dynamo follows plain tuples.
Variant: TypeAlias = tuple[Blocks | None, int | None, Packing | None, str]


class Built(Shown):
    """The half of an AttentionEngine that traces its functions, and builds what runs them."""

    dropout_p: float

    def _trace_functions(self, types: Mapping[str, Type], variant: Variant) -> Program:
        (blocks, dim, *_), scale = variant, self.scale
        if scale is None:
            scale = 1.0 if dim is None else dim**-0.5
        return trace(self.score_mod, self._mask(blocks), self.online_func, self._io(variant), types, scale)

    def _traced(self, types: Mapping[str, Type], variant: Variant) -> tuple[Program, tuple[Captured, ...]]:
        program, captured = super()._traced(types, variant)
        *_, packing, drops = variant
        return drop_weights(program, float.fromhex(drops), packing) if drops else program, captured

    @property
    def _drops(self) -> str:
        return self.dropout_p.hex() if self.training and self.dropout_p else ""

    def _variant(
        self, blocks: CallBlocks | None = None, dim: int | None = None, packing: Packing | None = None,
        drops: str | None = None,
    ) -> Variant:  # fmt: skip
        of_blocks = None if blocks is None else blocks.variant
        return of_blocks, dim if self.scale is None else None, packing, self._drops if drops is None else drops

    def _io(self, variant: Variant) -> CustomIO:
        blocks, _, packing, drops = variant
        more = [] if packing is None else tables_of(packing)
        if blocks is not None:
            more.append(spec_of(blocks))
        if drops:
            more.append(SPEC)
        return self.custom_io.with_more(more, packing) if more else self.custom_io

    def _specs(self, variant: Variant) -> list[CustomSpec]:
        specs = super()._specs(variant)
        return specs if variant[2] is None else count_sequences(specs)

    def _mask(self, blocks: Blocks | None) -> Callable[..., Any] | None:
        """The user's mask and, where a call says which blocks exist, the existence of the pair's block."""
        if blocks is None:
            return self.mask_mod
        inner = self.mask_mod

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any, custom: Any) -> Any:
            exists = custom[name_of(blocks)][place_in_map(blocks, self.block_size, b, h, q_idx, kv_idx)] != 0
            if inner is None:
                return exists
            from attention_engine.frontend.tracing import call

            return exists & call(inner, "b, h, q_idx, kv_idx", [b, h, q_idx, kv_idx], custom)

        return mask

    def _backend_for(self, device: torch.device) -> str:
        """Which backend runs on this device; NoDevice where the one asked for can't."""
        return backend_for(self.backend, device)

    def _options(self, variant: Variant) -> str:
        matter = self.qkv_meta is not None and hints_matter(*(m.dim for m in self.qkv_meta[1:]))
        return f"{self.deterministic} {self._hints() if matter else ''}"

    def _hints(self) -> Lengths | None:
        return None if self.qkv_meta is None else hints_of(self.qkv_meta)

    def _register(
        self, key: str, program: Program, specs: Sequence[CustomSpec], backend: str, variant: Variant
    ) -> None:
        maths = analyse(program)
        program_kernels, trained = None, None
        if backend != "reference":
            program_kernels = self._program_kernels(maths, specs, backend == "interpret")
        if maths.bent is not None and program_kernels is not None:
            trained, inner = f"{key} trained", maths.bent.maths
            of_inner = self._program_kernels(inner, specs, backend == "interpret")
            ATTENTIONS[trained] = PairAttention(trained, inner, specs, of_inner, bend=maths.bent.bend)
        ATTENTIONS[key] = PairAttention(key, maths, specs, program_kernels, trained)

    def _program_kernels(self, maths: Maths, specs: Sequence[CustomSpec], interpret: bool) -> ProgramKernels:
        def choose_tiles(
            wanted: tuple[str, ...], problem: Problem, target: Target, lengths: Lengths,
            device: torch.device, tiles: Tiles, backward: bool, custom: Sequence[Tensor],
        ) -> Tiles:  # fmt: skip
            asked = Asked(maths.wanting(wanted), specs, problem, target, deterministic, lengths, str(device), wanted)
            chosen: Tiles = choose(tuning, asked, tiles, backward, custom)
            return chosen

        tuning, deterministic, hints = self.tuning, self.deterministic, self._hints()
        packed = any(spec.name == SEQUENCE_Q for spec in specs)  # trials draw no tables of sequences
        chosen = choose_tiles if tuning.matters and not packed else None
        return ProgramKernels(maths, specs, interpret, self.device, self.deterministic, choose=chosen, hints=hints)
