"""Engines inside Hugging Face models: register("name") and build a model with attn_implementation="name"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from attention_engine.errors import NotYetSupported
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.meta import Meta, meta_tensor
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.symbols import where
from attention_engine.library import OnlineSoftmax, OnlineSoftmaxSink
from attention_engine.runtime.module import AttentionEngine

Axes = tuple[int | str, ...]
PAIRS = ("batch", "heads", "seq_len", "seq_len_kv")


@dataclass(frozen=True)
class Band:
    """Which distances q_idx - kv_idx a mask keeps: least to most, None where it has no bound."""

    least: int | None = None
    most: int | None = None

    def __and__(self, other: Band) -> Band:
        least = [b for b in (self.least, other.least) if b is not None]
        most = [b for b in (self.most, other.most) if b is not None]
        return Band(max(least, default=None), min(most, default=None))


@dataclass(frozen=True)
class Layer:
    """What a model's layer asks of its attention, as the parts of an engine.

    scaling: the factor of the score. band: what causality and windows keep. softcap: cap * tanh(score / cap), if any.
    sinks: one more score a head. inputs: the custom inputs that the layer will bring, with their axes: "padding"
    (bool, True keeps a key), "shift" (added to q_idx where earlier keys are cached), "mask" (bool) and "bias" of
    pairs, "sinks".
    """

    scaling: float
    band: Band
    softcap: float | None
    inputs: tuple[tuple[str, Axes], ...]

    @property
    def custom_io(self) -> CustomIO:
        """The declaration of the layer's custom inputs."""
        return CustomIO(dict(self.inputs))

    @property
    def online_func(self) -> OnlineFunc:
        """Softmax, with the sink where the layer has one."""
        return OnlineSoftmaxSink() if "sinks" in dict(self.inputs) else OnlineSoftmax()

    def score_mod(self, score: Any, custom: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The scaled, capped and biased score."""
        score = score * self.scaling
        if self.softcap is not None:
            score = self.softcap * (score / self.softcap).tanh()
        return score + custom["bias"] if "bias" in custom else score

    def mask_mod(self, b: Any, h: Any, q_idx: Any, kv_idx: Any, custom: Any) -> Any:
        """Band, padding and whatever else the model masks."""
        keep: Any = True
        distance = q_idx - kv_idx + (custom["shift"][0] if "shift" in custom else 0)
        if self.band.least is not None:
            keep = (distance >= self.band.least) & keep
        if self.band.most is not None:
            keep = (distance <= self.band.most) & keep
        for name in ("padding", "mask"):
            if name in custom:
                keep = where(custom[name], keep, False)
        return keep


EngineFactory = Callable[[Sequence[Meta], Layer], AttentionEngine]


def softmax_engine(qkv_meta: Sequence[Meta], layer: Layer) -> AttentionEngine:
    """The engine that a layer asks for, and nothing else: a place to start for other maths."""
    return AttentionEngine(
        qkv_meta, layer.custom_io, layer.score_mod, layer.mask_mod, layer.online_func, layout="bhsd"
    )  # fmt: skip


@dataclass(frozen=True)
class Mask:
    """What the model's mask says, without a tensor over pairs."""

    band: Band
    padding: Tensor | None  # (batch, keys), True keeps
    shift: int | Tensor  # of queries against keys


def _band(mask_function: Any) -> Band | None:
    """The mask function as a band of distances; None where it isn't one."""
    of = masking_utils
    closure = mask_function.__closure__ or ()
    held = dict(zip(mask_function.__code__.co_freevars, (c.cell_contents for c in closure), strict=True))
    if mask_function is of.causal_mask_function:
        return Band(least=0)
    if mask_function is of.bidirectional_mask_function:
        return Band()
    if mask_function.__code__ is of.sliding_window_overlay(1).__code__:
        return Band(most=held["sliding_window"] - 1)
    if mask_function.__code__ is of.sliding_window_bidirectional_overlay(1).__code__:
        return Band(-held["sliding_window"], held["sliding_window"])
    if mask_function.__code__ is of.and_masks(of.causal_mask_function).__code__:
        band = Band()
        for part in map(_band, held["mask_functions"]):
            if part is None:
                return None
            band = band & part
        return band
    return None


def make_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0,
    mask_function: Any = masking_utils.causal_mask_function, attention_mask: Tensor | None = None, **options: Any,
) -> Mask | Tensor:  # fmt: skip
    """What transformers calls to make the mask of a kind of layers; pairs as a tensor only where no band says it."""
    band = _band(mask_function)
    if band is None:
        dense = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **(options | dense)
        )
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].bool()
    return Mask(band, padding, q_offset - kv_offset)


