"""What the scores of each row are in each block of keys: for a model that learns which blocks to choose."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_engine.compiler import Kernel, pass_configs
from attention_engine.errors import OptionsClash, WrongBlockMask
from attention_engine.frontend.frames import briefly
from attention_engine.frontend.online_func import Rows, SymbolScalar, Var
from attention_engine.frontend.symbols import Symbol
from attention_engine.ir.block_lists import ListedBlocks
from attention_engine.ir.problem import Problem
from attention_engine.library import OnlineSoftmax
from attention_engine.passes.absent_pairs import leave_out_absent
from attention_engine.passes.maths import analyse_part
from attention_engine.passes.schedule import ForwardSchedule
from attention_engine.plan.forms import Tile
from attention_engine.plan.targets import Target
from attention_engine.runtime.arguments import as_parameter, with_strides
from attention_engine.runtime.blocks import BlockList, check_entries, check_lists
from attention_engine.runtime.captured import axes_now, check_captured, sizes_of, specs_of, tensors_now
from attention_engine.runtime.inputs import (
    check_custom,
    check_qkv,
    check_ranks,
    follow_autocast,
    order_custom,
    share_keys,
    type_of,
)
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.runtime.shown import Shown

MOST_Q, MOST_KV = {2: 128, 4: 64}, {2: 64, 4: 32}  # queries and keys of a tile, by the bytes of a number
LEAST = 16  # of which tiles are multiples


class BlockRows(NamedTuple):
    """The scores of each row in each block that its list names, fp32 (batch, heads, queries, entries).

    maxima: the largest score of a kept pair, -inf where the block has none. sums: of exp(score - maximum) over kept
    pairs, 0 where there is none.
    """

    maxima: Tensor
    sums: Tensor

    @property
    def lse(self) -> Tensor:
        """The logarithm of what a softmax weighs in each block, before it is normalised: maxima + log(sums)."""
        return self.maxima + self.sums.log()


class _Scores(OnlineSoftmax):
    """Returns the maximum of the scores and the sum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.final_rowscales = {name: SymbolScalar(name, Var("0.0")) for name in ("maximum", "sum")}

    @staticmethod
    def online_fwd_epilogue(
        o: Symbol, online_rowscales: Rows, b: Symbol, h: Symbol, q_idx: Symbol
    ) -> tuple[Any, dict[str, Any]]:
        m, r = online_rowscales["m"], online_rowscales["r"]
        return o / r, {"maximum": m, "sum": r}


