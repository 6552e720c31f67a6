"""Integers are torch's int64 on both backends: wide ids, lengths, windows, products, hashes, shifts and indices.

Each function is called twice: by the engine, on symbols, and here, on torch's int64 tensors.
"""

import sys

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, document

BATCH, HEADS, LENGTH, DIM = 2, 2, 70, 16
BACKENDS = ("reference", "interpret")
PLACES = torch.arange(LENGTH)
HIGH, MOST, LEAST = 2**32, sys.maxsize, -(2**63)
INT32 = torch.iinfo(torch.int32)
SPREAD = torch.tensor([3, -5, HIGH + 1, -HIGH - 9, MOST, LEAST, 2**31, -(2**31) - 1, 17, 0])


def each(*rows):
    """An int64 input (batch, length)."""
    return torch.stack([torch.as_tensor(r)[PLACES % len(r)] for r in rows])


OF_TOKENS, OF_BATCH = ("batch", "seq_len"), ("batch",)
MASKS = {
    "ids with equal low words": (
        lambda b, h, q, k, c: c["x"][b, q] == c["x"][b, k],
        OF_TOKENS, torch.stack([PLACES // 30 + HIGH * (PLACES // 15), PLACES % 3 - HIGH * (PLACES % 2)])),
    "other ids with equal low words": (
        lambda b, h, q, k, c: c["x"][b, q] != c["x"][b, k], OF_TOKENS, each([7, 7 + HIGH], [-1, HIGH - 1, MOST])),
    "an order of ids": (
        lambda b, h, q, k, c: c["x"][b, q] >= c["x"][b, k], OF_TOKENS, each(SPREAD, SPREAD.flip(0))),
    "ids of a bound": (lambda b, h, q, k, c: c["x"][b, k] < 2**40, OF_TOKENS, each(SPREAD, [0, 2**40, 2**40 - 1])),
    "ids beside a number": (lambda b, h, q, k, c: c["x"][b, q] == 3, OF_TOKENS, each([3, 3 + HIGH], [3 - HIGH, 4])),
    "lengths": (lambda b, h, q, k, c: k < c["x"][b], OF_BATCH, torch.tensor([2**31, HIGH + 5])),
    "negative lengths": (lambda b, h, q, k, c: k < c["x"][b], OF_BATCH, torch.tensor([5 - HIGH, 31])),
    "lengths that have no shorter form": (lambda b, h, q, k, c: k < c["x"][b, k], OF_TOKENS, each(SPREAD, [HIGH, 5])),
    "a window that wraps": (lambda b, h, q, k, c: k <= q + c["x"][b], OF_BATCH, torch.tensor([MOST - 20, LEAST])),
    "a window of maxsize": (lambda b, h, q, k: k <= q + sys.maxsize, None, None),
    "a window of 63 bits": (lambda b, h, q, k: q * 2**40 + 2**44 >= k * 2**40, None, None),
    "a window of the least": (lambda b, h, q, k: q + LEAST <= k - 3, None, None),
    "a window of int32": (lambda b, h, q, k, c: k <= q + c["x"][b], OF_BATCH, torch.tensor([INT32.max, -9]).int()),
    "the least of int32": (lambda b, h, q, k, c: c["x"][b] - q < k, OF_BATCH, torch.tensor([INT32.min, 40]).int()),
    "products of int32": (
        lambda b, h, q, k, c: c["x"][b, q] * c["x"][b, k] % 7 < 3,
        OF_TOKENS, each([INT32.max, INT32.min, 65536, 3], [46341, -46341, 2]).int()),
    "squares of indices": (lambda b, h, q, k: (q * q * q * q * q * q * q * q * q * q * q * q + k) % 5 < 2, None, None),
    "large steps": (lambda b, h, q, k: (q * 2**30 + k) % 3 != 0, None, None),
    "negative remainders": (
        lambda b, h, q, k, c: (c["x"][b, k] % -7 + c["x"][b, q] % 5 + q) % 3 == 0,
        OF_TOKENS, each(SPREAD, SPREAD + 4)),
    "quotients": (
        lambda b, h, q, k, c: c["x"][b, k] // 3 <= c["x"][b, q] // -5, OF_TOKENS, each(SPREAD, SPREAD.flip(0))),
    "multiples of what wraps": (lambda b, h, q, k, c: c["x"][b, k] * 21 % 7 == q % 2, OF_TOKENS,
                                each(SPREAD, SPREAD * 3)),
    "quotients of what wraps": (lambda b, h, q, k, c: c["x"][b, k] * 12 // 4 == c["x"][b, k] * 3, OF_TOKENS,
                                each(SPREAD, [MOST // 3, 5])),
    "sums that wrap": (
        lambda b, h, q, k, c: c["x"][b, k] + 100 > c["x"][b, k] - q, OF_TOKENS, each(SPREAD, [MOST, LEAST + 5])),
    "a hash": (
        lambda b, h, q, k: ((q * 6364136223846793005 + k * 1442695040888963407) ^ ((h + 1) * 1234567891011)) % 5 < 2,
        None, None),
    "a hash with a seed": (
        lambda b, h, q, k, c: ((c["x"][b] + q * 7046029254386353131) * 3202034522624059733 ^ (k * k)) % 100 < 40,
        OF_BATCH, torch.tensor([1234567890123456789, -5])),
    "xorshift": (lambda b, h, q, k, c: xorshift(c["x"][b, q] + k) & 1 == 0, OF_TOKENS, each(SPREAD, SPREAD + 1)),
    "a bit a key": (
        lambda b, h, q, k, c: (c["x"][b, q] >> (k % 64)) & 1 == 1, OF_TOKENS, each(SPREAD, [0x5555555555555555, 1])),
    "shifts beyond the bits": (
        lambda b, h, q, k, c: (c["x"][b, k] << (k - 3)) + (c["x"][b, q] >> (k + 20)) < 0, OF_TOKENS,
        each(SPREAD, SPREAD + 2)),
    "bits": (
        lambda b, h, q, k, c: (c["x"][b, q] & -256 | 1) ^ c["x"][b, k] > 5, OF_TOKENS, each(SPREAD, SPREAD - 3)),
    "absolute values": (lambda b, h, q, k, c: (c["x"][b, k] * 3).abs() >= q * HIGH, OF_TOKENS, each(SPREAD, [5])),
    "extremes": (
        lambda b, h, q, k, c: c["x"][b, q].minimum(c["x"][b, k]).maximum(c["x"][b, k] - 2**35) < 2**33 + k,
        OF_TOKENS, each(SPREAD, [HIGH, 2**34])),
    "a choice": (
        lambda b, h, q, k, c: torch.where(k > q, c["x"][b, q], c["x"][b, k] + HIGH) > 7, OF_TOKENS, each(SPREAD, [3])),
    "a read at a wide index": (
        lambda b, h, q, k, c: c["x"][b, c["x"][b, q] + k] == 3, OF_TOKENS, each([3, HIGH, MOST, LEAST], [-HIGH, 5, 3])),
    "a read at the same wide index": (
        lambda b, h, q, k, c: (c["x"][b, c["x"][b, 0]] == 0) & (k <= q), OF_TOKENS, each([HIGH + 1, 5], [1, 5])),
    "many rows of tiles, few ids": (
        lambda b, h, q, k, c: (c["x"][b, q // 32] - c["x"][b, k // 32] == HIGH) | (k // 16 == q // 16), OF_TOKENS,
        torch.stack([PLACES * HIGH, -PLACES * HIGH])),
}  # fmt: skip


def xorshift(x):
    x = x ^ (x << 13)
    x = x ^ (x >> 7)
    return x ^ (x << 17)


class Entries:
    """A tensor as the engine reads it: 0 at an index out of range."""

    def __init__(self, tensor):
        self.tensor = tensor if tensor.is_floating_point() else tensor.long()

    def __getitem__(self, indices):
        indices = torch.broadcast_tensors(*map(torch.as_tensor, indices if isinstance(indices, tuple) else (indices,)))
        inside = [(i >= 0) & (i < n) for i, n in zip(indices, self.tensor.shape)]
        found = self.tensor[tuple(i.clamp(0, n - 1) for i, n in zip(indices, self.tensor.shape))]
        return torch.where(torch.stack(inside).all(0), found, torch.zeros_like(found))


def places():
    sizes = (BATCH, HEADS, LENGTH, LENGTH)
    return [torch.arange(n).view([-1 if axis == at else 1 for axis in range(4)]) for at, n in enumerate(sizes)]


def plain(q, k, v, score, mask):
    """The output (batch, length, heads, dim) of these float64 tensors."""
    products = torch.einsum("bqhd,bkhd->bhqk", q, k)
    keep = mask(*places()).expand(products.shape)
    scores = score(products, *places()).masked_fill(~keep, -torch.inf)
    weights = torch.where(keep.any(-1, keepdim=True), scores, 0.0).softmax(-1) * keep
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def inputs():
    torch.manual_seed(0)
    return [torch.randn(BATCH, LENGTH, HEADS, DIM).requires_grad_() for _ in range(3)]


def gradients(o, tensors):
    weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
    return [o.detach(), *torch.autograd.grad((o.double() * weights).sum(), tensors)]


def compare(backend, score, mask, axes, tensor, **options):
    """Output and gradients of an engine beside plain torch in float64 and int64."""
    tensors = inputs()
    custom = [] if tensor is None else [tensor]
    table = [t for t in custom if t.requires_grad]
    exact = [t.detach().double().requires_grad_() for t in (*tensors, *table)]
    read = {"x": Entries(exact[-1] if table else tensor)} if custom else {}
    reads = options.pop("mask_reads", True)
    ask = (lambda *at: mask(*at, read)) if read and reads else mask
    expected = gradients(plain(*exact[:3], lambda s, *at: score(s, read, *at), ask), exact)
    metas = (meta_tensor(None, HEADS, None, DIM, dtype=torch.float32),) * 3
    io = CustomIO({} if axes is None else {"x": axes})
    engine = AttentionEngine(metas, io, score, mask, OnlineSoftmax(), backend=backend, **options)
    found = gradients(engine(*tensors, *custom), [*tensors, *table])
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-5)


def scaled(score, custom, b, h, q, k):
    return score * 0.25


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_torch_arithmetic_in_int64(name, backend):
    mask, axes, tensor = MASKS[name]
    compare(backend, scaled, mask, axes, tensor)


def near_causal(b, h, q, k):
    return k <= q + 3


SCORES = {
    "differences of times": (
        lambda s, c, b, h, q, k: s * 0.25 - (c["x"][b, q] - c["x"][b, k]).abs().float() * 1e-3,
        OF_TOKENS, torch.stack([2**45 + 37 * PLACES, -(2**52) + 1000 * PLACES])),
    "large numbers as floats": (
        lambda s, c, b, h, q, k: s * 0.25 + c["x"][b, k].float() * 2.0**-63, OF_TOKENS, each(SPREAD, SPREAD.flip(0))),
    "noise of a hash": (
        lambda s, c, b, h, q, k: s * 0.25 + ((q * 6364136223846793005 ^ k * 3202034522624059733) & 1023).float() / 1e3,
        None, None),
    "a truth of 64 bits": (
        lambda s, c, b, h, q, k: torch.where(c["x"][b, k] > 2**33, s * 0.25, s * 0.5), OF_TOKENS, each(SPREAD, [3])),
    "a table of a remainder": (
        lambda s, c, b, h, q, k: s * 0.25 + c["x"][h, (q * 6364136223846793005 + k) % 5], ("heads", 5),
        torch.linspace(-1, 1, 10).view(2, 5).requires_grad_()),
    "a table at an index that wraps into range in 32 bits": (
        lambda s, c, b, h, q, k: s * 0.25 + c["x"][h, q + 2**32 * (k % 3)], ("heads", 40),
        torch.linspace(-1, 1, 80).view(2, 40).requires_grad_()),
    "a table of large distances": (
        lambda s, c, b, h, q, k: s * 0.25 + c["x"][h, ((q - k) * 2**40 // 2**41 + 20).clamp(0, 39)], ("heads", 40),
        torch.linspace(-1, 1, 80).view(2, 40).requires_grad_()),
    "a table of buckets, from floats": (
        lambda s, c, b, h, q, k: s * 0.25 + c["x"][h, ((q - k).abs() + 1).float().log().mul(7.3).to(torch.int64)],
        ("heads", 40), torch.linspace(-1, 1, 80).view(2, 40).requires_grad_()),
    "a float of more than 32 bits": (
        lambda s, c, b, h, q, k: s * 0.25 + ((q - k).float() * 1e9).to(torch.int64).float() * 1e-10, None, None),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_torch_arithmetic_in_int64(name, backend, deterministic):
    score, axes, tensor = SCORES[name]
    if deterministic and (backend == "reference" or tensor is None or not tensor.requires_grad):
        pytest.skip("nothing that an order of sums could change")
    compare(backend, score, near_causal, axes, tensor, mask_reads=False, deterministic=deterministic)


@pytest.mark.parametrize("offsets", [[20, 3], [HIGH + 20, MOST], [LEAST, -HIGH]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_of_shifted_distances_has_its_gradient(backend, offsets):
    offsets, (q, k, v) = torch.tensor(offsets), inputs()
    table = torch.linspace(-1, 1, 80).view(HEADS, 40).requires_grad_()
    metas = (meta_tensor(None, HEADS, None, DIM, dtype=torch.float32),) * 3
    engine = AttentionEngine(metas, CustomIO({"table": ("heads", 40), "offsets": ("batch",)}),
                             lambda s, c, b, h, i, j: s * 0.25 + c["table"][h, i - j + c["offsets"][b]],
                             near_causal, OnlineSoftmax(), backend=backend)  # fmt: skip
    o = engine(q, k, v, table, offsets)
    wide = table.detach().double().requires_grad_()
    exact = plain(*(t.double() for t in (q, k, v)),
                  lambda s, b, h, i, j: s * 0.25 + Entries(wide)[h, i - j + offsets[b]], near_causal)  # fmt: skip
    torch.testing.assert_close(o.double(), exact, atol=2e-5, rtol=2e-5)
    found, expected = (torch.autograd.grad(x.sin().sum(), t)[0].double() for x, t in ((o, table), (exact, wide)))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_captured_tensors_of_64_bits(backend):
    ids, shift = each([7, 7 + HIGH], [LEAST, 0]), torch.tensor(2**40)
    tensors = inputs()
    expected = plain(*(t.double() for t in tensors), lambda s, *at: s * 0.25,
                     lambda b, h, q, k: (ids[b, q] + shift == ids[b, k] + 2**40) & (q + shift > k))  # fmt: skip
    metas = (meta_tensor(None, HEADS, None, DIM, dtype=torch.float32),) * 3
    mask = lambda b, h, q, k: (ids[b, q] + shift == ids[b, k] + 2**40) & (q + shift > k)  # noqa: E731
    engine = AttentionEngine(metas, None, scaled, mask, OnlineSoftmax(), backend=backend)
    torch.testing.assert_close(engine(*tensors).double(), expected, atol=2e-5, rtol=2e-5)


LOWERED = {
    "document ids": ("forward", "H100", document("x"), OF_TOKENS),
    "a hash with a seed": ("forward", "A100", *MASKS["a hash with a seed"][:2]),
    "absolute values": ("tile map of forward", "A100", *MASKS["absolute values"][:2]),
    "shifts beyond the bits": ("tile map of forward", "H100", *MASKS["shifts beyond the bits"][:2]),
    "a read at a wide index": ("tile map of forward", "A100", *MASKS["a read at a wide index"][:2]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LOWERED)
def test_kernels_of_wide_integers_lower(name):
    """Sums and products that may wrap are unsigned, so that compilers can't take them for ones that don't."""
    pytest.importorskip("tilelang")
    from attention_engine.codegen.compile import lower_kernel

    which, device, mask, axes = LOWERED[name]
    device = getattr(arch, device)()
    metas = (meta_tensor(1, HEADS, 256, 64, dtype=torch.float16),) * 3
    engine = AttentionEngine(metas, CustomIO({} if axes is None else {"x": axes}), scaled, mask, OnlineSoftmax())
    given = [] if axes is None else [torch.zeros(1, dtype=torch.int64)]
    kernel = engine._all_kernels(device, given)[which]
    text = lower_kernel(kernel.prim_func, device, pass_configs=kernel.configs).source("cuda")
    assert "int64_t" in text
    wraps = name not in ("document ids", "a read at a wide index")  # a shift is cut before it is added
    assert ("(uint64_t)" in text or "(ulong)" in text) is wraps, text
