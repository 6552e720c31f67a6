"""What mods may call, in kernels and the reference: values and gradients as torch's, at ties and far from 0 too.

A query of (1, 0, ...), keys of (point, 0, ...) and values that are the unit vectors make the output f(point), and the
gradient of a key's first number f'(point).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, meta_tensor, where
from attention_engine.frontend.symbols import Symbol
from attention_engine.ir.expr import Axis, Op, Type, topological, var
from attention_engine.ir.verify import OPERANDS

BACKENDS = ("reference", "interpret")
POINTS = [-1e4, -20.0, -6.0, -3.0, -1.0, -0.5, -0.125, 0.0, 0.125, 0.5, 1.0, 1.5, 3.0, 6.0, 20.0, 1e4]
N = len(POINTS)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": F.elu,
    "softsign": F.softsign,
    "leaky_relu": F.leaky_relu,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "expm1": lambda x: torch.expm1(torch.clamp(x, -1e4, 1.0)),
    "atan": torch.atan,
    "exp": lambda x: torch.exp(torch.clamp(x, -1e4, 2.0)),
    "exp2": lambda x: torch.exp2(torch.clamp(x, -1e4, 2.0)),
    "log": lambda x: torch.log(torch.abs(x) + 0.25),
    "log2": lambda x: torch.log2(torch.abs(x) + 0.25),
    "log1p": lambda x: torch.log1p(torch.abs(x)),
    "sqrt": lambda x: torch.sqrt(torch.abs(x) + 0.25),
    "rsqrt": lambda x: torch.rsqrt(torch.abs(x) + 0.25),
    "sin": lambda x: torch.sin(torch.clamp(x, -6.0, 6.0)),
    "cos": lambda x: torch.cos(torch.clamp(x, -6.0, 6.0)),
    "sign": lambda x: torch.sign(x) * x,
    "round": lambda x: torch.round(x) + x,
    "ceil": lambda x: torch.ceil(x) + x,
    "trunc": lambda x: torch.trunc(x) + x,
    "floor": lambda x: torch.floor(x) + x,
    "abs": torch.abs,
    "clamp": lambda x: torch.clamp(x, -1.0, 1.0),
    "clamp min": lambda x: torch.clamp(x, min=0.0),
    "clamp max": lambda x: x.clamp_max(3.0),
    "maximum": lambda x: torch.maximum(x, torch.tensor(0.0, dtype=x.dtype)) if isinstance(x, Tensor) else x.max(0),
    "minimum": lambda x: torch.minimum(x, torch.tensor(1.0, dtype=x.dtype)) if isinstance(x, Tensor) else x.min(1),
    "masked_fill": lambda x: torch.masked_fill(x * 2.0, x > 1.0, 3.0),
    "a power": lambda x: torch.relu(x) ** 0.5 * torch.sign(x),
}


def probe(score_mod: Callable[..., Any], points: Tensor, backend: str, *custom: Tensor, io: CustomIO | None = None):
    """f(points), and keys whose first numbers the points are."""
    n = len(points)
    q, v = torch.zeros(1, 1, 1, n, dtype=points.dtype), torch.eye(n, dtype=points.dtype).view(1, n, 1, n)
    q[..., 0] = 1.0
    k = torch.zeros(1, n, 1, n, dtype=points.dtype)
    k[0, :, 0, 0] = points
    k.requires_grad_()
    kind = torch.float32 if points.dtype is torch.float64 else points.dtype
    metas = (meta_tensor(1, 1, 1, n, dtype=kind), *(meta_tensor(1, 1, n, n, dtype=kind),) * 2)
    engine = AttentionEngine(metas, io, score_mod, None, OnlineFunc(), backend=backend)
    return engine(q, k, v, *custom).flatten(), k


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_and_its_gradient_are_as_torch_has_them(name, dtype, backend):
    function = FUNCTIONS[name]
    points = torch.tensor(POINTS, dtype=dtype)
    leaf = points.double().requires_grad_()
    expected = function(leaf)
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    found, k = probe(lambda s, c, b, h, i, j: function(s), points, backend)
    (dk,) = torch.autograd.grad(found.sum(), k)
    nearness = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-6 if dtype is torch.float32 else 1e-5}
    torch.testing.assert_close(found.double(), expected.detach(), **nearness)
    torch.testing.assert_close(dk[0, :, 0, 0].double(), slope, **nearness)


def test_every_operation_on_floats_is_tried_in_kernels():
    score = Symbol(var("x", (Axis.BATCH, Axis.HEAD, Axis.QUERY, Axis.KEY)))
    tried = {node.op for function in FUNCTIONS.values() for node in topological(function(score).expr)}
    on_floats = {op for op, operands in OPERANDS.items() if operands == (frozenset({Type.FLOAT}),)} - {Op.REDUCE}
    untried = sorted(op.value for op in on_floats - tried)
    assert not untried, f"nothing holds what kernels make of {untried} to torch: give FUNCTIONS a function of each"


SMOOTH = ["softplus", "logsigmoid", "silu", "gelu", "gelu tanh", "elu", "softsign", "mish", "atan"]


@pytest.mark.parametrize("name", SMOOTH)
def test_a_function_has_its_second_derivative(name):
    points = torch.tensor([*POINTS[1:-1], 30.0, -30.0], dtype=torch.float64)
    if name == "elu":
        points[points == 0] = 0.25  # where it has two
    leaf = points.clone().requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS[name](leaf).sum(), leaf, create_graph=True)
    (expected,) = torch.autograd.grad(slope.sum(), leaf)
    found, k = probe(lambda s, c, b, h, i, j: FUNCTIONS[name](s), points, "reference")
    (dk,) = torch.autograd.grad(found.sum(), k, create_graph=True)
    (again,) = torch.autograd.grad(dk[..., 0].sum(), k)
    torch.testing.assert_close(again[0, :, 0, 0], expected, rtol=1e-7, atol=1e-8)


def bits(i: Any, j: Any) -> dict[str, Any]:
    return {
        "&": (i + 5) & j, "|": (j - 4) | i, "^": (i - 3) ^ j, "~": ~(j - 4), "<<": (j - 5) << 2,
        ">>": (j * 7 - 50) >> 2,
        "mixed": ((1 << j) & 0xA5A5) >> (j % 5), "far": (j + 1) >> 31,
    }  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", bits(0, 1))
def test_the_bits_of_integers(name, backend):
    expected = bits(torch.zeros((), dtype=torch.int32), torch.arange(N, dtype=torch.int32))[name]
    found, _ = probe(lambda s, c, b, h, i, j: bits(i, j)[name].float(), torch.ones(N), backend)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int16], ids=str)
def test_a_mask_of_packed_bits(dtype, backend):
    """A custom input of which the constructor can't know yet that it holds integers."""
    torch.manual_seed(0)
    words = torch.randint(0, 127, (5, 4), dtype=dtype)
    q, k, v = (torch.randn(1, n, 1, 16) for n in (5, 28, 28))
    metas = (meta_tensor(1, 1, 5, 16, dtype=torch.float32), *(meta_tensor(1, 1, 28, 16, dtype=torch.float32),) * 2)
    engine = AttentionEngine(
        metas, CustomIO({"words": ("seq_len", 4)}),
        lambda s, c, b, h, i, j: s, lambda b, h, i, j, c: (c["words"][i, j // 7] >> (j % 7)) & 1 == 1, OnlineFunc(),
        backend=backend,
    )  # fmt: skip
    keep = torch.stack([(words.long()[:, j // 7] >> (j % 7)) & 1 for j in range(28)], 1).double()
    expected = (q[0, :, 0].double() @ k[0, :, 0].double().T * keep) @ v[0, :, 0].double()
    torch.testing.assert_close(engine(q, k, v, words)[0, :, 0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_learned_exponent_has_no_gradient_where_the_base_is_0(dtype, backend):
    """Of a distance, of relu() and of a learned base: torch's convention."""
    points = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, 4.0], dtype=dtype)
    forms: list[Callable[[Any, Any, Any, Any], Any]] = [
        lambda s, j, p, g: s * j**p,
        lambda s, j, p, g: s.relu() ** p,
        lambda s, j, p, g: s * g**j,
    ]
    for form in forms:
        leaves = [torch.tensor([n], dtype=torch.float32, requires_grad=True) for n in (0.5, 0.0)]
        wide = [points.double().requires_grad_(), *(t.detach().double().requires_grad_() for t in leaves)]
        exact = torch.autograd.grad(form(wide[0], torch.arange(8.0).double(), *wide[1:]).sum(), wide, allow_unused=True)
        io = CustomIO({"p": (1,), "g": (1,)})
        found, k = probe(lambda s, c, b, h, i, j, f=form: f(s, j, c["p"], c["g"]), points, backend, *leaves, io=io)
        ours = torch.autograd.grad(found.sum(), [k, *leaves], allow_unused=True)
        for got, want in zip((ours[0][0, :, 0, 0], *ours[1:]), exact, strict=True):
            if want is not None:
                torch.testing.assert_close(got.double(), want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


def test_a_learned_exponent_is_differentiated_twice():
    points = torch.tensor([-2.0, 0.0, 0.5, 1.0, 2.0, 3.0, 0.25, 4.0], dtype=torch.float64)
    p = torch.tensor([1.5], dtype=torch.float64, requires_grad=True)
    found, _ = probe(lambda s, c, b, h, i, j: s.relu() ** c["p"], points, "reference", p, io=CustomIO({"p": (1,)}))
    (dp,) = torch.autograd.grad(found.sum(), p, create_graph=True)
    base = points[points > 0]
    assert dp.item() == pytest.approx((base**1.5 * base.log()).sum().item())
    assert torch.autograd.grad(dp, p)[0].item() == pytest.approx((base**1.5 * base.log() ** 2).sum().item())


def test_a_choice_by_where_takes_the_functions_too():
    assert isinstance(where(Symbol.FUNCTIONS["sign"](1.0) > 0, 1.0, 2.0), Symbol)


BASES = [-3.0, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 2.0]
EXPONENTS = [-2.0, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_power_of_any_base_to_any_exponent_is_torchs(dtype, backend):
    pairs = [(a, p) for a in BASES for p in EXPONENTS if not (a == 0 and p < 0) and not (a < 0 and p == 0.5)]
    bases, exponents = (torch.tensor(x, dtype=dtype) for x in zip(*pairs, strict=True))
    io = CustomIO({"p": ("seq_len_kv",)})
    found, _ = probe(lambda s, c, b, h, i, j: s ** c["p"], bases, backend, exponents.float(), io=io)
    torch.testing.assert_close(found.double(), bases.double() ** exponents.double(), rtol=2e-3, atol=1e-6)


@pytest.mark.slow
def test_fast_math_takes_no_power_of_a_negative_number():
    """nvcc makes such a power of logarithms: NaN for every negative base, whatever the exponent."""
    pytest.importorskip("tilelang")
    from attention_engine import arch
    from attention_engine.codegen import compile as codegen_compile

    def text(score_mod: Callable[..., Any]) -> str:
        metas = (meta_tensor(1, 1, 64, 64, dtype=torch.float16),) * 3
        engine = AttentionEngine(metas, CustomIO({"p": ("heads",)}), score_mod, None, OnlineFunc(), device=arch.A100())
        kernel = engine._source_kernel("forward", "cuda")
        return codegen_compile.lower_kernel(kernel.prim_func, arch.A100(), pass_configs=kernel.configs).cuda

    of_any = text(lambda s, c, b, h, i, j: s ** c["p"])
    assert "powf(" in of_any and all(part.startswith("fabsf(") for part in of_any.split("powf(")[1:])
    of_none_below_0 = text(lambda s, c, b, h, i, j: s.exp() ** c["p"])
    assert "powf(" in of_none_below_0 and "fabsf(" not in of_none_below_0
