"""Engines inside Hugging Face models: register("name") and build a model with attn_implementation="name"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from attention_engine.errors import NotYetSupported
from attention_engine.frontend.custom_io import CustomInputs, CustomIO
from attention_engine.frontend.meta import Meta, meta_tensor
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.signatures import AxisName, DeclaredAxis
from attention_engine.frontend.symbols import Symbol, where
from attention_engine.integrations.masks import Band, Mask, make_mask
from attention_engine.integrations.paged import attend_to_pages, register_paged
from attention_engine.integrations.paged import continuous as continuous  # a public name of this module
from attention_engine.library import OnlineSoftmax, OnlineSoftmaxSink
from attention_engine.runtime.module import AttentionEngine

Axes = tuple[DeclaredAxis, ...]
MOST_NEW = 16  # tokens of a call that decodes
PAIRS: tuple[AxisName, ...] = ("batch", "heads", "seq_len", "seq_len_kv")


@dataclass(frozen=True)
class Layer:
    """What a model's layer asks of its attention, as the parts of an engine.

    scaling: the factor of the score. band: what causality and windows keep. softcap: cap * tanh(score / cap), if any.
    sinks: one more score a head, or a query. inputs: the custom inputs that the layer will bring, with their axes:
    "padding" (bool, True keeps a key), "shift" (added to q_idx where earlier keys are cached), "mask" (bool) and "bias"
    of pairs, "alike" (bool, True for a row whose pairs share alike, whatever their scores), "sinks".
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

    def score_mod(
        self, score: Symbol, custom: CustomInputs, b: Symbol, h: Symbol, q_idx: Symbol, kv_idx: Symbol
    ) -> Symbol:
        """The scaled, capped and biased score."""
        score = score * self.scaling
        if self.softcap is not None:
            score = self.softcap * (score / self.softcap).tanh()
        if "bias" in custom:
            score = score + custom["bias"]
        if "alike" in custom:  # scores that a least number swallows: all alike, with the gradients of what they were
            score = where(custom["alike"], score - score.detach(), score)
        return score

    def mask_mod(self, b: Symbol, h: Symbol, q_idx: Symbol, kv_idx: Symbol, custom: CustomInputs) -> Symbol | bool:
        """Band, padding and whatever else the model masks."""
        keep: Symbol | bool = True
        distance = q_idx - kv_idx + (custom["shift"][0] if "shift" in custom else 0)
        if self.band.least is not None:
            keep = (distance >= self.band.least) & keep
        if self.band.most is not None:
            keep = (distance <= self.band.most) & keep
        for name in ("padding", "mask"):
            if name in custom:
                keep = where(custom[name], keep, False)
        return keep


# Tensors that models hand through their layers to whoever may want them, and that no score depends on.
OF_OTHERS = frozenset({
    "position_ids", "cache_position", "num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q",
    "max_length_k", "seq_idx", "token_type_ids",
})  # fmt: skip
EngineFactory = Callable[[Sequence[Meta], Layer], AttentionEngine]


def softmax_engine(qkv_meta: Sequence[Meta], layer: Layer) -> AttentionEngine:
    """The engine that a layer asks for, and nothing else: a place to start for other maths."""
    return AttentionEngine(
        qkv_meta, layer.custom_io, layer.score_mod, layer.mask_mod, layer.online_func, layout="bhsd"
    )  # fmt: skip


