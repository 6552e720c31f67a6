"""Small models of a few families beside their own attention; `python -m tests.integrations.families` runs all."""

import pytest
import torch

pytest.importorskip("transformers")

from attention_engine.errors import NotYetSupported
from attention_engine.integrations.transformers import attention_of, register, softmax_engine
from tests.integrations import families

OUTCOMES = {
    "llama": "right", "bert": "right", "t5": "right", "gemma2": "right", "gpt_oss": "right", "deepseek_v3": "right",
    "inkling2_text": "right", "bloom": "refused", "deberta": "own",
}  # fmt: skip


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_family_has_the_outcome_that_the_page_says(name):
    register(families.NAME)
    if name not in families.families():
        pytest.skip(f"this version of transformers has no {name}")
    kind, reason = families.outcome(*families.families()[name])
    assert kind == OUTCOMES[name], reason


def test_other_logits_and_lost_gradients_are_wrong():
    right = {"logits": torch.ones(3), "weight": torch.ones(2)}
    assert families.judged(right, dict(right))[0] == "right"
    assert families.judged(right, right | {"weight": torch.tensor([1.0, 1.01])}) == ("wrong", "1.0e-02 weight")
    assert families.judged(right, {"logits": torch.ones(3)})[0] == "wrong"


def test_a_tensor_that_engines_know_nothing_of_is_refused_by_name():
    attention, q = attention_of(softmax_engine), torch.randn(1, 2, 5, 16)
    options = {"position_ids": torch.arange(5)[None], "sliding_window": 4}
    attention(torch.nn.Identity(), q, q, q, None, **options)
    with pytest.raises(NotYetSupported, match=r"^block_indices: the model gives its attention a tensor"):
        attention(torch.nn.Identity(), q, q, q, None, block_indices=torch.zeros(1, 2, 5, 1), **options)


def test_a_sink_for_each_query_takes_part_in_its_row():
    q, k, v = torch.randn(3, 2, 4, 6, 16).unbind()
    sinks = torch.randn(2, 4, 6, 1, requires_grad=True)
    found, _ = attention_of(softmax_engine)(torch.nn.Identity(), q, k, v, None, is_causal=False, sinks=sinks)
    wide = [x.detach().double().requires_grad_(x is sinks) for x in (q, k, v, sinks)]
    scores = torch.cat([wide[0] @ wide[1].transpose(2, 3) * 0.25, wide[3]], -1)
    right = (scores.softmax(-1)[..., :-1] @ wide[2]).transpose(1, 2)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(right)
    (found,) = torch.autograd.grad((found * weight).sum(), sinks)
    (right,) = torch.autograd.grad((right * weight).sum(), wide[3])
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
