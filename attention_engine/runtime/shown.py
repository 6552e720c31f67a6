"""What an engine shows of itself: its program, kernels, tiles and costs, and a check against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_engine.arch import Arch, check_gpu
from attention_engine.codegen.compile import Resources
from attention_engine.compiler import CachedKernels, Kernel, Kernels, compile_all, resources_by_symbol
from attention_engine.frontend.frames import briefly
from attention_engine.frontend.meta import hints_of, lengths_of
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.signatures import Form, MaskMod, ScoreMod
from attention_engine.ir.expr import Expr
from attention_engine.ir.merge import Merge
from attention_engine.ir.packing import Packing
from attention_engine.ir.program import Program
from attention_engine.passes.drop_weights import SEED
from attention_engine.passes.maths import Maths, analyse
from attention_engine.runtime import parts
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.blocks import BlockList, CallBlocks, GivenBlocks, blocks_alike, map_kernel, spec_of
from attention_engine.runtime.cached_shown import NAMES as OF_CACHES
from attention_engine.runtime.cached_shown import explain_cached, kernels_of_caches
from attention_engine.runtime.captured import axes_now, specs_of, tensors_now
from attention_engine.runtime.check import check_call
from attention_engine.runtime.check_report import CheckReport
from attention_engine.runtime.cost import Cost, cost_of
from attention_engine.runtime.described import in_lines, in_one_line, name_of, parts_of, parts_of_backward, places_of
from attention_engine.runtime.dropout import SPEC, seed_tensor
from attention_engine.runtime.engine import Engine, device_to_show, gpu_of, gpu_to_compile_for, kernel_of
from attention_engine.runtime.explain import explain
from attention_engine.runtime.inputs import check_ranks, order_custom, stand_ins, type_of
from attention_engine.runtime.packed import Packed, count_sequences, packing_of, sizes_of_packed, tables_of
from attention_engine.runtime.packed_tables import tables_kernel
from attention_engine.runtime.pictures import MaskPicture, ScorePicture
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.runtime.program_text import Part, program_text
from attention_engine.runtime.showing import Choice, draw_mask, draw_scores, mask_of_engine
from attention_engine.runtime.small_call import draw
from attention_engine.runtime.source_text import titled
from attention_engine.runtime.tuning import Asked

USUAL = (1, 1024, 1024)  # batch, queries, keys of metas that don't say


class Shown(Engine):
    """The half of an AttentionEngine that looks at it; the other half runs calls."""

    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    online_func: OnlineFunc
    scale: float | None
    block_size: tuple[int, int]
    block_mask: GivenBlocks | None

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], captured: Sequence[Tensor],
        block_mask: GivenBlocks | None, return_rowscales: bool, named: Mapping[str, Tensor], seed: Tensor | None = None,
    ) -> Any:  # fmt: skip
        raise NotImplementedError

    @property
    def _drops(self) -> str:
        """With which probability weights are dropped, as text; "" where none are."""
        raise NotImplementedError

    def _backend_for(self, device: torch.device) -> str:
        raise NotImplementedError

    def _blocks(self, given: GivenBlocks | None, q: Tensor, k: Tensor) -> CallBlocks | None:
        raise NotImplementedError

    def _variant(
        self, blocks: CallBlocks | None = None, dim: int | None = None, packing: Packing | None = None,
        drops: str | None = None,
    ) -> Any:  # fmt: skip
        """What a call with these blocks and this head dim, of sequences packed so, says of the program. drops: with
        which probability weights are dropped, where not as the engine's mode says."""
        raise NotImplementedError

    def _combine_of(self, program: Program) -> Expr | None:
        """What the user's `combine` multiplies the outputs of parts with, of the rows that they return."""
        raise NotImplementedError

    def _merge_of(self, program: Program) -> Merge:
        """How the parts of a program's rows join. Raises NoMerge."""
        raise NotImplementedError

    def _maths(self, packed: Packed = None) -> Maths:
        """The program, scaled by the newest call's dim where calls make the scale."""
        dim, packing = self._called[0].dim if self.scale is None and self._called else None, packing_of(packed)
        if dim is None and packing is None and not self._drops:
            return analyse(self._program)
        return analyse(self._trace(self._types, self._variant(dim=dim, packing=packing)))

    def program(self, packed: Packed = None) -> str:
        """The traced maths and the derived backward pass as numbered lines, each after what it uses, with the function
        that it is of. In a notebook its formulas are drawn. packed: "alike" or "unlike", that of a packed call, whose
        sequences of queries and keys have the same lengths or not.

        qk is q . k of a pair; `score` what score_mod made of it; state.m a row's state so far and next.m after this
        tile; o the sum of weights times v so far; v0, g0 names of what is used twice.
        """
        maths = self._maths(packed)
        return program_text([Part(self._spell_scale()), *parts_of(self, maths.program), *parts_of_backward(maths)])

    def _spell_scale(self) -> str:
        """What multiplies q . k before score_mod, in words."""
        known = self.qkv_meta or self._called
        if self.scale is None and known is None:
            return "q . k is scaled by dim ** -0.5, of the tensors in a call; below it stands scaled"
        scale = known[0].dim ** -0.5 if self.scale is None and known else self.scale
        if scale == 1.0:
            return "q . k comes unscaled" + (": score_mod scales itself" if self.score_mod is not None else "")
        usual = " = dim ** -0.5" if known and scale == known[0].dim ** -0.5 else ""
        return f"q . k is scaled by {scale!r}{usual}"

    @briefly
    def source(
        self, kernel: str = "forward", form: Form = "tilelang", packed: Packed = None, cache_page: int | None = None,
        cache_shared: bool = False, device: Arch | None = None,
    ) -> str:  # fmt: skip
        """A kernel as text, by the name that `compile_for` returns: "forward", "preprocess", "backward", "postprocess",
        "decode", "decode parts", "combine", and what else this engine launches.

        form: "tilelang", under a title and in lines of less than 120 columns, or "cuda" for what is compiled (for
        `device`, else the engine's, else this machine's GPU). Two more are lowered and not compiled: "hip" for AMD's
        GPUs, and "cutedsl", of kernels in straight lines, for CUTLASS's Python (docs/limits.md). With custom inputs of
        other dtypes than fp32 the kernels of a call differ in those loads. packed: as `program` takes it. cache_page,
        cache_shared: as `compile_for` takes them. Raises UnknownOption, NoDevice, NotLowered.

            print(engine.source("backward", form="hip", device=arch.MI300X()))
        """
        device = device_to_show(self, form, device)
        if kernel in OF_CACHES or cache_page is not None:
            given = self._of_caches(device, cache_page or 0, cache_shared, packed)
            found = kernel_of(given.every, kernel)
        else:
            found = self._source_kernel(kernel, form, packed, device)
        return titled(kernel, found.source(form), places_of(self)) if form == "tilelang" else found.source(form)

    def _source_kernel(self, kernel: str, form: str, packed: Packed = None, device: Arch | None = None) -> Kernel:
        kernels, trained = (self._kernels(form, trained, packed, device) for trained in (False, True))
        found = dict(kernels.of_forward)
        found |= {} if trained.maths.backward is None else trained.every_of_backward
        return kernel_of(found, kernel)

    def _of_caches(
        self, device: Arch | None, page: int, shared: bool, packed: Packed, given: Sequence[Tensor] = ()
    ) -> CachedKernels:
        """The kernels of `with_cache`."""
        return kernels_of_caches(self, device, page, given, shared=shared, packed=packing_of(packed) is not None)

    def _kernels(
        self, form: str, trained: bool = False, packed: Packed = None, device: Arch | None = None
    ) -> Kernels:  # fmt: skip
        asked = self._asked(device or self.device, device_to_show(self, form, device) is None, packed=packed)
        return (asked.trained if trained else asked).kernels_as_known(self.tuning)

    def _asked(
        self, device: Arch | None, interpret: bool, given: Sequence[Tensor] = (), packed: Packed = None,
        block_mask: GivenBlocks | None = None,
    ) -> Asked:  # fmt: skip
        """The problem that the metas describe, and a call's custom inputs: fp32 ones, unless there are some."""
        place = torch.device("cuda" if device is None and not interpret else "cpu")
        metas = self._metas()
        dtype = getattr(torch, metas[0].dtype_name)
        q, k, v = (torch.empty(1, 1, m.heads, m.dim, dtype=dtype, device=place) for m in metas)
        v = v[..., : parts.width(v.shape[3])]
        declared = list(self.custom_io.specs.values())
        blocks = None if block_mask is None else blocks_alike(block_mask, q, k)
        held = tensors_now(self._captured)
        maths = self._maths_of(given, held, blocks, packed)
        specs, tensors = list(declared), list(given) or stand_ins(declared, self._types, place)
        sizes: dict[str, int | None] = {"batch": None, "heads": q.shape[2], "seq_len": None, "seq_len_kv": None}
        if (packing := packing_of(packed)) is not None:
            sizes, tables = sizes_of_packed(q), tables_of(packing)
            specs = [*count_sequences(declared), *tables]
            tensors += [torch.empty(1, dtype=torch.int32, device=place) for _ in tables]
        if blocks is not None:
            specs.append(spec_of(blocks.variant))
            tensors.append(blocks.map)
        if self._drops:
            specs.append(SPEC)
            tensors.append(seed_tensor(0, place))
        specs += specs_of(self._captured, axes_now(self._captured, held, sizes))
        tensors += [torch.empty(1, dtype=t.dtype, device=place, requires_grad=t.requires_grad) for t in held]
        custom = [as_parameter(t) for t in tensors]
        program_kernels = ProgramKernels(maths, specs, interpret, device, self.deterministic)
        lengths = lengths_of(metas, USUAL)
        problem, target = program_kernels.problem(q, k, v, custom), program_kernels.target(q)
        wanted = tuple(spec.name for spec, t in zip(specs, tensors, strict=True) if t.requires_grad)
        return Asked(
            maths.wanting(wanted), specs, problem, target, self.deterministic, lengths, str(place), wanted,
            hints_of(metas),
        )  # fmt: skip

    def _maths_of(
        self, given: Sequence[Tensor], held: Sequence[Tensor], blocks: CallBlocks | None, packed: Packed
    ) -> Maths:  # fmt: skip
        """Of calls with these custom inputs (none: of the types that the constructor guessed) and captured tensors."""
        if not given and blocks is None:
            return self._maths(packed)
        types = dict(self._types)
        types |= {s.name: type_of(t) for s, t in zip(self.custom_io.in_order, given, strict=False)}
        types |= {c.name: type_of(t) for c, t in zip(self._captured, held, strict=True)}
        if blocks is not None:
            types[blocks.name] = type_of(blocks.map)
        return analyse(self._trace(types, self._variant(blocks, self._metas()[0].dim, packing_of(packed))))

    @briefly
    def explain(
        self, packed: Packed = None, cache_page: int | None = None, cache_shared: bool = False,
        block_mask: GivenBlocks | None = None,
    ) -> str:  # fmt: skip
        """Which tile each kernel runs with for the metas' lengths, where it comes from, and why others fell. packed: as
        `program` takes it. block_mask, cache_page, cache_shared: as `compile_for` takes them; with cache_page it says
        into how many parts rows are cut, the grid, the bytes that move, and what compiled kernels take of a GPU."""
        device = device_to_show(self, "tilelang")
        if cache_page is not None:
            return explain_cached(self, self._of_caches(device, cache_page, cache_shared, packed))
        return explain(self._asked(self.device, device is None, packed=packed, block_mask=block_mask), self.tuning)

    @briefly
    def compile_for(
        self, device: Arch, *custom: Tensor, cache_page: int | None = None, packed: Packed = None,
        cache_shared: bool = False, block_mask: GivenBlocks | None = None, **named: Tensor,
    ) -> list[str]:  # fmt: skip
        """Compiles this engine's kernels for a GPU, which need not be here, and keeps them on disk; their names.

        A machine with that GPU and the same cache folder (ATTENTION_ENGINE_CACHE_DIR) then needs no nvcc. custom: as a
        call gets them, on any device, with requires_grad where their gradients will be asked for; without any they are
        taken as fp32, all gradients as asked for. Gradients through returned rows are left out. A persistent kernel
        serves GPUs with as many SMs as `device` has (`dataclasses.replace(arch.H100(), sm_count=114)` for a PCIe card).
        cache_page: compiles the kernels of `with_cache`, for pages of so many keys; 0: for keys one after the other;
        cache_shared: where values are the first columns of keys (v_cache=None); with `packed`, queries by cu_seqlens_q.
        packed: the kernels of packed calls, "alike" or "unlike", whether queries and keys have the same lengths.
        block_mask: those of calls with blocks like these; whether batches and heads share them and the size of a block
        count, lengths don't. Raises NoCudaCompiler, TileDoesNotFit, CustomInputMissing.
        """
        check_gpu(device)
        given = order_custom(self.custom_io, custom, named) if custom or named else []
        if cache_page is None:
            kernels = self._all_kernels(device, given, packed, block_mask)
        else:
            kernels = self._of_caches(device, cache_page, cache_shared, packed, given).every
        compile_all(kernels.values())
        return list(kernels)

    @briefly
    def resources(
        self, device: Arch | None = None, packed: Packed = None, cache_page: int | None = None,
        cache_shared: bool = False,
    ) -> dict[str, Resources]:  # fmt: skip
        """Registers, spills and shared memory of each kernel, as ptxas reports them, by the name of its function.

        device: a GPU that need not be here; None: this machine's. packed, cache_page, cache_shared: as `compile_for`
        takes them. Compiles what isn't compiled yet. Raises NoCudaCompiler, TileDoesNotFit.
        """
        device = gpu_to_compile_for(self, device)
        if cache_page is None:
            kernels = self._all_kernels(device, packed=packed)
        else:
            kernels = self._of_caches(device, cache_page, cache_shared, packed).every
        compile_all(kernels.values())
        return resources_by_symbol(kernels)

    def _all_kernels(
        self, device: Arch, given: Sequence[Tensor] = (), packed: Packed = None, block_mask: GivenBlocks | None = None
    ) -> dict[str, Kernel]:  # fmt: skip
        """The kernels of both directions on a GPU, by name."""
        asked = self._asked(device, False, given, packed, block_mask)
        kernels, trained = (each.kernels_as_known(self.tuning) for each in (asked, asked.trained))
        both = dict(kernels.of_forward)
        if (packing := packing_of(packed)) is not None:
            both["tables of sequences"] = tables_kernel(packing, device)
        if isinstance(block_mask, BlockList):
            both["map of blocks"] = map_kernel(block_mask.counts is not None, device)
        if asked.maths.bent is not None:
            both |= {f"{name} with gradients": kernel for name, kernel in trained.of_forward.items()}
        if trained.maths.backward is None:
            return both
        return both | trained.every_of_backward

    def _dense_program(
        self, tensors: Sequence[Tensor], block_mask: GivenBlocks | None
    ) -> tuple[Program, list[str], list[Tensor]]:
        """The program of a call with these tensors (q, k, v, custom inputs, captured tensors), the names of all but the
        first three, and the blocks and the seed of dropout, 0, which are named last."""
        q, k = (t if self.layout == "bshd" else t.transpose(1, 2) for t in tensors[:2])
        blocks = self._blocks(block_mask, q, k)
        seeds = [seed_tensor(0, q.device)] if self._drops else []
        extra = [*([] if blocks is None else [blocks.map]), *seeds]
        variant = self._variant(blocks, q.shape[3])
        added = [*([] if blocks is None else [blocks.name]), *([SEED] if seeds else [])]
        names = [*self.custom_io.specs, *[c.name for c in self._captured], *added]
        types = {n: type_of(t) for n, t in zip(names, [*tensors[3:], *extra], strict=True)}
        return self._trace(types, variant), names, extra

    @briefly
    def check(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *custom: Tensor,
        block_mask: GivenBlocks | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
        kv_lengths: Tensor | None = None, page_table: Tensor | None = None, q_starts: Tensor | None = None,
        **named: Tensor,
    ) -> CheckReport:  # fmt: skip
        """Compares every output and gradient with float64, those through returned rows too; print what it returns.

        Tensors as in a call, packed ones too; without q, k and v they are drawn at random, of the metas and short. With
        kv_lengths it is a call of `with_cache`, where k and v are the caches: whole rows, and rows in parts. With
        backend="auto" and CPU tensors kernels run on the interpreter, on the first tokens alone (96, 2 batches); with
        backend="reference" no kernel runs, and the report says so. Its `ok` is True where each error is within 1.1
        (fp32: 10) times that of eager PyTorch in the same dtype. Raises NotOnline, and what a call raises.

        Example:
            >>> AttentionEngine(mask_mod=library.causal).check(*torch.randn(3, 1, 8, 1, 16)).ok
            True
        """
        tensors = order_custom(self.custom_io, custom, named)
        if kv_lengths is not None and q is not None and k is not None:
            from attention_engine.runtime.cached_check import Given, check_cached

            return check_cached(self, Given(q, k, v, tensors, kv_lengths, page_table, q_starts, cu_seqlens_q))
        drawn = draw(self) if q is None or k is None or v is None else [q, k, v]
        if cu_seqlens_q is not None:
            from attention_engine.runtime.packed_check import check_packed

            report = check_packed(self, drawn[0], drawn[1], drawn[2], tensors, (cu_seqlens_q, cu_seqlens_k))
        else:
            report = check_call(self, drawn[0], drawn[1], drawn[2], tensors, block_mask)
        self._note_asked(*drawn)
        return report

    @briefly
    def cost(
        self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, block_mask: GivenBlocks | None = None,
        device: Arch | None = None, **named: Tensor,
    ) -> Cost:  # fmt: skip
        """FLOPs of the pairs that a call with these tensors keeps, and bytes that must move, forward and backward; it
        prints as a table, with the time that a GPU needs at least: `device`, else the engine's, else this machine's.
        """
        check_ranks(self.layout, q, k, v)
        tensors = [q, k, v, *order_custom(self.custom_io, custom, named), *tensors_now(self._captured)]
        program, names, extra = self._dense_program(tensors, block_mask)
        if self.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        inputs = dict(zip(names, [*tensors[3:], *extra], strict=True))
        return cost_of(program, q, k, v, inputs, gpu_of(self, device))

    @briefly
    def show_mask(
        self, *custom: Tensor, B: int | None = None, H: int | None = None, Sq: int | None = None,
        Skv: int | None = None, block_mask: GivenBlocks | None = None, batch: Choice = None, head: Choice = None,
        tile: tuple[int, int] | None = None, **named: Tensor,
    ) -> MaskPicture:  # fmt: skip
        """A picture of the pairs that this engine keeps: SVG in a notebook, block characters where it is printed.

        custom: as in a call; those that the mask doesn't read may be left out. B, H, Sq, Skv: batch, heads, queries and
        keys; None: those of the custom inputs, else of the metas. The rest is what `show_mask` takes.

        Example:
            >>> io = CustomIO({"documents": ("batch", "seq_len")})
            >>> engine = AttentionEngine(custom_io=io, mask_mod=library.document())
            >>> picture = engine.show_mask(documents=document_ids([20, 44]), tile=(16, 16))
        """
        mask, queries, keys = mask_of_engine(self, custom, named, block_mask, (B, H, Sq, Skv))
        title = "no mask" if self.mask_mod is None else name_of(self.mask_mod)
        return draw_mask(mask, title, queries, keys, batch, head, tile)

    @briefly
    def show_scores(
        self, q: Tensor, k: Tensor, *custom: Tensor, block_mask: GivenBlocks | None = None, weights: bool = False,
        batch: Choice = None, head: Choice = None, **named: Tensor,
    ) -> ScorePicture:  # fmt: skip
        """A picture of the scores of q and k after score_mod, masked; with weights=True, of each row's final weights.

        custom: as in a call. batch, head: which to draw, an index or several; None: the first few.
        """
        check_ranks(self.layout, q, k, k)
        tensors = [q, k, k, *order_custom(self.custom_io, custom, named), *tensors_now(self._captured)]
        program, names, extra = self._dense_program(tensors, block_mask)
        q, k = (t if self.layout == "bhsd" else t.transpose(1, 2) for t in (q, k))
        functions = [name_of(f) for f in (self.score_mod, self.mask_mod) if f is not None]
        title = ", ".join([*functions, *([f"{type(self.online_func).__name__}()"] if weights else [])]) or "q . k"
        inputs = dict(zip(names, [*tensors[3:], *extra], strict=True))
        return draw_scores(program, inputs, title, q, k, weights, batch, head)

    def __repr__(self) -> str:
        return in_one_line(self)

    def __str__(self) -> str:
        return in_lines(self)
