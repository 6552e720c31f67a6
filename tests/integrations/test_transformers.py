"""Hugging Face models with engines in place of their attention, beside the same models with eager attention."""

import itertools

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402 - after the look whether it is there
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from attention_engine import AttentionEngine  # noqa: E402
from attention_engine.integrations.transformers import Band, Layer, make_mask, register  # noqa: E402
from attention_engine.ir.chance import MOST_SEED, chance, threshold  # noqa: E402
from attention_engine.library import OnlineSigmoid  # noqa: E402

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
WINDOW = 5
BUILT: list[Layer] = []


def factory(backend):
    def make(qkv_meta, layer):
        BUILT.append(layer)
        return AttentionEngine(qkv_meta, layer.custom_io, layer.score_mod, layer.mask_mod, layer.online_func,
                               layout="bhsd", backend=backend)  # fmt: skip

    return make


def sdpa_with_sinks(module, query, key, value, attention_mask, scaling=None, s_aux=None, **options):
    """torch's own attention where a model has sinks: one more key whose score is the sink and whose value is 0."""
    groups = query.shape[1] // key.shape[1]
    key, value = (F.pad(t.repeat_interleave(groups, 1), (0, 0, 0, 1)) for t in (key, value))
    bias = torch.where(attention_mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    sinks = s_aux.to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    bias = torch.cat([bias.expand(*query.shape[:3], -1), sinks], -1)
    return F.scaled_dot_product_attention(query, key, value, bias, scale=scaling).transpose(1, 2).contiguous(), None


register("attention_engine")
register("interpreted", factory("interpret"))
register("counted", factory("reference"))
AttentionInterface.register("torchs_with_sinks", sdpa_with_sinks)
AttentionMaskInterface.register(
    "torchs_with_sinks",
    lambda **options: AttentionMaskInterface()["sdpa"](**{**options, "allow_is_causal_skip": False}),
)


def llama(attention):
    return LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation=attention)


