"""Calls of flex_attention that are alike one before: they skip what was asked then, and see all that has changed."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from attention_engine import errors, scaled_dot_product_attention
from attention_engine.flex import BlockMask, again, attention, create_block_mask, flex_attention, noop_mask

S = 12
SHARED = 1.0  # a global that functions read


@pytest.fixture(autouse=True)
def fresh():
    again.KNOWN.clear()


def qkv(length=S, dtype=torch.float32, grad=False):
    make = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, 8, generator=make).to(dtype).requires_grad_(grad) for _ in range(3)]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def mask_of(mask_mod=causal, queries=S, keys=S):
    return create_block_mask(mask_mod, None, None, queries, keys)


@pytest.fixture
def counted(monkeypatch):
    """How many calls looked for an engine."""
    looked, find = [], attention.find
    monkeypatch.setattr(attention, "find", lambda *given: looked.append(given) or find(*given))
    return looked


def plain(q, k, v, score=None, keep=None):
    x = (q @ k.mT) * q.shape[-1] ** -0.5
    x = x if score is None else score(x)
    return (x if keep is None else x.masked_fill(~keep, -torch.inf)).softmax(-1) @ v


# ---- what is skipped


@pytest.mark.parametrize("backend", ["auto", "interpret"])
@pytest.mark.parametrize("grad", [False, True])
def test_functions_made_anew_look_for_no_engine(counted, grad, backend):
    low = torch.ones(S, S, dtype=torch.bool).tril()
    for n in range(4):
        given, slopes = qkv(grad=grad), torch.tensor([0.1 * n, 0.5]).requires_grad_(grad)
        found = flex_attention(*given, lambda s, b, h, i, j: s - slopes[h] * (i - j),  # noqa: B023
                               mask_of(lambda b, h, i, j: i >= j), kernel_options={"backend": backend})  # fmt: skip
        far = slopes[:, None, None] * (torch.arange(S)[:, None] - torch.arange(S))
        want = plain(*given, lambda x: x - far, low)  # noqa: B023
        assert_close(found, want)
        if grad:
            leaves = [*given, slopes]
            found, want = (torch.autograd.grad(o.square().sum(), leaves) for o in (found, want))
            assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert len(counted) == 1


def test_half_precision_takes_the_launch_that_is_known(counted):
    for _ in range(3):
        given = qkv(dtype=torch.float16)
        o, lse = flex_attention(*given, None, mask_of(), return_lse=True, kernel_options={"backend": "interpret"})
        x = (given[0].float() @ given[1].float().mT) * 8**-0.5
        x = x.masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -torch.inf)
        assert_close(lse, x.logsumexp(-1), rtol=1e-3, atol=1e-3)
        assert_close(o.float(), x.softmax(-1) @ given[2].float(), rtol=1e-2, atol=1e-2)
    assert len(counted) == 1
    (known,) = next(iter(again.KNOWN.values()))
    assert known.direct is not None


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", ["documents", "window", "by head"])
def test_lists_of_tiles_are_those_of_the_call(counted, kind, grad):
    """Launches of several kernels: lists that a captured tensor says, and lists that lengths alone say."""
    length, index = 150, torch.arange(150)
    for n in range(3):
        given, docs = qkv(length, torch.float16, grad), index // (20 + 40 * n)
        mods = {
            "documents": lambda b, h, i, j: (docs[i] == docs[j]) & (i >= j),  # noqa: B023
            "window": lambda b, h, i, j: (i - j < 20) & (i >= j),
            "by head": lambda b, h, i, j: (i + 30 * h >= j) & (docs[j] < 2),  # noqa: B023
        }
        mask = mask_of(mods[kind], length, length)
        found = flex_attention(*given, None, mask, kernel_options={"backend": "interpret"})
        keep = mods[kind](0, torch.arange(2)[:, None, None], index[:, None], index)
        leaves = [t.detach().double().requires_grad_(grad) for t in given]
        want = plain(*leaves, keep=keep).nan_to_num()
        assert_close(found.double(), want, rtol=1e-2, atol=5e-3)
        if grad:
            found, want = (torch.autograd.grad(o.float().sum(), of) for o, of in ((found, given), (want, leaves)))
            assert_close([t.double() for t in found], list(want), rtol=2e-2, atol=2e-2)
    assert len(counted) == 1
    assert next(iter(again.KNOWN.values()))[0].direct is not None


def test_every_length_is_known_by_itself(counted):
    for _ in range(2):
        for length in (5, 9, 12, 17):
            given = qkv(length)
            assert_close(flex_attention(*given), plain(*given))
            low = torch.ones(length, length, dtype=torch.bool).tril()
            assert_close(flex_attention(*given, None, mask_of(causal, length, length)), plain(*given, keep=low))
            assert_close(flex_attention(*given, None, mask_of(noop_mask, length, length)), plain(*given))
    assert len(counted) == 12


def test_so_many_calls_are_known(monkeypatch):
    monkeypatch.setattr(again, "MOST", 3)
    for length in range(3, 10):
        flex_attention(*qkv(length))
    assert len(again.KNOWN) == 3
    factors = [0.1 * n for n in range(12)]
    for factor in factors:
        flex_attention(*qkv(), lambda s, b, h, i, j: s * factor)  # noqa: B023
    assert max(map(len, again.KNOWN.values())) == again.MOST_ALIKE


def test_scaled_dot_product_attention_looks_for_no_engine(counted):
    dense = torch.nn.functional.scaled_dot_product_attention
    for _ in range(3):
        given = qkv()
        for more in (dict(is_causal=True), dict(is_causal=False), dict(scale=0.5), dict(scale=0.5, is_causal=True)):
            assert_close(scaled_dot_product_attention(*given, **more), dense(*given, **more))
    assert len(counted) == 4


# ---- what has changed is seen


def both(call):
    """What a call gives among others, and what it gives where nothing is known."""
    found = call()
    known = dict(again.KNOWN)
    again.KNOWN.clear()
    want = call()
    again.KNOWN.clear()
    again.KNOWN.update(known)
    return found, want


def scaled(factor, inner=None):
    return lambda s, b, h, i, j: (s if inner is None else inner(s)) * factor


def shifted(factor, inner=None):
    return lambda s, b, h, i, j: (s if inner is None else inner(s)) + factor * (i - j)


def reads_global(s, b, h, i, j):
    return s * SHARED


def test_numbers_in_functions_are_seen():
    given = qkv()
    for factor in (2.0, 3.0, 2.0, 2, True, 0.0, -0.0, torch.tensor(2.0), torch.tensor([[3.0]]), (2.0,)):
        score = scaled(factor) if not isinstance(factor, tuple) else scaled_by_first(factor)
        assert_close(*both(lambda: flex_attention(*given, score)))  # noqa: B023


def scaled_by_first(factors):
    return lambda s, b, h, i, j: s * factors[0]


def test_tuples_are_seen():
    given = qkv()
    for factors in ((2.0, 1), (3.0, 1), (2.0,), (torch.tensor(2.0),), (torch.tensor(0.5),), (2.0, 1)):
        assert_close(*both(lambda: flex_attention(*given, scaled_by_first(factors))))  # noqa: B023


def test_functions_within_functions_are_seen():
    given = qkv()

    def power(n):
        return lambda s: s * n

    for factor, inner in ((2.0, None), (2.0, power(3.0)), (2.0, power(4.0)), (2.0, lambda s: -s), (2.0, power(3.0))):
        assert_close(*both(lambda: flex_attention(*given, scaled(factor, inner))))  # noqa: B023


def test_globals_are_seen(monkeypatch):
    given = qkv()
    for value in (1.0, 2.0, torch.tensor([0.5, 3.0])[1], 2.0):
        monkeypatch.setitem(globals(), "SHARED", value)
        assert_close(*both(lambda: flex_attention(*given, reads_global)))
    hidden = mask_of(lambda b, h, i, j: abs(i - j) < 3)
    want = flex_attention(*given, None, hidden)
    assert_close(flex_attention(*given, None, hidden), want)
    monkeypatch.setitem(globals(), "abs", lambda x: x)  # over the builtin
    assert not torch.equal(flex_attention(*given, None, hidden), want)


def test_a_functions_own_attributes_are_seen():
    given, score = qkv(), scaled(2.0)
    before = flex_attention(*given, score)
    assert_close(flex_attention(*given, score), before)
    score.__closure__[0].cell_contents = 5.0
    assert_close(*both(lambda: flex_attention(*given, score)))
    score.__code__ = shifted(1.0).__code__
    assert_close(*both(lambda: flex_attention(*given, score)))
    score.__defaults__ = (4.0,)
    assert_close(*both(lambda: flex_attention(*given, score)))


def test_captured_tensors_are_the_calls_own():
    given = qkv()
    for table in (torch.rand(2), torch.rand(2), torch.rand(2).double(), torch.rand(3), torch.rand(4)[::2]):
        assert_close(*both(lambda: flex_attention(*given, lambda s, b, h, i, j: s + table[h])))  # noqa: B023
        table.fill_(0.0)
        assert_close(*both(lambda: flex_attention(*given, lambda s, b, h, i, j: s + table[h])))  # noqa: B023
        assert_close(*both(lambda: flex_attention(*given, lambda s, b, h, i, j: s * table.shape[0])))  # noqa: B023


def test_one_tensor_in_two_places_is_told_from_two():
    given, first, second = qkv(), torch.rand(2), torch.rand(2)

    def run(a, b):
        return flex_attention(*given, lambda s, batch, h, i, j: s * a[h] + b[h] * (i - j))

    for pair in ((first, second), (second, first), (first, first), (second, first), (first, second)):
        assert_close(*both(lambda: run(*pair)))  # noqa: B023


def test_other_tensors_of_a_call_are_seen():
    for length, dtype, grad in ((S, torch.float32, False), (S, torch.float64, False), (S, torch.float32, True)):
        given = qkv(length, dtype, grad)
        found, want = both(lambda: flex_attention(*given, scaled(2.0)))  # noqa: B023
        assert found.requires_grad is grad and found.dtype is dtype
        assert_close(found, want)
        with torch.no_grad():
            assert not flex_attention(*given, scaled(2.0)).requires_grad
        turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in given]
        assert_close(flex_attention(*turned, scaled(2.0)), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(*qkv(), scaled(2.0)).dtype is torch.bfloat16
    one_key_head = [given[0], *(t[:, :1] for t in given[1:])]
    with pytest.raises(errors.HeadsDoNotGroup):
        flex_attention(*one_key_head, scaled(2.0))
    flex_attention(*one_key_head, scaled(2.0), enable_gqa=True)
    with pytest.raises(errors.HeadsDoNotGroup):
        flex_attention(*one_key_head, scaled(2.0))


def test_other_options_of_a_call_are_seen():
    given = qkv()
    assert_close(flex_attention(*given), plain(*given))
    assert_close(flex_attention(*given, scale=1.0), plain(*given, lambda x: x * 8**0.5))
    assert_close(flex_attention(*given, scale=2.0), plain(*given, lambda x: x * 2 * 8**0.5))
    for _ in range(2):
        o, lse = flex_attention(*given, return_lse=True)
        assert_close(lse, ((given[0] @ given[1].mT) * 8**-0.5).logsumexp(-1))
    assert torch.equal(flex_attention(*given), o)
    assert (flex_attention(*given, dropout_p=0.5) != o).any()
    with pytest.raises(errors.UnknownOption):
        flex_attention(*given, kernel_options={"backend": "nothing"})


def test_a_mask_that_has_changed_is_seen():
    given, mask = qkv(), mask_of()
    low = torch.ones(S, S, dtype=torch.bool).tril()
    for _ in range(2):
        assert_close(flex_attention(*given, None, mask), plain(*given, keep=low))
    mask.mask_mod = lambda b, h, i, j: i <= j
    assert_close(flex_attention(*given, None, mask), plain(*given, keep=low.mT))
    mask.seq_lengths = (S, S + 1)
    with pytest.raises(errors.WrongBlockMask):
        flex_attention(*given, None, mask)
    mask.seq_lengths = (S, S)
    for length in (9, S):  # lengths that the engine knows, and the mask was not made for
        flex_attention(*qkv(length), None, mask_of(causal, length, length))
    with pytest.raises(errors.WrongBlockMask):
        flex_attention(*qkv(9), None, mask_of())
    with pytest.raises(errors.WrongBlockMask):
        flex_attention(*given, None, BlockMask((S, S), causal, batch=3))


def test_an_empty_cell_is_an_error_of_the_function():
    given = qkv()

    def run(filled):
        score = lambda s, b, h, i, j: s * factor  # noqa: E731
        if filled:
            factor = 2.0
        return flex_attention(*given, score)

    run(True), run(True)
    with pytest.raises(NameError):
        run(False)


def test_what_watches_sees_the_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    given = qkv(dtype=torch.float16)
    for _ in range(2):
        flex_attention(*given, kernel_options={"backend": "interpret"})
    with Watch():
        flex_attention(*given, kernel_options={"backend": "interpret"})
    assert "attention_engine.forward.default" in seen
    found = torch.func.vmap(lambda q, k, v: flex_attention(q, k, v))(*(torch.stack([t, t]) for t in qkv()))
    assert_close(found[1], plain(*qkv()))
