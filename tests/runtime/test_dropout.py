"""Dropout as users meet it: the same pairs in every backend and tile, seeds, modes of torch, mistakes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_engine import AttentionEngine, attention, meta_tensor
from attention_engine.errors import BadInput, UnknownArgument, UnknownOption
from attention_engine.ir.chance import chance, threshold
from attention_engine.library import OnlineRetention, OnlineSigmoid, OnlineSoftmax, causal
from attention_engine.plan.forms import HopperForward, HopperKeys, Tile
from attention_engine.runtime.moved import Portion, call_portion
from tests.runtime.engines import CLOSE, build, close, exactly, qkv, results, same

P, SEED = 0.3, 2**40 + 12345


def dropout(backend="reference", p=P, **options):
    return build(backend=backend, dropout_p=p, **options)


def kept_pairs(batch: int, heads: int, queries: int, keys: int, p: float = P, seed: int = SEED) -> Tensor:
    axes = [torch.arange(n).view([-1 if a == place else 1 for a in range(4)])
            for place, n in enumerate((batch, heads, queries, keys))]  # fmt: skip
    return chance(torch.tensor([seed]), *axes) >= threshold(p)


# ---- the same pairs


def pairs_that_met_values(engine, batch, heads, length, dim, dtype):
    """Which pairs the forward pass kept, and which the backward pass: values, or gradients, stand for `dim` keys, or
    queries, at a time."""
    q, k = torch.zeros(2, batch, length, heads, dim, dtype=dtype)
    forward, backward = [], []
    for first in range(0, length, dim):
        hot = torch.zeros(batch, length, heads, dim, dtype=dtype)
        count = min(dim, length - first)
        hot[:, first : first + count, :, :count] = torch.eye(count, dtype=dtype)[None, :, None]
        forward.append(engine(q, k, hot, dropout_seed=SEED).transpose(1, 2)[..., :count] != 0)
        v = torch.zeros_like(hot).requires_grad_()
        (dv,) = torch.autograd.grad(engine(q, k, v, dropout_seed=SEED), v, hot)
        backward.append(dv.permute(0, 2, 3, 1)[:, :, :count] != 0)
    return torch.cat(forward, -1), torch.cat(backward, 2)


STRAIGHT = [(16, 16, 32), (32, 48, 64), (64, 32, 128)]  # queries, keys, threads of a tile
HOPPER = [  # first the one whose values stand for all keys at once: `make test` runs it
    (256, Tile(128, 80, 256, 2, HopperForward()), Tile(64, 64, 256, 2, HopperKeys(shared_weights=True))),
    (128, Tile(128, 128, 256, 2, HopperForward(persistent=True)), Tile(80, 128, 256, 2, HopperKeys())),
    (64, Tile(192, 128, 384, 2, HopperForward()), Tile(64, 128, 256, 2, HopperKeys())),
]


@pytest.mark.parametrize("tile", STRAIGHT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_kernels_drop_the_pairs_of_the_reference(tile, dtype, chosen_tiles):
    q_tile, kv_tile, threads = tile
    chosen_tiles.update({name: Tile(q_tile, kv_tile, threads, 0) for name in ("forward", "backward")})
    engine = AttentionEngine(mask_mod=causal, dropout_p=P, backend="interpret")
    forward, backward = pairs_that_met_values(engine, 2, 3, 75, 80, dtype)
    places = torch.arange(75)
    wanted = kept_pairs(2, 3, 75, 75) & (places[:, None] >= places)
    assert torch.equal(forward, wanted)
    assert torch.equal(backward, wanted)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9985])
def test_kernels_drop_as_many_as_the_reference(p):
    """Bounds whose first byte is 0, whose last three are, and whose first is the greatest."""
    engine = AttentionEngine(dropout_p=p, backend="interpret")
    forward, _ = pairs_that_met_values(engine, 1, 2, 90, 96, torch.float32)
    assert torch.equal(forward, kept_pairs(1, 2, 90, 90, p))


@pytest.mark.parametrize(("dim", "forward_tile", "backward_tile"), HOPPER, ids=["256", "128", "64"])
def test_hand_placed_kernels_drop_the_pairs_of_the_reference(dim, forward_tile, backward_tile, chosen_tiles):
    chosen_tiles.update(forward=forward_tile, backward=backward_tile)
    engine = AttentionEngine(dropout_p=P, backend="interpret")
    forward, backward = pairs_that_met_values(engine, 1, 2, 140, dim, torch.float16)
    assert torch.equal(forward, kept_pairs(1, 2, 140, 140))
    assert torch.equal(backward, kept_pairs(1, 2, 140, 140))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_give_the_outputs_and_gradients_of_the_reference(dtype, deterministic):
    """Grouped heads, tails, a bias of pairs, which another kernel makes the gradient of."""
    axes = {"bias": (1, "heads", "seq_len", "seq_len_kv")}
    options = {"score_mod": lambda s, custom, b, h, i, j: s * 0.25 + custom["bias"], "dropout_p": P}
    inputs = (*qkv(37, 45, dtype=dtype), torch.randn(1, 4, 37, 45, dtype=dtype).requires_grad_())
    engine = build(axes, dtype=dtype, deterministic=deterministic, **options)
    found = results(engine, *inputs, dropout_seed=SEED)
    reference = build(axes, dtype=dtype, backend="reference", **options)
    close(found, results(reference, *exactly(inputs), dropout_seed=SEED), 2 * CLOSE[dtype])


@pytest.mark.parametrize("online_func", [OnlineSigmoid, OnlineRetention], ids=lambda f: f.__name__)
def test_other_rows_on_the_interpreter(online_func):
    inputs = qkv(33)
    found = results(dropout("interpret", online_func=online_func()), *inputs, dropout_seed=SEED)
    close(found, results(dropout(online_func=online_func()), *exactly(inputs), dropout_seed=SEED), CLOSE[torch.float32])


def test_layout_dtype_head_dims_and_program_change_no_pair():
    kept = kept_pairs(1, 2, 20, 20)
    for dim, dtype in ((8, torch.float32), (20, torch.float64)):
        q, k = torch.zeros(2, 1, 2, 20, dim, dtype=dtype)
        v = torch.eye(20, dtype=dtype).expand(1, 2, 20, 20)
        for online in (OnlineSoftmax(), OnlineSigmoid()):
            engine = AttentionEngine(online_func=online, layout="bhsd", backend="reference", dropout_p=P)
            assert torch.equal(engine(q, k, v, dropout_seed=SEED) != 0, kept)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_packed_sequences_have_the_pairs_of_a_batch(backend):
    """Of queries at the end of longer keys too, whose places begin where those of other sequences don't."""
    for queries, keys in ((21, 21), (13, 30)):
        inputs = qkv(queries, keys, batch=3)
        engine, reference = (AttentionEngine(mask_mod=causal, backend=b, dropout_p=P) for b in (backend, "reference"))
        rows = [t.flatten(0, 1).detach().requires_grad_() for t in inputs]
        starts = [torch.arange(4, dtype=torch.int32) * n for n in (queries, keys)]
        packed = engine(*rows, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], dropout_seed=SEED)
        whole = [torch.zeros(3, keys, *t.shape[2:]) for t in inputs[:1]] + [t.detach() for t in inputs[1:]]
        whole[0][:, keys - queries :] = inputs[0].detach()  # query n stands at keys - queries + n
        whole = [t.requires_grad_() for t in whole]
        batched = reference(*whole, dropout_seed=SEED)[:, keys - queries :]
        gradients = torch.autograd.grad(batched.sin().sum(), whole)
        wanted = [batched.flatten(0, 1), gradients[0][:, keys - queries :].flatten(0, 1)]
        wanted += [g.flatten(0, 1) for g in gradients[1:]]
        close([packed, *torch.autograd.grad(packed.sin().sum(), rows)], wanted, 2e-5)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_packed_calls_that_were_seen_heed_another_probability(backend):
    rows = [t.detach() for t in torch.randn(3, 12, 2, 16)]
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    engine, other = (AttentionEngine(backend=backend, dropout_p=p) for p in (P, 0.6))
    before = [engine(*rows, cu_seqlens_q=starts, dropout_seed=SEED) for _ in range(2)]
    engine.dropout_p = 0.6
    after = engine(*rows, cu_seqlens_q=starts, dropout_seed=SEED)
    assert torch.equal(*before) and not torch.equal(after, before[0])
    assert torch.equal(after, other(*rows, cu_seqlens_q=starts, dropout_seed=SEED))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_a_part_of_an_attention_has_the_pairs_of_the_whole(backend):
    q, k, v = qkv(29, batch=2)
    engine = AttentionEngine(mask_mod=causal, backend=backend, dropout_p=P)
    whole = AttentionEngine(mask_mod=causal, backend="reference", dropout_p=P)(q, k, v, dropout_seed=SEED)
    starts = torch.tensor([[1, 0, 11, 0]], dtype=torch.int32)
    part = Portion(starts, ("batch", "seq_len"), {"batch": 2, "seq_len": 29})
    found = call_portion(engine, part, q[1:, 11:23], k[1:], v[1:], [], dropout_seed=SEED)
    close([found], [whole[1:, 11:23]], 2e-5)
    wanted = torch.autograd.grad(whole[1:, 11:23].sin().sum(), (k, v))
    close(list(torch.autograd.grad(found.sin().sum(), (k, v))), list(wanted), 2e-5)


