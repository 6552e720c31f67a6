"""Masks as models and users give them, tensors over pairs too, and what a model asks of its attention besides."""

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402 - after the look whether it is there

from attention_engine import AttentionEngine  # noqa: E402
from attention_engine.errors import AttentionOutOfReach, NotYetSupported  # noqa: E402
from attention_engine.integrations.masks import Band, Mask, make_mask  # noqa: E402
from attention_engine.integrations.transformers import attention_of, register, softmax_engine  # noqa: E402


def interpreted(qkv_meta, layer):
    return AttentionEngine(qkv_meta, layer.custom_io, layer.score_mod, layer.mask_mod, layer.online_func,
                           layout="bhsd", backend="interpret")  # fmt: skip


register("attention_engine")
register("interpreted", interpreted)
ATTENTIONS = {"reference": attention_of(softmax_engine), "interpret": attention_of(interpreted)}
B, H, Q, K, D = 2, 4, 5, 9, 16
LEAST = torch.finfo(torch.float32).min
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
ROPE = {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "bos_token_id": 1, "pad_token_id": 0,
        "eos_token_id": None}  # fmt: skip


def qkv(lengths=(Q, K), heads_kv=2):
    torch.manual_seed(0)
    sizes = [(B, H, lengths[0], D), (B, heads_kv, lengths[1], D), (B, heads_kv, lengths[1], D)]
    return [torch.randn(s, requires_grad=True) for s in sizes]


def outputs_and_gradients(run, inputs):
    out = run(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def plain(q, k, v, mask):
    """Softmax attention in float64, as eager models have it: what the mask says is added to scores."""
    k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * D**-0.5
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf)
    return ((scores + mask).softmax(-1) @ v).transpose(1, 2)


def hold_against_plain(attention, mask, learned=False, bound=2e-5):
    tensors = [*qkv(), mask]
    if learned:
        mask.requires_grad_()

    def ours(q, k, v, mask=mask):
        return attention(torch.nn.Module(), q, k, v, mask)[0]

    exact = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in tensors]
    asked = 4 if learned else 3
    right = outputs_and_gradients(lambda *t: plain(*t[:3], exact[3] if len(t) == 3 else t[3]), exact[:asked])
    for a, b in zip(outputs_and_gradients(ours, tensors[:asked]), right, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=bound, rtol=bound)


SHAPES = [(B, 1, 1, K), (1, 1, Q, K), (B, H, Q, K), (B, 1, Q, K), (1, H, 1, K), (1, 1, 1, K), (B, 1, Q, 1), (Q, K)]


CASES = [("reference", s) for s in SHAPES] + [
    ("interpret", SHAPES[0]), pytest.param("interpret", SHAPES[4], marks=pytest.mark.slow)
]  # fmt: skip


@pytest.mark.parametrize(("backend", "shape"), CASES, ids=str)
def test_masks_of_every_shape_are_broadcast(backend, shape):
    torch.manual_seed(1)
    keep = torch.rand(shape) > 0.4
    keep[..., 0] = True  # in every row a pair
    hold_against_plain(ATTENTIONS[backend], keep)
    number = torch.randn(shape)
    hold_against_plain(ATTENTIONS[backend], number.masked_fill(~keep, LEAST))
    hold_against_plain(ATTENTIONS[backend], number, learned=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_mask_may_have_another_dtype_than_the_model(dtype):
    torch.manual_seed(1)
    for backend in ("reference", "interpret") if dtype is torch.float64 else ("reference",):
        hold_against_plain(ATTENTIONS[backend], torch.randn(B, 1, Q, K).to(dtype))


@pytest.mark.parametrize("learned", [False, True], ids=["given", "learned"])
@pytest.mark.parametrize("backend", ATTENTIONS)
def test_pairs_of_a_row_of_least_numbers_share_alike_and_pass_gradients_on(backend, learned):
    torch.manual_seed(1)
    mask = torch.randn(B, 1, Q, K)
    mask[0, 0, :2] = LEAST  # left padding
    mask[0, 0, 1, 3:] = -torch.inf  # only three of them share
    mask[1, 0, :, 4:] = LEAST
    hold_against_plain(ATTENTIONS[backend], mask, learned)


@pytest.mark.parametrize("backend", ATTENTIONS)
def test_a_row_of_nothing_but_infinities_keeps_nothing(backend):
    mask = torch.zeros(B, 1, Q, K)
    mask[0, 0, 1] = -torch.inf
    q, k, v = qkv()
    out, *gradients = outputs_and_gradients(lambda *t: ATTENTIONS[backend](torch.nn.Module(), *t, mask)[0], [q, k, v])
    assert (out[0, 1] == 0).all() and (gradients[0][0, :, 1] == 0).all()
    assert all(t.isfinite().all() for t in (out, *gradients))


def test_nan_in_a_mask_shows():
    mask = torch.zeros(B, 1, Q, K)
    mask[0, 0, 1, 2] = torch.nan
    out = ATTENTIONS["reference"](torch.nn.Module(), *qkv(), mask)[0]
    assert out[0, 1].isnan().all() and out.isnan().sum() == H * D


@pytest.mark.parametrize("attention", ["attention_engine", "interpreted"])
def test_left_padding_by_a_float_mask_is_as_in_eager_models(attention):
    """Queries that keep nothing have labels too: the loss reads the token before the first label."""
    ids = torch.arange(3, 13)[None]
    mask = torch.ones(10, 10).tril().bool()
    mask[:, :3] = False
    found = []
    for name in ("eager", attention):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**SIZES | ROPE), attn_implementation=name
        )
        loss = model(ids, attention_mask=torch.where(mask, 0.0, LEAST)[None, None], labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4)


