"""The masks of Hugging Face models: what transformers asks for, said without a tensor over pairs where that can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from attention_engine.errors import AttentionOutOfReach


@dataclass(frozen=True)
class Band:
    """Which distances q_idx - kv_idx a mask keeps: least to most, None where it has no bound."""

    least: int | None = None
    most: int | None = None

    def __and__(self, other: Band) -> Band:
        least = [b for b in (self.least, other.least) if b is not None]
        most = [b for b in (self.most, other.most) if b is not None]
        return Band(max(least, default=None), min(most, default=None))


@dataclass(frozen=True, eq=False)
class Mask:
    """What the model's mask says, without a tensor over pairs where a band says it.

    A model that hands its mask on never looks inside. To one that does more it is the bool tensor of pairs, True where
    a pair is kept, that transformers' sdpa would get. A model that adds it to scores has an attention of its own, which
    no engine runs: AttentionOutOfReach, rather than scores with True added to them.

    band: distances kept. padding: (batch, keys), True keeps. shift: of queries against keys. pairs: all that is kept,
    where no band says it. sizes: (batch, 1, queries, keys). model: whose mask it is.
    """

    band: Band
    padding: Tensor | None = None
    shift: int | Tensor = 0
    pairs: Tensor | None = None
    sizes: tuple[int, int, int, int] | None = None
    device: torch.device | None = None
    model: str | None = None

    dtype = torch.bool
    ndim = 4

    @property
    def shape(self) -> torch.Size:
        """(batch, 1, queries, keys), as the tensor's."""
        return torch.Size(self.sizes or ()) if self.pairs is None else self.pairs.shape

    def contiguous(self) -> Mask:
        """Itself: transformers asks for this where a compiled forward pass is to get the mask."""
        return self

    def dense(self) -> Tensor:
        """The tensor over pairs, (batch, 1, queries, keys), True where a pair is kept."""
        if self.pairs is not None:
            return self.pairs
        assert self.sizes is not None, "the mask of a layer without one, which no model sees"
        batch, _, queries, keys = self.sizes
        places = torch.arange(queries, device=self.device)[:, None] + self.shift
        distance = places - torch.arange(keys, device=self.device)
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.band.least is not None:
            keep = keep & (distance >= self.band.least)
        if self.band.most is not None:
            keep = keep & (distance <= self.band.most)
        keep = keep[None, None].expand(batch, 1, queries, keys)
        return keep if self.padding is None else keep & self.padding[:, None, None, :]

    def _again(self, found: Any) -> Any:
        """A bool tensor that was made of the mask is a mask; an own attention is found out however it slices it."""
        if isinstance(found, Tensor) and found.dtype is torch.bool:
            return replace(self, band=Band(), padding=None, shift=0, pairs=found)
        return found

    def _refuse(self, *_: object, **__: object) -> Any:
        raise AttentionOutOfReach(self.model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in NUMBERS:
            return self._refuse
        found = getattr(self.dense(), name)
        if not callable(found):
            return self._again(found)

        def method(*args: Any, **options: Any) -> Any:
            floating = [d for d in (*args, *options.values()) if isinstance(d, torch.dtype) and d.is_floating_point]
            return self._refuse() if name in ("to", "type") and floating else self._again(found(*args, **options))

        return method

    def __len__(self) -> int:
        return len(self.dense())

    def __getitem__(self, index: Any) -> Any:
        return self._again(self.dense()[index])

    def __and__(self, other: Any) -> Any:
        return self._again(self.dense() & _plain(other))

    def __or__(self, other: Any) -> Any:
        return self._again(self.dense() | _plain(other))

    def __invert__(self) -> Any:
        return self._again(~self.dense())

    def __eq__(self, other: Any) -> Any:
        return self._again(self.dense() == _plain(other))

    def __ne__(self, other: Any) -> Any:
        return self._again(self.dense() != _plain(other))

    __hash__ = object.__hash__
    __rand__, __ror__ = __and__, __or__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        """torch's functions see the tensor over pairs; those that would take it for numbers don't."""
        masks = [a for a in (*args, *(options or {}).values()) if isinstance(a, Mask)]
        fills = function.__name__.startswith("masked_fill")  # of scores, by one who takes True for a pair left out
        if masks and (fills or function.__name__.strip("_") in NUMBERS):
            masks[0]._refuse()
        found = function(*map(_plain, args), **{name: _plain(a) for name, a in (options or {}).items()})
        return masks[0]._again(found) if masks else found


NUMBERS = frozenset(
    ("bool", "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "neg",
     "baddbmm", "addcmul", "float", "double", "half", "bfloat16", "type_as", "matmul", "bmm")
)  # fmt: skip


def _plain(value: Any) -> Any:
    return value.dense() if isinstance(value, Mask) else value


def _distances(mask_function: Any) -> tuple[int | None, int | None] | None:
    """Which distances the mask function keeps, as a band's least and most; None where it isn't one."""
    of = masking_utils
    closure = mask_function.__closure__ or ()
    held = dict(zip(mask_function.__code__.co_freevars, (c.cell_contents for c in closure), strict=True))
    if mask_function is of.causal_mask_function:
        return 0, None
    if mask_function is of.bidirectional_mask_function:
        return None, None
    if mask_function.__code__ is of.sliding_window_overlay(1).__code__:
        return None, held["sliding_window"] - 1
    if mask_function.__code__ is of.sliding_window_bidirectional_overlay(1).__code__:
        return -held["sliding_window"], held["sliding_window"]
    if mask_function.__code__ is of.and_masks(of.causal_mask_function).__code__:
        band = Band()
        for part in map(_distances, held["mask_functions"]):
            if part is None:
                return None
            band = band & Band(*part)
        return band.least, band.most
    return None


# torch.compile can't look into a closure; it calls what is marked so, with closures that hold numbers and functions
_distances._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _band(mask_function: Any, config: Any, overlaid: bool) -> Band | None:
    """The mask function as a band of distances; None where it isn't one, or where a compiled one may hold tensors."""
    if mask_function is masking_utils.causal_mask_function:
        return Band(least=0)
    if torch.compiler.is_compiling() and (overlaid or getattr(config, "attention_chunk_size", None) is not None):
        return None
    found = _distances(mask_function)
    return None if found is None else Band(*found)


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | Mask | None = None, device: torch.device | str = "cpu", config: Any = None,
    **options: Any,
) -> Mask:  # fmt: skip
    """What transformers calls to make the mask of a kind of layers; it holds pairs only where no band says it."""
    if isinstance(attention_mask, Mask):  # made ahead of the forward pass: generate does so for static caches
        return attention_mask
    sizes, where = (batch_size, 1, q_length, kv_length), torch.device(device)
    model = getattr(config, "model_type", None)
    plain = options.get("allow_is_causal_skip", False) or options.get("allow_is_bidirectional_skip", False)
    band = _band(mask_function, config, overlaid=not plain)
    if band is None:
        dense = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": where}
        pairs = masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **(options | dense)
        )
        return Mask(Band(), pairs=pairs, sizes=sizes, device=where, model=model)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    return Mask(band, padding, q_offset - kv_offset, None, sizes, where, model)