def test_values_wider_than_a_kernel_have_the_pairs_of_their_first_columns():
    q, k = torch.randn(2, 1, 9, 1, 16)
    v = torch.randn(1, 9, 1, 600)
    ours = AttentionEngine(dropout_p=P, backend="interpret")(q, k, v, dropout_seed=SEED)
    close([ours], [AttentionEngine(dropout_p=P, backend="reference")(q, k, v, dropout_seed=SEED)], 2e-5)


def test_rows_that_are_returned_know_all_pairs():
    inputs = qkv()
    lse = dropout()(*inputs, dropout_seed=SEED, return_rowscales=True)[1]["lse"]
    assert torch.equal(lse, build(backend="reference")(*inputs, return_rowscales=True)[1]["lse"])


# ---- when, and by which seed


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_nothing_is_dropped_in_eval_mode_nor_at_0(backend):
    inputs = qkv(9)
    plain = results(build(backend=backend), *inputs)
    before = torch.get_rng_state()
    same(results(dropout(backend).eval(), *inputs), plain)
    same(results(dropout(backend).eval(), *inputs, dropout_seed=3), plain)
    same(results(dropout(backend, p=0.0), *inputs), plain)
    assert torch.equal(torch.get_rng_state(), before)
    engine = dropout(backend)
    changed = engine(*inputs)
    assert not torch.equal(changed, plain[0])
    same(results(engine.eval(), *inputs), plain)
    assert not torch.equal(engine.train()(*inputs), plain[0])


