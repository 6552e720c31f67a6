"""Launches that are told addresses: what a kernel reads there, and that nothing of a call changes by them."""

import ctypes
import gc
import threading
import weakref
from functools import cached_property

import pytest
import torch

from attention_engine import compiler
from attention_engine.flex import again, create_block_mask, flex_attention
from attention_engine.runtime import pointers
from attention_engine.runtime.gpu import maker

SCALE = 0.377  # of no other test: kernels that these launch are theirs alone
LAUNCHED, BEFORE = [], []  # how many addresses each launch was told; what is done before it reads there
DTYPES = {(2, 16): torch.float16, (4, 16): torch.bfloat16, (2, 32): torch.float32, (0, 32): torch.int32}


def tensor_at(address):
    """The tensor that a description at this address is of."""
    words = (ctypes.c_uint64 * 6).from_address(address)
    rank, kind = words[2] & 0xFFFFFFFF, words[2] >> 32
    assert words[1] == 1  # a CPU's
    assert words[5] == 0  # no offset
    assert kind >> 16 == 1  # lane
    shape, strides = ([*(ctypes.c_int64 * rank).from_address(words[n])] for n in (3, 4))
    dtype = DTYPES[kind & 0xFF, kind >> 8 & 0xFF]
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides))
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(words[0])
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


@pytest.fixture
def launched(monkeypatch):
    """Interpreted kernels take addresses as compiled ones do: how many arguments of each launch are addresses."""
    LAUNCHED.clear()  # in place: kernels of a test before are still launched so

    def run(kernel):
        def call(*arguments):
            for wait in BEFORE:
                wait()
            LAUNCHED.append(sum(isinstance(a, ctypes.c_void_p) for a in arguments))
            kernel.compiled(*[tensor_at(a.value) if isinstance(a, ctypes.c_void_p) else a for a in arguments])

        return call

    taking = cached_property(run)
    taking.__set_name__(compiler.Kernel, "run")
    monkeypatch.setattr(compiler.Kernel, "run", taking)
    monkeypatch.setattr(pointers, "takes_addresses", lambda _: True)
    monkeypatch.setattr(again, "KNOWN", {})
    return LAUNCHED


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def call(q, k, v, score_mod=None, mask_mod=causal, **named):
    mask = create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2])
    return flex_attention(q, k, v, score_mod, mask, SCALE, kernel_options={"backend": "interpret"}, **named)


def qkv(length=40, dtype=torch.float16, heads=2, dim=16, seed=1):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(2, n, length, dim, generator=make).to(dtype) for n in (heads, 2, 2)]


def test_a_call_like_one_before_is_told_addresses(launched):
    given = qkv()
    first, second = call(*given), call(*given)
    assert launched == [0, 4]
    assert torch.equal(first, second)
    assert first.stride() == second.stride()
    assert not second._is_view()


def test_captured_tensors_and_lists_of_tiles(launched):
    """Captured tensors of other values each time; documents launch a kernel that lists tiles first."""
    for seed in range(3):
        given = qkv(seed=seed)
        slopes, documents = torch.rand(2), (torch.arange(40) // (9 + seed)).int()
        found = call(*given, lambda s, b, h, i, j: s - slopes[h] * (i - j),  # noqa: B023
                     lambda b, h, i, j: documents[i] == documents[j])  # noqa: B023 # fmt: skip
        far = slopes[:, None, None] * (torch.arange(40)[:, None] - torch.arange(40))
        x = (given[0].float() @ given[1].float().mT) * SCALE - far
        x = x.masked_fill(documents[:, None] != documents, -torch.inf)
        torch.testing.assert_close(found.float(), x.softmax(-1) @ given[2].float(), rtol=1e-2, atol=1e-2)
    assert launched == [0, 0, 1, 6, 1, 6]


def test_a_mask_that_serves_again_keeps_its_lists_of_tiles(launched):
    """The launch that makes them is left out, until torch writes what they were made of."""
    given, documents = qkv(), (torch.arange(40) // 9).int()
    mask = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 40, 40)
    for length, launches in ((9, [0, 0]), (9, [1, 5]), (9, [5]), (9, [5]), (14, [1, 5]), (14, [5])):
        if documents[length - 1] != 0 or documents[length] == 0:
            documents.copy_(torch.arange(40) // length)
        found = flex_attention(*given, None, mask, SCALE, kernel_options={"backend": "interpret"})
        x = (given[0].float() @ given[1].float().mT) * SCALE
        x = x.masked_fill(documents[:, None] != documents, -torch.inf)
        torch.testing.assert_close(found.float(), x.softmax(-1) @ given[2].float(), rtol=1e-2, atol=1e-2)
        assert launched == launches
        launched.clear()


def test_lists_of_tiles_that_no_tensor_says_are_made_once(launched):
    """Of a mask of indices alone, which no bounds describe: the launch before is left out, in either kind of call."""
    given = qkv()
    found = [call(*given, None, lambda b, h, i, j: (i >= j) & ((i - j) % 3 == 0)) for _ in range(3)]
    assert launched == [0, 0, 4, 4]
    low = torch.arange(40)[:, None] - torch.arange(40)
    x = (given[0].float() @ given[1].float().mT) * SCALE
    x = x.masked_fill((low < 0) | (low % 3 != 0), -torch.inf)
    for o in found:
        torch.testing.assert_close(o.float(), x.softmax(-1) @ given[2].float(), rtol=1e-2, atol=1e-2)


def test_rows_are_returned_and_heads_may_share_keys(launched):
    given = qkv(heads=4)
    found = [call(*given, return_lse=True, enable_gqa=True) for _ in range(3)]
    assert launched[1:] == [4, 4]
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])


