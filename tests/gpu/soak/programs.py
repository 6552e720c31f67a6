"""The attentions that the soak draws from: few, to be compiled ahead, since kernels hold no length and no batch."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, meta_tensor
from attention_engine import library as lib
from tests.gpu.soak import cached
from tests.gpu.soak.parts import BLOCK, BLOCKS, MASKS, SCORES, STARTS, Sizes

ONLINE = {
    "softmax": lib.OnlineSoftmax, "softmax_one": lib.OnlineSoftmaxOne, "sigmoid": lib.OnlineSigmoid,
    "relu": lib.OnlineRelu, "retention": lib.OnlineRetention,
}  # fmt: skip
BF16, FP16 = torch.bfloat16, torch.float16
ANY = (None, None)
OF_EACH = {"causal documents": "causal", "documents": "full"}  # the masks of packed documents


@dataclass(frozen=True)
class Program:
    """An attention and all that its kernels are compiled for.

    rows: a gradient arrives at the returned rows too; learned: the custom inputs that want one, of dtype `held`;
    hint: batch and length of the metas; longest: of a draw; square: as many keys as queries. packed: all documents of
    all batches are one packed call, whose mask says nothing of documents; unlike: whose keys have starts of their own,
    with the same numbers where the mask does not say that documents are unlike.
    """

    mask: str
    heads: int
    kv_heads: int
    dim: int = 128
    dim_v: int = 0
    dtype: torch.dtype = BF16
    score: str = "scaled"
    kind: str = "softmax"
    deterministic: bool = False
    rows: bool = False
    learned: tuple[str, ...] = ()
    held: torch.dtype = torch.float32
    hint: tuple[int | None, int | None] = ANY
    longest: int = 65536
    packed: bool = False
    unlike: bool = False
    linear = False

    @property
    def values_dim(self) -> int:
        return self.dim_v or self.dim

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return float(self.dim**-0.5)

    @property
    def square(self) -> bool:
        return "documents" in self.mask and not self.ends_meet

    @property
    def ends_meet(self) -> bool:
        """Are documents' lengths of queries and keys unlike?"""
        return "unlike documents" in self.mask

    @property
    def name(self) -> str:
        words = [self.mask, *([self.score] if self.score != "scaled" else []), self.kind]
        words += [f"{self.heads}/{self.kv_heads}", f"D {self.dim}" + (f"/{self.dim_v}" if self.dim_v else "")]
        words.append("bf16" if self.dtype is BF16 else "fp16")
        words += [
            word
            for word, said in (
                ("rows", self.rows),
                ("deterministic", self.deterministic),
                ("packed", self.packed),
                ("unlike", self.unlike),
            )
            if said
        ]
        words += [f"d{name}" for name in self.learned]
        words += ["bf16 bias"] * (self.held is BF16) + [f"for {self.hint}"] * (self.hint != ANY)
        return " ".join(words)

    def small(self) -> Program:
        """The same with few heads."""
        kv_heads = min(self.kv_heads, 2)
        return replace(self, heads=kv_heads * self.group, kv_heads=kv_heads)

    def sizes(self, batch: int, queries: int, keys: int, packing: str, count: int) -> Sizes:
        return Sizes(batch, queries, keys, self.heads, self.scale, packing, count)

    def custom(self, sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
        """The custom inputs by name, the blocks among them."""
        found = SCORES[self.score].custom(sizes, generator) | MASKS[self.mask].custom(sizes, generator)
        return {n: x.to(self.held) if n in self.learned else x for n, x in found.items()}

    def keeps(self, b: int, h: Tensor, i: Tensor, j: Tensor, custom: dict[str, Tensor]) -> Tensor:
        mask = MASKS[self.mask]
        named = {n: custom[n] for n in ([BLOCKS] if self.mask == BLOCKS else mask.axes)}
        if self.ends_meet:
            return mask.plain(b, h, i + custom["ahead"][b, i], j, at=i, **named)
        return mask.plain(b, h, i, j, **named)

    def scores(self, s: Tensor, b: int, h: Tensor, i: Tensor, j: Tensor, custom: dict[str, Tensor]) -> Tensor:
        score = SCORES[self.score]
        if self.ends_meet:
            i = i + custom["ahead"][b, i]
        return score.plain(s, self.scale, b, h, i, j, **{n: custom[n] for n in score.axes}).to(s.dtype)

    @functools.cache  # noqa: B019 - programs are few
    def engine(self, backend: str) -> AttentionEngine:
        (batch, length), dtype = self.hint, self.dtype
        metas = (
            meta_tensor(batch, self.heads, length, self.dim, dtype=dtype),
            meta_tensor(batch, self.kv_heads, length, self.dim, dtype=dtype),
            meta_tensor(batch, self.kv_heads, length, self.values_dim, dtype=dtype),
        )
        mask, score, sizes = MASKS[self.mask], SCORES[self.score], {"block_size": (BLOCK, BLOCK)}
        if self.packed:
            mask = MASKS[OF_EACH.get(self.mask, self.mask)]
        return AttentionEngine(
            metas,
            CustomIO({**score.axes, **({} if self.packed else mask.axes)}),
            score.ours(self.scale),
            mask.ours,
            ONLINE[self.kind](),
            backend=backend,
            deterministic=self.deterministic,
            **sizes,
        )

    def run(self, backend: str, q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor]) -> tuple[Tensor, dict]:
        """(o, {name: row})."""
        if self.packed:
            return self._run_packed(backend, q, k, v, custom)
        named = {n: x for n, x in custom.items() if n != BLOCKS}
        output: Any = self.engine(backend)(
            q, k, v, **named, block_mask=custom.get(BLOCKS), return_rowscales=self.kind.startswith("softmax")
        )
        return output if isinstance(output, tuple) else (output, {})

    def _run_packed(
        self, backend: str, q: Tensor, k: Tensor, v: Tensor, custom: dict[str, Tensor]
    ) -> tuple[Tensor, dict]:  # fmt: skip
        batch, length, heads, _ = q.shape
        named = {n: custom[n] for n in SCORES[self.score].axes}
        named |= {n: custom[n] for n in STARTS if n in custom} or self._starts(custom["documents"])
        output: Any = self.engine(backend)(
            *(t.flatten(0, 1) for t in (q, k, v)), **named, return_rowscales=self.kind.startswith("softmax")
        )
        o, rows = output if isinstance(output, tuple) else (output, {})
        rows = {n: row.view(heads, batch, length).transpose(0, 1) for n, row in rows.items()}
        return o.view(batch, length, heads, -1), rows

    def _starts(self, ids: Tensor) -> dict[str, Tensor]:
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = torch.cat([begins.view(-1).nonzero()[:, 0], ids.new_tensor([ids.numel()], dtype=torch.int64)]).int()
        return dict.fromkeys(STARTS if self.unlike else STARTS[:1], starts)