def test_an_engine_without_dropout_runs_the_kernels_that_it_ran():
    q, k, v = qkv(9)
    engines = [build(), dropout("interpret", p=0.0), dropout("interpret").eval()]
    for engine in engines:
        engine(q, k, v)
    assert len({key for engine in engines for key in engine._keys.values()}) == 1


def test_manual_seed_repeats_a_run_and_calls_differ():
    engine, inputs = dropout(), qkv()
    torch.manual_seed(7)
    first, second = engine(*inputs), engine(*inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    same([engine(*inputs), engine(*inputs)], [first, second])


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_seeds_are_integers_or_tensors_of_one(backend):
    engine, inputs = dropout(backend), qkv(9)
    found = engine(*inputs, dropout_seed=5)
    for seed in (torch.tensor(5), torch.tensor([5], dtype=torch.int32), torch.tensor([[5]])):
        assert torch.equal(engine(*inputs, dropout_seed=seed), found)
    for seed in (0, 6, 2**32 + 5, 2**63 - 1):
        assert not torch.equal(engine(*inputs, dropout_seed=seed), found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_pairs(reentrant):
    engine, inputs = dropout(), qkv()
    torch.manual_seed(3)
    o = engine(*inputs)
    wanted = torch.autograd.grad(o.sin().sum(), inputs)
    torch.manual_seed(3)
    again = checkpoint(lambda *given: engine(*given), *inputs, use_reentrant=reentrant)
    again.sin().sum().backward()
    same([again, *(t.grad for t in inputs)], [o, *wanted])


def test_the_probability_may_change_between_calls():
    engine, inputs = dropout(), qkv()
    first = engine(*inputs, dropout_seed=1)
    engine.dropout_p = 0.6
    assert torch.equal(engine(*inputs, dropout_seed=1), dropout(p=0.6)(*inputs, dropout_seed=1))
    engine.dropout_p = P
    assert torch.equal(engine(*inputs, dropout_seed=1), first)


def test_attention_in_one_call():
    q, k, v = torch.randn(3, 2, 9, 3, 8)
    engine = AttentionEngine(mask_mod=causal, dropout_p=P)
    found = attention(q, k, v, mask_mod=causal, dropout_p=P, dropout_seed=5)
    assert torch.equal(found, engine(q, k, v, dropout_seed=5))
    torch.manual_seed(1)
    drawn = attention(q, k, v, mask_mod=causal, dropout_p=P)
    torch.manual_seed(1)
    assert torch.equal(drawn, engine(q, k, v))
    assert torch.equal(attention(q, k, v, mask_mod=causal), engine.eval()(q, k, v))
    compiled = torch.compile(lambda q, seed: attention(q, k, v, mask_mod=causal, dropout_p=P, dropout_seed=seed),
                             fullgraph=True, backend="aot_eager")  # fmt: skip
    assert torch.equal(compiled(q, torch.tensor(5)), found)
    with pytest.raises(UnknownOption, match="dropout_p is"):
        attention(q, k, v, dropout_p=1.0)


# ---- torch


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_compiled_whole_with_gradients(backend):
    engine, inputs = dropout(backend), qkv(9)
    compiled = torch.compile(engine, fullgraph=True, backend="aot_eager")
    torch.manual_seed(2)
    drawn = compiled(*inputs)
    torch.manual_seed(2)
    assert torch.equal(drawn, engine(*inputs))
    seed = torch.tensor([5])
    o = compiled(*inputs, dropout_seed=seed)
    wanted = engine(*inputs, dropout_seed=5)
    same([o, *torch.autograd.grad(o.sin().sum(), inputs)], [wanted, *torch.autograd.grad(wanted.sin().sum(), inputs)])
    engine.eval()
    assert torch.equal(compiled(*inputs), engine(*inputs))


@pytest.mark.slow
def test_gradients_of_gradients():
    q, k, v = (t[:1, :5, :, :4].detach().double().requires_grad_() for t in qkv())
    engine = AttentionEngine(dropout_p=P, backend="reference")
    assert torch.autograd.gradgradcheck(lambda *given: engine(*given, dropout_seed=4), (q, k, v))


def test_under_torch_func():
    """vmap asks its caller what randomness means to it; each entry of a batch has the pairs of its own call."""
    engine = AttentionEngine(dropout_p=P, backend="reference")
    inputs = [torch.randn(3, 2, 7, 2, 8) for _ in range(3)]
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(engine)(*inputs)
    found = torch.vmap(lambda *given: engine(*given, dropout_seed=4))(*inputs)
    same([found], [torch.stack([engine(*each, dropout_seed=4) for each in zip(*inputs)])])
    torch.manual_seed(0)
    other = torch.vmap(engine, randomness="different")(*(t[:1].expand_as(t) for t in inputs))
    assert not torch.equal(other[0], other[1])
    gradient = torch.func.grad(lambda q: engine(q, inputs[1][0], inputs[2][0], dropout_seed=4).sin().sum())(
        inputs[0][0]
    )
    q = inputs[0][0].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(engine(q, inputs[1][0], inputs[2][0], dropout_seed=4).sin().sum(), q)
    same([gradient], [wanted])


def test_with_custom_inputs_blocks_and_captured_tensors():
    table = torch.randn(4, 64, requires_grad=True)
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.int8)
    blocks[0, 0, 1, 0] = 0

    def score(s, custom, b, h, i, j):
        return s * custom["heat"] + table[h, i - j + 31]

    inputs = (*qkv(25), torch.full((4,), 0.25, requires_grad=True))
    found = []
    for backend in ("interpret", "reference"):
        engine = build({"heat": ("heads",)}, score_mod=score, backend=backend, dropout_p=P, block_size=(16, 16))
        found.append(results(engine, *inputs, block_mask=blocks, dropout_seed=SEED))
        (gradient,) = torch.autograd.grad(engine(*inputs, block_mask=blocks, dropout_seed=SEED).sin().sum(), table)
        found[-1].append(gradient)
    close(*found, 2e-5)


def test_check_compares_with_the_same_pairs():
    q, k, v = qkv(20)
    report = dropout("interpret").check(q, k, v)
    assert report.ok, report
    assert "chance(_dropout_seed[0], b, h, q_idx, kv_idx)" in dropout().program()
    assert "chance" not in dropout().eval().program()


# ---- mistakes


@pytest.mark.parametrize("p", [True, "0.1", 1, 1.0, -0.1, float("nan"), None])
def test_a_probability_is_a_number_below_1(p):
    with pytest.raises(UnknownOption, match="dropout_p is"):
        AttentionEngine(dropout_p=p)


@pytest.mark.parametrize(
    "seed", [True, -1, 2**63, 1.5, "1", torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(True)], ids=str
)
def test_a_seed_is_one_integer(seed):
    for engine in (dropout(), dropout().eval(), build()):
        with pytest.raises(UnknownOption, match="dropout_seed is"):
            engine(*qkv(), dropout_seed=seed)


def test_a_seed_elsewhere_is_named():
    with pytest.raises(BadInput, match="dropout_seed"):
        dropout()(*qkv(), dropout_seed=torch.zeros(1, dtype=torch.int64, device="meta"))


def test_linear_attention_has_no_pairs_to_drop():
    from attention_engine import LinearAttentionEngine

    with pytest.raises(UnknownArgument, match="dropout_p"):
        LinearAttentionEngine((meta_tensor(1, 2, 8, 16),) * 3, dropout_p=0.1)
