"""The attentions whose kernels ship, in one table: programs by head dims, dtypes and numbers of heads.

Kernels hold numbers of heads, so a wheel serves those of HEADS and DIMS alone; lengths and batches are any.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attention_engine.arch import Arch
from attention_engine.codegen.cache import KernelKey
from attention_engine.compiler import Kernel
from attention_engine.errors import UnknownOption, did_you_mean
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.meta import meta_tensor
from attention_engine.frontend.signatures import AxisName
from attention_engine.library import (
    OnlineSigmoid,
    alibi,
    and_masks,
    causal,
    document,
    sliding_window,
    softcap,
)
from attention_engine.runtime.linear import LinearAttentionEngine
from attention_engine.runtime.module import AttentionEngine

HEADS = ((8, 8), (12, 12), (16, 16), (32, 32), (32, 8))  # of queries, and of keys and values
LINEAR_HEADS = ((8, 8), (16, 16), (32, 32))
DIMS = (64, 128)
DTYPES = ("float16", "bfloat16")
# Batch and length of metas: unknown, and those with which a tile of queries has few steps, or a GPU few waves.
HINTS = ((None, None), (1, 1024))
# A linear attention walks short sequences, and cuts long ones where blocks are few.
LINEAR_HINTS = ((1, 256), (1, 8192))


Custom = Mapping[str, tuple[tuple[AxisName, ...], torch.dtype]]


@dataclass(frozen=True)
class Attention:
    """A softmax-like one. score: makes the score function of a factor, which is head dim ** -0.5; None: the factor is
    all. custom: the axes and the dtype of each custom input, whose gradients are not asked for."""

    score: Callable[[float], Callable[..., Any]] | None = None
    mask: Callable[..., Any] | None = None
    weights: type[OnlineSigmoid] | None = None
    custom: Custom = field(default_factory=dict)


def _softcap(factor: float) -> Callable[..., Any]:
    return softcap(50.0, factor)


IDS: Custom = {"documents": (("batch", "seq_len"), torch.int32)}
SLOPES: Custom = {"slopes": (("heads",), torch.float32)}
ATTENTIONS = {
    "softmax.full": Attention(),
    "softmax.causal": Attention(mask=causal),
    "softmax.window-4096": Attention(mask=sliding_window(4095)),
    "softmax.window-1024": Attention(mask=sliding_window(1023)),
    "softmax.documents": Attention(mask=document(), custom=IDS),
    "softmax.documents-causal": Attention(mask=and_masks(causal, document()), custom=IDS),
    "alibi.full": Attention(alibi, custom=SLOPES),
    "alibi.causal": Attention(alibi, causal, custom=SLOPES),
    "softcap.full": Attention(_softcap),
    "softcap.causal": Attention(_softcap, causal),
    "sigmoid.full": Attention(weights=OnlineSigmoid),
    "sigmoid.causal": Attention(mask=causal, weights=OnlineSigmoid),
}
LINEAR = "linear.decays"  # log decays of each token as they are given, q scaled by its dim ** -0.5


@dataclass(frozen=True)
class Case:
    """One attention at one size."""

    attention: str
    dim: int
    dtype: str
    heads: tuple[int, int]

    @property
    def name(self) -> str:
        """As the command line calls it: "softmax.causal.128.bfloat16.heads-32-8"."""
        return f"{self.attention}.{self.dim}.{self.dtype}.heads-{self.heads[0]}-{self.heads[1]}"


def cases(*wanted: str) -> list[Case]:
    """Those whose names hold one of these texts, in which * stands for any part; all of them without. Raises
    UnknownOption for a text that none holds."""
    every = list(_every())
    found = {text: {case for case in every if fnmatch.fnmatch(case.name, f"*{text}*")} for text in wanted}
    for text, held in found.items():
        if not held:
            words = {word for case in every for word in case.name.split(".")} | {*ATTENTIONS, LINEAR}
            raise UnknownOption(f"no attention that ships is called {text!r}.{did_you_mean(text, words)}")
    return [case for case in every if not wanted or any(case in held for held in found.values())]


def _every() -> Iterator[Case]:
    for attention in (*ATTENTIONS, LINEAR):
        for dim in DIMS:
            for dtype in DTYPES:
                for heads in LINEAR_HEADS if attention == LINEAR else HEADS:
                    yield Case(attention, dim, dtype, heads)


def kernels_of(case: Case, arch: Arch) -> dict[str, Kernel]:
    """Its kernels of both directions on a GPU, by digest: none is compiled."""
    found = _linear_kernels(case, arch) if case.attention == LINEAR else _kernels(case, arch)
    keys = [KernelKey(k.builder, k.given, arch, tuple(k.configs.items())) for k in found]
    return dict(zip((key.digest for key in keys), found, strict=True))


def compile_case(case: Case, arch: Arch) -> list[str]:
    """Compiles its kernels and keeps them on disk; their digests. What a process of `kernels build` runs."""
    kernels = kernels_of(case, arch)
    for kernel in kernels.values():
        _ = kernel.compiled
    return list(kernels)


def _kernels(case: Case, arch: Arch) -> list[Kernel]:
    made, (queries, keys), found = ATTENTIONS[case.attention], case.heads, []
    score = made.score(case.dim**-0.5) if made.score is not None else None
    io = CustomIO({name: axes for name, (axes, _) in made.custom.items()})
    given = [torch.empty(1, dtype=dtype) for _, dtype in made.custom.values()]
    for batch, length in HINTS:
        metas = [meta_tensor(batch, heads, length, case.dim, case.dtype) for heads in (queries, keys, keys)]
        weights = made.weights() if made.weights is not None else None
        engine = AttentionEngine(metas, io, score, made.mask, weights)
        found += [*engine._all_kernels(arch, given).values()]
    return found


def _scaled(factor: float) -> Callable[..., Any]:
    return lambda x, custom: x * factor


def _linear_kernels(case: Case, arch: Arch) -> list[Kernel]:
    heads, found = case.heads[0], []
    for batch, length in LINEAR_HINTS:
        metas = (meta_tensor(batch, heads, length, case.dim, case.dtype),) * 3
        engine = LinearAttentionEngine(metas, q_mod=_scaled(case.dim**-0.5))
        for fixed in (False, True):  # decays with a gradient, and without
            found += [kernel for _, kernel in engine._all_kernels(arch, "token", fixed=fixed)]
    return found
