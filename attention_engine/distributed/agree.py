"""Do all ranks ask for the same? Told before anything else is sent: else some would wait for what others never send."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from attention_engine.distributed.exchange import Ranks
from attention_engine.errors import RanksDisagree


def check_agreement(ranks: Ranks, facts: Mapping[str, object]) -> None:
    """RanksDisagree, on every rank, unless all of them have the same facts."""
    mine = {what: repr(value) for what, value in facts.items()}
    found: list[dict[str, str]] = [{} for _ in range(ranks.size)]
    dist.all_gather_object(found, mine, group=ranks.group)
    for what in mine:
        values = [each.get(what, "nothing") for each in found]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise RanksDisagree(
                f"ranks that share a sequence differ in {what}: rank 0 has {values[0]}, rank {other} has "
                f"{values[other]}.\n  Give all ranks the same engine, and their own parts of the same sequence."
            )