def _of_module(module: Any, query: Tensor, is_causal: bool | None) -> Mask:
    """What a layer without a mask means, as transformers' sdpa reads it."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return Mask(Band(least=0 if causal and query.shape[2] > 1 else None))


def _axes(tensor: Tensor) -> Axes:
    """The axes of a tensor over pairs, 1 where it is the same for all."""
    return tuple(name if size != 1 else 1 for name, size in zip(PAIRS, tensor.shape, strict=True))


def _of_pairs(mask: Tensor, keys: int) -> dict[str, tuple[Axes, Tensor]]:
    """A tensor over pairs as custom inputs: which pairs it keeps and, of a floating one, what it adds to their scores.

    -inf and the dtype's least number keep no pair, so that kernels may skip it: beside any larger score its weight is
    exactly 0. A row that holds nothing larger is as torch has it: with -inf alone it keeps nothing; where least
    numbers stand their pairs share alike, since such a number swallows the scores, while gradients flow through it.
    """
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = mask if mask.shape[3] == 1 else mask[..., :keys]
    if mask.dtype is torch.bool:
        return {"mask": (_axes(mask), mask)}
    if not mask.is_floating_point():
        raise NotYetSupported(
            f"an attention mask is {mask.dtype}. Give bool, True where a pair is kept, or a floating one."
        )
    least = torch.finfo(mask.dtype).min
    larger = ~(mask <= least)  # NaN is one of them, and shows
    alike = ~larger.any(-1, keepdim=True)
    keep = larger | (alike & (mask == least))
    none = torch.zeros((), dtype=mask.dtype, device=mask.device)
    swallowed = torch.where(keep, mask - mask.detach(), none) if mask.requires_grad else none
    bias = torch.where(larger, mask, swallowed)
    return {"mask": (_axes(keep), keep), "bias": (_axes(bias), bias), "alike": (_axes(alike), alike)}


def _inputs(
    mask: Mask | Tensor, key: Tensor, bias: Tensor | None, sinks: Tensor | None, placed: bool
) -> dict[str, tuple[Axes, Tensor]]:
    """The custom inputs of a call, with their axes. placed: does the call say by itself where its queries stand?"""
    found: dict[str, tuple[Axes, Tensor]] = {}
    keys = key.shape[2]
    if not isinstance(mask, Mask):
        found |= _of_pairs(mask.to(key.device), keys)
    elif mask.pairs is not None:
        found |= _of_pairs(mask.pairs.to(key.device), keys)
    else:
        if mask.padding is not None:
            found["padding"] = (("batch", "seq_len_kv"), mask.padding.to(key.device)[:, :keys])
        if placed:
            pass
        elif isinstance(mask.shift, Tensor):
            found["shift"] = ((1,), mask.shift.to(key.device, torch.int32).reshape(1))
        elif mask.shift != 0:
            found["shift"] = ((1,), torch.full((1,), mask.shift, dtype=torch.int32, device=key.device))
    if bias is not None:
        bias = bias[..., :keys] if bias.shape[-1] != 1 else bias
        bias = bias + found["bias"][1] if "bias" in found else bias
        found["bias"] = (_axes(bias), bias)
    if sinks is not None and sinks.ndim == 4:  # one for each query
        found["sinks"] = (_axes(sinks)[:3], sinks[..., 0])
    elif sinks is not None:
        found["sinks"] = (("heads",), sinks.reshape(-1))
    return found


def _lengths_of_caches(mask: Mask | Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """How many keys there are for a few new tokens, int32 (batch,); None where the call is none that decodes.

    Then keys are shared among blocks (`with_cache`), and of a static cache those that are there alone are read.
    """
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    if torch.compiler.is_compiling() or queries > MOST_NEW or queries >= keys or not isinstance(mask, Mask):
        return None
    if torch.is_grad_enabled() or torch.is_autocast_enabled(query.device.type) or mask.pairs is not None:
        return None
    if not query.dtype == key.dtype == value.dtype:
        return None
    if isinstance(mask.shift, Tensor):  # a static cache, whose length the device alone knows
        if mask.band.least != 0:
            return None
        return (mask.shift.to(key.device) + queries).reshape(1).expand(batch).to(torch.int32).contiguous()
    if mask.band != Band() and mask.shift != keys - queries:
        return None
    return torch.full((batch,), keys, dtype=torch.int32, device=key.device)


def _refuse_what_is_not_there(mask: Mask, options: Mapping[str, Any]) -> None:
    """NotYetSupported for what a model asks of its attention and no engine here gives, rather than without it."""
    if options.get("output_attentions"):
        raise NotYetSupported('output_attentions=True: engines keep no weights. Use attn_implementation="eager".')
    if options.get("head_mask") is not None:
        raise NotYetSupported('head_mask: engines have none. Use attn_implementation="eager".')
    if options.get("cu_seq_lens_q") is not None and mask.pairs is None and options.get("cache") is None:
        raise NotYetSupported(
            "cu_seq_lens_q: engines read packed sequences from position_ids. Give those, and use_cache=False."
        )
    unknown = [name for name, x in options.items() if isinstance(x, Tensor) and name not in OF_OTHERS]
    if unknown:
        raise NotYetSupported(
            f"{', '.join(unknown)}: the model gives its attention a tensor that engines know nothing of. "
            'Use attn_implementation="eager".'
        )


def _attend(
    engine: AttentionEngine, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], lengths: Tensor | None
) -> Tensor:  # fmt: skip
    """The output, (batch, queries, heads, dim); lengths: of the keys of a call that decodes."""
    if lengths is not None:
        output = engine.with_cache(q, k, v, *custom, kv_lengths=lengths)
        assert isinstance(output, Tensor), "no rows were asked for"
    else:
        output = engine(q, k, v, *custom)
    return output.transpose(1, 2).contiguous()


def _dtype_of(query: Tensor) -> torch.dtype:
    """In which dtype a call computes; descriptions know kernels' dtypes alone."""
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return torch.float32 if dtype is torch.float64 else dtype


