"""Which blocks exist, as a call says it: a map of blocks, or lists of key blocks, which become one on the device."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import Arch, detect
from attention_engine.compiler import Kernel, pass_configs
from attention_engine.errors import DevicesDiffer, NotATensor, WrongBlockMask, as_given
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.frontend.frames import briefly
from attention_engine.ir.block_lists import BLOCK_LIST
from attention_engine.ir.problem import Problem
from attention_engine.runtime import op
from attention_engine.runtime.inputs import BLOCKS, check_blocks

ANY = Problem(1, 1, 64, 64, "float16")  # maps are of no problem
# Of a map: is it one for all batches, one for all heads? Of lists: one for all batches; how many heads share a list (0:
# all); the queries and keys of a block. Dynamo follows plain tuples.
Blocks: TypeAlias = tuple[bool, bool] | tuple[bool, int, int, int]


class BlockList:
    """Lists of key blocks: each block of queries sees those of its list alone. Given to a call, as `block_mask`.

    Lists are read anew in each call, on the device: a model may choose blocks by its own numbers. They join the
    engine's mask, if there is one. A block of queries whose list is empty has the output 0.

    Args:
        indices: int32 (B or 1, H or Hkv or 1, ceil(Sq / queries of a block), k): numbers of key blocks, in any order,
            none twice. With a list for each key head, the query heads that share it see the same blocks.
        counts: int32, the shape of indices without k: how many entries of each list count. None: all of them.
        block_size: the queries and keys of a block.

    Raises:
        WrongBlockMask: indices or counts of another shape or dtype; on a CPU, in a call, numbers of blocks that are
            not there, or twice in a list. On a GPU nobody looks, which would wait for it: there a number out of range
            is ignored, and one that stands twice counts once.

    Example:
        >>> import torch
        >>> from attention_engine import AttentionEngine, BlockList
        >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
        >>> newest = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32)   # block 1 of queries sees blocks 1 and 0
        >>> counts = torch.tensor([1, 2], dtype=torch.int32)
        >>> lists = BlockList(newest[None, None], counts[None, None], block_size=(4, 4))
        >>> AttentionEngine()(q, k, v, block_mask=lists).shape
        torch.Size([1, 8, 2, 16])
    """

    @briefly
    def __init__(
        self, indices: Tensor, counts: Tensor | None = None, block_size: tuple[int, int] = (128, 128)
    ) -> None:  # fmt: skip
        for name, tensor in (("indices", indices), ("counts", counts)):
            if tensor is None and name == "counts":
                continue
            if not isinstance(tensor, Tensor):
                raise NotATensor(f"{name} of a BlockList is {type(tensor).__name__}. Give an int32 tensor.")
            if tensor.dtype is not torch.int32:
                raise WrongBlockMask(
                    f"{name} of a BlockList is {tensor.dtype}. Give int32: {name}.to(torch.int32), of what topk gives."
                )
        if indices.ndim != 4:
            raise WrongBlockMask(
                f"indices of a BlockList has shape {tuple(indices.shape)}. Give (batch or 1, heads or key heads or 1, "
                "blocks of queries, key blocks of a list)."
            )
        if counts is not None and counts.shape != indices.shape[:3]:
            raise WrongBlockMask(
                f"counts of a BlockList has shape {tuple(counts.shape)}, and indices {tuple(indices.shape)}. Give "
                f"counts of {tuple(indices.shape[:3])}: one for each list."
            )
        sizes = block_size if isinstance(block_size, (tuple, list)) else ()
        if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
            raise WrongBlockMask(
                f"block_size of a BlockList is {as_given(block_size)}. Give (queries, keys) of a block: (128, 64)."
            )
        if counts is not None and counts.device != indices.device:
            raise DevicesDiffer(
                f"counts of a BlockList is on '{counts.device}' and indices on '{indices.device}'. Put them on one "
                "device."
            )
        self.indices, self.counts, self.block_size = indices, counts, (sizes[0], sizes[1])

    def __repr__(self) -> str:
        q, kv = self.block_size
        return f"BlockList(lists of {self.indices.shape[-1]} for {tuple(self.indices.shape[:3])}, blocks of {q} x {kv})"

    def counts_or_all(self) -> Tensor:
        """How many entries of each list count, contiguous."""
        if self.counts is None:
            shape, length = self.indices.shape[:3], self.indices.shape[3]
            return torch.full(shape, length, dtype=torch.int32, device=self.indices.device)
        return self.counts.contiguous()

    def _counted(self) -> Tensor:
        """Which entries count."""
        if self.counts is None:
            return torch.ones_like(self.indices, dtype=torch.bool)
        return torch.arange(self.indices.shape[-1], device=self.indices.device) < self.counts[..., None]

    def to_map(self, columns: int) -> Tensor:
        """The map, of so many blocks of keys: int8, 1 where a list holds the block; it has the shape of indices, with
        blocks of keys for entries."""
        inside = self._counted() & (self.indices >= 0) & (self.indices < columns)
        found = torch.zeros(*self.indices.shape[:3], columns + 1, dtype=torch.int8, device=self.indices.device)
        return found.scatter_(-1, torch.where(inside, self.indices, columns).long(), 1)[..., :columns].contiguous()

    def map_by_kernel(self, columns: int) -> Tensor | None:
        """The same in one launch; None while the kernel is being compiled, and where there is nothing to list."""
        kernel = _begun(self.counts is not None, self.indices.device)
        if not kernel.ready or not (self.indices.numel() and columns):
            return None
        found = torch.empty(*self.indices.shape[:3], columns, dtype=torch.int8, device=self.indices.device)
        kernel.run(*[t.contiguous() for t in (self.indices, self.counts) if t is not None], found)
        return found

    def cut(self, batch: int, rows: int, columns: int) -> BlockList:
        """The lists of the first batches and blocks of queries, with the first blocks of keys alone."""
        indices, counted = self.indices[:batch, :, :rows], self._counted()[:batch, :, :rows]
        kept = counted & (indices < columns)
        order = torch.argsort(~kept, dim=-1, stable=True)
        return BlockList(indices.gather(-1, order), kept.sum(-1, dtype=torch.int32), self.block_size)


GivenBlocks: TypeAlias = Tensor | BlockList


@functools.lru_cache(maxsize=16)
def map_kernel(counted: bool, device: Arch) -> Kernel:
    """The kernel that makes a map of lists."""
    return Kernel("listed_blocks.listed_blocks", (ANY, counted), device, ANY, pass_configs(ANY))


@functools.lru_cache(maxsize=64)
def _begun(counted: bool, device: torch.device) -> Kernel:
    kernel = map_kernel(counted, detect(device))
    kernel.begin()
    return kernel


class CallBlocks(NamedTuple):
    """The blocks of a call as its custom input, and what they say of the program."""

    map: Tensor
    variant: Blocks

    @property
    def name(self) -> str:
        """Of the custom input."""
        return name_of(self.variant)


def name_of(blocks: Blocks) -> str:
    """Of the custom input that they become."""
    return BLOCKS if len(blocks) == 2 else BLOCK_LIST


def spec_of(blocks: Blocks) -> CustomSpec:
    """The same with its axes."""
    heads: int | str = 1 if blocks[1] else "heads"
    if len(blocks) == 4:
        by_sharing: dict[int, int | str] = {0: 1, 1: "heads"}
        heads = by_sharing.get(blocks[1], "lists")
    return CustomSpec(name_of(blocks), (1 if blocks[0] else "batch", heads, "q_blocks", "kv_blocks"))


def place_in_map(
    blocks: Blocks, block_size: tuple[int, int], b: Any, h: Any, q_idx: Any, kv_idx: Any
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Where the map says whether a pair's block exists. block_size: of a map; lists have their own."""
    if len(blocks) == 2:
        return 0 if blocks[0] else b, 0 if blocks[1] else h, q_idx // block_size[0], kv_idx // block_size[1]
    one_batch, sharing, q, kv = blocks
    head = 0
    if sharing:
        head = h if sharing == 1 else h // sharing
    return 0 if one_batch else b, head, q_idx // q, kv_idx // kv