def _of_module(module: Any, query: Tensor, is_causal: bool | None) -> Mask:
    """What a layer without a mask means, as transformers' sdpa reads it."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return Mask(Band(least=0 if causal and query.shape[2] > 1 else None), None, 0)


def _pair_axes(tensor: Tensor) -> Axes:
    """The axes of a mask or bias over pairs, 1 where it is the same for all."""
    names = [name if size != 1 else 1 for name, size in zip(PAIRS[:2], tensor.shape, strict=False)]
    return (*names, *PAIRS[2:])


def _inputs(
    mask: Mask | Tensor, key: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> dict[str, tuple[Axes, Tensor]]:
    """The custom inputs of a call, with their axes."""
    found: dict[str, tuple[Axes, Tensor]] = {}
    if isinstance(mask, Mask):
        if mask.padding is not None:
            found["padding"] = (("batch", "seq_len_kv"), mask.padding)
        if isinstance(mask.shift, Tensor) or mask.shift != 0:
            shift = torch.as_tensor(mask.shift, device=key.device).to(torch.int32)
            found["shift"] = ((1,), shift.reshape(1))
    else:
        mask = mask[..., : key.shape[2]]
        found["mask" if mask.dtype is torch.bool else "bias"] = (_pair_axes(mask), mask)
    if bias is not None:
        bias = bias + found["bias"][1] if "bias" in found else bias
        found["bias"] = (_pair_axes(bias), bias)
    if sinks is not None:
        found["sinks"] = (("heads",), sinks)
    return found


def attention_of(engine_factory: EngineFactory) -> Callable[..., tuple[Tensor, None]]:
    """The function that transformers calls in each layer; engines are built when a kind of layer first needs one."""
    engines: dict[object, AttentionEngine] = {}

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if dropout:
            raise NotYetSupported(f"attention dropout is {dropout}. Set attention_dropout=0.0 in the model's config.")
        if options.get("cache") is not None:
            raise NotYetSupported("a paged cache reached an engine. Generate with a dynamic or a static cache.")
        mask = attention_mask if attention_mask is not None else _of_module(module, query, is_causal)
        found = _inputs(mask, key, position_bias, s_aux)
        band = mask.band if isinstance(mask, Mask) else Band()
        inputs = tuple((name, axes) for name, (axes, _) in found.items())
        layer = Layer(scaling or query.shape[3] ** -0.5, band, softcap, inputs)
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        sizes = tuple((t.shape[1], t.shape[3]) for t in (query, key, value))
        engine = engines.get((layer, dtype, sizes))
        if engine is None:
            metas = [meta_tensor(None, heads, None, dim, dtype=dtype) for heads, dim in sizes]
            engine = engines[layer, dtype, sizes] = engine_factory(metas, layer)
        output = engine(query, key, value, *(tensor for _, tensor in found.values()))
        return output.transpose(1, 2).contiguous(), None

    return attention


def register(name: str, engine_factory: EngineFactory = softmax_engine) -> None:
    """Makes attn_implementation=name run engines, forward and backward.

    engine_factory(qkv_meta, layer) gives the engine (layout "bhsd") for one kind of layer; the default is the softmax
    attention that the model was written for. A factory with maths of its own takes from the layer what it keeps:
    layer.custom_io (all of it), layer.mask_mod, layer.score_mod, layer.online_func.

        register("attention_engine")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="attention_engine")

    Handled: padding masks, grouped heads, windows, sinks, softcap, caches, packed sequences (these last by a mask over
    pairs). Raises NotYetSupported for dropout and paged caches.
    """
    AttentionInterface.register(name, attention_of(engine_factory))
    AttentionMaskInterface.register(name, make_mask)