def attention_of(engine_factory: EngineFactory) -> Callable[..., tuple[Tensor, None]]:
    """The function that transformers calls in each layer; engines are built when a kind of layer first needs one."""
    names: dict[object, str] = {}
    engines = SimpleNamespace()  # by name: torch.compile follows attributes that appear while it traces

    def name_engine(
        scaling: str, least: int | None, most: int | None, softcap: str | None,
        inputs: tuple[tuple[str, Axes], ...], dtype: torch.dtype, sizes: tuple[tuple[int, int], ...], dropout: str,
    ) -> str:  # fmt: skip
        cap = None if softcap is None else float.fromhex(softcap)
        kind = (Layer(float.fromhex(scaling), Band(least, most), cap, inputs), dtype, sizes, dropout)
        if kind not in names:
            metas = [meta_tensor(None, heads, None, dim, dtype=dtype) for heads, dim in sizes]
            names[kind] = f"engine_{len(names)}"
            engine = engine_factory(metas, kind[0])
            engine.dropout_p = float.fromhex(dropout)  # the model says when and how much, whoever made the engine
            setattr(engines, names[kind], engine)
        return names[kind]

    # torch.compile asks for the name and looks no further (torch.compiler.assume_constant_result). What it gets must be
    # constants: with dynamic shapes a number may be a symbol, and as text (hex: exactly) or index it is none.
    name_engine._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def engine_for(
        query: Tensor, sizes: tuple[tuple[int, int], ...], band: Band, inputs: tuple[tuple[str, Axes], ...],
        scaling: float | None, softcap: float | None, dropout: float,
    ) -> AttentionEngine:  # fmt: skip
        factor = float(scaling if scaling is not None else query.shape[3] ** -0.5).hex()
        cap = None if softcap is None else float(softcap).hex()
        how = inputs, _dtype_of(query), sizes, float(dropout).hex()
        found: AttentionEngine = getattr(engines, name_engine(factor, band.least, band.most, cap, *how))
        return found

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | Tensor | None,
        scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None,
        sinks: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        sinks = s_aux if sinks is None else sinks
        if options.get("cache") is not None:
            asked = position_bias, sinks, (scaling, softcap, 0.0)
            return _continuous(module, (query, key, value), asked, options, engine_for), None
        if query.shape[0] != key.shape[0]:  # learned queries or keys that all of a batch share
            query, key, value = (t.expand(max(query.shape[0], key.shape[0]), -1, -1, -1) for t in (query, key, value))
        mask = attention_mask if attention_mask is not None else _of_module(module, query, is_causal)
        band = mask.band if isinstance(mask, Mask) else Band()
        _refuse_what_is_not_there(mask if isinstance(mask, Mask) else Mask(Band(), pairs=mask), options)
        lengths = None if dropout else _lengths_of_caches(mask, query, key, value)
        found = _inputs(mask, key, position_bias, sinks, lengths is not None)
        inputs = tuple((name, axes) for name, (axes, _) in found.items())
        sizes = tuple([(index(t.shape[1]), index(t.shape[3])) for t in (query, key, value)])
        engine = engine_for(query, sizes, band, inputs, scaling, softcap, dropout)
        return _attend(engine, query, key, value, [tensor for _, tensor in found.values()], lengths), None

    return attention


def _continuous(
    module: Any, tensors: tuple[Tensor, Tensor, Tensor],
    asked: tuple[Tensor | None, Tensor | None, tuple[float | None, ...]], options: Mapping[str, Any],
    engine_for: Callable[..., AttentionEngine],
) -> Tensor:  # fmt: skip
    """Continuous batching: causal, with the layer's window, over the keys of a paged cache."""
    bias, sinks, numbers = asked
    if bias is not None or (sinks is not None and sinks.ndim == 4):
        raise NotYetSupported("position biases, and sinks for each query, have no place in continuous batching.")
    custom = [] if sinks is None else [sinks.reshape(-1)]
    inputs: tuple[tuple[str, Axes], ...] = () if sinks is None else (("sinks", ("heads",)),)

    def engine_of(window: int | None, *of: Tensor) -> AttentionEngine:
        sizes = tuple((t.shape[-2], t.shape[-1]) for t in of)
        return engine_for(tensors[0], sizes, Band(0, None if window is None else window - 1), inputs, *numbers)

    return attend_to_pages(module, tensors, custom, options, engine_of)


def register(name: str, engine_factory: EngineFactory = softmax_engine) -> None:
    """Makes attn_implementation=name run engines, forward and backward.

    engine_factory(qkv_meta, layer) gives the engine (layout "bhsd") for one kind of layer; the default is the softmax
    attention that the model was written for. A factory with maths of its own takes from the layer what it keeps:
    layer.custom_io (all of it), layer.mask_mod, layer.score_mod, layer.online_func.

        register("attention_engine")
        model = AutoModelForCausalLM.from_config(config, attn_implementation="attention_engine")

    Handled: padding masks, grouped heads, windows, sinks, softcap, dropout, caches, packed sequences (these last by a
    mask over pairs), and continuous batching within `continuous(model)`.
    """
    attention = attention_of(engine_factory)
    AttentionInterface.register(name, attention)
    register_paged(name, attention)
    AttentionMaskInterface.register(name, make_mask)