def test_an_integer_mask_is_refused():
    with pytest.raises(NotYetSupported) as caught:
        ATTENTIONS["reference"](torch.nn.Module(), *qkv(), torch.ones(B, 1, Q, K, dtype=torch.long))
    assert str(caught.value) == (
        "an attention mask is torch.int64. Give bool, True where a pair is kept, or a floating one."
    )


def model_of(name, attention, **more):
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**SIZES | ROPE | more)
    return getattr(transformers, name + "ForCausalLM")._from_config(config, attn_implementation=attention).eval()


WINDOWED = ("Gemma2", {"sliding_window": 5})


@pytest.mark.parametrize("cache", ["dynamic", "static", "hybrid"])
@pytest.mark.parametrize(("name", "more"), [("Llama", {}), WINDOWED], ids=["whole", "windows"])
def test_generation_with_any_cache_says_the_same(name, more, cache):
    if cache == "hybrid" and name == "Llama":
        pytest.skip("has no windows")
    ids = torch.randint(1, 64, (2, 9))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    eager = model_of(name, "eager", **more).generate(ids, attention_mask=padding, **options)
    assert torch.equal(
        model_of(name, "attention_engine", **more).generate(ids, attention_mask=padding, **options), eager
    )


@pytest.mark.parametrize("backend", ["attention_engine", "interpreted"])
def test_chunks_of_a_prompt_give_what_the_whole_gives(backend):
    ids = torch.randint(1, 64, (2, 12))
    whole = model_of("Llama", "eager")(ids).logits
    model, cache, found = model_of("Llama", backend), transformers.DynamicCache(), []
    for chunk in ids.split(5, 1):
        found.append(model(chunk, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", [
    "padded", "windows", "static",
    *(pytest.param(case, marks=pytest.mark.slow) for case in ("packed", "bool", "float")),
])  # fmt: skip
def test_a_model_compiles_as_one_graph(case):
    """Nothing ran before: engines are built while torch.compile traces."""
    ids = torch.randint(1, 64, (1, 12))
    causal = torch.ones(12, 12).tril().bool()[None, None]
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    options = {
        "packed": {"position_ids": torch.arange(12)[None] % 7, "use_cache": False}, "bool": {"attention_mask": causal},
        "float": {"attention_mask": torch.where(causal, 0.0, LEAST)},
    }.get(case, {"attention_mask": padding})  # fmt: skip
    name, more = WINDOWED if case == "windows" else ("Llama", {})
    register("compiled")  # a name of its own: no engine is built yet
    uncompiled = "sdpa" if case == "bool" else "eager"  # which would add a bool mask
    right, model = (model_of(name, attention, **more) for attention in (uncompiled, "compiled"))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    if case == "static":
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
        said = [m.generate(ids, attention_mask=padding, max_new_tokens=3, do_sample=False,
                           cache_implementation="static") for m in (right, model)]  # fmt: skip
        assert torch.equal(*said)
    else:
        real = slice(3, None)  # padded queries are nobody's
        logits, eager = compiled(ids, **options).logits[:, real], right(ids, **options).logits[:, real]
        torch.testing.assert_close(logits, eager, atol=1e-5, rtol=1e-4)


def test_lengths_may_be_dynamic_in_a_compiled_model():
    model = model_of("Llama", "attention_engine")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (9, 17):
        ids = torch.randint(1, 64, (2, length))
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-4)


