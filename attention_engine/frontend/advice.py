"""What to write in place of what has no meaning in a mod."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attention_engine.errors import did_you_mean

ONE_PAIR = "A mod sees one pair at a time, as numbers without dimensions."
NO_ROW = f"{ONE_PAIR} Sums over a row are scores.get_reduce('sum'), in online_fwd."
RUNNING = f"{ONE_PAIR} A sum over earlier keys is made outside, where q . k isn't in it: sums[b, h, kv_idx]."
RANKED = f"{ONE_PAIR} A row's scores come tile by tile, and are never all there to be ranked."
SIZES = "A mod sees one pair at a time. Put lengths into it as Python numbers, or as a custom input."
ELSEWHERE = "A mod runs where q, k and v are: leave it out."
NO_NUMBER = "A symbol stands for a value of every pair: it has no number yet. Compute with the symbol itself."
CHANCE = "Draw numbers outside, and read the tensor in the mod: noise[b, h, q_idx, kv_idx]."
MADE = "A number will do: 0.0 for zeros, torch.zeros_like(x) too."
ADVICE = {
    "softmax": "A row's normaliser is the engine's online_func: OnlineSoftmax(), or one of your own.",
    "mean": "A mean over a row is scores.get_reduce('sum') over a row state that counts keys.",
    **dict.fromkeys(("shape", "size", "ndim", "numel", "dim"), SIZES),
    **dict.fromkeys(("item", "tolist", "numpy"), NO_NUMBER),
    **dict.fromkeys(("cuda", "cpu", "device", "contiguous", "clone", "requires_grad_"), ELSEWHERE),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp"), RUNNING),
    **{f"a{kind}": f"The {kind} over a row is scores.get_reduce('{kind}'), in online_fwd." for kind in ("max", "min")},
    **dict.fromkeys(("argmax", "argmin", "argsort", "sort", "topk", "median", "kthvalue"), RANKED),
    **dict.fromkeys(("logsumexp", "prod", "std", "var", "norm", "any", "all", "log_softmax"),
                    NO_ROW),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "expand", "transpose", "permute", "flatten", "cat",
                     "stack", "gather", "repeat", "T", "mT"), ONE_PAIR),
    **dict.fromkeys(("matmul", "mm", "bmm", "einsum", "dot", "linear"),
                    f"{ONE_PAIR} q . k is in the score already; multiply by *."),
    "embedding": "Read the table at an index: embedding.weight[q_idx, h].",
    **dict.fromkeys(("tril", "triu"), "A triangle is a mask: mask_mod=library.causal, or q_idx >= kv_idx."),
    **dict.fromkeys(("dropout", "rand_like", "randn_like", "bernoulli"), CHANCE),
    **dict.fromkeys(("isnan", "isinf", "isfinite", "nan_to_num"),
                    "Numbers in a mod are taken to be finite; a pair of the score -math.inf takes no part."),
    **dict.fromkeys(("new_tensor", "empty_like"), MADE),
}  # fmt: skip
OF_ROWS = {name for name, advice in ADVICE.items() if ONE_PAIR in advice or " row" in advice}
ONE_ENTRY = "A mod of a linear attention sees one entry of its tensor: do it with the whole tensor, before the call."
_sees_entries: ContextVar[bool] = ContextVar("sees_entries", default=False)
FORMULAS = {  # of functions that are a line of others
    "acos": "math.pi / 2 - torch.atan(x * torch.rsqrt(1 - x * x))",
    "asin": "torch.atan(x * torch.rsqrt(1 - x * x))",
    "celu": "torch.where(x > 0, x, alpha * torch.expm1(x.min(0) / alpha))",
    "copysign": "torch.where(b < 0, -a.abs(), a.abs())",
    "cosh": "(x.exp() + (-x).exp()) / 2",
    "erfc": "1 - x.erf()",
    "exp10": "(x * math.log(10)).exp()",
    "fmod": "a - (a / b).trunc() * b",
    "frac": "x - x.trunc()",
    "hardshrink": "torch.where(x.abs() > lambd, x, 0.0)",
    "hypot": "(a * a + b * b).sqrt()",
    "lerp": "a + weight * (b - a)",
    "log10": "x.log() / math.log(10)",
    "logaddexp": "a + F.softplus(b - a)",
    "logit": "(x / (1 - x)).log()",
    "prelu": "torch.where(x > 0, x, weight * x)",
    "rad2deg": "x * (180 / math.pi)",
    "selu": "1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * torch.expm1(x.min(0)))",
    "sinh": "(x.exp() - (-x).exp()) / 2",
    "softshrink": "x.sign() * (x.abs() - lambd).relu()",
    "tanhshrink": "x - x.tanh()",
    "threshold": "torch.where(x > threshold, x, value)",
    "xlogy": "torch.where(a == 0, 0.0, a * b.log())",
}
# What numpy calls a function of these names.
NUMPY = dict(less="lt", greater="gt", less_equal="le", greater_equal="ge", equal="eq", not_equal="ne", power="pow",
             rint="round", invert="bitwise_not", left_shift="bitwise_left_shift",
             right_shift="bitwise_right_shift")  # fmt: skip
USE_OURS = "Use its methods (x.exp(), x.max(y), x.floor()) or torch's functions, not math's or Python's."


@contextmanager
def of_entries() -> Iterator[None]:
    """Inside, mods of a linear attention are traced: there are no pairs and no rows."""
    token = _sees_entries.set(True)
    try:
        yield
    finally:
        _sees_entries.reset(token)


def no_row(of_pairs: str = NO_ROW) -> str:
    """What to write instead of what reads a row. of_pairs: where a mod sees pairs."""
    return ONE_ENTRY if _sees_entries.get() else of_pairs


def way_out(name: str, names: Collection[str]) -> str:
    """What to write instead of this function, where the functions with these names are known."""
    if name in ADVICE:
        return ONE_ENTRY if name in OF_ROWS and _sees_entries.get() else ADVICE[name]
    if name.endswith("_") and name[:-1] in names:
        return f"Nothing is changed in place: use x = x.{name[:-1]}(...)."
    if name in FORMULAS:
        return f"Write {FORMULAS[name]}."
    if meant := did_you_mean(name, [*names, "get_reduce"]):
        return meant.strip()
    one = "A mod sees one entry of its tensor." if _sees_entries.get() else ONE_PAIR
    return f"{one} Write it in functions that a mod knows: the page below lists them."


def instead_of(code: str, names: Collection[str]) -> str:
    """What to write in place of this code, which asks a symbol for its number."""
    called = re.match(r"((?:\w+\.)*)(\w+)\(", code)
    if called is None:
        return USE_OURS
    name = called[2]
    if name in ("array", "asarray", "tensor", "as_tensor"):
        return f"Leave {called[0][:-1]} out: compute with the symbol itself."
    if not called[1] and name in ("int", "float"):
        return f"Write x.to({name})."
    if name in names:
        return f"In place of {called[0][:-1]} write torch.{name}, or x.{name}()."
    return f"In place of {name} write {FORMULAS[name]}." if name in FORMULAS else USE_OURS


def said_of_count(expr: object) -> str:
    """What is said where Python counts to this symbolic value."""
    return (
        f"a symbolic value, {expr}, can't count: it has no number yet. Compare with it instead.\n"
        "  A loop over keys is the kernel's: say in mask_mod which keys count, in score_mod how much."
    )


def said_of_index(expr: object, code: str) -> str:
    """What is said where this code reads something else than a tensor at this symbolic value."""
    read = re.match(r"([\w.]+)\[", code)
    made = f"make {read[1]} one, torch.tensor({read[1]})," if read else "make one of it, torch.tensor([...]),"
    what = f"`{code}`" if code else "what is no tensor"
    return f"{what} is read at a symbolic index, {expr}. Only tensors can be: {made} outside of the mod."


def said_of_lookup(expr: object, code: str) -> str:
    """What is said where this code looks for this symbolic value in a dict or a set."""
    what = f"`{code}`" if code else "Python"
    return (
        f"{what} looks up a symbolic value, {expr}, in a dict or a set, and it has no number yet. "
        f"Compare it, {expr} == 0, or read a tensor at it, tensor[{expr}]."
    )
