"""Who is timed: AttentionEngine and others, each in the layout it likes; one that can't run a case says why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_engine.tuner.cases import WINDOW, Case
from benchmarks.cases import attend_head, keep_pairs

Attention = Callable[[Tensor, Tensor, Tensor, dict[str, Tensor]], Tensor]


class Unavailable(Exception):
    """The peer can't run this case here; the message says why."""


@dataclass(frozen=True)
class Peer:
    """make: an attention for a case and dtype, or Unavailable. layout: of its q, k, v and output."""

    make: Callable[[Case, torch.dtype], Attention]
    layout: str


def need(*modules: str) -> None:
    """Raises Unavailable where a module can't be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Unavailable(f"import {module}: {error}") from error


def only(case: Case, programs: tuple[str, ...], masks: tuple[str, ...]) -> None:
    """Raises Unavailable for other programs and masks."""
    if case.program not in programs or case.mask not in masks:
        raise Unavailable(f"can't express {case.program} {case.mask}")


def compile_to_repeat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile, with a backward pass that may run more than once."""
    import torch._functorch.config as functorch_config

    functorch_config.donated_buffer = False
    torch.compiler.reset()  # a process meets many cases; past a few recompilations torch would run them uncompiled
    return torch.compile(function)


def attention_engine(case: Case, dtype: torch.dtype) -> Attention:
    from attention_engine import AttentionEngine

    engine = AttentionEngine(case.metas(str(dtype).removeprefix("torch.")), **case.options())
    return lambda q, k, v, custom: engine(q, k, v, **custom)


def deterministic(case: Case, dtype: torch.dtype) -> Attention:
    from attention_engine import AttentionEngine

    metas = case.metas(str(dtype).removeprefix("torch."))
    engine = AttentionEngine(metas, **case.options(), deterministic=True)
    return lambda q, k, v, custom: engine(q, k, v, **custom)


def sdpa(backend: str) -> Callable[[Case, torch.dtype], Attention]:
    """torch's scaled_dot_product_attention on one backend."""

    def make(case: Case, dtype: torch.dtype) -> Attention:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        only(case, ("softmax",), ("full", "causal"))
        grouped = case.shape.heads != case.shape.kv_heads
        chosen = getattr(SDPBackend, backend)

        def attend(q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor]) -> Tensor:
            with sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.mask == "causal", enable_gqa=grouped
                )

        return attend

    return make


def flex_attention(case: Case, dtype: torch.dtype) -> Attention:
    from torch.nn.attention import flex_attention as flex

    only(case, ("softmax", "softcap", "alibi"), ("full", "causal", "window"))
    masks = {"causal": lambda b, h, i, j: i >= j, "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW)}
    length, scale = case.length, case.shape.dim**-0.5
    block_mask = None
    if case.mask != "full":
        block_mask = flex.create_block_mask(masks[case.mask], None, None, length, length, "cuda")
    grouped = case.shape.heads != case.shape.kv_heads
    compiled = compile_to_repeat(flex.flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor]) -> Tensor:
        score_mod = None
        if case.program == "softcap":

            def score_mod(x, b, h, i, j):
                return 50.0 * torch.tanh(x / 50.0)
        elif case.program == "alibi":
            slopes = custom["slopes"]

            def score_mod(x, b, h, i, j):
                return x - slopes[h] * (i - j)

        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=grouped)

    return attend


def flash_attention_4(case: Case, dtype: torch.dtype) -> Attention:
    need("flash_attn.cute")
    from flash_attn.cute import flash_attn_func

    only(case, ("softmax",), ("full", "causal", "window"))
    window = (WINDOW - 1, 0) if case.mask == "window" else (None, None)

    def attend(q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor]) -> Tensor:
        found = flash_attn_func(q, k, v, causal=case.mask == "causal", window_size=window)
        return found[0] if isinstance(found, tuple) else found

    return attend


def torch_compile(case: Case, dtype: torch.dtype) -> Attention:
    """The plain formula, compiled; its pairs must fit in memory."""
    s = case.shape
    needed = 5 * s.batch * s.heads * case.length**2 * dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise Unavailable(f"needs about {needed >> 30} GiB for its pairs, {free >> 30} GiB are free")
    keep = keep_pairs(case, "cuda")
    head = torch.arange(s.heads, device="cuda")[:, None, None]

    def formula(q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor]) -> Tensor:
        k, v = (x.repeat_interleave(s.heads // s.kv_heads, 1) for x in (k, v))
        return attend_head(case, q, k, v, custom, head, keep)

    return compile_to_repeat(formula)


PEERS = {
    "attention_engine": Peer(attention_engine, "bshd"),
    "deterministic": Peer(deterministic, "bshd"),
    "cudnn": Peer(sdpa("CUDNN_ATTENTION"), "bhsd"),
    "flash_attention_2": Peer(sdpa("FLASH_ATTENTION"), "bhsd"),
    "flash_attention_4": Peer(flash_attention_4, "bshd"),
    "flex_attention": Peer(flex_attention, "bhsd"),
    "torch_compile": Peer(torch_compile, "bhsd"),
}
