"""Tries tiles within a budget: compiles several at once, measures one at a time, and keeps what became of each."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from attention_engine.errors import NothingRan
from attention_engine.tuner.entries import AnyTile

FINALISTS = 3  # measured again, in turns, so that a drifting clock meets all alike
ROUNDS = 3
WORTH = 0.99  # a tile replaces the default where it takes at most this part of its time: less is noise


class Outcome(Enum):
    """What became of a tile."""

    OK = "ok"
    REJECTED = "rejected"  # compiled, and it needs more than the GPU has, or spills
    WRONG = "wrong numbers"
    COMPILE_ERROR = "compile error"
    LAUNCH_ERROR = "launch error"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Trial:
    """A tile that was tried. time_us: of one call, where it is ok; message: why it is not."""

    tile: AnyTile
    outcome: Outcome
    time_us: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Budget:
    """How many tiles to try, and for how many seconds; the trial that is running then is ended."""

    max_trials: int = 24
    max_seconds: float = 75.0


class Bench(Protocol):
    """Where tiles are compiled and measured."""

    def compile(self, tiles: Sequence[AnyTile], seconds: float) -> Iterator[Trial]:
        """One trial for each tile as it is done; OK means compiled, not yet measured."""

    def measure(self, tile: AnyTile, seconds: float) -> Trial:
        """Checks the numbers of a compiled tile, then times it."""


@dataclass(frozen=True)
class Result:
    """Every trial, the best tile with its time, and the default's time where it ran."""

    trials: tuple[Trial, ...]
    best: Trial
    default_us: float | None

    def counts(self) -> dict[str, int]:
        """How many tiles came to which end."""
        return dict(Counter(t.outcome.value for t in self.trials))


def search(bench: Bench, tiles: Sequence[AnyTile], budget: Budget, what: str = "") -> Result:
    """The best of the tiles, which come in order of promise, the default first. Raises NothingRan."""
    tiles = tiles[: budget.max_trials]
    stop = time.monotonic() + budget.max_seconds
    trials: dict[AnyTile, Trial] = {}
    with progress(len(tiles), what) as bar, closing(_compiled(bench, tiles, stop)) as compiled:
        for made in compiled:
            left = stop - time.monotonic()
            trial = bench.measure(made.tile, max(left, 1.0)) if made.outcome is Outcome.OK else made
            trials[trial.tile] = trial
            bar.update(1)
            bar.set_postfix_str(_best_so_far(trials.values()))
            if left <= 0 and any(t.outcome is Outcome.OK for t in trials.values()):
                break
    default = tiles[0]
    right = sorted(_right(trials.values()), key=_time)
    if not right:
        lines = [f"  {t.tile}: {t.outcome.value}: {t.message}" for t in trials.values()]
        raise NothingRan("\n".join([f"none of {len(trials)} tiles ran and gave right numbers{what and ' for ' + what}:",
                                    *lines, "  Leave tune out: default tiles are used then."]))  # fmt: skip
    final = _finals(bench, right, trials.get(default), stop)
    best = min(final.values(), key=_time)
    default_trial = final.get(default)
    if default_trial is not None and _time(best) > WORTH * _time(default_trial):
        best = default_trial
    return Result(tuple(trials.values()), best, default_trial.time_us if default_trial else None)


def _compiled(bench: Bench, tiles: Sequence[AnyTile], stop: float) -> Generator[Trial, None, None]:
    yield from bench.compile(tiles, max(stop - time.monotonic(), 1.0))


def _right(trials: Iterable[Trial]) -> list[Trial]:
    return [t for t in trials if t.outcome is Outcome.OK]


def _time(trial: Trial) -> float:
    assert trial.time_us is not None, "only a tile that is ok has a time"
    return trial.time_us


def _best_so_far(trials: Iterable[Trial]) -> str:
    right = _right(trials)
    return f"best {min(map(_time, right)):.0f} us" if right else "none yet"


def _finals(bench: Bench, right: Sequence[Trial], default: Trial | None, stop: float) -> dict[AnyTile, Trial]:
    """The best few and the default, measured again in turns: each with the least of its times."""
    few = list(right[:FINALISTS])
    if default is not None and default.outcome is Outcome.OK and default not in few:
        few.append(default)
    times = {t.tile: [_time(t)] for t in few}
    for _ in range(ROUNDS if len(few) > 1 else 0):
        for tile in list(times):
            if time.monotonic() > stop:
                break
            again = bench.measure(tile, max(stop - time.monotonic(), 1.0))
            if again.outcome is Outcome.OK:
                times[tile].append(_time(again))
            elif again.outcome is not Outcome.TIMEOUT and len(times) > 1:
                del times[tile]  # right once and wrong once is wrong
    return {tile: Trial(tile, Outcome.OK, min(found)) for tile, found in times.items()}


def progress(total: int, what: str) -> Any:
    """A bar where there is a terminal to show it on."""
    from tqdm import tqdm

    return tqdm(total=total, desc=f"tuning {what}".strip(), unit="tile", disable=not sys.stderr.isatty(), leave=False)
