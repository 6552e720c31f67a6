"""`attention(q, k, v, ...)`: the engine's results, whatever its functions are made of, and few engines for them."""
# ruff: noqa: B023 - functions made anew in a loop, over what changes in it, are what is tested

import functools
import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import attention_engine
from attention_engine import AttentionEngine, CustomIO, OnlineFunc, create_block_mask, errors, library
from attention_engine.runtime import functional
from attention_engine.runtime.finding import KEPT
from attention_engine.runtime.functional import attention
from attention_engine.runtime.recipes import Recipe

DOUBLE = torch.float64
FACTOR, TABLE = 0.5, torch.zeros(1)


@pytest.fixture(autouse=True)
def fresh():
    functional.FINDER._built.cache_clear()


def made():
    return functional.FINDER._built.cache_info().misses


def qkv(batch=2, heads=2, length=7, dim=8, dtype=DOUBLE):
    make = torch.Generator().manual_seed(0)
    shape = (batch, length, heads, dim)
    return [torch.randn(*shape, generator=make, dtype=DOUBLE).to(dtype).requires_grad_() for _ in range(3)]


def same(score_mod, *more, right=None, **options):
    """The functional form gives what an engine does that is made of the right function."""
    given = qkv()
    o = attention(*given, score_mod=score_mod, **options)
    want = AttentionEngine(score_mod=right or score_mod, **options)(*given)
    assert torch.equal(o, want)
    found = torch.autograd.grad(o.sum(), [*given, *more], allow_unused=True)
    expected = torch.autograd.grad(want.sum(), [*given, *more], allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_it_is_public_and_means_what_everybody_means():
    given = qkv()
    assert attention_engine.attention is attention
    turned = [t.transpose(1, 2) for t in given]
    want = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
    assert (attention(*given, mask_mod=library.causal) - want).abs().max() < 1e-12
    o = attention(*turned, mask_mod=library.causal, layout="bhsd")
    assert (o.transpose(1, 2) - want).abs().max() < 1e-12


def test_every_option_has_its_effect():
    given = qkv()
    for options in (
        {"scale": 0.1}, {"online_func": library.OnlineSigmoid()}, {"online_func": library.OnlineIdentity()},
        {"mask_mod": library.sliding_window(2)}, {"backend": "interpret"}, {"deterministic": True},
    ):  # fmt: skip
        single = [t.float() for t in given]
        assert torch.equal(attention(*single, **options), AttentionEngine(**options)(*single)), options
    blocks = create_block_mask(library.causal, None, None, 7, 7, Q_BLOCK_SIZE=4, KV_BLOCK_SIZE=4)
    o, rows = attention(*given, block_mask=blocks, block_size=(4, 4), return_rowscales=True)
    want, more = AttentionEngine(block_size=(4, 4))(*given, block_mask=blocks, return_rowscales=True)
    assert torch.equal(o, want) and torch.equal(rows["lse"], more["lse"])
    with pytest.raises(errors.UnknownOption, match="layout is 'bsdh'"):
        attention(*given, layout="bsdh")
    with pytest.raises(errors.UnknownOption, match="scale is True"):
        attention(*given, scale=True)


# ---- which functions are alike


def test_functions_made_anew_with_other_numbers_are_others():
    for factor in (0.5, 0.25, 1, True, 0.0, -0.0):
        same(lambda s, c, b, h, i, j, factor=factor: s * factor)
        same(lambda s, c, b, h, i, j: s + factor * (i - j))
    assert made() == 12


def test_a_global_number_that_changed_is_seen(monkeypatch):
    def score(s, c, b, h, i, j):
        return s * FACTOR

    def outer(s, c, b, h, i, j):
        return score(s, c, b, h, i, j) + 1

    def inner(s, c, b, h, i, j):
        return sum([s * FACTOR for _ in range(1)])

    for function in (score, outer, inner):
        for factor in (0.5, 0.25):
            monkeypatch.setitem(globals(), "FACTOR", factor)
            same(function, right=lambda s, c, b, h, i, j, f=function, n=factor: s * n + (1 if f is outer else 0))


def test_a_global_tensor_that_another_took_the_place_of_is_seen(monkeypatch):
    for _ in range(2):
        monkeypatch.setitem(globals(), "TABLE", table := torch.randn(2, dtype=DOUBLE, requires_grad=True))
        same(lambda s, c, b, h, i, j: s * TABLE[h], table)
    assert made() == 1


class Scaled(torch.nn.Module):
    offset = 0.0

    def __init__(self):
        super().__init__()
        self.factor, self.config, self.inner = 0.5, {"cap": 5.0}, torch.nn.Linear(2, 2).double()
        self.bias = torch.nn.Parameter(torch.randn(2, 16, dtype=DOUBLE))

    def helped(self, s):
        return s * self.factor + self.offset

    @property
    def cap(self):
        return self.config["cap"]

    def score(self, s, custom, b, h, i, j):
        s = self.helped(s) + self.bias[h, i - j + 8] + self.inner.weight[0, h]
        return (s / self.cap).tanh() * self.cap


def test_methods_read_what_their_object_holds_now():
    module = Scaled()
    check = functools.partial(same, lambda *args: module.score(*args))
    changes = (
        lambda: None, lambda: setattr(module, "factor", 0.25), lambda: module.config.update(cap=2.0),
        lambda: setattr(module, "offset", 1.0), lambda: setattr(Scaled, "offset", 2.0),
        lambda: setattr(module, "bias", torch.nn.Parameter(torch.randn(2, 16, dtype=DOUBLE))),
        lambda: module.inner.weight.data.mul_(3), lambda: setattr(module, "inner", torch.nn.Linear(2, 2).double()),
    )  # fmt: skip
    try:
        for change in changes:
            change()
            given = qkv()
            o = attention(*given, score_mod=module.score)
            want = AttentionEngine(score_mod=module.score)(*given)
            assert torch.equal(o, want)
            weights = [module.bias, module.inner.weight]
            for a, b in zip(*(torch.autograd.grad(x.sum(), weights) for x in (o, want)), strict=True):
                assert torch.equal(a, b)
            check(module.bias)
    finally:
        Scaled.offset = 0.0


class Power(OnlineFunc):
    """Weights that are the scores, to a power that an attribute says, times a number of the class."""

    factor = 1.0

    def __init__(self, power):
        super().__init__()
        self.power = power

    def online_fwd(self, scores, online_rowscales, b, h, q_idx):
        return scores.abs() ** self.power * self.factor, {}, 1.0


def test_row_functions_are_alike_by_class_and_numbers():
    given = qkv()
    for _ in range(3):
        attention(*given, online_func=library.OnlineSoftmax())
    assert made() == 1
    try:
        for factor in (1.0, 2.0):
            Power.factor = factor
            for power in (2.0, 3.0, 2.0):
                want = AttentionEngine(online_func=Power(power))(*given)
                assert torch.equal(attention(*given, online_func=Power(power)), want)
    finally:
        Power.factor = 1.0
    assert made() == 5


def test_other_ways_to_hold_a_number():
    def score(factor, s, c, b, h, i, j, *, more=1.0):
        return s * factor * more

    box, array = [0.5], np.array([0.5])
    for number in (0.5, 0.25):
        box[0], array[0] = number, number
        right = functools.partial(lambda n, s, c, b, h, i, j: s * n, number)
        same(functools.partial(score, number), right=right)
        same(functools.partial(score, 1.0, more=number), right=right)
        same(lambda s, c, b, h, i, j: s * box[0], right=right)
        same(lambda s, c, b, h, i, j: s * array[0], right=right)


def test_a_number_read_off_a_tensor_is_read_again():
    number = torch.tensor(0.5, dtype=DOUBLE)
    for value in (0.5, 0.25, 2.0):
        number.fill_(value)
        right = functools.partial(lambda n, s, c, b, h, i, j: s * n, value)
        same(lambda s, c, b, h, i, j: s * number.item(), right=right)
        same(lambda s, c, b, h, i, j: s * float(number), right=right)
        same(lambda s, c, b, h, i, j: s * value if number < 1 else s * 2.0, right=right)


# ---- captured tensors


def test_closures_over_tensors_made_anew_trace_once_and_leak_nothing():
    seen = []
    for _ in range(6):
        bias = torch.randn(2, 14, dtype=DOUBLE, requires_grad=True)
        seen.append(weakref.ref(bias))
        same(lambda s, c, b, h, i, j: s * 0.3 + bias.exp()[h, i - j + 7], bias, mask_mod=library.causal)
        same(lambda s, c, b, h, i, j: s * 0.3 + bias[h, i - j + 7] * bias[h, 0], bias)
    assert made() == 2
    bias = None
    gc.collect()
    assert [r() is not None for r in seen].count(True) <= 2


def test_one_tensor_twice_is_not_two_tensors():
    one, two = (torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    for first, second in ((one, one), (one, two), (two, two), (two, one)):
        same(lambda s, c, b, h, i, j: s * first[h] + second[h], first, second)
    assert made() == 2


def test_other_shapes_and_dtypes_are_told_apart():
    for shape, dtype in (((2,), DOUBLE), ((2,), torch.float32), ((2,), torch.int32), ((2, 1), DOUBLE), ((1,), DOUBLE)):
        table = torch.ones(shape, dtype=dtype) * 2
        index = (lambda h: table[h, 0]) if len(shape) == 2 else (lambda h: table[h])
        same(lambda s, c, b, h, i, j: s * index(h) + table.shape[0])


def test_tensors_in_lists_and_dicts():
    for _ in range(2):
        tables = [torch.randn(2, dtype=DOUBLE, requires_grad=True) for _ in range(2)]
        held = {"a": torch.randn(2, dtype=DOUBLE, requires_grad=True)}
        same(lambda s, c, b, h, i, j: s * tables[0][h] + tables[1][h] * held["a"][h], *tables, held["a"])
    assert made() == 1


# ---- custom inputs


def test_custom_inputs_by_name():
    given, slopes = qkv(), torch.rand(2, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(2, 7, 7, dtype=DOUBLE, requires_grad=True)

    def score(s, custom, b, h, i, j):
        return s + custom["slopes"] * custom["bias"]

    io = CustomIO({"slopes": ("heads",), "bias": ("heads", "seq_len", "seq_len_kv")})
    want = AttentionEngine(custom_io=io, score_mod=score)(*given, slopes, bias)
    for custom in ({"slopes": slopes, "bias": bias}, {"bias": bias, "slopes": slopes}):
        assert torch.equal(attention(*given, score_mod=score, custom=custom, custom_io=io), want)
    with pytest.raises(errors.WrongIndex):  # as long as the batch too: which is it?
        attention(*given, score_mod=score, custom={"slopes": slopes, "bias": bias})
    one = [t[:1] for t in given]
    found = attention(*one, score_mod=score, custom={"bias": bias, "slopes": slopes})
    assert torch.equal(found, want[:1])
    assert all(g is not None for g in torch.autograd.grad(found.sum(), [slopes, bias]))
    with pytest.raises(errors.CustomInputMissing, match="'bias' is missing"):
        attention(*given, score_mod=score, custom={"slopes": slopes}, custom_io=io)
    with pytest.raises(errors.NotATensor):
        attention(*given, score_mod=score, custom={"slopes": 0.5})
    with pytest.raises(errors.UnknownOption, match=r"custom is Tensor\. Give tensors by name"):
        attention(*given, score_mod=score, custom=slopes)


# ---- few engines


def test_the_engines_used_last_are_kept():
    given = qkv()
    for n in range(KEPT + 10):
        attention(*given, scale=0.01 * n + 0.01)
        attention(*given, scale=0.01)
    assert functional.FINDER._built.cache_info().currsize == KEPT
    before = made()
    attention(*given, scale=0.01)
    assert made() == before


def test_threads_share_engines():
    given, found = [t.detach() for t in qkv()], []

    def run(factor):
        for _ in range(20):
            table = torch.full((2,), factor, dtype=DOUBLE)
            found.append((factor, attention(*given, score_mod=lambda s, c, b, h, i, j: s * table[h])))

    threads = [threading.Thread(target=run, args=(0.1 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for factor, o in found:
        assert torch.equal(o, AttentionEngine(scale=factor)(*given)) or torch.allclose(
            o, AttentionEngine(scale=factor)(*given), rtol=0, atol=1e-12)  # fmt: skip


def test_a_recipe_ends_where_objects_hold_each_other():
    a, b = type("A", (), {})(), type("B", (), {})()
    a.other, b.other, a.factor = b, a, 0.5
    same(lambda s, c, bb, h, i, j: s * a.other.other.factor)

    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    same(lambda s, c, bb, h, i, j: s * (0.5 if even(4) else 0.25))
    assert Recipe(even) == Recipe(even) != Recipe(odd)


# ---- in PyTorch


def test_vmap_grad_and_checkpointing():
    given = [t.detach() for t in qkv()]
    call = functools.partial(attention, mask_mod=library.causal)
    stacked = [torch.stack([t, t + 1]) for t in given]
    assert torch.allclose(torch.func.vmap(call)(*stacked)[1], call(*(t + 1 for t in given)))
    found = torch.func.grad(lambda q: call(q, *given[1:]).sum())(given[0])
    leaf = given[0].clone().requires_grad_()
    assert torch.allclose(found, torch.autograd.grad(call(leaf, *given[1:]).sum(), leaf)[0])
    again = torch.utils.checkpoint.checkpoint(call, leaf, *given[1:], use_reentrant=False)
    assert torch.allclose(torch.autograd.grad(again.sum(), leaf)[0], found)


def global_score(s, custom, b, h, i, j):
    return s * 0.3 + h


def factory(number):
    return lambda s, c, b, h, i, j: s * number


WAYS = ("none", "a mask", "a factory's mask", "a function", "a lambda", "a number", "custom")


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("name", WAYS)
def test_torch_compile(name, backend):
    given, slopes = qkv(batch=1, dtype=torch.float32), torch.rand(2, requires_grad=True)
    local = 0.2

    def alibi(s, custom, b, h, i, j):
        return s * 0.3 - custom["slopes"] * (i - j)

    ways = {
        "none": lambda q, k, v: attention(q, k, v, backend=backend),
        "a mask": lambda q, k, v: attention(q, k, v, mask_mod=library.causal, backend=backend),
        "a factory's mask": lambda q, k, v: attention(q, k, v, mask_mod=library.sliding_window(2), backend=backend),
        "a function": lambda q, k, v: attention(q, k, v, score_mod=global_score, backend=backend),
        "a lambda": lambda q, k, v: attention(q, k, v, score_mod=lambda s, c, b, h, i, j: s * 0.5, backend=backend),
        "a number": lambda q, k, v: attention(q, k, v, score_mod=lambda s, c, b, h, i, j: s * local, backend=backend),
        "custom": lambda q, k, v: attention(q, k, v, score_mod=alibi, custom={"slopes": slopes}, backend=backend),
    }
    way = ways[name]
    try:
        compiled = torch.compile(way, fullgraph=True, backend="aot_eager")
        o, want = compiled(*given), way(*given)
    except torch._dynamo.exc.Unsupported as why:
        raise AssertionError(name) from why
    assert torch.allclose(o, want, atol=1e-6)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), given) for x in (o, want)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("make", [library.sliding_window, library.softcap])
def test_torch_compile_takes_other_numbers_of_a_factory_in_each_call(make):
    """torch leaves a number open that differs in the second call; each gets its own attention."""
    given, name = [t.detach() for t in qkv()], "mask_mod" if make is library.sliding_window else "score_mod"

    def call(number):
        return attention(*given, **{name: make(number)})

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for number in (3, 1, 2) if name == "mask_mod" else (3.0, 0.5, 2.0):
        assert torch.equal(compiled(number), call(number)), number


@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compile_takes_options_that_are_other_numbers_in_each_call(dynamic):
    torch._dynamo.reset()
    given = qkv()

    def call(scale, size):
        return attention(*given, mask_mod=library.causal, scale=scale, block_size=(size, 128))

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for scale, size in ((0.1, 64), (0.30000001, 64), (2, 32)):
        assert torch.equal(compiled(scale, size), call(scale, size)), scale


def test_torch_compile_takes_keys_that_are_values():
    torch._dynamo.reset()
    q, k, _ = (t.requires_grad_() for t in qkv())

    def call(q, k):
        return attention(q, k, k, mask_mod=library.causal)

    found, want = (run(q, k) for run in (torch.compile(call, fullgraph=True, backend="aot_eager"), call))
    torch.testing.assert_close(found, want)
    of_found, of_want = (torch.autograd.grad(o.square().sum(), [q, k]) for o in (found, want))
    torch.testing.assert_close(of_found, of_want)


def test_torch_compile_sees_that_a_closure_is_another():
    given = [t.detach() for t in qkv()]
    compiled = torch.compile(lambda q, k, v, f: attention(q, k, v, score_mod=f), fullgraph=True, backend="aot_eager")
    for function in (factory(0.5), factory(0.25), factory(0.125), factory(3), library.scale(0.5), library.scale(0.2)):
        assert torch.equal(compiled(*given, function), attention(*given, score_mod=function)), function
    table = torch.ones((), dtype=DOUBLE)
    with pytest.raises(Exception, match="captured a tensor or an object"):
        compiled(*given, factory(table))
