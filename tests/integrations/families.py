"""Which of transformers' model families run on these engines, beside their own attention: one line for each.

    python -m tests.integrations.families            all that transformers can build from a small configuration
    python -m tests.integrations.families llama t5   these

A small model of each family is made, run with left padding and trained a step, with its eager attention and with
engines. Where they differ, both run in float64, so that no rounding sends a token to another expert, and engines beside
sdpa too, since an eager attention may have faults of its own. A family is "right" where logits and the gradient of each
parameter agree, "own" where it computes its attention in code of its own whatever it is told, "refused" where our error
names what it asks for, "not built" where the small configuration doesn't fit it (which says nothing of the family).
Anything else is a fault, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import collections
import copy
import inspect
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from attention_engine.errors import AttentionEngineError
from attention_engine.integrations.transformers import register

NAME = "attention_engine"
LENGTH, VOCABULARY = 12, 64
LARGEST = 20_000_000  # parameters: a family that stays larger has sizes by other names
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "dim": 64,
    "num_hidden_layers": 4, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 16, "d_kv": 16,
    "intermediate_size": 96, "d_ff": 96, "ffn_dim": 96, "n_inner": 96, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "hidden_dim": 96, "ffn_hidden_size": 96, "max_position_embeddings": 64, "n_positions": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    "sliding_window": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip
SILENT = ("dropout", "pdrop", "drop_rate", "layerdrop")  # parts of names of probabilities, which are set to 0


def families() -> dict[str, tuple[type, type]]:
    """The configuration and the model of each family that takes token ids."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_MASKED_LM_MAPPING,
    )
    found: dict[str, tuple[type, type]] = {}
    for mapping in mappings:
        for config in mapping:
            model = mapping[config]
            found.setdefault(config.model_type, (config, model[0] if isinstance(model, tuple) else model))
    return dict(sorted(found.items()))


def small(config_class: type) -> Any:
    """A configuration of few layers and channels, without dropout."""
    takes = inspect.signature(config_class).parameters
    defaults = config_class()
    names = {n for n in SMALL if n in takes or hasattr(defaults, n)}
    if "head_dim" not in takes:  # it is made of others
        names -= {"head_dim"}
    values = {n: SMALL[n] for n in names}
    if "kv_lora_rank" in names:  # latent keys are expanded to every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    config = config_class(**values)
    config.use_cache = False
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in SILENT):
            setattr(config, name, 0.0)
    return config


def results(model: torch.nn.Module) -> dict[str, Tensor]:
    """Logits where there are tokens, and the gradient of each parameter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids.flip(1)
    logits = model(**given).logits
    kept = logits if model.config.is_encoder_decoder else logits[mask.bool()]
    weight = torch.randn(kept.shape, generator=generator)
    model.zero_grad()
    (kept.float() * weight).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": kept.detach(), **gradients}


def outcome(config_class: type, model_class: type) -> tuple[str, str]:
    """What comes of a family, and why."""
    try:
        config = small(config_class)
        with torch.device("meta"):
            sketch = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
        size = sum(p.numel() for p in sketch.parameters())
        if size > LARGEST:
            return "not built", f"{size / 1e6:.0f} million parameters are left"
        torch.manual_seed(0)
        plain = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        expected = results(plain)
    except Exception as error:  # noqa: BLE001 - any of a hundred models may want other numbers
        return "not built", f"{type(error).__name__}: {error}".splitlines()[0][:100]
    if not all(bool(x.isfinite().all()) for x in expected.values()):
        return "not built", "its eager attention has values that are not finite"
    try:
        model = model_class._from_config(copy.deepcopy(config), attn_implementation=NAME).eval()
        model.load_state_dict(plain.state_dict())
        with counted() as calls:
            found = results(model)
    except AttentionEngineError as error:
        return "refused", f"{type(error).__name__}: {error}".splitlines()[0][:100]
    except (KeyError, ValueError) as error:
        if NAME in str(error):  # transformers' own answer to a model that takes no implementation from outside
            return "own", f"{type(error).__name__}: {error}".splitlines()[0][:100]
        raise
    if not calls:
        return "own", "asks for none"
    verdict = judged(expected, found)
    for attention in ("eager", "sdpa") if verdict[0] == "wrong" else ():
        if verdict[0] == "wrong" and (attention == "eager" or model_class._supports_sdpa):
            plain = model_class._from_config(copy.deepcopy(config), attn_implementation=attention).eval().double()
            plain.load_state_dict(model.state_dict())
            verdict = judged(results(plain), results(model.double()))
    return verdict


def judged(expected: dict[str, Tensor], found: dict[str, Tensor]) -> tuple[str, str]:
    """What came of it: "right", or "wrong" with the worst name."""
    lacking = expected.keys() ^ found.keys()
    if lacking:
        return "wrong", f"gradients of {sorted(lacking)[:3]} on one side alone"
    expected = {n: x for n, x in expected.items() if x.numel()}
    off = {n: float((found[n] - x).abs().max() / (x.abs().max() + 1e-3)) for n, x in expected.items()}
    worst = max(off, key=lambda n: off[n])
    return ("right" if off[worst] <= 1e-3 else "wrong"), f"{off[worst]:.1e} {worst}"


@contextmanager
def counted() -> Iterator[list[str]]:
    """A list that grows by one whenever an engine is called."""
    from transformers import AttentionInterface

    calls: list[str] = []
    functions = AttentionInterface._global_mapping
    attention = functions[NAME]

    def noted(*given: Any, **named: Any) -> Any:
        calls.append(NAME)
        return attention(*given, **named)

    functions[NAME] = noted
    try:
        yield calls
    finally:
        functions[NAME] = attention


def survey(chosen: list[str]) -> Iterator[tuple[str, str, str]]:
    """The name of each family, its outcome and the reason."""
    for name, (config_class, model_class) in families().items():
        if not chosen or name in chosen:
            try:
                yield name, *outcome(config_class, model_class)
            except Exception as error:  # noqa: BLE001 - it is what is looked for
                yield name, "fault", f"{type(error).__name__}: {error}".splitlines()[0][:200]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("tests.integrations.families", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; by default all")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    register(NAME)
    by_outcome: dict[str, list[str]] = collections.defaultdict(list)
    for name, kind, reason in survey(args.names):
        by_outcome[kind].append(name)
        print(f"{name:28} {kind:10} {reason}", flush=True)
    for kind, names in sorted(by_outcome.items()):
        print(f"\n{len(names)} {kind}: {', '.join(names)}")
    return 1 if {"wrong", "fault"} & by_outcome.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
