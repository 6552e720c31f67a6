"""What random programs are made of: pieces of text, each as a user writes it and as plain torch.

In the user's text stand score, custom, b, h, q_idx, kv_idx; in the plain one s, c (custom inputs), b, h, i, j, tensors
that broadcast to (batch, heads, queries, keys). `{n}` is the number of the piece, which keeps names apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Input:
    """A custom input: its axes as text, how it is made (in terms of B, H, SQ, SK and randn), has it a gradient."""

    name: str
    axes: str
    made: str
    learned: bool = True


@dataclass(frozen=True)
class Piece:
    """A step of a score (an expression), or a mask (a condition). square: as many keys as queries."""

    ours: str
    plain: str
    inputs: tuple[Input, ...] = ()
    square: bool = False


SCORES = {
    "scaled": Piece("score * 0.7", "s * 0.7"),
    "softcap": Piece("2.5 * torch.tanh(score / 2.5)", "2.5 * torch.tanh(s / 2.5)"),
    "distance": Piece("score - 0.05 * (q_idx - kv_idx).abs()", "s - 0.05 * (i - j).abs()"),
    "log distance": Piece("score - 0.3 * ((q_idx - kv_idx).abs() + 1).log()", "s - 0.3 * ((i - j).abs() + 1.0).log()"),
    "of the head": Piece("score - 0.1 * 2.0 ** (-h) * (q_idx - kv_idx)", "s - 0.1 * torch.exp2(-h.double()) * (i - j)"),
    "waves": Piece("score + 0.5 * (0.1 * (q_idx - kv_idx)).cos()", "s + 0.5 * torch.cos(0.1 * (i - j))"),
    "decay": Piece("score * 0.98 ** (q_idx - kv_idx).abs()", "s * 0.98 ** (i - j).abs()"),
    "near and far": Piece(
        "where((q_idx - kv_idx).abs() < 9, score, 0.5 * score - 1)", "torch.where((i - j).abs() < 9, s, 0.5 * s - 1)"
    ),
    "bent": Piece("score + 0.25 * score.sin()", "s + 0.25 * s.sin()"),
    "squashed": Piece("score / (1 + score.square()).sqrt() * 2", "s / (1 + s.square()).sqrt() * 2"),
    "slopes": Piece(
        'score - custom["slopes{n}"] * (q_idx - kv_idx).abs()', 's - c["slopes{n}"].view(1, -1, 1, 1) * (i - j).abs()',
        (Input("slopes{n}", '("heads",)', "randn(H) * 0.05 + 0.1"),),
    ),
    "heat": Piece(
        'score * custom["heat{n}"]', 's * c["heat{n}"].view(1, -1, 1, 1)',
        (Input("heat{n}", '("heads",)', "randn(H) * 0.2 + 1"),),
    ),
    "bias of keys": Piece(
        'score + custom["of_keys{n}"]', 's + c["of_keys{n}"][:, None, None]',
        (Input("of_keys{n}", '("batch", "seq_len_kv")', "randn(B, SK)"),),
    ),
    "bias of keys and heads": Piece(
        'score + custom["bias{n}"]', 's + c["bias{n}"]',
        (Input("bias{n}", '("batch", "heads", 1, "seq_len_kv")', "randn(B, H, 1, SK)"),),
    ),
    "heat of queries": Piece(
        'score * custom["rows{n}"].sigmoid()', 's * c["rows{n}"].sigmoid()[:, None, :, None]',
        (Input("rows{n}", '("batch", "seq_len")', "randn(B, SQ)"),),
    ),
    "bias of pairs": Piece(
        'score + custom["pairs{n}"]', 's + c["pairs{n}"]',
        (Input("pairs{n}", '(1, "heads", "seq_len", "seq_len_kv")', "randn(1, H, SQ, SK)"),),
    ),
    "16-bit bias of pairs": Piece(
        'score + custom["half{n}"]', 's + c["half{n}"]',
        (Input("half{n}", '("batch", 1, "seq_len", "seq_len_kv")', "randn(B, 1, SQ, SK).bfloat16()"),),
    ),
    "gate of pairs": Piece(
        'score * custom["gate{n}"]', 's * c["gate{n}"]',
        (Input("gate{n}", '("seq_len", "seq_len_kv")', "randn(SQ, SK)"),),
    ),
    "relative": Piece(
        'score + custom["table{n}"][h, (q_idx - kv_idx).clamp(-12, 12) + 12]',
        's + c["table{n}"][h, (i - j).clamp(-12, 12) + 12]', (Input("table{n}", '("heads", 25)', "randn(H, 25)"),),
    ),
    "buckets": Piece(
        'score + custom["bias{n}"][h, custom["bucket{n}"][(q_idx - kv_idx).abs().min(63)]]',
        's + c["bias{n}"][h, c["bucket{n}"].long()[(i - j).abs().clamp(max=63)]]',
        (Input("bias{n}", '("heads", 9)', "randn(H, 9)"),
         Input("bucket{n}", "(64,)", "(torch.arange(64) * 5 % 9).int()", learned=False)),
    ),
    "one number": Piece(
        'score + custom["shift{n}"] * 0.5', 's + c["shift{n}"] * 0.5', (Input("shift{n}", "(1,)", "randn(1)"),),
    ),
    "kinds": Piece(  # of tokens, read by their numbers
        'score + custom["match{n}"][custom["kind{n}"][b, q_idx], custom["kind{n}"][b, kv_idx]]',
        's + c["match{n}"][c["kind{n}"].long()[b, i], c["kind{n}"].long()[b, j]]',
        (Input("match{n}", "(5, 5)", "randn(5, 5)"),
         Input("kind{n}", '("batch", "seq_len")', "torch.randint(0, 5, (B, SQ), generator=make)", learned=False)),
        square=True,
    ),
}  # fmt: skip

MASKS = {
    "causal": Piece("q_idx >= kv_idx", "i >= j"),
    "offset": Piece("q_idx + 11 >= kv_idx", "i + 11 >= j"),
    "late": Piece("q_idx >= kv_idx + 5", "i >= j + 5"),  # the first rows keep nothing
    "window": Piece("(q_idx - kv_idx <= 30) & (kv_idx - q_idx <= 4)", "(i - j <= 30) & (j - i <= 4)"),
    "prefix": Piece("(kv_idx < 20) | (q_idx >= kv_idx)", "(j < 20) | (i >= j)"),
    "dilated": Piece("(q_idx - kv_idx) % 3 == 0", "(i - j) % 3 == 0"),
    "blocks": Piece("q_idx // 16 == kv_idx // 16", "i // 16 == j // 16"),
    "of the head": Piece("q_idx - kv_idx < 8 * (h + 1)", "i - j < 8 * (h + 1)"),
    "not window": Piece("~((q_idx - kv_idx).abs() < 7)", "~((i - j).abs() < 7)"),
    "documents": Piece(
        'custom["ids{n}"][b, q_idx] == custom["ids{n}"][b, kv_idx]', 'c["ids{n}"][b, i] == c["ids{n}"][b, j]',
        (Input("ids{n}", '("batch", "seq_len")',
               "torch.randint(0, 2, (B, SQ), generator=make).cumsum(1).div(13, rounding_mode='floor').int()",
               learned=False),),
        square=True,
    ),
    "lengths": Piece(
        'kv_idx < custom["lengths{n}"][b]', 'j < c["lengths{n}"][b]',
        (Input("lengths{n}", '("batch",)', "torch.randint(0, SK + 1, (B,), generator=make)", learned=False),),
    ),
    "keep": Piece(
        'custom["keep{n}"]', 'c["keep{n}"][:, None, None]',
        (Input("keep{n}", '("batch", "seq_len_kv")', "torch.rand(B, SK, generator=make) < 0.7", learned=False),),
    ),
    "keep pairs": Piece(
        'custom["pair{n}"]', 'c["pair{n}"][None, None]',
        (Input("pair{n}", '("seq_len", "seq_len_kv")', "torch.rand(SQ, SK, generator=make) < 0.5", learned=False),),
    ),
    "threshold": Piece(
        'custom["a{n}"][q_idx] >= custom["a{n}"][kv_idx]', 'c["a{n}"][i] >= c["a{n}"][j]',
        (Input("a{n}", '("seq_len",)', "torch.randint(0, 9, (SQ,), generator=make)", learned=False),), square=True,
    ),
}  # fmt: skip
JOINS = {"and": ("({}) & ({})", "({}) & ({})"), "or": ("({}) | ({})", "({}) | ({})"), "and not": ("({}) & ~({})",) * 2}
