"""Blocks of a grid that wait for one another, as Python threads of which one runs at a time.

A block runs to its end, or until none of its roles can run; then those that were stuck before it try again, and the
next one starts. So many at most are under way, as on a GPU that has so many places: where none of them can go on, that
is a deadlock, as it would be there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch

AT_ONCE = 8  # blocks that run at once

_here = threading.local()


class Block:
    """One of them; `body` is all that it does."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        self._error: BaseException | None = None
        self.over, self.moved, self.is_last_try = False, False, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        _here.block = self
        self._turn.acquire()
        try:
            with torch.no_grad():
                self._body()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._error = error
        self.over = True
        self._back.release()

    def go_on(self) -> bool:
        """Runs it on; did it do anything?"""
        self.moved = False
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self.moved or self.over

    def let_others_run(self) -> None:
        """Of a block that cannot go on, called by itself."""
        self._back.release()
        self._turn.acquire()


def block_here() -> Block | None:
    """The one that this thread is of, if blocks wait for one another."""
    return getattr(_here, "block", None)


def run_blocks(bodies: Iterable[Callable[[], None]]) -> None:
    """All blocks to their ends, in the order in which they start."""
    left, under_way = iter(bodies), list[Block]()
    while True:
        moved = [block.go_on() for block in under_way]
        under_way = [block for block in under_way if not block.over]
        body = next(left, None) if len(under_way) < AT_ONCE else None
        if body is not None:
            under_way.append(Block(body))
        elif not under_way:
            return
        elif not any(moved):
            under_way[0].is_last_try = True  # it tells what it waits for
            under_way[0].go_on()