@dataclass(frozen=True)
class Linear:
    """A linear attention: decay of each "token" or "channel" or None; states: with one before and one after.

    mods: v and decay come times a custom input of each token, as Mamba 2 has it.
    """

    decay: str | None
    q_heads: int
    heads: int
    dim: int = 128
    dim_v: int = 128
    dtype: torch.dtype = BF16
    states: bool = False
    mods: bool = False
    longest: int = 65536
    linear = True

    @property
    def name(self) -> str:
        words = [f"linear, decay of each {self.decay}" if self.decay else "linear, no decay"]
        words += [f"{self.heads}/{self.q_heads} D {self.dim}/{self.dim_v}", "bf16" if self.dtype is BF16 else "fp16"]
        return " ".join([*words, *["mods"] * self.mods, *["states"] * self.states])

    @property
    def group(self) -> int:
        return self.heads // self.q_heads

    def small(self) -> Linear:
        """The same with few heads."""
        q_heads = min(self.q_heads, 2)
        return replace(self, heads=q_heads * self.group, q_heads=q_heads)

    @functools.cache  # noqa: B019 - programs are few
    def engine(self, backend: str) -> LinearAttentionEngine:
        heads = ((self.q_heads, self.dim), (self.q_heads, self.dim), (self.heads, self.dim_v))
        metas = [meta_tensor(None, n, None, d, dtype=self.dtype) for n, d in heads]
        mods = {f"{n}_mod": lambda x, custom: x * custom["dt"] for n in ("v", "decay")} if self.mods else {}
        io = CustomIO({"dt": ("batch", "heads", "seq_len")} if self.mods else {})
        return LinearAttentionEngine(metas, custom_io=io, backend=backend, **mods)


