"""Continuous batching of transformers with engines, beside generate with eager attention, a request at a time."""

import itertools
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching")

from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402 - after the look whether it is there

from attention_engine import AttentionEngine  # noqa: E402
from attention_engine.errors import NotYetSupported  # noqa: E402
from attention_engine.integrations import paged  # noqa: E402
from attention_engine.integrations.transformers import attention_of, continuous, softmax_engine  # noqa: E402
from tests.integrations.test_transformers import build, gemma, gpt_oss, llama  # noqa: E402

NEW = 8
HOW = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
FEW = (("interpreted", llama, 16), *(("attention_engine", *kind) for kind in ((llama, 16), (gpt_oss, 16), (gemma, 24))))
KINDS = [*itertools.product(("attention_engine", "interpreted"), (llama, gpt_oss, gemma), (16, 24))]


def prompts():
    torch.manual_seed(3)
    return [torch.randint(1, 64, (n,)).tolist() for n in (3, 40, 17, 1, 25)]


def said_in_one_batch(model, page):
    """Tokens by prompt; 48 tokens a step, so that some prompts are read in two of them, beside other requests."""
    config = ContinuousBatchingConfig(page_size=page, num_blocks=64, max_batch_tokens=48)
    found = model.generate_batch(prompts(), generation_config=HOW, continuous_batching_config=config)
    return {tuple(one.prompt_ids): one.generated_tokens for one in found.values()}


@pytest.mark.parametrize(("attention", "make", "page"), [
    kind if kind in FEW else pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS
])  # fmt: skip
def test_the_tokens_are_those_of_generate(attention, make, page, monkeypatch):
    eager = build(make, "eager").eval()
    expected = {
        tuple(ids): eager.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        .tolist()[0][len(ids):] for ids in prompts()
    }  # fmt: skip
    gathered, written = [], paged._written
    monkeypatch.setattr(paged, "_written", lambda cache, layer, *rest: gathered.append(layer)
                        or written(cache, layer, *rest))  # fmt: skip
    model = build(make, attention).eval()
    with continuous(model):
        assert said_in_one_batch(model, page) == expected
    assert model.config._attn_implementation == attention
    if make is llama and page == 16:
        assert gathered == [0, 1]  # a step of prompts alone; all others read pages


@pytest.mark.parametrize("attention", ["attention_engine", "interpreted"])
@pytest.mark.parametrize("make", [llama, gpt_oss])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_decoding_reads_the_keys_that_there_are(attention, make, cache, monkeypatch):
    """Each step by with_cache; padding, windows and sinks are those of eager attention."""
    calls, right = [], AttentionEngine.with_cache

    def counted(engine, q, k, *rest, kv_lengths, **named):
        calls.append((tuple(q.shape), k.shape[2], kv_lengths.tolist()))
        return right(engine, q, k, *rest, kv_lengths=kv_lengths, **named)

    monkeypatch.setattr(AttentionEngine, "with_cache", counted)
    torch.manual_seed(1)
    ids, real = torch.randint(1, 64, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    real[0, :3] = 0
    how = {"attention_mask": real, "max_new_tokens": 5, "do_sample": False, "cache_implementation": cache}
    eager = build(make, "eager").eval().generate(ids, **how)
    assert not calls
    assert torch.equal(build(make, attention).eval().generate(ids, **how), eager)
    assert len(calls) == 8 and all(q == (2, 4, 1, 16) for q, _, _ in calls)
    if make is llama:
        assert [lengths for _, _, lengths in calls] == [[n, n] for n in (10, 11, 12, 13) for _ in range(2)]
        assert cache == "dynamic" or {keys for _, keys, _ in calls} == {13}


def test_what_continuous_batching_has_no_place_for_is_refused():
    model = build(llama, "sdpa")
    with pytest.raises(NotYetSupported, match='attn_implementation="sdpa", which runs no engines'), continuous(model):
        pass
    q = torch.randn(1, 4, 3, 16)
    module, attend = SimpleNamespace(layer_idx=0), attention_of(softmax_engine)
    with pytest.raises(NotYetSupported, match="position biases"):
        attend(module, q, q, q, None, cache=object(), position_bias=torch.zeros(1, 4, 3, 3))
