"""Row functions of random programs, as text: classes as users write them, and plain torch.

The plain text has x (scores in float64 or fp32), keep (bool of the same shape), c, and makes w, the weights, and rows.
Where numbers of the row multiply a whole row of weights, it says their product, factor: 1 over the sum, say.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.pieces import Input


@dataclass(frozen=True)
class Normaliser:
    """base: what the class derives from; body: its methods, without decorators; rows: what it returns; bend: what is
    made of z, the product of weights and values, in rows that keep a key.
    """

    body: str
    plain: str
    base: str = "OnlineFunc"
    rows: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    bend: str = "z"


def states(**starts: float) -> str:
    """A constructor; those whose name ends in _ are not returned."""
    held = ", ".join(f'"{n}": {v}' for n, v in starts.items())
    returned = ", ".join(f'"{n}": 0.0' for n in starts if not n.endswith("_"))
    return f"def __init__(self):\n    super().__init__({{{held}}}, {{{returned}}})\n"


FORWARD = "@staticmethod\ndef online_fwd(scores, rows, b, h, q_idx):\n"
FORWARD_CUSTOM = "@staticmethod\ndef online_fwd(scores, rows, b, h, q_idx, custom):\n"
EPILOGUE = "@staticmethod\ndef online_fwd_epilogue(o, rows, b, h, q_idx):\n"
EPILOGUE_CUSTOM = "@staticmethod\ndef online_fwd_epilogue(o, rows, b, h, q_idx, custom):\n"
EXPONENTIALS = """\
x = x.masked_fill(~keep, -math.inf)
top = x.detach().amax(-1, keepdim=True)
top = torch.where(top.isfinite(), top, 0.0)
e = (x - top).exp()
"""
SOFTMAX_END = """\
some = total > 0
safe = torch.where(some, total, 1.0)
factor = 1 / safe
w = torch.where(some, e / safe, 0.0)
rows = {"lse": torch.where(some, safe.log() + top, -math.inf)}
"""
SOFTMAX = EXPONENTIALS + "total = e.sum(-1, keepdim=True)\n" + SOFTMAX_END
SOFTMAX_FORWARD = (
    FORWARD + '    m = rows["m"].max(scores.get_reduce("max"))\n    rescale = (rows["m"] - m).exp()\n'
    '    e = (scores - m).exp()\n    return e, {"m": m, "r": rows["r"] * rescale + e.get_reduce("sum")}, rescale\n'
)
NORMALISERS = {
    "softmax": Normaliser("pass\n", EXPONENTIALS + "total = e.sum(-1, keepdim=True)\n" + SOFTMAX_END,
                          "L.OnlineSoftmax", ("lse",)),
    "softmax one": Normaliser(
        "pass\n", EXPONENTIALS + "total = e.sum(-1, keepdim=True) + (-top).exp()\n" + SOFTMAX_END,
        "L.OnlineSoftmaxOne", ("lse",),
    ),
    "sink": Normaliser(
        "pass\n", EXPONENTIALS + 'total = e.sum(-1, keepdim=True) + (c["sinks"].view(1, -1, 1, 1) - top).exp()\n'
        + SOFTMAX_END, "L.OnlineSoftmaxSink", ("lse",), (Input("sinks", '("heads",)', "randn(H)"),),
    ),
    "sigmoid": Normaliser("pass\n", "w, rows = torch.where(keep, x.sigmoid(), 0.0), {}\n", "L.OnlineSigmoid"),
    "relu": Normaliser("pass\n", "w, rows = torch.where(keep, x.relu(), 0.0), {}\n", "L.OnlineRelu"),
    "retention": Normaliser(
        "pass\n",
        "x = torch.where(keep, x, 0.0)\nw, rows = x / x.detach().abs().sum(-1, keepdim=True).clamp(min=1.0), {}\n",
        "L.OnlineRetention",
    ),
    "squares over their sum": Normaliser(
        states(r=0.0) + FORWARD + '    f = scores.square()\n    return f, {"r": rows["r"] + f.get_reduce("sum")}, 1.0\n'
        + EPILOGUE + '    return o / (rows["r"] + 0.1), {"r": rows["r"]}\n',
        'f = torch.where(keep, x.square(), 0.0)\nr = f.sum(-1, keepdim=True)\nfactor = 1 / (r + 0.1)\n'
        'w, rows = f / (r + 0.1), {"r": r}\n',
        rows=("r",),
    ),
    "over the absolute sum": Normaliser(
        states(a=0.0) + FORWARD + '    return scores, {"a": rows["a"] + scores.get_reduce("abssum")}, 1.0\n'
        + EPILOGUE + '    return o / (rows["a"] + 1), {"a": rows["a"]}\n',
        'x = torch.where(keep, x, 0.0)\na = x.abs().sum(-1, keepdim=True)\nfactor = 1 / (a + 1)\n'
        'w, rows = x / (a + 1), {"a": a}\n',
        rows=("a",),
    ),
    "softplus": Normaliser(
        FORWARD + "    return scores.max(0.0) + (1 + (-scores.abs()).exp()).log(), {}, 1.0\n",
        "w, rows = torch.where(keep, torch.nn.functional.softplus(x.double()).to(x.dtype), 0.0), {}\n",
    ),
    "plain scores": Normaliser(FORWARD + "    return scores, {}, 1.0\n", "w, rows = torch.where(keep, x, 0.0), {}\n"),
    "exponentials over their sum": Normaliser(  # without a maximum
        states(r=0.0) + FORWARD + "    f = (scores * 0.5).exp()\n"
        + '    return f, {"r": rows["r"] + f.get_reduce("sum")}, 1.0\n'
        + EPILOGUE + '    return o / (rows["r"] + 1), {"r": rows["r"]}\n',
        'f = torch.where(keep, (x * 0.5).exp(), 0.0)\nr = f.sum(-1, keepdim=True)\n'
        'factor = 1 / (r + 1)\nw, rows = f / (r + 1), {"r": r}\n',
        rows=("r",),
    ),
    "gated softmax": Normaliser(
        EPILOGUE_CUSTOM + '    m, r = rows["m"], rows["r"]\n'
        '    return o / r * custom["gate"].sigmoid(), {"lse": r.log() + m}\n',
        EXPONENTIALS + "total = e.sum(-1, keepdim=True)\n" + SOFTMAX_END
        + 'gate = c["gate"].sigmoid()[:, None, :, None]\nfactor, w = factor * gate, w * gate\n',
        "L.OnlineSoftmax", ("lse",), (Input("gate", '("batch", "seq_len")', "randn(B, SQ)"),),
    ),
    "tempered softmax": Normaliser(
        FORWARD_CUSTOM + '    scores = scores * custom["tau"]\n'
        '    m = rows["m"].max(scores.get_reduce("max"))\n    rescale = (rows["m"] - m).exp()\n'
        "    scores = (scores - m).exp()\n"
        '    return scores, {"m": m, "r": rows["r"] * rescale + scores.get_reduce("sum")}, rescale\n',
        'x = x * c["tau"].view(1, -1, 1, 1)\n' + EXPONENTIALS + "total = e.sum(-1, keepdim=True)\n" + SOFTMAX_END,
        "L.OnlineSoftmax", ("lse",), (Input("tau", '("heads",)', "randn(H) * 0.2 + 1"),),
    ),
    "mean of kept keys": Normaliser(
        states(n=0.0) + FORWARD
        + '    return scores, {"n": rows["n"] + (scores * 0.0 + 1.0).get_reduce("sum")}, 1.0\n'
        + EPILOGUE + '    return o / (rows["n"] + 1), {"n": rows["n"]}\n',
        'n = keep.to(x.dtype).sum(-1, keepdim=True)\nw, rows = torch.where(keep, x, 0.0) / (n + 1), {"n": n}\n',
    ),
    "over the largest": Normaliser(
        states(t=0.0) + FORWARD + '    return scores, {"t": rows["t"].max(scores.get_reduce("absmax"))}, 1.0\n'
        + EPILOGUE + '    return o / (rows["t"] + 1), {"t": rows["t"]}\n',
        'x = torch.where(keep, x, 0.0)\nt = x.abs().amax(-1, keepdim=True)\nfactor = 1 / (t + 1)\n'
        'w, rows = x / (t + 1), {"t": t}\n',
        rows=("t",),
    ),
    "entropy": Normaliser(
        "def __init__(self):\n"
        '    super().__init__({"m": float("-inf"), "r": 0.0, "u": 0.0}, {"lse": 0.0, "entropy": 0.0})\n'
        + FORWARD + '    m = rows["m"].max(scores.get_reduce("max"))\n    rescale = (rows["m"] - m).exp()\n'
        "    e = (scores - m).exp()\n"
        '    moved = where(rows["r"] > 0, rescale * (rows["u"] + (rows["m"] - m) * rows["r"]), 0.0)\n'
        '    r = rows["r"] * rescale + e.get_reduce("sum")\n'
        '    return e, {"m": m, "r": r, "u": moved + (e * (scores - m)).get_reduce("sum")}, rescale\n'
        + EPILOGUE + '    m, r = rows["m"], rows["r"]\n'
        '    return o / r, {"lse": r.log() + m, "entropy": r.log() - rows["u"] / r}\n',
        EXPONENTIALS + "total = e.sum(-1, keepdim=True)\n" + SOFTMAX_END
        + "u = (e * torch.where(keep, x - top, 0.0)).sum(-1, keepdim=True)\n"
        + 'rows["entropy"] = safe.log() - u / safe\n',
        rows=("lse", "entropy"),
    ),
    "softmax and its largest score": Normaliser(
        "def __init__(self):\n"
        '    super().__init__({"m": float("-inf"), "r": 0.0}, {"lse": 0.0, "top": 0.0})\n' + SOFTMAX_FORWARD
        + EPILOGUE + '    m, r = rows["m"], rows["r"]\n    return o / r, {"lse": r.log() + m, "top": m}\n',
        SOFTMAX + 'rows["top"] = x.amax(-1, keepdim=True)\n', rows=("lse", "top"),
    ),
    "over the spread": Normaliser(
        "def __init__(self):\n"
        '    super().__init__({"low": float("inf"), "high": float("-inf")}, {"spread": 0.0})\n'
        + FORWARD + '    low = rows["low"].min(scores.get_reduce("min"))\n'
        '    return scores, {"low": low, "high": rows["high"].max(scores.get_reduce("max"))}, 1.0\n'
        + EPILOGUE + '    spread = rows["high"] - rows["low"]\n    return o / (spread + 1), {"spread": spread}\n',
        "high = x.masked_fill(~keep, -math.inf).amax(-1, keepdim=True)\n"
        "low = x.masked_fill(~keep, math.inf).amin(-1, keepdim=True)\n"
        "spread = torch.where(keep.any(-1, keepdim=True), high - low, 0.0)\nfactor = 1 / (spread + 1)\n"
        'w, rows = torch.where(keep, x, 0.0) / (spread + 1), {"spread": spread}\n',
        rows=("spread",),
    ),
    "tanh of softmax": Normaliser(
        EPILOGUE + '    r = rows["r"]\n    return torch.tanh(o / r), {"lse": r.log() + rows["m"]}\n',
        SOFTMAX, "L.OnlineSoftmax", ("lse",), bend="z.tanh()",
    ),
    "tanh of softmax beside lse": Normaliser(
        EPILOGUE + '    lse = rows["r"].log() + rows["m"]\n'
        '    return torch.tanh(o / rows["r"] + 0.1 * lse), {"lse": lse}\n',
        SOFTMAX, "L.OnlineSoftmax", ("lse",), bend='(z + 0.1 * torch.where(some, rows["lse"], 0.0)).tanh()',
    ),
    "softsign of scaled softmax": Normaliser(
        EPILOGUE_CUSTOM + '    z = o / rows["r"] * custom["gain"]\n'
        '    return z / (1 + z.abs()), {"lse": rows["r"].log() + rows["m"]}\n',
        SOFTMAX, "L.OnlineSoftmax", ("lse",), (Input("gain", '("heads",)', "randn(H) * 0.3 + 1"),),
        bend='torch.nn.functional.softsign(z * c["gain"].view(1, -1, 1, 1))',
    ),
    "sigmoid of squares over their sum": Normaliser(
        states(r=0.0) + FORWARD + '    f = scores.square()\n    return f, {"r": rows["r"] + f.get_reduce("sum")}, 1.0\n'
        + EPILOGUE + '    return 2.0 * (o / (rows["r"] + 0.1) * 0.7).sigmoid(), {"r": rows["r"]}\n',
        'f = torch.where(keep, x.square(), 0.0)\nr = f.sum(-1, keepdim=True)\nfactor = 1 / (r + 0.1)\n'
        'w, rows = f / (r + 0.1), {"r": r}\n',
        rows=("r",), bend="2.0 * (z * 0.7).sigmoid()",
    ),
    "silu of plain scores": Normaliser(
        FORWARD + "    return scores, {}, 1.0\n" + EPILOGUE + "    return o * o.sigmoid(), {}\n",
        "w, rows = torch.where(keep, x, 0.0), {}\n", bend="z * z.sigmoid()",
    ),
}  # fmt: skip
