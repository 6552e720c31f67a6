"""What mods may say: every operator, method and torch function on symbols means what torch means on numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import setitem
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_engine.errors import BadInitialValue, BranchOnSymbol, UnsupportedOperation
from attention_engine.frontend.online_func import SymbolScalar, Var
from attention_engine.frontend.symbols import Symbol, SymbolicArray, SymbolicTensor, wrap
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Expr, Op, Type, const, make, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, SCORE, B, H, state_variable

S, M = wrap(SCORE), wrap(state_variable("m"))
I, J, HEAD = wrap(Q_IDX), wrap(KV_IDX), wrap(H)
NUMBERS = {
    SCORE: torch.tensor([-2.5, -1.0, 0.0, 0.3, 1.75, 4.0], dtype=torch.float64),
    state_variable("m"): torch.tensor(1.25, dtype=torch.float64),
    Q_IDX: torch.tensor(5), KV_IDX: torch.tensor([0, 1, 4, 5, 6, 7]), H: torch.tensor(3), B: torch.tensor(1),
}  # fmt: skip


def value(expr: Expr) -> Tensor:
    """The expression on NUMBERS."""
    values = {n: NUMBERS[n].tolist() for n in topological(expr) if n.op is Op.VAR}
    return torch.tensor(evaluate(expr, values, 6), dtype=torch.float64)


def on_torch(function: Callable[..., Any]) -> Tensor:
    """The function on NUMBERS themselves."""
    return function(*(NUMBERS[e] for e in (SCORE, state_variable("m"), Q_IDX, KV_IDX, H)))


def positive(x: Any) -> Any:
    return x * x + 0.5


OPERATORS: dict[str, Callable[..., Any]] = {
    "s + m": lambda s, m, i, j, h: s + m,
    "s + 2": lambda s, m, i, j, h: s + 2,
    "2 + s": lambda s, m, i, j, h: 2 + s,
    "s - m": lambda s, m, i, j, h: s - m,
    "2 - s": lambda s, m, i, j, h: 2 - s,
    "s * i": lambda s, m, i, j, h: s * i,
    "0.5 * s": lambda s, m, i, j, h: 0.5 * s,
    "s / m": lambda s, m, i, j, h: s / m,
    "i / 2": lambda s, m, i, j, h: i / 2,
    "i / j": lambda s, m, i, j, h: i / (j + 1),
    "1 / s": lambda s, m, i, j, h: 1 / positive(s),
    "i // 2": lambda s, m, i, j, h: i // 2,
    "-i // 2": lambda s, m, i, j, h: (-i - j) // 2,
    "17 // j": lambda s, m, i, j, h: 17 // (j + 1),
    "s // m": lambda s, m, i, j, h: s // m,
    "j % 3": lambda s, m, i, j, h: j % 3,
    "(j - i) % 3": lambda s, m, i, j, h: (j - i) % 3,
    "17 % j": lambda s, m, i, j, h: 17 % (j + 1),
    "s % m": lambda s, m, i, j, h: s % m,
    "s ** 2": lambda s, m, i, j, h: s**2,
    "s ** m": lambda s, m, i, j, h: positive(s) ** m,
    "2.0 ** s": lambda s, m, i, j, h: 2.0**s,
    "2.0 ** -h": lambda s, m, i, j, h: 2.0 ** (-5 - h),
    "i ** 3": lambda s, m, i, j, h: i**3,
    "s ** -1": lambda s, m, i, j, h: positive(s) ** -1,
    "s ** 0.5": lambda s, m, i, j, h: positive(s) ** 0.5,
    "-s": lambda s, m, i, j, h: -s,
    "+s": lambda s, m, i, j, h: +s,
    "-i": lambda s, m, i, j, h: -i,
    "abs(s)": lambda s, m, i, j, h: abs(s),
    "abs(i - j)": lambda s, m, i, j, h: abs(i - j),
    "s < m": lambda s, m, i, j, h: s < m,
    "s <= 0": lambda s, m, i, j, h: s <= 0,
    "s > m": lambda s, m, i, j, h: s > m,
    "0 >= s": lambda s, m, i, j, h: s <= 0,
    "i == j": lambda s, m, i, j, h: i == j,
    "i != j": lambda s, m, i, j, h: i != j,
    "5 == j": lambda s, m, i, j, h: j == 5,
    "i <= j + 0.5": lambda s, m, i, j, h: i <= j + 0.5,
    "& |": lambda s, m, i, j, h: (i > j) & (s < m) | (j == 7),
    "~": lambda s, m, i, j, h: ~(i >= j),
    "^ of conditions": lambda s, m, i, j, h: (i > j) ^ (s < m),
    "& of ints": lambda s, m, i, j, h: i & j,
    "| of ints": lambda s, m, i, j, h: (j - 4) | 2,
    "^ of ints": lambda s, m, i, j, h: 3 ^ (j - i),
    "~ of ints": lambda s, m, i, j, h: ~(j - 4),
    "<<": lambda s, m, i, j, h: (j - 3) << 2,
    ">>": lambda s, m, i, j, h: (j - 5) >> 1,
    "1 <<": lambda s, m, i, j, h: 1 << j,
    "a bit": lambda s, m, i, j, h: (0b1011 >> (j % 4)) & 1 == 1,
    "True &": lambda s, m, i, j, h: True & (i >= j),
    "condition * s": lambda s, m, i, j, h: (i >= j) * s,
    "a += b": lambda s, m, i, j, h: sum((s, m), 0.0),
    "a loop": lambda s, m, i, j, h: sum((s * 0.5**n for n in range(3)), 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator(name):
    function = OPERATORS[name]
    expected = on_torch(function)
    found = function(S, M, I, J, HEAD)
    assert isinstance(found, Symbol)
    precision = 1e-6 if expected.dtype is torch.float32 else 1e-12  # torch divides ints in fp32
    assert torch.allclose(value(found.expr), expected.double().expand(value(found.expr).shape), rtol=precision)
    kind = Type.BOOL if expected.dtype is torch.bool else Type.FLOAT if expected.is_floating_point() else Type.INT
    assert found.expr.dtype is kind


METHODS: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda s, m: s.exp(),
    "exp2": lambda s, m: s.exp2(),
    "log": lambda s, m: positive(s).log(),
    "log2": lambda s, m: positive(s).log2(),
    "log1p": lambda s, m: positive(s).log1p(),
    "sqrt": lambda s, m: positive(s).sqrt(),
    "rsqrt": lambda s, m: positive(s).rsqrt(),
    "tanh": lambda s, m: s.tanh(),
    "sigmoid": lambda s, m: s.sigmoid(),
    "relu": lambda s, m: s.relu(),
    "erf": lambda s, m: s.erf(),
    "sin": lambda s, m: s.sin(),
    "cos": lambda s, m: s.cos(),
    "abs": lambda s, m: s.abs(),
    "absolute": lambda s, m: s.absolute(),
    "floor": lambda s, m: s.floor(),
    "square": lambda s, m: s.square(),
    "expm1": lambda s, m: s.expm1(),
    "atan": lambda s, m: s.atan(),
    "arctan": lambda s, m: s.arctan(),
    "ceil": lambda s, m: s.ceil(),
    "ceil int": lambda s, m: (s * 3).int().ceil(),
    "trunc": lambda s, m: s.trunc(),
    "fix": lambda s, m: s.fix(),
    "round": lambda s, m: (s * 2).round(),
    "round decimals": lambda s, m: (s * 1.234).round(decimals=1),
    "round tens": lambda s, m: (s * 100).round(decimals=-2),
    "sign": lambda s, m: s.sign(),
    "sign int": lambda s, m: s.int().sign(),
    "masked_fill": lambda s, m: s.masked_fill(s < m, 7.0),
    "logical_xor": lambda s, m: (s > 0).logical_xor(s < m),
    "bitwise_and": lambda s, m: s.int().bitwise_and(3),
    "bitwise_or": lambda s, m: s.int().bitwise_or(3),
    "bitwise_xor": lambda s, m: s.int().bitwise_xor(3),
    "bitwise_not": lambda s, m: s.int().bitwise_not(),
    "bitwise_left_shift": lambda s, m: s.int().bitwise_left_shift(3),
    "bitwise_right_shift": lambda s, m: s.int().bitwise_right_shift(1),
    "reciprocal": lambda s, m: positive(s).reciprocal(),
    "neg": lambda s, m: s.neg(),
    "negative": lambda s, m: s.negative(),
    "clamp": lambda s, m: s.clamp(-1, 1),
    "clamp min": lambda s, m: s.clamp(min=0.5),
    "clamp max": lambda s, m: s.clamp(max=0.5),
    "clamp_min": lambda s, m: s.clamp_min(0.5),
    "clamp_max": lambda s, m: s.clamp_max(0.5),
    "clip": lambda s, m: s.clip(-1.0, 1.0),
    "maximum": lambda s, m: s.maximum(m),
    "minimum": lambda s, m: s.minimum(m),
    "where": lambda s, m: s.where(s > 0, m),
    "pow": lambda s, m: s.pow(2),
    "add": lambda s, m: s.add(1),
    "sub": lambda s, m: s.sub(m),
    "subtract": lambda s, m: s.subtract(m),
    "mul": lambda s, m: s.mul(m),
    "multiply": lambda s, m: s.multiply(m),
    "div": lambda s, m: s.div(m),
    "divide": lambda s, m: s.divide(m),
    "true_divide": lambda s, m: s.true_divide(m),
    "remainder": lambda s, m: s.remainder(m),
    "floor_divide": lambda s, m: s.floor_divide(m),
    "logical_and": lambda s, m: (s > 0).logical_and(s < m),
    "logical_or": lambda s, m: (s > 0).logical_or(s < m),
    "logical_not": lambda s, m: (s > 0).logical_not(),
    "eq": lambda s, m: s.eq(0),
    "ne": lambda s, m: s.ne(0),
    "lt": lambda s, m: s.lt(m),
    "gt": lambda s, m: s.gt(m),
    "le": lambda s, m: s.le(m),
    "ge": lambda s, m: s.ge(m),
    "to": lambda s, m: (s > 0).to(torch.float32),
    "to int": lambda s, m: s.to(torch.int32),
    "float": lambda s, m: (s > 0).float(),
    "int": lambda s, m: s.int(),
    "long": lambda s, m: s.long(),
    "bool": lambda s, m: s.bool(),
    "detach": lambda s, m: s.detach(),
    "zeros_like": lambda s, m: s + torch.zeros_like(s),
    "zeros_like dtype": lambda s, m: s + torch.zeros_like(s, dtype=torch.float32),
    "ones_like": lambda s, m: s + torch.ones_like(s.int()),
    "full_like": lambda s, m: s + torch.full_like(s, 2.5),
    "tan": lambda s, m: s.tan(),
    "new_zeros": lambda s, m: s + s.new_zeros(()),
    "new_ones": lambda s, m: s.new_ones((), dtype=torch.bool) & (s > m),
    "new_full": lambda s, m: s + s.new_full((1,), 2.5),
    "dtype": lambda s, m: (s > m).to(m.to(torch.float32).dtype),
    "max of two": lambda s, m: s.max(m) if isinstance(s, Symbol) else s.maximum(m),
    "min of two": lambda s, m: s.min(0.0) if isinstance(s, Symbol) else s.clamp(max=0.0),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method(name):
    found = METHODS[name](S, M)
    expected = METHODS[name](NUMBERS[SCORE], NUMBERS[state_variable("m")])
    assert torch.allclose(value(found.expr), expected.double(), rtol=1e-12)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "softplus": F.softplus,
    "softplus beta": lambda s: F.softplus(s, beta=2.0, threshold=1.5),
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "log_sigmoid": lambda s: F.logsigmoid(3 * s),
    "silu": F.silu,
    "nn.SiLU": torch.nn.SiLU(),
    "gelu": F.gelu,
    "gelu tanh": lambda s: F.gelu(s, approximate="tanh"),
    "elu": F.elu,
    "elu alpha": lambda s: F.elu(s, 0.5),
    "leaky_relu": F.leaky_relu,
    "leaky_relu slope": lambda s: F.leaky_relu(s, negative_slope=0.2),
    "relu6": lambda s: F.relu6(2 * s),
    "hardtanh": F.hardtanh,
    "hardtanh bounds": lambda s: F.hardtanh(s, -2.0, 0.5),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "expit": torch.special.expit,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation(name):
    found, expected = ACTIVATIONS[name](S), ACTIVATIONS[name](NUMBERS[SCORE])
    assert isinstance(found, Symbol)
    assert torch.allclose(value(found.expr), expected, rtol=3e-8)  # torch ends a softplus at 20


def test_a_number_is_made_of_a_symbol_alone():
    with pytest.raises(UnsupportedOperation, match=r"a tensor of shape \(3,\) is made of a symbolic value"):
        S.new_zeros(3)


def test_every_known_function_is_tried():
    tried = {name.split()[0] for name in METHODS} | ACTIVATIONS.keys()
    assert set(Symbol.FUNCTIONS) - tried == {"sum"}  # which says how a row is summed


TORCH = {
    "exp": lambda s, m: torch.exp(s),
    "where": lambda s, m: torch.where(s > 0, s, m),
    "where number": lambda s, m: torch.where(s > 0, s, 0.0),
    "number where": lambda s, m: torch.where(s > 0, 1.0, s),
    "maximum": lambda s, m: torch.maximum(s, m),
    "minimum": lambda s, m: torch.minimum(s, m),
    "max": lambda s, m: torch.max(s, m),
    "min": lambda s, m: torch.min(s, m),
    "clamp": lambda s, m: torch.clamp(s, min=0),
    "relu": lambda s, m: torch.relu(s),
    "F.relu": lambda s, m: torch.nn.functional.relu(s),
    "sigmoid": lambda s, m: torch.sigmoid(s),
    "tanh": lambda s, m: torch.tanh(s),
    "pow": lambda s, m: torch.pow(2.0, s),
    "sub": lambda s, m: torch.sub(s, m),
    "logical_and": lambda s, m: torch.logical_and(s > 0, s < m),
    "abs": lambda s, m: torch.abs(s),
    "remainder": lambda s, m: torch.remainder(s, m),
    "gt": lambda s, m: torch.gt(s, m),
    "tensor + s": lambda s, m: torch.tensor(2.0) + s,
    "tensor - s": lambda s, m: torch.tensor(2.0) - s,
    "tensor * s": lambda s, m: torch.tensor(2.0) * s,
    "tensor / s": lambda s, m: torch.tensor(2.0) / positive(s),
    "tensor ** s": lambda s, m: torch.tensor(2.0) ** s,
    "tensor < s": lambda s, m: torch.tensor(0.5) < s,
    "s * tensor": lambda s, m: s * torch.tensor(2.0),
    "maximum tensor": lambda s, m: torch.maximum(s, torch.tensor(0.25)),
    "numpy * s": lambda s, m: np.float32(2) * s,
    "s - numpy": lambda s, m: s - np.float64(0.5),
    "numpy.exp": lambda s, m: np.exp(s) if isinstance(s, Symbol) else torch.exp(s),
    "sign": lambda s, m: torch.sign(s),
    "round": lambda s, m: torch.round(s),
    "bitwise_and": lambda s, m: torch.bitwise_and(s.int(), 3),
    "bitwise_not": lambda s, m: torch.bitwise_not(s.int()),
    "bitwise_left_shift": lambda s, m: torch.bitwise_left_shift(s.int(), 2),
    "masked_fill": lambda s, m: torch.masked_fill(s, s < m, 1.5),
    "special.expm1": lambda s, m: torch.special.expm1(s),
    "numpy.rint": lambda s, m: np.rint(s) if isinstance(s, Symbol) else torch.round(s),
    "numpy ** s": lambda s, m: np.float64(2) ** s,
}


@pytest.mark.parametrize("name", TORCH)
def test_a_torch_function(name):
    found = TORCH[name](S, M)
    expected = TORCH[name](NUMBERS[SCORE], NUMBERS[state_variable("m")])
    assert isinstance(found, Symbol)
    assert torch.allclose(value(found.expr), torch.as_tensor(expected).double(), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"), [("sum", 2.55), ("max", 4.0), ("min", -2.5), ("abssum", 9.55), ("absmax", 4.0)]
)
def test_a_row_reduction(kind, expected):
    found = S.get_reduce(kind)
    assert isinstance(found, SymbolicArray)
    assert evaluate(found.expr, {SCORE: NUMBERS[SCORE].tolist()}, 6) == pytest.approx(expected)


def test_a_condition_is_counted():
    assert evaluate((S > 0).get_reduce("sum").expr, {SCORE: NUMBERS[SCORE].tolist()}, 6) == 3.0


def test_what_depends_on_the_key_can_be_reduced_and_nothing_else():
    assert isinstance(J * 2, SymbolicTensor)
    assert isinstance(I * 2, SymbolicArray)
    assert isinstance(J + I, SymbolicTensor)


def test_a_symbol_shows_its_formula():
    assert repr(S * 2 - M) == f"{S * 2 - M:.3f}" == "score * 2 - state.m"


def test_private_names_are_no_functions():
    """Debuggers and copies look for them."""
    assert not hasattr(S, "__deepcopy__") and not hasattr(S, "_ipython_display_")


BRANCH = (
    "Write where(condition, a, b), and & | ~ between conditions.\n"
    "  So for `if`, and for `and`, `or`, `not` (with brackets around comparisons). a < x < b becomes "
    "(a < x) & (x < b),\n  max(a, b) becomes a.max(b)."
)
ONE_PAIR = "A mod sees one pair at a time, as numbers without dimensions."
NO_ROW = f"{ONE_PAIR} Sums over a row are scores.get_reduce('sum'), in online_fwd."


def line_of(function: Callable[..., Any]) -> str:
    """The file and line of a lambda, as messages begin."""
    return f"{__file__.rsplit('/', 1)[-1]}:{function.__code__.co_firstlineno}: "


def fails(error: type[Exception], function: Callable[[], Any], message: str) -> None:
    with pytest.raises(error) as caught:
        function()
    assert str(caught.value) == line_of(function) + message


BRANCHES = {
    "if": (lambda: 1 if I > 4 else 0, "4 < q_idx"),
    "and": (lambda: (I > 4) and (J < 3), "4 < q_idx"),
    "or": (lambda: (S < 0) or (J < 3), "score < 0"),
    "not": (lambda: not (I > 4), "4 < q_idx"),
    "chained": (lambda: 0 < I < 4, "0 < q_idx"),
    "max": (lambda: max(S, 0), "score < 0"),
    "bool": (lambda: bool(I >= J), "kv_idx <= q_idx"),
    "any": (lambda: any([I > J]), "kv_idx < q_idx"),
    "in": (lambda: S in [1, 2], "score == 1"),
    "sorted": (lambda: sorted([I, J]), "kv_idx < q_idx"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_on_a_symbol_is_refused_at_the_users_line(name):
    function, condition = BRANCHES[name]
    fails(BranchOnSymbol, function, f"Python asked for the truth of a symbolic value, {condition}. {BRANCH}")
    assert issubclass(BranchOnSymbol, TypeError)


NO_NUMBER = "a symbolic value, score, has no number yet. "
USE_OURS = "Use its methods (x.exp(), x.max(y), x.floor()) or torch's functions, not math's or Python's."
IN_PLACE_OF = "In place of {} write torch.{}, or x.{}()."


JOINED = (
    "&, |, ^ and ~ join conditions with conditions, or integers with integers, and {}.\n"
    "  Put brackets around comparisons: (a < b) & (c < d)."
)
SLOPES = [0.5, 0.25]
REFUSED = {
    "math.exp": (lambda: math.exp(S), NO_NUMBER + IN_PLACE_OF.format("math.exp", "exp", "exp")),
    "math.floor": (lambda: math.floor(S), NO_NUMBER + IN_PLACE_OF.format("math.floor", "floor", "floor")),
    "float()": (lambda: float(S), NO_NUMBER + "Write x.to(float)."),
    "int()": (lambda: int(S), NO_NUMBER + "Write x.to(int)."),
    "round": (lambda: round(S), NO_NUMBER + IN_PLACE_OF.format("round", "round", "round")),
    "len": (lambda: len(S), NO_NUMBER + USE_OURS),
    "iterate": (lambda: list(S), NO_NUMBER + USE_OURS),
    "math.log10": (lambda: math.log10(S), NO_NUMBER + "In place of log10 write x.log() / math.log(10)."),
    "index": (lambda: [1, 2][S], "`[1, 2][S]` is read at a symbolic index, score. Only tensors can be: make one of "
              "it, torch.tensor([...]), outside of the mod."),
    "a name's index": (lambda: SLOPES[S], "`SLOPES[S]` is read at a symbolic index, score. Only tensors can be: make "
                       "SLOPES one, torch.tensor(SLOPES), outside of the mod."),
    "a member": (lambda: S in {0, 1}, "`S in {0, 1}` looks up a symbolic value, score, in a dict or a set, and it has "
                 "no number yet. Compare it, score == 0, or read a tensor at it, tensor[score]."),
    "a numpy array of it": (lambda: np.asarray(S), "a symbolic value, score, has no number yet. Leave np.asarray out: "
                            "compute with the symbol itself."),
    "count": (lambda: list(range(S)), "a symbolic value, score, can't count: it has no number yet. Compare with it "
              "instead.\n  A loop over keys is the kernel's: say in mask_mod which keys count, in score_mod how much."),
    "a tensor's index": (
        lambda: torch.ones(3)[S],
        "`torch.ones(3)[S]`, a tensor, is read at a symbolic index, score, outside of an engine's functions.\n"
        "  Read it in score_mod, mask_mod or a method of OnlineFunc.",
    ),
    "numpy function": (lambda: np.sinh(S), "numpy.sinh has no meaning in a mod. Write (x.exp() - (-x).exp()) / 2."),
    "numpy reduction": (lambda: np.add.reduce(S), f"numpy.add.reduce has no meaning in a mod. {NO_ROW}"),
    "array": (lambda: S * np.ones(3), "a ndarray can't be mixed with symbolic values.\n  Use Python numbers, "
              "tensors, or custom inputs: CustomIO({'name': axes}) and custom['name']."),
    "in place": (lambda: S.mul_(2), "symbolic values have no `mul_`. "
                 "Nothing is changed in place: use x = x.mul(...)."),
    "mean": (lambda: S.mean(), "symbolic values have no `mean`. "
             "A mean over a row is scores.get_reduce('sum') over a row state that counts keys."),
    "assignment": (lambda: setitem(S, 0, 1.0), "x[...] = y has no meaning on a symbolic value, "
                   "score. Nothing is changed in place: x = where(condition, y, x)."),
    "^ of floats": (lambda: S ^ S, JOINED.format("score is a float")),
    "<< of a float": (lambda: S << 1, "<< and >> shift an integer by an integer, and score is none."),
    "<< by a float": (lambda: I >> S, "<< and >> shift an integer by an integer, and score is none."),
    "<< back": (lambda: I << -1, "a shift by -1 bits, of 0 to 63."),
    "<< far": (lambda: I >> 64, "a shift by 64 bits, of 0 to 63."),
    "gelu's kind": (lambda: F.gelu(S, approximate="fast"),
                    "gelu's approximate is 'fast'. Choose 'none' or 'tanh'."),
    "@": (lambda: S @ S, "@ has no meaning on a symbolic value, score. It is one number: multiply by *."),
    "divmod": (lambda: divmod(S, 2), "divmod has no meaning on a symbolic value, score. Write a // b and a % b."),
    "s[0]": (lambda: S[0], "[0] has no meaning on a symbolic value, score. It is one number."),
    "s['bias']": (
        lambda: S["bias"],
        "['bias'] has no meaning on a symbolic value, score. It is one number; the argument custom is another: "
        "score_mod(score, custom, ...), mask_mod(b, h, q_idx, kv_idx, custom).",
    ),
    "1 in s": (lambda: 1 in S, "`in` has no meaning on a symbolic value, score. It is one number: compare with ==."),
    "method": (lambda: S.softmax(-1), "symbolic values have no `softmax`. "
               "A row's normaliser is the engine's online_func: OnlineSoftmax(), or one of your own."),
    "attribute": (lambda: S.shape, "symbolic values have no `shape`. "
                  "A mod sees one pair at a time. Put lengths into it as Python numbers, or as a custom input."),
    "torch function": (lambda: torch.logsumexp(S, -1), f"torch.logsumexp has no meaning in a mod. {NO_ROW}"),
    "a running sum": (
        lambda: S.cumsum(-1),
        f"symbolic values have no `cumsum`. {ONE_PAIR} A sum over earlier keys is made outside, where q . k isn't in "
        "it: sums[b, h, kv_idx].",
    ),
    "an order": (
        lambda: torch.topk(S, 2),
        f"torch.topk has no meaning in a mod. {ONE_PAIR} A row's scores come tile by tile, and are never all there to "
        "be ranked.",
    ),
    "a name nearly right": (lambda: S.sigmod(), "symbolic values have no `sigmod`. Did you mean "
                            "'sigmoid', 'logsigmoid' or 'log_sigmoid'?"),
    "a name like none": (lambda: torch.fft.fft(S), f"torch.fft_fft has no meaning in a mod. {ONE_PAIR} Write it "
                         "in functions that a mod knows: the page below lists them."),
    "torch's own Python": (
        lambda: torch.nn.functional.tanhshrink(S),
        "torch.tanhshrink has no meaning in a mod. Write x - x.tanh().",
    ),
    "arguments": (lambda: S.exp(2), "exp on a symbolic value: too many positional arguments."),
    "keyword": (lambda: S.clamp(low=1), "clamp on a symbolic value: got an unexpected keyword argument 'low'."),
    "s.max()": (lambda: S.max(), "max takes two values: a.max(b). For the max over a row, scores.get_reduce('max')."),
    "s.min()": (lambda: S.min(), "min takes two values: a.min(b). For the min over a row, scores.get_reduce('min')."),
    "s.sum()": (lambda: S.sum(), "`sum` over a row is scores.get_reduce('sum'); a sum of two values is a + b."),
    "& of a float": (lambda: S & (I > J), JOINED.format("score is a float")),
    "& of both": (lambda: (I > J) & I, JOINED.format("q_idx is an integer")),
    "logical_and of ints": (lambda: I.logical_and(J), JOINED.format("q_idx is an integer")),
    "~ of a float": (lambda: ~S, JOINED.format("score is a float")),
    "tensor": (lambda: S * torch.ones(3), "a Tensor can't be mixed with symbolic values.\n  Use Python numbers, "
               "tensors, or custom inputs: CustomIO({'name': axes}) and custom['name']."),
    "text": (lambda: S + "a", "a str can't be mixed with symbolic values.\n  Use Python numbers, tensors, or "
             "custom inputs: CustomIO({'name': axes}) and custom['name']."),
    "reduction": (lambda: S.get_reduce("mean"),
                  'get_reduce("mean") is unknown. Choose "sum", "max", "min", "abssum" or "absmax".'),
    "reduced row": (lambda: M.get_reduce("sum"), 'get_reduce("sum") on state.m, which is the same for every key.\n'
                    "  Reduce the scores, or what you computed from them."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused_at_the_users_line(name):
    function, message = REFUSED[name]
    fails(UnsupportedOperation, function, message)


@pytest.mark.parametrize("value", ["text", None, "nan", float("nan"), [1]])
def test_a_first_value_that_is_no_number_is_refused(value):
    def declare():
        return Var(value)

    with pytest.raises(BadInitialValue) as error:
        declare()
    line = declare.__code__.co_firstlineno + 1
    shown = f"test_symbols.py:{line}: Var({value!r}) is no number. Write Var('-inf'), Var('0.0') or Var(1.0)."
    assert str(error.value) == shown


def test_declarations_show_what_was_written():
    assert SymbolScalar("m", Var("-inf")).value.value == -math.inf
    assert SymbolScalar("m", 2).value.value == 2.0
    assert repr(SymbolScalar("m", Var("0.5"))) == 'SymbolScalar("m", Var("0.5"))'


def test_numbers_keep_their_type():
    assert (I + 1).expr.dtype is Type.INT
    assert (I + 1.0).expr.dtype is Type.FLOAT
    assert (S + 1).expr is make(Op.ADD, SCORE, const(1.0))
