"""What a kernel is compiled for: sizes that are fixed at compile time, and the tile it works in."""

from __future__ import annotations

import math
from dataclasses import dataclass

STAGED_UNIT = 8  # what divides the strides of staged custom inputs, which are of 16 bits
ROW_PAD = 128  # the backward pass pads its rows to a multiple of it, which blocks of rows divide


def padded(dim: int) -> int:
    """A head dim as tiles hold it: a multiple of 32 (wgmma's tiles of dQ want that), the rest zeros."""
    return (dim + 31) // 32 * 32


@dataclass(frozen=True)
class Problem:
    """One attention problem, without its batch and lengths, which are run-time values.

    heads, kv_heads: query and key heads (query head h reads key head h // (heads / kv_heads)); dim, dim_v: of q and k,
    and of v; dtype: "float16", "bfloat16" or "float32" of q, k, v and o; tf32: may fp32 products run as one tf32
    product; stride_unit: what divides every stride of q, k, v and do (8 keeps copies 16 bytes wide); custom: for each
    custom input its name, dtype and shape, in which a string names a run-time length; staged: the custom inputs of
    which tiles are copied ahead as keys are, since their strides fit 16-byte copies.
    """

    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    dtype: str
    tf32: bool = False
    stride_unit: int = 8
    custom: tuple[tuple[str, str, tuple[int | str, ...]], ...] = ()
    staged: tuple[str, ...] = ()

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def approximate(self) -> bool:
        """May exponentials, reciprocals and the like be off by a few units of fp32's last place? 16 bits hide it."""
        return self.dtype != "float32"

    @property
    def splits(self) -> bool:
        """Is each fp32 product made of three tf32 ones?"""
        return self.dtype == "float32" and not self.tf32


TILE_FORMS = ("persistent", "queries_ahead", "lazy_rescale", "skewed_sums")  # of Tile, for kernels placed by hand


@dataclass(frozen=True)
class Tile:
    """How a kernel cuts its work: queries and keys of a tile, threads of a block, stages of the copy pipeline (0: no).

    shared_weights: the backward pass over keys hands weights to its products through shared memory, not in registers,
    so that warps can share rows where a tile has fewer rows than the warps of a block need.
    specialised: a kernel of its own, in which one more group of warps copies (kernels/hopper/), where there is one.
    skewed_sums: such a kernel over keys sums diagonals of its tiles by walks over a copy (kernels/diagonals.py).
    persistent: of that kernel forward and over keys, the form in which as many blocks as the GPU runs at once walk over
    all work.
    queries_ahead: of the persistent form, the one in which a block's next queries come while it works on the present
    ones, where shared memory has room; it costs each step a little, so it is for few steps.
    lazy_rescale: of that kernel forward, the form in which a warp rescales the output only where one of its rows has a
    factor that is not 1, as after a new maximum.
    """

    q: int
    kv: int
    threads: int
    stages: int
    shared_weights: bool = False
    specialised: bool = False
    skewed_sums: bool = False
    persistent: bool = False
    lazy_rescale: bool = False
    queries_ahead: bool = False

    @property
    def row_pad(self) -> int:
        """What the backward pass pads its rows to a multiple of, so that no block of rows ends outside."""
        assert self.q <= ROW_PAD, "a tile may begin at any piece, and then ends within ROW_PAD of the last query"
        return math.lcm(ROW_PAD, self.q)


def padded_rows(queries: int, row_pad: int) -> int:
    """The length of the backward pass's own rows, past which no tile and no block of rows ends."""
    return -(-(queries + ROW_PAD) // row_pad) * row_pad
