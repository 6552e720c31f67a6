"""The benchmark problems, by name: models' attention shapes, programs and masks, as data for tuning and benchmarks.

A case is called shape.program.mask.length: "llama-8b.softmax.causal.8192". `find` takes patterns with *.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention_engine import library
from attention_engine.errors import UnknownOption, did_you_mean
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.meta import Meta, meta_tensor
from attention_engine.frontend.signatures import DeclaredAxis
from attention_engine.frontend.symbols import Symbol

WINDOW = 1024


@dataclass(frozen=True)
class Shape:
    """A model's attention: query and key heads, head dims, and the batch that a benchmark uses."""

    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    batch: int = 1


SHAPES = {
    "mha-128": Shape(16, 16, 128, 128, 2),
    "mha-64": Shape(16, 16, 64, 64, 2),
    "mha-128-b1": Shape(32, 32, 128, 128),
    "llama-8b": Shape(32, 8, 128, 128),  # Llama 3.1
    "llama-70b": Shape(64, 8, 128, 128),
    "llama-70b-tp8": Shape(8, 1, 128, 128),  # its heads on one of eight GPUs
    # Both with 8192 tokens in all, at lengths of 4096 and 2048.
    **{
        f"llama-{size}-b{batch}": Shape(heads, 8, 128, 128, batch)
        for size, heads in (("8b", 32), ("70b", 64))
        for batch in (2, 4)
    },
    "deepseek": Shape(16, 16, 192, 128),  # DeepSeek V2 Lite, keys expanded
    "diff-transformer": Shape(24, 24, 128, 256),  # 3B: two attentions on values of twice the width
    "vit": Shape(6, 6, 64, 64, 8),  # ViT-S
    "retnet": Shape(16, 16, 256, 512),  # 6.7B
    "yoco": Shape(40, 40, 256, 256),
    # Others between and beside the usual head dims: of some, tiles hold more columns than they have.
    **{f"mha-{dim}": Shape(16, 16, dim, dim, 2) for dim in (32, 80, 96, 112, 160, 256)},
}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = ("full", "causal", "window")


def _retention(factor: float) -> Callable[..., Any]:
    """score * factor * decay^distance, decay = 1 - 2^(-5 - head) (arXiv 2307.08621)."""

    def score_mod(score: Symbol, custom: object, b: Symbol, h: Symbol, q_idx: Symbol, kv_idx: Symbol) -> Symbol:
        decay = 1 - 2.0 ** (-5 - h)
        decayed: Symbol = score * factor * ((q_idx - kv_idx).abs() * decay.log2()).exp2()
        return decayed

    return score_mod


def _biased(factor: float) -> Callable[..., Any]:
    return lambda score, custom, b, h, q_idx, kv_idx: score * factor + custom["bias"]


@dataclass(frozen=True)
class Maths:
    """A program: its score function (of the factor dim^-0.5), row function, and custom inputs."""

    score_mod: Callable[[float], Callable[..., Any]]
    online_func: Callable[[], Any]
    custom: tuple[tuple[str, tuple[DeclaredAxis, ...]], ...] = ()


PROGRAMS = {
    "softmax": Maths(library.scale, library.OnlineSoftmax),
    "softcap": Maths(lambda factor: library.softcap(50.0, factor), library.OnlineSoftmax),
    "alibi": Maths(library.alibi, library.OnlineSoftmax, (("slopes", ("heads",)),)),
    "sigmoid": Maths(_biased, library.OnlineSigmoid, (("bias", (1,)),)),
    "relu": Maths(library.scale, library.OnlineRelu),
    "retention": Maths(_retention, library.OnlineRetention),
}


@dataclass(frozen=True)
class Case:
    """One benchmark problem."""

    shape_name: str
    program: str
    mask: str
    length: int

    @property
    def name(self) -> str:
        return f"{self.shape_name}.{self.program}.{self.mask}.{self.length}"

    @property
    def shape(self) -> Shape:
        return SHAPES[self.shape_name]

    @property
    def kept(self) -> float:
        """The part of all pairs that the mask keeps, about."""
        window = min(WINDOW / self.length, 1.0)
        return {"full": 1.0, "causal": 0.5, "window": window * (1 - window / 2)}[self.mask]

    def flops(self, direction: str) -> float:
        """FLOPs that count: products of kept pairs, forward 2, backward 5 (three over dim, two over dim_v)."""
        s = self.shape
        dims = s.dim + s.dim_v if direction == "forward" else 3 * s.dim + 2 * s.dim_v
        return 2 * s.batch * s.heads * self.length**2 * self.kept * dims

    def metas(self, dtype: str = "float16") -> tuple[Meta, Meta, Meta]:
        """q, k, v described."""
        s = self.shape
        q, k, v = (
            meta_tensor(s.batch, heads, self.length, dim, dtype=dtype)
            for heads, dim in ((s.heads, s.dim), (s.kv_heads, s.dim), (s.kv_heads, s.dim_v))
        )
        return q, k, v

    def options(self) -> dict[str, Any]:
        """The maths, as arguments of AttentionEngine behind the metas."""
        maths = PROGRAMS[self.program]
        masks = {"full": None, "causal": library.causal, "window": library.sliding_window(WINDOW - 1)}
        return {
            "custom_io": CustomIO(dict(maths.custom)),
            "score_mod": maths.score_mod(self.shape.dim**-0.5),
            "mask_mod": masks[self.mask],
            "online_func": maths.online_func(),
        }


CASES = {
    case.name: case
    for case in (
        Case(shape, program, mask, length)
        for shape in SHAPES for program in PROGRAMS for mask in MASKS for length in LENGTHS
    )
}  # fmt: skip


def find(*patterns: str) -> list[Case]:
    """The cases that the patterns name, each once. Raises UnknownOption for a pattern that names none."""
    found: dict[str, Case] = {}
    for pattern in patterns:
        names = fnmatch.filter(CASES, pattern)
        if not names:
            raise UnknownOption(
                f"no case is called {pattern!r}.{did_you_mean(pattern, CASES)} A case is shape.program.mask.length, "
                "and * stands for any:\n"
                f"  shapes {', '.join(SHAPES)}\n  programs {', '.join(PROGRAMS)}\n  masks {', '.join(MASKS)}\n"
                f"  lengths {', '.join(map(str, LENGTHS))}"
            )
        found.update({name: CASES[name] for name in names})
    return list(found.values())
