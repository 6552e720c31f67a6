"""engine.explain(): the tile of each kernel, where it comes from, and what became of the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from attention_engine.arch import Arch
from attention_engine.errors import BackwardNotDerived
from attention_engine.ir.linear import LinearTile
from attention_engine.plan.forms import KernelName, Tile, words
from attention_engine.plan.targets import INTERPRETED, Target
from attention_engine.runtime.linear_tuning import LinearAsked
from attention_engine.runtime.tuning import Asked, Tuning, look_up
from attention_engine.tuner.defaults import default_tiles, where_from
from attention_engine.tuner.entries import Entry, name_of
from attention_engine.tuner.problems import gpu_name

FEW_KEY_HEADS = """\
backward, at these lengths: key heads are few, and blocks of all heads of a group would leave much of the GPU idle
  each block has one query head, and a kernel behind adds up their dK and dV"""


def explain(asked: Asked, tuning: Tuning) -> str:
    """A paragraph for each kernel of a problem."""
    _, queries, keys = asked.lengths
    head = f"{asked.problem.dtype}, {queries} queries and {keys} keys, on {_where(asked.target)}"
    trained = asked.trained
    if isinstance(trained.maths.refusal, BackwardNotDerived):
        lines = [head, f"no backward pass: {asked.maths.refusal}"]
        return "\n".join([*lines, *_of_kernels(asked, tuning, forward=True, backward=False)])
    if trained is asked:
        return "\n".join([head, *_of_kernels(asked, tuning, forward=True, backward=True)])
    return "\n".join([
        head, *_of_kernels(asked, tuning, forward=True, backward=False),
        "where gradients are wanted, torch makes the output of what these kernels make:",
        *_of_kernels(trained, tuning, forward=True, backward=True),
    ])  # fmt: skip


def _where(target: Target) -> str:
    if isinstance(target, Arch):
        return gpu_name(target)
    return (
        f"a CPU, which emulates the kernels of an {INTERPRETED.name}\n"
        "(those of another GPU: build the engine with device=attention_engine.arch.A100())"
    )


def _of_kernels(asked: Asked, tuning: Tuning, *, forward: bool, backward: bool) -> list[str]:
    tiles = default_tiles(asked.problem, asked.maths, asked.target, asked.hints)
    known = look_up(tuning, asked, tiles)
    names: list[KernelName] = [*(asked.kernels(False, tiles) if forward else [])]
    names += asked.kernels(True, tiles) if backward else []
    lines = []
    for name in names:
        runs = asked.as_planned(tiles, name, asked.tile(tiles, name))
        default = f"the default ({where_from(name, asked.problem, asked.maths, asked.target, asked.hints, runs)})"
        lines += _of_kernel(asked, tuning, name, tiles, known.get(name), default)
    if backward and asked.hints is not None:
        made = asked.kernels_as_known(tuning)
        lines += [FEW_KEY_HEADS] if made.of_call(*asked.hints).problem.copies > 1 else []
    return lines


def explain_linear(asked: LinearAsked, tuning: Tuning) -> str:
    """The same of a linear attention."""
    batch, length = asked.lengths
    lines = [f"{asked.problem.dtype}, a batch of {batch} and {length} tokens, on {_where(asked.target)}"]
    tiles = asked.default_tiles
    names = [n for backward in (False, True) for n in asked.kernels(backward, tiles)]
    if asked.problem.per_channel:
        why = "the default; this version tunes no linear attention with a decay for each channel"
        return "\n".join(
            [*lines, *(f"linear {n}: {spell(asked.tile(tiles, n))}\n  {why}" for n in dict.fromkeys(names))]
        )
    known = look_up(tuning, asked, tiles)
    for name in names:
        lines += _of_kernel(asked, tuning, name, tiles, known.get(name), "the default")
    return "\n".join(lines)


def _of_kernel(asked: Any, tuning: Tuning, name: Any, tiles: Any, entry: Entry | None, default: str) -> list[str]:
    key, source, tile = asked.key(name, tiles), default, asked.tile(tiles, name)
    if entry is not None:
        where, tile = tuning.file(name), entry.tile
        source = f"from {where.path}" if where is not None else "measured by this process"
        source += f": {entry.time_us} us, the best of {entry.tried}, {entry.when}"
    lines = [
        f"{key['kernel']}: {spell(asked.as_planned(tiles, name, tile))}",
        f"  {source}",
        f"  key {entry.name if entry else name_of(key)}",
    ]
    return lines + _others(asked, tuning, name, tiles)


def spell(tile: Tile | LinearTile) -> str:
    """A tile in words."""
    if isinstance(tile, LinearTile):
        return f"chunks of {tile.chunk}, {tile.inner} x {tile.outer}, {tile.threads} threads, {tile.stages} stages"
    head = f"{tile.q} queries x {tile.kv} keys, {tile.threads} threads, {tile.stages} stages"
    return ", ".join([head, *words(tile.form)])


def _others(asked: Any, tuning: Tuning, name: Any, tiles: Any) -> list[str]:
    space = asked.space(name, tiles)
    every, may = len(space.tiles) + len(space.rejected), len(space.tiles)
    lines = [f"  of {_spaced(every)} tiles {_spaced(may)} may run; the others were rejected before compiling:"]
    lines += [f"    {_spaced(count):>6}  {reason}" for reason, count in _alike([r for _, r in space.rejected])]
    result = tuning.results.get(name_of(asked.key(name, tiles)))
    if result is not None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in result.counts().items())
        lines.append(f"  tried by this process: {counts}")
        lines += [f"    {spell(t.tile)}: {t.outcome.value}: {t.message}" for t in result.trials if t.message]
    return lines


def _alike(reasons: Sequence[str]) -> list[tuple[str, int]]:
    """Reasons that differ in their numbers alone as one, with all of them, and how many tiles it is of; most first."""
    numbers: dict[str, list[tuple[int, ...]]] = {}
    for reason in reasons:
        numbers.setdefault(re.sub(r"\d+", "#", reason), []).append(tuple(map(int, re.findall(r"\d+", reason))))
    told = []
    for pattern, found in sorted(numbers.items(), key=lambda each: -len(each[1])):
        spelled = [_range(sorted(set(column))) for column in zip(*found, strict=True)]
        between = pattern.split("#")
        told.append((between[0] + "".join(n + rest for n, rest in zip(spelled, between[1:], strict=True)), len(found)))
    return told


def _range(values: list[int]) -> str:
    """Up to three numbers one by one, more by the first and the last."""
    if len(values) > 3:
        return f"{_spaced(values[0])} to {_spaced(values[-1])}"
    *first, last = map(_spaced, values)
    return f"{', '.join(first)} or {last}" if first else last


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")
