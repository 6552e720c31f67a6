"""Ten attentions that ranks share, each as an engine's arguments with its custom inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention_engine import library as lib

BATCH, LENGTH, DIM, DIM_V = 2, 53, 8, 6  # no length that ranks share evenly


@dataclass(frozen=True)
class Shared:
    """heads: of queries and keys. axes and custom: of the custom inputs, in order, whole."""

    heads: tuple[int, int]
    given: dict[str, Any]
    axes: dict[str, tuple] = field(default_factory=dict)
    custom: tuple[Tensor, ...] = ()


def decay(score, custom, b, h, q_idx, kv_idx):
    gamma = (1 - (-5.0 - h.to(float)).exp2()).log()
    return score * 0.35 * (gamma * (q_idx - kv_idx)).exp()


def two_biases(score, custom, b, h, q_idx, kv_idx):
    return score * 0.4 + custom["bias"] + custom["pair"]


def of_rows_and_keys(score, custom, b, h, q_idx, kv_idx):
    """A gate of rows, a bias of keys, and a read at another token."""
    return score * 0.35 * custom["gate"] + custom["keys"] + 0.1 * custom["near"][b, (kv_idx - 1).max(0)]


def attentions() -> dict[str, Shared]:
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 20 + [1] * 9 + [2] * 24, [0] * 3 + [1] * 40 + [2] * 10])

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64)

    scaled = lib.scale(0.35)
    return {
        "causal, grouped heads": Shared((4, 2), {"score_mod": scaled, "mask_mod": lib.causal}),
        "full, one key head": Shared((4, 1), {"score_mod": scaled}),
        "sigmoid, biases of heads and pairs": Shared(
            (4, 4), {"score_mod": two_biases, "mask_mod": lib.causal, "online_func": lib.OnlineSigmoid()},
            {"bias": ("heads",), "pair": (1, "heads", "seq_len", "seq_len_kv")},
            (draw(4), draw(1, 4, LENGTH, LENGTH)),
        ),
        "retention": Shared((4, 4), {"score_mod": decay, "mask_mod": lib.causal, "online_func": lib.OnlineRetention()}),
        "ALiBi, causal documents": Shared(
            (4, 2), {"score_mod": lib.alibi(0.35), "mask_mod": lib.and_masks(lib.causal, lib.document())},
            {"slopes": ("heads",), "documents": ("batch", "seq_len")}, (draw(4).abs(), documents),
        ),
        "sinks, window": Shared(
            (4, 2), {"score_mod": scaled, "mask_mod": lib.sliding_window(11), "online_func": lib.OnlineSoftmaxSink()},
            {"sinks": ("heads",)}, (draw(4),),
        ),
        "softmax one, relative bias, prefix": Shared(
            (4, 4), {"score_mod": lib.relative_bias("table", 9, 0.35), "mask_mod": lib.prefix_lm(7),
                     "online_func": lib.OnlineSoftmaxOne()},
            {"table": ("heads", 19)}, (draw(4, 19),),
        ),
        "gate of rows, bias of keys": Shared(
            (4, 2), {"score_mod": of_rows_and_keys, "mask_mod": lib.causal},
            {"gate": ("batch", "heads", "seq_len"), "keys": ("batch", "seq_len_kv"), "near": ("batch", "seq_len_kv")},
            (draw(BATCH, 4, LENGTH), draw(BATCH, LENGTH), draw(BATCH, LENGTH)),
        ),
        "ReLU, dilated": Shared(
            (4, 4), {"score_mod": scaled, "mask_mod": lib.dilated(3), "online_func": lib.OnlineRelu()}
        ),
        "softcap, padding": Shared(
            (4, 2), {"score_mod": lib.softcap(3.0, 0.4), "mask_mod": lib.padding()}, {"lengths": ("batch",)},
            (torch.tensor([53, 17]),),
        ),
    }  # fmt: skip
