"""Tables of packed sequences that calls share: a model's layers, forward and backward, make them once a step.

Tables belong to the tensors of starts that they were made of, as long as those say the same: their version counter is
the one by which autograd notices that a tensor which it saved was written. So calls share tables where autograd
follows them, and nowhere else: a counter tells of writes by torch alone, not of those by other kernels, nor of those
of a graph that is replayed. A graph that is captured makes its own.

What kernels make of the tables alone (lists of tiles) belongs to the tables.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.ir.program import PLACES
from attention_engine.runtime.gpu import is_capturing, stream_of

Tables: TypeAlias = tuple[Tensor, ...]
Results: TypeAlias = dict[str, Tensor]
MOST = 4  # sets of starts whose tables are held: several kinds of attention in a model


@dataclass(frozen=True)
class _Shared:
    """Tables, the starts that they were made of, and what kernels made of them."""

    starts: tuple[weakref.ref[Tensor], ...]
    key: object
    tables: Tables
    made: dict[object, Results] = field(default_factory=dict)

    def is_of(self, starts: tuple[Tensor, ...], key: object) -> bool:
        """Are these the starts, and do they say what they said?"""
        same = len(starts) == len(self.starts) and all([a() is b for a, b in zip(self.starts, starts, strict=True)])
        return same and self.key == key


_LATEST: deque[_Shared] = deque(maxlen=MOST)


def _counts_writes(starts: Tensor) -> bool:
    """Would a write show in its version?"""
    return type(starts) is Tensor and starts.is_cuda and not starts.is_inference()


def share_tables(starts: tuple[Tensor, ...], rows: tuple[int, int], make: Callable[[], Tables]) -> Tables:
    """The tables of these starts, for so many rows of queries and of keys: those that a call before made, or new
    ones."""
    device = starts[0].device
    if is_compiling() or not all([_counts_writes(s) for s in starts]) or is_capturing(device):
        return make()
    key = rows, stream_of(device), *[(s._version, s.data_ptr()) for s in starts]
    for shared in _LATEST:
        if shared.is_of(starts, key):
            return shared.tables
    found = make()
    _LATEST.append(_Shared(tuple([weakref.ref(s) for s in starts]), key, found))
    return found


def share_results(memory: Mapping[str, Any], key: object, make: Callable[[], Results]) -> Results:
    """What a launch made of the tables in a call's memory, or makes now. It reads nothing else."""
    places = memory[f"custom_{PLACES}"]
    for shared in _LATEST:
        if any([table is places for table in shared.tables]):
            found = shared.made.get(key)
            if found is None:
                found = shared.made[key] = make()
            return found
    return make()
