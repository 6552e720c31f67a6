"""What a kernel is compiled for: sizes that are fixed at compile time."""

from __future__ import annotations

from dataclasses import dataclass

STAGED_UNIT = 8  # what divides the strides of staged custom inputs, which are of 16 bits


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
    which tiles are copied ahead as keys are, since their strides fit 16-byte copies; copies: how many neighbours among
    the key heads read the same head of k and v (plan/few_key_heads.py).
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
    copies: int = 1

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    @property
    def heads_of_keys(self) -> int:
        """The heads of k and v, and of their gradients."""
        return self.kv_heads // self.copies

    @property
    def tile_dims(self) -> tuple[int, int]:
        """The head dims of queries and keys, and of values, in tiles."""
        return padded(self.dim), padded(self.dim_v)

    @property
    def approximate(self) -> bool:
        """May exponentials, reciprocals and the like be off by a few units of fp32's last place? 16 bits hide it."""
        return self.dtype != "float32"

    @property
    def splits(self) -> bool:
        """Is each fp32 product made of three tf32 ones?"""
        return self.dtype == "float32" and not self.tf32
