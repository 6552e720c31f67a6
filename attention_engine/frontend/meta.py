"""The description of q, k and v that an engine is built from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attention_engine.errors import BadMeta, HeadDimsDiffer, HeadsDoNotGroup, as_given

Length = int | str | None
Lengths = tuple[int, int, int]  # batch, queries, keys
Heads = tuple[int, int]  # of q, k or v: how many, and their dim
DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Meta:
    """One tensor: (batch, heads, length, dim), always in this order, and a dtype. Batch and length are hints."""

    batch: Length
    heads: int
    length: Length
    dim: int
    dtype: Any

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __repr__(self) -> str:
        return f"meta_tensor({self.batch!r}, {self.heads}, {self.length!r}, {self.dim}, dtype={self.dtype!r})"


def meta_tensor(batch: Length, heads: int, length: Length, dim: int, dtype: Any = "float16") -> Meta:
    """Describes q, k or v: (batch, heads, length, dim), whatever the layout of the tensors in a call.

    Args:
        batch: a hint for tuning; a name or None is "any". A call may bring any other.
        heads: of this tensor.
        length: a hint, as batch is.
        dim: the head dim.
        dtype: float16, bfloat16 or float32, of torch, or its name.

    Raises:
        BadMeta: a number or the dtype is none of these.

    >>> meta_tensor(None, 8, None, 64, dtype=torch.bfloat16)
    meta_tensor(None, 8, None, 64, dtype=torch.bfloat16)
    """
    meta = Meta(batch, heads, length, dim, dtype)
    for name, value in (("heads", heads), ("dim", dim)):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise BadMeta(
                f"meta_tensor: {name} is {as_given(value)}. "
                "Give a positive int: meta_tensor(batch, heads, length, dim)."
            )
    for name, hint in (("batch", batch), ("length", length)):
        if isinstance(hint, int) and hint < 0:
            raise BadMeta(f"meta_tensor: {name} is {hint}. Give an int of at least 0, a name or None.")
    if meta.dtype_name not in DTYPES:
        raise BadMeta(f"meta_tensor: dtype is {dtype}. Choose torch.float16, torch.bfloat16 or torch.float32.")
    return meta


def check_metas(metas: Any) -> tuple[Meta, Meta, Meta]:
    """q, k and v as descriptions that fit each other."""
    q, k, v = _three(metas)
    check_heads(*((m.heads, m.dim) for m in metas))
    if isinstance(k.length, int) and isinstance(v.length, int) and k.length != v.length:
        raise BadMeta(f"k has length {k.length} and v has {v.length}. They must be equal.")
    if len({q.dtype_name, k.dtype_name, v.dtype_name}) != 1:
        raise BadMeta(f"q, k and v are {q.dtype_name}, {k.dtype_name} and {v.dtype_name}. Give one dtype.")
    return q, k, v


def _three(metas: Any) -> tuple[Meta, Meta, Meta]:
    """The three descriptions; BadMeta for anything else."""
    if callable(metas):
        shown = getattr(metas, "__qualname__", repr(metas))
        raise BadMeta(f"qkv_meta is {shown}, a function. Give functions by name: score_mod=..., mask_mod=...")
    given = tuple(metas) if isinstance(metas, (tuple, list)) else (metas,)
    if len(given) == 3 and all(isinstance(m, Meta) for m in given):
        return given
    if any(hasattr(m, "shape") for m in given):
        shown = as_given(metas) if len(given) == 1 else f"({', '.join(type(m).__name__ for m in given)})"
        raise BadMeta(f"qkv_meta is {shown}. Tensors are given with the call: AttentionEngine(...)(q, k, v).")
    raise BadMeta(f"qkv_meta is {metas!r}. Give three descriptions: (meta_tensor(...),) * 3.")


def check_heads(q: Heads, k: Heads, v: Heads) -> None:
    """Of attention: HeadDimsDiffer, BadMeta or HeadsDoNotGroup unless the heads and dims of q, k, v fit each other."""
    if q[1] != k[1]:
        raise HeadDimsDiffer(f"q has head dim {q[1]} and k has {k[1]}. They must be equal: the score is q . k.")
    if k[0] != v[0]:
        raise BadMeta(f"k has {k[0]} heads and v has {v[0]}. They must be equal.")
    _check_share("query", q[0], "key", k[0])


def check_linear_heads(q: Heads, k: Heads, v: Heads) -> None:
    """The same of linear attention."""
    if q[1] != k[1]:
        raise BadMeta(f"q has head dim {q[1]} and k has {k[1]}. They must be equal: o = q h, h += k^T v.")
    _check_share("value", v[0], "query", q[0])
    _check_share("value", v[0], "key", k[0])


def _check_share(many: str, count: int, few: str, number: int) -> None:
    if number and count % number == 0:
        return
    divisors = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
    raise HeadsDoNotGroup(
        f"{count} {many} heads cannot share {number} {few} heads evenly. "
        f"Choose {few} heads that divide {count}: {divisors}."
    )


def check_linear_metas(metas: Any) -> tuple[Meta, Meta, Meta]:
    """q, k and v of a linear attention: v's heads are the heads, and those of q and of k divide them."""
    q, k, v = _three(metas)
    check_linear_heads(*((m.heads, m.dim) for m in metas))
    if len({m.length for m in metas if isinstance(m.length, int)}) > 1:
        raise BadMeta(f"q, k and v have lengths {q.length}, {k.length} and {v.length}. They must be equal.")
    if len({m.dtype_name for m in metas}) != 1:
        raise BadMeta(f"q, k and v are {q.dtype_name}, {k.dtype_name} and {v.dtype_name}. Give one dtype.")
    return q, k, v


def hints_of(metas: Sequence[Meta]) -> Lengths | None:
    """Batch, queries and keys as the metas of q, k, v name them; None where they don't name all."""
    batch, queries, keys = lengths_of(metas, (0, 0, 0))
    return (batch, queries, keys) if batch and queries and keys else None


def lengths_of(metas: Sequence[Meta], usual: Lengths) -> Lengths:
    """Batch, queries and keys; the usual ones where the metas of q, k, v don't name them."""
    named = (metas[0].batch, metas[0].length, metas[1].length)
    batch, queries, keys = (n if isinstance(n, int) else m for n, m in zip(named, usual, strict=True))
    return batch, queries, keys
