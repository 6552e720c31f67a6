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

    def entry(self, first: Any, j: Any, column: Any, keys: int) -> Any:
        """An entry of key first + j of a tile of so many keys; 0 where there is none: its index is then behind the
        last, where TileLang reads 0.

        A tile that lies in one page asks the table once. It is asked of keys that are there alone, with which it may
        end.
        """
        key = first + j
        gone = key >= self.stop
        if self.seen is not None:
            gone = T.Or(gone, T.Not(self.seen(key)))
        if self.table is None:
            return self.buffer[self.batch, key + _where(gone, self.buffer.shape[1]), self.head, column]
        held = first if self.page % keys == 0 else T.min(key, self.stop - 1)
        page = self.table[self.batch, held // self.page] + _where(gone, self.buffer.shape[0])
        return self.buffer[page, key % self.page, self.head, column]


def _where(condition: Any, number: Any) -> Any:
    """A number, or 0, without a branch."""
    return T.cast(condition, "int32") * number


@T.macro
def bring(source: Source, operand: Operand, first: Any) -> None:
    """A tile of keys from `first` on."""
    for j, d in T.Parallel(operand.shape[0], operand.shape[1]):
        operand.whole[j, d] = source.entry(first, j, d, operand.shape[0])
    split_operand(operand)