def blocks_of_call(
    given: GivenBlocks, block_size: tuple[int, int], q: Tensor, k: Tensor, by_kernel: bool = False
) -> CallBlocks:  # fmt: skip
    """What a call says of blocks, held against its q and k, (batch, length, heads, dim). block_size: of a map.
    by_kernel: may a kernel make a map of lists?"""
    if not isinstance(given, BlockList):
        found = check_blocks(given, block_size, q, k)
        return CallBlocks(found, (found.shape[0] == 1, found.shape[1] == 1))
    sharing, columns = check_lists(given, q, k)
    made = given.map_by_kernel(columns) if q.is_cuda and by_kernel and op.unwatched() else None
    return CallBlocks(
        given.to_map(columns) if made is None else made, (given.indices.shape[0] == 1, sharing, *given.block_size)
    )


def check_lists(given: BlockList, q: Tensor, k: Tensor) -> tuple[int, int]:
    """How many heads share a list of a call (0: all), and how many blocks of keys there are. Raises WrongBlockMask,
    DevicesDiffer."""
    (batch, queries, heads), key_heads = q.shape[:3], k.shape[2]
    lists = given.indices.shape[1]
    rows, columns = (-(-t.shape[1] // size) for t, size in zip((q, k), given.block_size, strict=True))
    if given.indices.shape[0] not in (1, batch) or lists not in (1, key_heads, heads) or given.indices.shape[2] != rows:
        of_heads = f"{heads} or 1" if heads == key_heads else f"{heads}, {key_heads} or 1"
        raise WrongBlockMask(
            f"indices of the BlockList has shape {tuple(given.indices.shape)}. With block_size={given.block_size} and "
            f"{queries} queries give ({batch} or 1, {of_heads}, {rows}, any)."
        )
    if given.indices.device != q.device:
        raise DevicesDiffer(
            f"the BlockList is on '{given.indices.device}' and q on '{q.device}'. Put them on one device."
        )
    if q.device.type == "cpu" and not is_compiling():
        check_entries(given, columns)
    return 0 if lists == 1 else heads // lists, columns


def blocks_alike(given: GivenBlocks, q: Tensor, k: Tensor) -> CallBlocks:
    """The blocks of calls with blocks like these, and as many heads as q and k have; of any length."""
    like = given.indices if isinstance(given, BlockList) else given
    found = torch.empty(1, 1, 1, 1, dtype=torch.int8, device=q.device)
    batch, lists = (n == 1 for n in like.shape[:2])
    if not isinstance(given, BlockList):
        return CallBlocks(found, (batch, lists))
    return CallBlocks(found, (batch, 0 if lists else q.shape[2] // like.shape[1], *given.block_size))


def check_entries(lists: BlockList, columns: int) -> None:
    """WrongBlockMask where a count, or an entry that counts, can't be: a look that waits for the device."""
    indices, length = lists.indices, lists.indices.shape[-1]
    if lists.counts is not None and bool(((lists.counts < 0) | (lists.counts > length)).any()):
        wrong = lists.counts[(lists.counts < 0) | (lists.counts > length)][0]
        raise WrongBlockMask(f"a count of the BlockList is {int(wrong)}, and lists have 0 to {length} entries.")
    counted = lists._counted()
    wrong = counted & ((indices < 0) | (indices >= columns))
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise WrongBlockMask(
            f"indices{at} of the BlockList is {int(indices[tuple(at)])}, and there are {columns} blocks of keys, from "
            "0 on.\n  Entries behind a list's count are ignored: lists of unequal lengths are padded there."
        )
    found = torch.where(counted, indices, -1 - torch.arange(length, device=indices.device)).sort(-1).values
    twice = (found[..., 1:] == found[..., :-1]).nonzero()
    if len(twice):
        *of, n = twice[0].tolist()
        raise WrongBlockMask(
            f"the list {of} (batch, head, block of queries) of the BlockList holds block {int(found[(*of, n)])} twice. "
            "Name each block once."
        )