def gpt_oss(attention):
    """Windows in every other layer, and sinks."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = GptOssConfig(**SMALL, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1,
                          rope_parameters=rope)  # fmt: skip
    model = GptOssForCausalLM._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    return model


def gemma(attention):
    config = Gemma2Config(**SMALL, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    return Gemma2ForCausalLM._from_config(config, attn_implementation=attention)


def build(make, attention, dtype=torch.float32):
    torch.manual_seed(0)
    return make(attention).to(dtype)


def batch(padding, length=21):
    """Tokens, which of them are real, and labels; some rows begin or end with padding."""
    torch.manual_seed(1)
    ids, real = torch.randint(1, 64, (3, length)), torch.ones(3, length, dtype=torch.long)
    if padding:
        real[0, :7], real[1, -2:] = 0, 0
    seen = real.bool() & F.pad(real[:, :-1], (1, 0), value=1).bool()  # no label is asked of a padded place
    return ids, real, ids.masked_fill(~seen, -100)


def logits_and_gradients(model, padding):
    ids, real, labels = batch(padding)
    out = model(ids, attention_mask=real if padding else None, labels=labels)
    out.loss.backward()
    return out.logits[real.bool()].detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


BESIDE = {"llama": (llama, "sdpa"), "gpt_oss": (gpt_oss, "torchs_with_sinks")}


CALLS = [*itertools.product(BESIDE, (torch.float32, torch.bfloat16), (False, True))]
FEW = (("llama", torch.float32, True), ("gpt_oss", torch.bfloat16, False))  # of the interpreter, in `make test`


@pytest.mark.parametrize(("attention", "name", "dtype", "padding"), [
    *(("attention_engine", *call) for call in CALLS), *(("interpreted", *call) for call in FEW),
    *(pytest.param("interpreted", *call, marks=pytest.mark.slow) for call in CALLS if call not in FEW),
], ids=str)  # fmt: skip
def test_logits_and_gradients_are_as_near_to_eager_as_sdpas(attention, name, dtype, padding, record_property):
    make, torchs = BESIDE[name]
    eager, eager_gradients = logits_and_gradients(build(make, "eager", dtype), padding)
    sdpa, sdpa_gradients = logits_and_gradients(build(make, torchs, dtype), padding)
    ours, gradients = logits_and_gradients(build(make, attention, dtype), padding)
    found, limit = (ours - eager).abs().max(), (sdpa - eager).abs().max()
    if limit == 0:  # with sinks in fp32 torch's runs eager's very operations: then a rounding of the last place or two
        limit = 2 * torch.finfo(dtype).eps * eager.abs().max()
    record_property("worst ratio", ("logits, against sdpa's", (found / limit).item(), f"{name} {dtype}", 1))
    assert found <= 2 * limit
    assert set(gradients) == set(eager_gradients) and sum("sinks" in n for n in gradients) in (0, 2)

    def farthest(each):
        return max((each[n] - g).float().norm() / g.float().norm().clamp_min(1e-6) for n, g in eager_gradients.items())

    rounding = 16 * torch.finfo(torch.float32).eps  # eager's own sums differ by it with the number of threads
    assert farthest(gradients) <= max(2 * farthest(sdpa_gradients), rounding)


@pytest.mark.parametrize("make", [llama, gpt_oss])
def test_twenty_steps_of_training_give_the_same_losses(make):
    def losses(attention):
        model = build(make, attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(20):
            ids, real, labels = batch(padding=step % 2 == 0)
            loss = model(ids, attention_mask=real, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.tensor(found)

    eager, ours = losses("eager"), losses("attention_engine")
    assert ours[-1] < 0.5 * ours[0]  # it learns
    torch.testing.assert_close(ours, eager, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("make", [llama, gpt_oss, gemma])
def test_generation_with_a_cache_gives_the_same_tokens(make):
    ids, real, _ = batch(padding=False, length=9)
    real[0, :3] = 0
    said = [
        build(make, attention).generate(ids, attention_mask=real, max_new_tokens=6, do_sample=False)
        for attention in ("eager", "attention_engine")
    ]
    assert said[0].shape == (3, 15) and torch.equal(*said)


def test_softcap_and_windows_are_the_models():
    (eager, _), (ours, _) = (logits_and_gradients(build(gemma, a), False) for a in ("eager", "attention_engine"))
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)


def test_an_encoder_sees_both_ways():
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    ids, real, _ = batch(padding=True)
    found = []
    for attention in ("eager", "attention_engine"):
        torch.manual_seed(0)
        model = BertModel._from_config(BertConfig(vocab_size=64, **sizes), attn_implementation=attention).eval()
        found.append(model(ids, attention_mask=real).last_hidden_state[real.bool()])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_packed_sequences_do_not_see_each_other():
    ids = batch(padding=False)[0][:1, :12]
    places = torch.cat([torch.arange(7), torch.arange(5)])[None]
    (eager, ours) = (build(llama, a)(ids, position_ids=places, use_cache=False).logits
                     for a in ("eager", "attention_engine"))  # fmt: skip
    torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)
    alone = build(llama, "attention_engine")(ids[:, 7:]).logits
    torch.testing.assert_close(ours[:, 7:], alone, atol=1e-5, rtol=1e-5)


def test_no_tensor_over_pairs_is_made_and_one_engine_serves_each_kind_of_layer():
    BUILT.clear()
    logits_and_gradients(build(gpt_oss, "counted"), padding=True)
    inputs = (("padding", ("batch", "seq_len_kv")), ("sinks", ("heads",)))
    windowed, whole = BUILT
    assert windowed == Layer(0.25, Band(0, WINDOW - 1), None, inputs)
    assert whole == Layer(0.25, Band(0), None, inputs)
    mask = make_mask(2, 1000, 1000, mask_function=transformers.masking_utils.causal_mask_function)
    assert (mask.band, mask.padding, mask.shift, mask.pairs) == (Band(0), None, 0, None)


def test_a_factory_may_bring_its_own_maths():
    def sigmoid(qkv_meta, layer):
        return AttentionEngine(qkv_meta, layer.custom_io, layer.score_mod, layer.mask_mod, OnlineSigmoid(),
                               layout="bhsd")  # fmt: skip

    register("sigmoid", sigmoid)
    ours, gradients = logits_and_gradients(build(llama, "sigmoid"), True)
    softmax, _ = logits_and_gradients(build(llama, "eager"), True)
    assert (ours - softmax).abs().max() > 1e-3 and all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("implementation", ["attention_engine", "interpreted"])
def test_a_model_trains_with_attention_dropout(implementation, monkeypatch):
    """Beside eager attention, whose weights are multiplied with the factors of the same seeds."""

    def dropout(weights, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return weights
        seed = torch.randint(0, MOST_SEED, (1,))
        axes = [torch.arange(n).view([-1 if a == place else 1 for a in range(4)])
                for place, n in enumerate(weights.shape)]  # fmt: skip
        return weights * (chance(seed, *axes) >= threshold(p)) / (1 - p)

    config = LlamaConfig(**SMALL, attention_dropout=0.3)
    tokens = batch(False)[0]
    losses, gradients = [], []
    monkeypatch.setattr(F, "dropout", dropout)
    for name in ("eager", implementation):
        torch.manual_seed(0)
        model = LlamaForCausalLM._from_config(config, attn_implementation=name).train()
        torch.manual_seed(5)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({n: p.grad for n, p in model.named_parameters()})
        assert not torch.equal(model(tokens, labels=tokens).loss, loss)
        model.eval()
        assert torch.equal(model(tokens).logits, model(tokens).logits)
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    for n, exact in gradients[0].items():
        torch.testing.assert_close(gradients[1][n], exact, atol=1e-5, rtol=1e-3, msg=n)
