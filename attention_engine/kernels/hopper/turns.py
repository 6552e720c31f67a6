"""Keeps the warpgroups of a block apart, so that one's products run with another's exponentials.

Groups that start together wait for the same unit of the SM at the same time, and nothing else would part them: what
runs together stays together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tilelang.language as T

from attention_engine.kernels.warps import GROUP, TURN


@dataclass(frozen=True)
class Turns:
    """How so many warpgroups are kept apart: they take turns with the products of a step (in_turn), or the second of
    two starts apart; one is alone.

    All computing threads call each method. items_before: how many items their block has done.
    """

    groups: int
    in_turn: bool

    def begin(self, thread: Any) -> None:
        """The first group may start at once."""
        if self.in_turn:
            let_first_begin(thread)

    def take(self, thread: Any) -> None:
        """Groups issue the products of a step one after another."""
        if self.in_turn:
            wait_for_turn(thread)

    def hand_on(self, thread: Any) -> None:
        """A group lets the next one issue its products."""
        if self.in_turn:
            tell_next(thread, self.groups)

    def start_apart(self, thread: Any, items_before: Any) -> None:
        """Without turns the second group starts when the first has weights. A block that gets no item at all has none,
        so that nobody may wait there: a list of packed sequences may be shorter than there are blocks."""
        if not self.in_turn and self.groups > 1:
            wait_for_first(thread, items_before)

    def let_second_start(self, thread: Any, items_before: Any) -> None:
        """The first group has weights, and lets the second start."""
        if not self.in_turn and self.groups > 1:
            tell_second(thread, items_before)


@T.macro
def let_first_begin(thread: Any) -> None:
    """Arrives for the group before the first."""
    if thread < 2 * GROUP:
        T.named_barrier_arrive(TURN, 2 * GROUP)


@T.macro
def wait_for_turn(thread: Any) -> None:
    """Each group waits for the one before it."""
    T.sync_threads(TURN + thread // GROUP - 1, 2 * GROUP)


@T.macro
def tell_next(thread: Any, groups: int) -> None:
    """Each group arrives for the one after it."""
    T.named_barrier_arrive(TURN + thread // GROUP % groups, 2 * GROUP)


@T.macro
def wait_for_first(thread: Any, items_before: Any) -> None:
    """The second group waits, before its block's first item."""
    if T.And(items_before == 0, thread >= 2 * GROUP):
        T.sync_threads(TURN + thread // GROUP - 2, 2 * GROUP)


@T.macro
def tell_second(thread: Any, items_before: Any) -> None:
    """The first group arrives, in its block's first item."""
    if T.And(items_before == 0, thread < 2 * GROUP):
        T.named_barrier_arrive(TURN + thread // GROUP - 1, 2 * GROUP)