class ByBlock(Shown):
    """The half of an AttentionEngine that looks at blocks of keys, one at a time."""

    def _begin(self) -> None:
        super()._begin()
        self._looking: Any = None
        self._looks: dict[object, ProgramKernels] = {}

    @briefly
    def block_rows(self, q: Tensor, k: Tensor, *custom: Tensor, block_mask: BlockList | None = None,
                   **named: Tensor) -> BlockRows:  # fmt: skip
        """The largest score of each row in each listed block of keys, and the sum over the block's scores.

        Scores are those of a call, after score_mod and masks; what the row function makes of them has no part in it.
        A model that learns to choose blocks is taught by these (SeerAttention, Gao et al., 2024, arXiv 2410.13276, by
        the maxima). They have no gradient.

        Args:
            q, k: as in a call.
            custom: custom inputs, in order or by name.
            block_mask: which blocks each block of queries looks at, `BlockList`. None: every block of keys, in order,
                of the engine's block_size.

        Returns:
            BlockRows: maxima and sums, fp32 (batch, heads, queries, entries), entries in the order of the list. Those
            behind a list's count have -inf and 0, as blocks have of which a row sees nothing.

        Raises:
            WrongBlockMask: lists that don't fit; a map of blocks in place of lists.
            BadInput: tensors that don't fit.

        >>> from attention_engine import AttentionEngine, BlockList
        >>> engine = AttentionEngine(mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, block_size=(4, 4))
        >>> q, k = torch.randn(2, 1, 8, 2, 16)
        >>> rows = engine.block_rows(q, k)                      # each of 2 blocks of keys
        >>> rows.maxima.shape
        torch.Size([1, 2, 8, 2])
        >>> rows.lse.softmax(-1)[0, 0, 3].tolist()              # the first four queries see the first block alone
        [1.0, 0.0]
        """
        if self._looking is None:
            self._looking = _looking(self)
        tensors = order_custom(self.custom_io, custom, named)
        found: BlockRows = self._looking._rows_of_blocks(q, k, tensors, block_mask)
        return found

    def _rows_of_blocks(self, q: Tensor, k: Tensor, tensors: Sequence[Tensor], lists: BlockList | None) -> BlockRows:
        captured = self._captured
        held = tensors_now(captured) if captured else ()
        check_ranks(self.layout, q, k, k)
        q, k, _ = follow_autocast(q.detach(), k.detach(), k.detach())
        if self.layout == "bhsd":
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        if q.shape[0] != 1 and k.shape[0] == 1:
            k, _ = share_keys(q, k, k)
        backend = self._backend_for(q.device)
        check_qkv(None, self.layout, backend != "reference", q, k, k)
        check_custom(self.custom_io.in_order, tensors, q, k)
        check_captured(captured, held, q)
        lists = _every(self.block_size, q, k) if lists is None else lists
        if not isinstance(lists, BlockList):
            raise WrongBlockMask(
                f"block_mask is {type(lists).__name__}, and rows of blocks want lists: block_mask=BlockList(indices)."
            )
        sharing, columns = check_lists(lists, q, k)
        if q.device.type == "cpu":
            check_entries(lists, columns)
        blocks = ListedBlocks(*lists.block_size, lists.indices.shape[0] > 1, sharing)
        given = [t.detach() for t in (*tensors, *held)]
        small = any(size % LEAST for size in lists.block_size)
        if backend == "reference" or small or not (q.numel() and k.numel() and lists.indices.numel()):
            return self._entry_by_entry(q, k, given[: len(tensors)], lists)
        return self._by_kernel(self._kernels_of(backend, q, k, given), q, k, given, lists, blocks)

    @torch.no_grad()
    def _entry_by_entry(self, q: Tensor, k: Tensor, tensors: Sequence[Tensor], lists: BlockList) -> BlockRows:
        """By a call for each entry of the lists."""
        found = []
        turned = [t.transpose(1, 2) if self.layout == "bhsd" else t for t in (q, k, k)]
        for entry in range(lists.indices.shape[-1]):
            one = lists.indices[..., entry : entry + 1]
            counts = lists.counts_or_all() > entry
            of_entry = BlockList(one, counts.to(torch.int32), lists.block_size)
            _, rows = self(*turned, *tensors, block_mask=of_entry, return_rowscales=True)
            found.append((rows["maximum"], rows["sum"]))
        if not found:
            none = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], 0, dtype=torch.float32)
            return BlockRows(none, none)
        maxima, sums = (torch.stack(of, -1).float() for of in zip(*found, strict=True))
        return _cleared(maxima, sums)

    def _kernels_of(self, backend: str, q: Tensor, k: Tensor, given: Sequence[Tensor]) -> ProgramKernels:
        """What says of such calls' kernels their problem and target."""
        captured, variant = self._captured, self._variant(None, q.shape[3])
        names = [*self.custom_io.specs, *(c.name for c in captured)]
        types = tuple((n, type_of(t)) for n, t in zip(names, given, strict=True))
        axes = axes_now(captured, given[len(self.custom_io.specs) :], sizes_of(q, k)) if captured else ()
        asked = (backend, types, variant, axes)
        if asked not in self._looks:
            maths = analyse_part(leave_out_absent(self._trace(dict(types), variant)))
            specs = [*self._specs(variant), *specs_of(captured, axes)]
            self._looks[asked] = ProgramKernels(maths, specs, backend == "interpret", self.device, False)
        return self._looks[asked]

    def _by_kernel(
        self, of: ProgramKernels, q: Tensor, k: Tensor, given: Sequence[Tensor], lists: BlockList, blocks: ListedBlocks
    ) -> BlockRows:  # fmt: skip
        """By one launch."""
        given = [as_parameter(t) for t in given]
        kernel = kernel_for(of, q, k, given, blocks)
        entries = lists.indices.shape[-1]
        shape = q.shape[0], q.shape[2], entries, q.shape[1]
        maxima, sums = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
        unit = kernel.problem.stride_unit
        strided = (*with_strides(q, unit), *with_strides(k, unit))
        kernel.run(*strided, *given, lists.indices.contiguous(), lists.counts_or_all(), maxima, sums)
        return _cleared(maxima.transpose(2, 3), sums.transpose(2, 3))


def tile_of(blocks: ListedBlocks, itemsize: int) -> Tile:
    """The largest tile that lies in a block, of those that shared memory has room for."""
    q, kv = (
        next(n for n in (128, 64, 32, 16) if n <= most[itemsize] and size % n == 0)
        for most, size in ((MOST_Q, blocks.q), (MOST_KV, blocks.kv))
    )
    return Tile(q, kv, 2 * q, 2)


def kernel_for(of: ProgramKernels, q: Tensor, k: Tensor, given: Sequence[Tensor], blocks: ListedBlocks) -> Kernel:
    """The kernel for calls of such tensors."""
    problem, target = replace(of.problem(q, k, k, given), staged=()), of.target(q)
    return _kernel(problem, of.maths.forward_schedule, tile_of(blocks, q.dtype.itemsize), blocks, target)


@functools.lru_cache(maxsize=256)
def _kernel(
    problem: Problem, schedule: ForwardSchedule, tile: Tile, blocks: ListedBlocks, target: Target
) -> Kernel:  # fmt: skip
    made = problem, schedule, tile, blocks
    return Kernel("straight.block_rows.block_rows", made, target, problem, pass_configs(problem))


def _looking(engine: Any) -> Any:
    """An engine of the same scores and masks, which returns what rows of them are."""
    if engine._buffers["block_mask"] is not None:
        raise OptionsClash(
            "the engine has a block_mask that is a tensor, beside which rows of blocks are not looked at.\n"
            "  Write it as a function: block_mask=lambda b, h, q_idx, kv_idx: ..."
        )
    found = copy.copy(engine)
    found.qkv_meta, found.online_func, found.dropout_p = None, _Scores(), 0.0
    return found


def _every(size: tuple[int, int], q: Tensor, k: Tensor) -> BlockList:
    """Every block of keys, in order, for each block of queries."""
    rows, columns = (-(-t.shape[1] // n) for t, n in zip((q, k), size, strict=True))
    return BlockList(torch.arange(columns, dtype=torch.int32, device=q.device).expand(1, 1, rows, columns), None, size)


def _cleared(maxima: Tensor, sums: Tensor) -> BlockRows:
    """A block of which a row sees nothing has -inf, whatever a kernel starts with."""
    return BlockRows(maxima.masked_fill(sums == 0, -torch.inf), sums)