# The kernel that once did not come back: it is drawn as often as `PACKED_SHARE` says.
PACKED = Program("causal documents", 32, 8)
PACKED_SHARE = 0.2
CACHED_SHARE = 0.25
OF_TENSORS: tuple[Program | Linear, ...] = (
    PACKED,
    Program("causal documents", 16, 16, 64, dtype=FP16),
    Program("causal documents", 32, 2, 64, rows=True),  # 16 query heads for each key head
    Program("causal documents", 16, 4, deterministic=True),
    Program("causal documents", 16, 4, score="alibi", learned=("slopes",), longest=16384),
    Program("causal documents, padding", 16, 2),
    Program("documents", 16, 4),
    Program("documents", 8, 8, dtype=FP16),
    Program("documents", 8, 2, score="relative", learned=("table",), longest=8192),
    Program("full", 16, 16),
    Program("full", 32, 8, 64, hint=(4, 4096)),
    Program("full", 8, 1, dtype=FP16, rows=True),
    Program("full", 16, 16, 192, 128),
    Program("causal", 32, 8),
    Program("causal", 16, 16, 64, dtype=FP16),
    Program("causal", 8, 8, 128, 256),
    Program("causal", 16, 1, deterministic=True),
    Program("causal", 16, 16, deterministic=True),  # these six add to dQ in order
    Program("causal", 16, 4, deterministic=True),
    Program("causal", 8, 4, kind="sigmoid", deterministic=True),
    Program("full", 16, 4, deterministic=True),
    Program("full", 16, 16, deterministic=True),
    Program("causal", 16, 16, 64, dtype=FP16, deterministic=True),
    Program("causal", 16, 4, score="alibi", learned=("slopes",), longest=16384),
    Program("causal", 16, 4, score="softcap"),
    Program("causal", 8, 8, score="bias", learned=("bias",), longest=4096),
    Program("full", 8, 2, 64, score="bias", learned=("bias",), held=BF16, longest=4096),
    Program("window", 32, 4),
    Program("two-sided window", 16, 16, 64, kind="softmax_one"),
    Program("prefix", 16, 4),
    Program("lengths", 16, 4),
    Program("blocks", 16, 4),
    Program("full", 16, 4, kind="sigmoid", score="shifted"),
    Program("causal documents", 8, 8, 64, kind="relu"),
    Program("causal", 8, 8, kind="retention", score="decayed", longest=16384),
    Program("causal documents", 32, 8, packed=True),
    Program("causal documents", 32, 2, 64, rows=True, packed=True),
    Program("causal documents", 16, 4, score="alibi", learned=("slopes",), longest=16384, packed=True),
    Program("causal documents", 8, 8, 64, kind="relu", deterministic=True, packed=True),
    Program("documents", 16, 4, dtype=FP16, packed=True),
    Program("causal documents", 16, 4, deterministic=True, packed=True),
    Program("causal documents", 16, 4, kind="sigmoid", score="shifted", packed=True),
    Program("causal documents", 32, 4, dtype=FP16, rows=True, packed=True, unlike=True),
    Program("causal unlike documents", 16, 4, score="softcap", rows=True, packed=True, unlike=True),
    Program(
        "window in unlike documents",
        8,
        4,
        score="capped alibi",
        rows=True,
        deterministic=True,
        packed=True,
        unlike=True,
    ),
    Program("causal unlike documents", 8, 8, 64, dtype=FP16, packed=True, unlike=True),
    Linear("token", 4, 16, 128, 64, states=True),
    Linear("token", 16, 16, 64, 64, FP16),
    Linear("token", 1, 16, 128, 64, mods=True),
    Linear("channel", 8, 8, states=True, longest=16384),
    Linear(None, 8, 8, states=True),
)
PROGRAMS: tuple[Program | Linear | cached.Cached, ...] = (*OF_TENSORS, *cached.PROGRAMS)