def test_checkpoints_and_autocast_are_as_with_sdpa():
    ids, found = torch.randint(1, 64, (2, 12)), []
    for name in ("sdpa", "attention_engine"):
        model = model_of("Llama", name).train()
        model.activation_checkpointing_enable()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for sdpa, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, sdpa, atol=2e-3, rtol=2e-2)


def test_position_biases_of_t5_learn():
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    ids, found = torch.randint(1, 64, (2, 9)), []
    padding = torch.ones_like(ids)
    padding[0, -3:] = 0
    for name in ("eager", "attention_engine"):
        torch.manual_seed(0)
        config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation=name)
        loss = model(ids, attention_mask=padding, labels=ids).loss
        loss.backward()
        learned = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
        found.append((loss.detach(), learned, model.decoder.block[0].layer[0].SelfAttention.q.weight.grad))
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-4)


def test_a_model_that_takes_true_for_a_pair_left_out_is_refused():
    config = transformers.MptConfig(vocab_size=64, d_model=32, n_heads=2, n_layers=1)
    model = transformers.MptForCausalLM._from_config(config, attn_implementation="attention_engine")
    with pytest.raises(AttentionOutOfReach, match="mpt"):
        model(torch.randint(64, (1, 6)))


def test_a_model_with_an_attention_of_its_own_is_refused_by_name():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="attention_engine")
    with pytest.raises(AttentionOutOfReach) as caught:
        model(torch.randint(64, (1, 6)))
    assert str(caught.value) == (
        "the attention of this model (bloom) is code of its own, which adds the mask to its scores. "
        "transformers puts no other in its place.\n"
        '  Use attn_implementation="eager", or a model of another family (docs/transformers.md says which).'
    )


def test_a_mask_is_the_tensor_that_sdpa_gets_to_those_who_look_inside():
    padding = torch.tensor([[False, True, True, True, True], [True] * 5])
    window = masking_utils.sliding_window_causal_mask_function(3)
    for function in (masking_utils.causal_mask_function, window, masking_utils.bidirectional_mask_function):
        given = {"batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2, "mask_function": function,
                 "attention_mask": padding, "allow_is_causal_skip": False}  # fmt: skip
        mask, dense = make_mask(**given), masking_utils.sdpa_mask(**given)
        assert mask.pairs is None and mask.shape == dense.shape and mask.ndim == 4 and mask.dtype is torch.bool
        assert torch.equal(mask.dense(), dense) and torch.equal((~mask[:, :, 1:]).dense(), ~dense[:, :, 1:])
        assert torch.equal(torch.where(mask, 0.0, 1.0), torch.where(dense, 0.0, 1.0))
        assert torch.equal((mask & dense).dense(), dense) and torch.equal((mask == 0).dense(), ~dense)
        misreadings = (
            lambda m: torch.zeros(5) + m, lambda m: m[..., :4] + 1, lambda m: m.to(torch.float32),
            lambda m: torch.mul(torch.zeros(5), m), lambda m: torch.zeros(5).masked_fill(m, 1.0),
            lambda m: m.expand(2, 4, 3, 5).float(),
        )  # fmt: skip
        for misread in misreadings:
            with pytest.raises(AttentionOutOfReach):
                misread(mask)


REFUSED = {
    "output_attentions": (True, 'output_attentions=True: engines keep no weights. Use attn_implementation="eager".'),
    "head_mask": (torch.ones(2), 'head_mask: engines have none. Use attn_implementation="eager".'),
    "cu_seq_lens_q": (
        torch.tensor([0, 5, 12], dtype=torch.int32),
        "cu_seq_lens_q: engines read packed sequences from position_ids. Give those, and use_cache=False.",
    ),
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_engines_do_not_give_is_refused_by_name(option):
    value, message = REFUSED[option]
    with pytest.raises(NotYetSupported) as caught:
        model_of("Llama", "attention_engine")(torch.randint(1, 64, (1, 12)), **{option: value})
    assert str(caught.value) == message


def test_keys_of_one_batch_serve_all_queries():
    q, k, v = (t[:1] if n else t for n, t in enumerate(qkv()))
    found = [outputs_and_gradients(lambda *t, f=f: f(*t), [x.detach().clone().requires_grad_() for x in (q, k, v)])
             for f in (lambda *t: ATTENTIONS["reference"](torch.nn.Module(), *t, Mask(Band()))[0],
                       lambda *t: F.scaled_dot_product_attention(*t, enable_gqa=True).transpose(1, 2))]  # fmt: skip
    for ours, torchs in zip(*found, strict=True):
        torch.testing.assert_close(ours, torchs, atol=1e-5, rtol=1e-4)
