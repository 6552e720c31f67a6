"""Dropout as a user asks for it: the probability, and a seed for each call."""

from __future__ import annotations

import torch
from torch import Tensor

from attention_engine.errors import UnknownOption, as_given
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.chance import MOST_SEED
from attention_engine.passes.drop_weights import SEED

SPEC = CustomSpec(SEED, (1,))


def check_probability(probability: object) -> float:
    """UnknownOption unless it is a number from 0 up to, but not, 1."""
    number = isinstance(probability, (int, float)) and not isinstance(probability, bool)
    if not number or not 0 <= probability < 1:  # type: ignore[operator]
        raise UnknownOption(
            f"dropout_p is {as_given(probability)}. Give a number from 0 up to, but not including, 1: 0.1."
        )
    return float(probability)  # type: ignore[arg-type]


def check_seed(seed: object) -> None:
    """UnknownOption unless it is None, an integer of a seed's range, or a tensor of one integer."""
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.is_floating_point() or seed.is_complex() or seed.dtype is torch.bool:
            raise UnknownOption(
                f"dropout_seed is a tensor of {seed.dtype} and shape {tuple(seed.shape)}. Give one integer."
            )
    elif seed is not None and (
        isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)) or not 0 <= seed <= MOST_SEED
    ):
        raise UnknownOption(
            f"dropout_seed is {as_given(seed)}. Give an integer from 0 to 2^63 - 1, or a tensor of one."
        )


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The seed of a call, one int64; None: drawn by torch's generator of the device. The host waits for nothing."""
    check_seed(seed)
    if seed is None:
        return torch.randint(0, MOST_SEED, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.detach().reshape(1).to(torch.int64)
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def seed_of_call(probability: float, seed: int | Tensor | None, q: object) -> Tensor | None:
    """The seed of a call with these queries; None where nothing is dropped."""
    check_seed(seed)
    return seed_tensor(seed, q.device) if probability and isinstance(q, Tensor) else None
