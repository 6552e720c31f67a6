"""Where the keys and values of a request lie: one after the other, or in pages that a table names.

A tile's rows are read one by one, none of them behind the request's length: what lies there may hold anything, and 0
times NaN is NaN. A copy of a window would bring it. Where the loop is pipelined each row becomes asynchronous copies
that write zeros where nothing is to be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.common import Operand, split_operand
from attention_engine.kernels.splice import both


@dataclass(frozen=True)
class Source:
    """The keys, or the values, of one request and head. table: of its pages; None: they lie one after the other.

    stop: the number of keys that it has. seen: does a key, by its place, take part? None: all do.
    """

    buffer: Any
    table: Any
    batch: Any
    head: Any
    stop: Any
    page: int
    seen: Callable[[Any], Any] | None = None

    def entry(self, key: Any, column: Any) -> Any:
        """An entry of a key; 0 where there is none: its index is then behind the last, where TileLang reads 0."""
        asked = key < self.stop
        if self.seen is not None:
            asked = both(asked, self.seen(key))
        if self.table is None:
            return self.buffer[self.batch, T.if_then_else(asked, key, self.buffer.shape[1]), self.head, column]
        page = T.if_then_else(asked, self.table[self.batch, key // self.page], self.buffer.shape[0])
        return self.buffer[page, key % self.page, self.head, column]


@T.macro
def bring(source: Source, operand: Operand, first: Any) -> None:
    """A tile of keys from `first` on."""
    for j, d in T.Parallel(operand.shape[0], operand.shape[1]):
        operand.whole[j, d] = source.entry(first + j, d)
    split_operand(operand)
