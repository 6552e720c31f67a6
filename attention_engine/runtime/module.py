"""AttentionEngine: a user's attention as a torch.nn.Module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, overload

from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import Arch
from attention_engine.errors import AttentionEngineError, OptionsClash
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.frames import brief
from attention_engine.frontend.meta import Meta, check_metas
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.signatures import Backend, Layout, MaskMod, MaskValue, ScoreMod
from attention_engine.frontend.tracing import place_of
from attention_engine.library import OnlineSoftmax
from attention_engine.passes.check_cuts import check_online
from attention_engine.runtime import op, parts
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.block_rows import ByBlock
from attention_engine.runtime.blocks import BlockList, CallBlocks, GivenBlocks, blocks_of_call
from attention_engine.runtime.built import Built, Variant
from attention_engine.runtime.captured import (
    Axes,
    axes_now,
    check_captured,
    sizes_of,
    tensors_now,
)
from attention_engine.runtime.dropout import check_probability, seed_of_call
from attention_engine.runtime.flex import of_flex
from attention_engine.runtime.inputs import (
    check_custom,
    check_flag,
    check_options,
    check_qkv,
    check_ranks,
    check_scale,
    check_tuning,
    check_type,
    follow_autocast,
    guess_types,
    heads_of,
    is_cast,
    is_dtensor,
    order_custom,
    share_keys,
    type_of,
)
from attention_engine.runtime.names import declared, either, explains_names
from attention_engine.runtime.on_caches import OnCaches
from attention_engine.runtime.packed import refuse_lengths
from attention_engine.runtime.packed_call import call_packed
from attention_engine.runtime.parted import Parted
from attention_engine.runtime.sharded import call_sharded
from attention_engine.runtime.tuning import Tuning

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

WithRows: TypeAlias = tuple[Tensor, dict[str, Tensor]]


class AttentionEngine(Built, Parted, ByBlock, OnCaches):
    """An attention, from its maths, as a torch.nn.Module. What is left out is as usual: softmax of scaled q . k.

    Args:
        qkv_meta: three `meta_tensor(B, H, S, D)` for q, k, v. Left out: heads, dims and dtype are those of each call.
        custom_io: the custom inputs, tensors that are given with a call. What functions capture needs none.
        score_mod: `(score, custom, b, h, q_idx, kv_idx) -> score`, for each pair, on q . k (fp32) times scale.
        mask_mod: `(b, h, q_idx, kv_idx[, custom]) -> bool`. True keeps. It is applied after score_mod, and a masked
            pair takes no part in anything.
        online_func: how a row of scores becomes weights; None is `library.OnlineSoftmax()`.
        mask_value: None, "-inf" or "0", which mean the same.
        scale: a number. None is dim ** -0.5 where there is no score_mod, and 1 where there is one, which scales itself.
        block_mask: a callable is a mask_mod. A tensor, int8 or bool (B or 1, H or 1, ceil(Sq/bq), ceil(Skv/bkv)), says
            which blocks exist.
        block_size: (bq, bkv), the queries and keys of a block of block_mask.
        layout: of the tensors in a call: "bshd" is (batch, length, heads, dim), "bhsd" (batch, heads, length, dim).
        device: an Arch to compile for; None is the tensors' own.
        backend: "auto" (kernels on CUDA tensors, the reference on CPU tensors), "tilelang", "reference", or "interpret"
            (the kernels, emulated on CPU tensors).
        tune: measure tiles of the forward kernel at the first call of each new problem (a dtype, a power of two of the
            lengths, ...), in processes of their own and on random q, k, v.
        tune_file: where what was found is kept, and looked up, also without tune.
        tune_bwd: the same as tune for the backward kernels.
        tune_file_bwd: another file for the backward kernels.
        deterministic: gradients are bitwise the same in every run.
        dropout_p: in train() mode each weight is dropped with this probability, 0 <= dropout_p < 1, and the others are
            divided by 1 - dropout_p. Returned rows know all weights.
        custom_fwd_inputs: another name of custom_io.
        tune_filename: another name of tune_file.

    Raises:
        BadMeta: qkv_meta doesn't describe an attention.
        HeadsDoNotGroup: query heads can't share the key heads evenly.
        UnknownOption: an option has a value that means nothing.
        NotOnline: the result depends on how a row is cut into tiles.
        AttentionEngineError: what else is wrong in the functions; each mistake has a class of its own.

    >>> engine = AttentionEngine(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    >>> q, k, v = torch.randn(3, 1, 8, 2, 16, requires_grad=True)
    >>> engine(q, k, v).shape
    torch.Size([1, 8, 2, 16])
    """

    block_mask: Tensor | None
    ORDINARY: ClassVar[Variant] = (None, None, None, "")
    TURNED: ClassVar[int] = 3

    @explains_names
    def __init__(
        self, qkv_meta: Sequence[Meta] | None = None, custom_io: CustomIO | None = None,
        score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None, online_func: OnlineFunc | None = None,
        mask_value: MaskValue | None = None, *, scale: float | None = None,
        block_mask: MaskMod | BlockMask | Tensor | None = None, block_size: tuple[int, int] = (128, 128),
        layout: Layout = "bshd", device: Arch | None = None, backend: Backend = "auto", tune: bool = False,
        tune_file: str | None = None, tune_bwd: bool = False, tune_file_bwd: str | None = None,
        deterministic: bool = False, custom_fwd_inputs: CustomIO | None = None, tune_filename: str | None = None,
        dropout_p: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_meta = None if qkv_meta is None else check_metas(qkv_meta)
        given = either("custom_io", custom_io, "custom_fwd_inputs", custom_fwd_inputs)
        self.custom_io = declared(given, ("score_mod", "mask_mod"))
        tune_file = either("tune_file", tune_file, "tune_filename", tune_filename)
        check_options(backend, layout, mask_value, device, block_size)
        check_scale(scale)
        check_flag("deterministic", deterministic)
        check_tuning(backend, tune=tune, tune_bwd=tune_bwd, tune_file=tune_file, tune_file_bwd=tune_file_bwd)
        check_type("online_func", online_func, OnlineFunc, optional=True)
        mask_mod, block_mask, block_size = of_flex(mask_mod, block_mask, block_size)
        if callable(block_mask) and not isinstance(block_mask, Tensor):
            if mask_mod is not None:
                raise OptionsClash(
                    "block_mask is a function and mask_mod is given too. A function is a mask_mod: join them with\n"
                    "  attention_engine.library.and_masks."
                )
            mask_mod, block_mask = block_mask, None
        if isinstance(block_mask, BlockList):
            raise OptionsClash("a BlockList belongs to a call: engine(q, k, v, block_mask=BlockList(...)).")
        check_type("block_mask", block_mask, Tensor, optional=True)
        assert block_mask is None or isinstance(block_mask, Tensor)
        self.score_mod, self.mask_mod = score_mod, mask_mod
        self.online_func = online_func if online_func is not None else OnlineSoftmax()
        self.scale = 1.0 if scale is None else float(scale)
        if scale is None and score_mod is None:
            self.scale = self.qkv_meta[0].dim ** -0.5 if self.qkv_meta else None
        self.layout, self.device, self.deterministic = layout, device, deterministic
        self.dropout_p = check_probability(dropout_p)
        self.backend = "tilelang" if backend == "tl" else backend
        self.block_size = (block_size[0], block_size[1])
        self.tuning = Tuning((tune, tune_bwd), (tune_file, tune_file_bwd or tune_file))
        self.register_buffer("block_mask", block_mask, persistent=False)
        self._begin()
        self._types = guess_types(list(self.custom_io.specs), lambda types: self._trace(types, self.ORDINARY))
        check_online(self._program, where=f"{place_of(self.online_func.online_fwd)}: ")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, block_mask: GivenBlocks | None = None,
                return_rowscales: bool = False, cu_seqlens_q: Tensor | None = None,
                cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
                max_seqlen_k: int | None = None, dropout_seed: int | Tensor | None = None,
                **named: Tensor) -> Tensor | WithRows:  # fmt: skip
        """The output, differentiable in q, k, v and every floating custom or captured tensor.

        Args:
            q, k, v: (batch, length, heads, dim), or (batch, heads, length, dim) with layout="bhsd"; with cu_seqlens_q
                (rows, heads, dim), the rows of many sequences behind one another.
            custom: custom inputs in the order of custom_io, or by name.
            block_mask: which blocks exist, for this call alone: a tensor as the constructor takes, or a `BlockList`.
            return_rowscales: return the rows of the epilogue, too.
            cu_seqlens_q: int32 (sequences + 1), where each sequence begins, and where the last ends. `b` is the
                sequence then, `kv_idx` the place in it, and q_idx = length of keys - length of queries + place.
            cu_seqlens_k: the same of keys; None where they are the queries' tokens.
            max_seqlen_q, max_seqlen_k: taken, as flash-attn's functions ask for them, and not needed.
            dropout_seed: 0 to 2^63 - 1, or a tensor of one integer: it says which weights are dropped, where some are.
                Left out, torch's generator of the device draws one.

        Returns:
            o, like q with v's head dim; with return_rowscales (o, {name: row (B, H, Sq), fp32}), rows (H, rows of q) of
            packed sequences.

        Raises:
            BadInput: tensors that don't fit.
        """
        try:
            if type(q) is not Tensor and is_dtensor(q):
                lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "block_mask": block_mask}
                results: WithRows = call_sharded(self, q, k, v, custom, named, return_rowscales, dropout_seed, lengths)
                return results
            captured = self._captured
            held = tensors_now(captured) if captured else ()
            seed = None
            if self.dropout_p or dropout_seed is not None:
                seed = seed_of_call(self.dropout_p if self.training else 0.0, dropout_seed, q)
            if cu_seqlens_q is not None:
                starts = cu_seqlens_q, cu_seqlens_k
                return call_packed(self, q, k, v, custom, held, starts, block_mask, return_rowscales, named, seed)
            if cu_seqlens_k is not None or max_seqlen_q is not None or max_seqlen_k is not None:
                refuse_lengths(cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            return self._call(q, k, v, custom, held, block_mask, return_rowscales, named, seed)
        except AttentionEngineError as error:
            if is_compiling():  # the compiler follows what is raised, but no traceback
                raise
            raise brief(error) from error.__cause__

    if TYPE_CHECKING:  # how an engine is called

        @overload
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, block_mask: GivenBlocks | None = None,
                    return_rowscales: Literal[False] = False, cu_seqlens_q: Tensor | None = None,
                    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
                    max_seqlen_k: int | None = None, dropout_seed: int | Tensor | None = None,
                    **named: Tensor) -> Tensor: ...  # fmt: skip

        @overload
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, block_mask: GivenBlocks | None = None,
                    return_rowscales: Literal[True], cu_seqlens_q: Tensor | None = None,
                    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
                    max_seqlen_k: int | None = None, dropout_seed: int | Tensor | None = None,
                    **named: Tensor) -> WithRows: ...  # fmt: skip

        @overload
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, *custom: Tensor, block_mask: GivenBlocks | None = None,
                    return_rowscales: bool, cu_seqlens_q: Tensor | None = None,
                    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
                    max_seqlen_k: int | None = None, dropout_seed: int | Tensor | None = None,
                    **named: Tensor) -> Tensor | WithRows: ...  # fmt: skip

        def __call__(self, *args: Any, **named: Any) -> Any: ...

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], captured: Sequence[Tensor],
        block_mask: GivenBlocks | None, return_rowscales: bool, named: Mapping[str, Tensor], seed: Tensor | None = None,
    ) -> Tensor | WithRows:  # fmt: skip
        """A call with these tensors in place of the captured ones. seed: where weights are dropped."""
        check_flag("return_rowscales", return_rowscales)
        seeds, form = ((), None) if seed is None else ((seed,), self.dropout_p)
        given = (q, k, v, *custom, *seeds, *captured)
        alone = block_mask is None and not named and self._buffers["block_mask"] is None and not is_compiling()
        if alone:
            found = self._repeat(form, return_rowscales, given, given)
            if found is not None:
                return self._results(found, return_rowscales)
        tensors = order_custom(self.custom_io, custom, named)
        check_ranks(self.layout, q, k, v)
        cast = is_cast(q)
        q, k, v = follow_autocast(q, k, v)
        if self.layout == "bhsd":
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if q.shape[0] != 1 and 1 in (k.shape[0], v.shape[0]):
            k, v = share_keys(q, k, v)
            alone = False  # what is seen is not what runs
        backend = self._backend_for(q.device)
        check_qkv(self.qkv_meta, self.layout, backend != "reference", q, k, v)
        blocks = self._blocks(block_mask, q, k)
        tensors = [*tensors, *([] if blocks is None else [blocks.map]), *seeds]
        heads = heads_of(q), heads_of(k), heads_of(v)
        self._note_call(heads, q.dtype)
        variant = self._variant(blocks, heads[0][1])
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
            return self._results(parts.run(key, q, k, v, tensors, return_rowscales), return_rowscales)
        self._begin_backward(key, (q, k, v, *tensors))
        direct = None
        if alone and not cast and op.unwatched():  # nothing that others look at may be kept, nor fakes
            program_kernels = ATTENTIONS[key].program_kernels
            direct = program_kernels.direct(q, k, v, tensors) if program_kernels is not None else None
            self._remember(form, given, key, direct)
        return self._results(op.run(key, return_rowscales, (q, k, v, *tensors), direct), return_rowscales)

    def _results(self, found: Sequence[Tensor], return_rowscales: bool) -> Tensor | WithRows:
        output, *rows = found
        output = output.transpose(1, 2) if self.layout == "bhsd" else output
        if not return_rowscales:
            return output
        return output, dict(zip((n for n, _ in self._program.finals), rows, strict=True))

    def _blocks(self, given: GivenBlocks | None, q: Tensor, k: Tensor) -> CallBlocks | None:
        """The blocks of a call: its own, or the engine's."""
        blocks = given if given is not None else self.block_mask
        return None if blocks is None else blocks_of_call(blocks, self.block_size, q, k, self.backend != "reference")