def test_gradients_and_their_gradients(launched):
    """Of q, k, v and a captured tensor, also through lse."""
    found = []
    for _ in range(2):
        given, slopes = [t.requires_grad_() for t in qkv(24)], torch.rand(2, generator=torch.Generator().manual_seed(3))
        leaves = [*given, slopes.requires_grad_()]
        o, lse = call(*given, lambda s, b, h, i, j: s - slopes[h] * (i - j), return_lse=True)  # noqa: B023
        loss = o.float().square().sum() + lse.sin().sum()
        once = torch.autograd.grad(loss, leaves, create_graph=True)
        twice = torch.autograd.grad(sum(d.float().square().sum() for d in once), leaves)
        found.append([o, lse, *once, *twice])
    assert 5 in launched
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def given_strides(kind):
    q, k, v = qkv()
    if kind == "length before heads":
        return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    if kind == "a part of wider rows":
        return [torch.cat([t, t], -1)[..., :16] for t in (q, k, v)]
    if kind == "one row for all":
        return [q, k[:, :, :1].expand_as(k), v]
    if kind == "rows that no wide read fits":
        return [torch.cat([q, q[..., :1]], -1)[..., :16], k, v]
    assert kind == "an address that no wide read fits"
    return [torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t) for t in (q, k, v)]


@pytest.mark.parametrize(
    ("kind", "told"),
    [("length before heads", 4), ("a part of wider rows", 4), ("one row for all", 0),
     ("rows that no wide read fits", 0), ("an address that no wide read fits", 0)],
)  # fmt: skip
def test_strides(launched, kind, told):
    given = given_strides(kind)
    found = [call(*given) for _ in range(3)]
    assert launched[1:] == [told, told]
    want = call(*[t.contiguous() for t in given])
    for o in found:
        torch.testing.assert_close(o, want)
        assert o.stride() == want.stride()


def test_captured_tensors_that_are_converted_first_are_not_told_so(launched):
    given, index = qkv(), torch.arange(40)
    of_bool, of_columns = torch.arange(40) % 3 == 0, torch.stack([index, index * 0], 1).int()[:, 0]
    for mask in (lambda b, h, i, j: of_bool[j] | (i == j), lambda b, h, i, j: of_columns[j] <= of_columns[i]):
        first, second = call(*given, None, mask), call(*given, None, mask)
        assert torch.equal(first, second)
    assert set(launched) == {0}


def test_calls_of_threads_have_descriptions_of_their_own(launched, monkeypatch):
    """Each sees its own tensors, though all have written addresses before one of them reads there."""
    together, found = threading.Barrier(4, timeout=30), {}
    call(*qkv())
    (known,) = next(iter(again.KNOWN.values()))
    cells = dict(zip(known.pointed.func.__code__.co_freevars, known.pointed.func.__closure__, strict=True))
    assert cells["frames"].cell_contents == []
    monkeypatch.setitem(globals(), "BEFORE", [together.wait])

    def ask(seed):
        given = qkv(seed=seed)
        found[seed] = [call(*given) for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, outputs in found.items():
        x = qkv(seed=seed)
        want = torch.nn.functional.scaled_dot_product_attention(*[t.float() for t in x], is_causal=True, scale=SCALE)
        for o in outputs:
            torch.testing.assert_close(o.float(), want, rtol=1e-2, atol=1e-2)
    assert len(found) == 4


def test_nothing_of_a_call_is_kept(launched):
    """Neither what it was given, nor rows: a frame's holes are empty between calls."""
    given = qkv()
    for _ in range(2):
        call(*given)
    alive = [weakref.ref(tensor) for tensor in given]
    del given
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    (known,) = next(iter(again.KNOWN.values()))
    cells = dict(zip(known.pointed.func.__code__.co_freevars, known.pointed.func.__closure__, strict=True))
    (frame,) = cells["frames"].cell_contents
    assert not any(isinstance(a, torch.Tensor) for _, arguments in frame.runs for a in arguments)


def test_a_description_names_the_tensor_that_it_is_of():
    of = [torch.zeros(2, 3, 4).transpose(0, 2), torch.zeros(5, dtype=torch.int32), torch.zeros(2, dtype=torch.bfloat16)]
    found = pointers.Descriptions([pointers.Like.of(tensor) for tensor in of])
    for n, tensor in enumerate(of):
        found.words[pointers.WORDS * n] = tensor.data_ptr()
        seen = tensor_at(found.arguments[n].value)
        assert (seen.shape, seen.stride(), seen.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert seen.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("order", [None, (0, 2, 1, 3), (3, 1, 0, 2)])
def test_what_is_made_lies_in_memory_as_asked(order):
    shape = (2, 3, 4, 5)
    made = maker(shape, torch.bfloat16, torch.device("cpu"), order)()
    want = torch.empty(shape) if order is None else torch.empty([shape[n] for n in order])
    turned = made if order is None else made.permute(*order)
    assert (made.shape, made.dtype) == (torch.Size(shape), torch.bfloat16)
    assert turned.stride() == want.stride()
