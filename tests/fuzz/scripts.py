"""A random program as the text of a script, which stands alone: the engine, its inputs and plain torch."""

from __future__ import annotations

import random
import textwrap
from dataclasses import dataclass, replace

from tests.fuzz.normalisers import NORMALISERS
from tests.fuzz.pieces import JOINS, MASKS, SCORES, Input, Piece

LENGTHS = (1, 2, 17, 33, 63, 64, 65, 100, 127, 128, 129)
LONG = (1, 63, 200, 257, 1000, 1024, 2049)  # where a GPU runs them
DIMS = ((64, 64), (128, 128), (32, 32), (16, 16), (40, 40), (80, 80), (96, 64), (64, 128), (192, 128), (128, 256),
        (20, 24))  # fmt: skip
HEADS = ((1, 1), (2, 2), (4, 2), (4, 1), (3, 3), (6, 3), (8, 1))
DTYPES = ("bfloat16", "float16", "float32")
FORMS = ("plain", "plain", "wider", "turned")  # of the tensors in memory

SCRIPT = '''\
# draw {number} of seed {seed}: {name}
import math

import torch

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, meta_tensor, where
from attention_engine import library as L

B, H, HK, SQ, SK, D, DV = {sizes}
DTYPE, LAYOUT, FORM, DETERMINISTIC = torch.{dtype}, "{layout}", "{form}", {deterministic}
make = torch.Generator().manual_seed({tensors})


def randn(*size):
    return torch.randn(size, generator=make)


q, k, v, d_o = (
    randn(*size).to(DTYPE) for size in ((B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, DV), (B, SQ, H, DV))
)
AXES, custom = {{}}, {{}}
{inputs}LEARNED = {learned}
ROWS = {rows}
d_rows = {{name: randn(B, H, SQ) for name in ROWS}}


def score_mod(score, custom, b, h, q_idx, kv_idx):
    score = score * {scale}
{score}    return score


def mask_mod(b, h, q_idx, kv_idx, custom):
    return {mask}


class Row({base}):
{body}

def engine(backend, **options):
    metas = [meta_tensor(B, n, s, d, dtype=DTYPE) for n, s, d in ((H, SQ, D), (HK, SK, D), (HK, SK, DV))]
    return AttentionEngine(
        metas, CustomIO(AXES), score_mod, {given_mask}, Row(), layout=LAYOUT, backend=backend,
        deterministic=DETERMINISTIC, **options,
    )


def plain(q, k, v, c, wide):
    """o (batch, queries, heads, dim_v), returned rows, which rows keep a key, what multiplies a row of weights, and
    weights times values, of which o is made; in the dtype of q, rows in wide.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    b, h, i, j = (
        torch.arange(n, device=q.device).view([-1 if a == axis else 1 for a in range(4)])
        for axis, n in enumerate((B, H, SQ, SK))
    )
    s = q @ k.transpose(-1, -2)
    s = s * {scale}
{plain_score}    keep = ({plain_mask}).expand(s.shape)
    x, factor = s.to(wide), torch.ones((), dtype=wide)
{normaliser}    z = w.to(v.dtype) @ v
    o = {bend}
    rows = {{name: row.squeeze(-1).expand(B, H, SQ) for name, row in rows.items()}}
    return o.to(v.dtype).transpose(1, 2), rows, keep.any(-1), factor, z
'''
END = """

if __name__ == "__main__":  # from the repository's root
    from tests.fuzz.check import run_names

    print(run_names(globals(), "{backend}", "{device}"))
"""


@dataclass(frozen=True)
class Draw:
    """What was drawn. text: the script."""

    seed: int
    number: int
    name: str
    text: str

    def paste(self, backend: str, device: str) -> str:
        """The script, which runs and compares itself."""
        return self.text + END.format(backend=backend, device=device)


def named(piece: Piece, number: int) -> Piece:
    """The piece with its number in its names."""

    def put(text: str) -> str:
        return text.replace("{n}", str(number))

    inputs = tuple(replace(i, name=put(i.name), made=put(i.made)) for i in piece.inputs)
    return replace(piece, ours=put(piece.ours), plain=put(piece.plain), inputs=inputs)


def draw(seed: int, number: int, long: bool = False) -> Draw:
    """The draw of that number: the same in every process."""
    rng = random.Random(f"fuzz {seed} {number}")
    steps = rng.sample(list(SCORES), rng.choice((0, 1, 1, 2, 2, 3)))
    masks = rng.sample(list(MASKS), rng.choice((0, 1, 1, 1, 2)))
    join = rng.choice(list(JOINS))
    kind = rng.choice(list(NORMALISERS))
    score_pieces = [named(SCORES[name], place) for place, name in enumerate(steps)]
    mask_pieces = [named(MASKS[name], place) for place, name in enumerate(masks)]
    normaliser, pieces = NORMALISERS[kind], [*score_pieces, *mask_pieces]
    inputs = [one for piece in pieces for one in piece.inputs] + [*normaliser.inputs]
    mask, plain_mask = _joined(mask_pieces, join)
    lengths = LONG if long else LENGTHS
    queries = rng.choice(lengths)
    keys = queries if any(p.square for p in pieces) or rng.random() < 0.6 else rng.choice(lengths)
    (heads, kv_heads), (dim, dim_v), dtype = rng.choice(HEADS), rng.choice(DIMS), rng.choice(DTYPES)
    with_rows = bool(normaliser.rows) and rng.random() < 0.4
    sizes = (rng.choice((1, 1, 2, 3)), heads, kv_heads, queries, keys, dim, dim_v)
    words = ["scores: " + ", ".join(steps or ["plain"]), "mask: " + (f" {join} ".join(masks) or "full"), kind]
    text = SCRIPT.format(
        number=number, seed=seed, name="; ".join([*words, dtype, str(sizes)]), sizes=", ".join(map(str, sizes)),
        dtype=dtype, layout=rng.choice(("bshd", "bshd", "bhsd")), form=rng.choice(FORMS),
        deterministic=rng.random() < 0.2, tensors=rng.randrange(1 << 31), inputs=_inputs(inputs),
        learned=[one.name for one in inputs if one.learned], rows=list(normaliser.rows) if with_rows else [],
        scale=f"{dim**-0.5:.6f}", score=_lines("score", [p.ours for p in score_pieces], ""),
        mask=mask or "q_idx >= 0", given_mask="mask_mod" if masks else "None", base=normaliser.base,
        body=textwrap.indent(normaliser.body, "    "),
        plain_score=_lines("s", [f"({p.plain}).to(s.dtype)" for p in score_pieces], ""),
        plain_mask=plain_mask or "j >= 0", normaliser=textwrap.indent(normaliser.plain, "    "),
        bend="z" if normaliser.bend == "z" else f"torch.where(keep.any(-1, keepdim=True), {normaliser.bend}, 0.0)",
    )  # fmt: skip
    return Draw(seed, number, "; ".join([*words, dtype, str(sizes)]), text)


def _lines(name: str, expressions: list[str], end: str) -> str:
    return "".join(f"    {name} = {e}\n" for e in expressions) + end


def _joined(pieces: list[Piece], join: str) -> tuple[str, str]:
    if len(pieces) < 2:
        return (pieces[0].ours, pieces[0].plain) if pieces else ("", "")
    ours, plain = JOINS[join]
    first, second = pieces
    return ours.format(first.ours, second.ours), plain.format(first.plain, second.plain)


def _inputs(inputs: list[Input]) -> str:
    return "".join(f'AXES["{i.name}"], custom["{i.name}"] = {i.axes}, {i.made}\n' for i in inputs)
