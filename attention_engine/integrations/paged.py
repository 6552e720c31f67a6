"""transformers' continuous batching: requests packed in one row of tokens, keys and values in its paged cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from attention_engine.errors import NotYetSupported
from attention_engine.runtime.module import AttentionEngine

FLASH = "flash|"  # without this in a name, generate_batch takes it for one that reads a mask over pairs
PAGE = 16  # keys, of which the pages that kernels read have a multiple
EngineOf = Callable[[int | None, Tensor, Tensor, Tensor], AttentionEngine]  # of a window, and tensors of (heads, dim)


def register_paged(name: str, attention: Callable[..., tuple[Tensor, None]]) -> None:
    """The names under which continuous batching asks for the attention."""
    for alias in (f"paged|{name}", _alias(name)):
        AttentionInterface.register(alias, attention)


def _alias(name: str) -> str:
    """What generate_batch lets in: transformers before 5.18 or so asked for names that begin with "paged|"."""
    return ("paged|" if "paged|sdpa" in AttentionInterface().valid_keys() else "") + FLASH + name


@contextlib.contextmanager
def continuous(model: Any) -> Iterator[Any]:
    """Within, model.generate_batch (continuous batching) runs the engines that the model was registered with.

    transformers lets no other attention than its own and flash-attn's into continuous batching, whatever is registered.

        with continuous(model):
            found = model.generate_batch(prompts, generation_config)
    """
    name = model.config._attn_implementation
    if _alias(name) not in AttentionInterface().valid_keys():
        raise NotYetSupported(
            f'the model was built with attn_implementation="{name}", which runs no engines.\n'
            '  Call register("name"), then model.set_attn_implementation("name").'
        )
    model.config._attn_implementation = _alias(name)
    try:
        yield model
    finally:
        model.config._attn_implementation = name


def attend_to_pages(
    module: Any, tensors: tuple[Tensor, Tensor, Tensor], custom: Sequence[Tensor], options: Mapping[str, Any],
    engine_of: EngineOf,
) -> Tensor:  # fmt: skip
    """The output (1, rows, heads, dim) for new tokens of several requests; tensors are (1, heads, rows, dim).

    They are written to the cache. Layers that see all keys then read its pages. Of layers with a window, and of caches
    that show no pages, the keys of all requests are gathered, one request behind the other.
    """
    if options.get("block_table") is not None:
        raise NotYetSupported("a block table reached an engine. Set max_blocks_per_request=0: pages are found without.")
    cache, layer = options["cache"], module.layer_idx
    window = options.get("sliding_window", getattr(module, "sliding_window", None))
    starts, starts_k = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    most = options["max_length_k"] if "max_length_k" in options else options["max_seqlen_k"]
    if isinstance(starts_k, Mapping):
        kind = "full_attention" if window is None else "sliding_attention"
        starts_k, most = starts_k[kind], most[kind]
    starts, starts_k, q = starts.int(), starts_k.int(), tensors[0][0].transpose(0, 1)
    pages = _pages_of(cache, layer, options) if window is None else None
    if pages is None:
        k, v = _written(cache, layer, tensors[1], tensors[2], options)
        output: Any = engine_of(window, q, k, v)(q, k, v, *custom, cu_seqlens_q=starts, cu_seqlens_k=starts_k)
    else:
        keys, values, index = pages
        _write(cache, layer, tensors[1], tensors[2], options)
        firsts = starts_k[:-1, None] + torch.arange(0, most, keys.shape[1], device=q.device)
        table = index[firsts.clamp(max=index.shape[0] - 1)].div(keys.shape[1], rounding_mode="floor").int()
        output = engine_of(None, q, keys, values).with_cache(
            q, keys.transpose(1, 2), values.transpose(1, 2), *custom, kv_lengths=starts_k[1:] - starts_k[:-1],
            page_table=table, cu_seqlens_q=starts,
        )  # fmt: skip
    assert isinstance(output, Tensor), "no rows were asked for"
    return output[None]


def _pages_of(cache: Any, layer: int, options: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The layer's pages of keys and of values, (pages, keys, heads, dim), and where each key of each request lies.

    None where the cache shows no pages that fit, and where no request has keys from earlier steps.
    """
    allocator = getattr(cache, "layer_to_allocator", {}).get(layer)
    if allocator is None or not allocator.supports_block_table:
        return None
    keys, values = allocator.get_cache_for_block_table(layer)
    index = options["read_index"][allocator.index]
    return None if keys.shape[1] % PAGE or not index.numel() else (keys, values, index)


def _write(cache: Any, layer: int, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> None:
    """New keys and values go to the cache. Asked for no key, it gathers none."""
    allocator = cache.layer_to_allocator[layer]
    write, none = options["write_index"][allocator.index], options["read_index"][allocator.index][:0]
    allocator.update(k[0].transpose(0, 1), v[0].transpose(0, 1), layer, none, write)


def _written(cache: Any, layer: int, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The same; keys and values of all requests, (rows, heads, dim)."""
    given: dict[str, Any] = {"key_states": k, "value_states": v, "layer_idx": layer}
    if hasattr(cache, "layer_to_allocator"):
        k, v = cache.update(**given, kwargs=dict(options))
        return k[0].transpose(0, 1), v[0].transpose(0, 1)
    k, v = cache.update(**given, read_index=options["read_index"], write_index=options["write_index"])
    return k, v
