"""What a tune file holds, and the one door through which it comes in: every entry is as kernels need it, or refused.

Here types and ranges are asked for, which are the same for all problems; what a tile must be for one problem and GPU is
asked when its kernel is made (tuner/space.py, tuner/linear_space.py).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attention_engine.errors import TuneFileUnreadable
from attention_engine.ir.linear import LinearTile
from attention_engine.plan.forms import Form, HopperForward, HopperKeys, Straight, Tile

SCHEMA = 1
Key = Mapping[str, Any]
AnyTile = Tile | LinearTile

# The numbers of tiles: least, most, and what divides them. Products want 16 rows, a warp has 32 threads, a block 1024.
ROWS, THREADS, STAGES = (16, 256, 16), (32, 1024, 32), (0, 8, 1)
NUMBERS: dict[type[AnyTile], dict[str, tuple[int, int, int]]] = {
    Tile: {"q": ROWS, "kv": ROWS, "threads": THREADS, "stages": STAGES},
    LinearTile: {
        "chunk": ROWS, "inner": (1, 1 << 16, 1), "outer": (16, 1 << 16, 16), "threads": THREADS, "stages": STAGES,
        "heads": (1, 1 << 16, 1), "blocks": (1, 32, 1),
    },
}  # fmt: skip


def name_of(key: Key) -> str:
    """A key as one text; equal keys, equal names."""
    return json.dumps(key, sort_keys=True)


@dataclass(frozen=True)
class Entry:
    """The best tile found for a problem. time_us: of one call; None where it was chosen without measuring."""

    key: Key
    tile: AnyTile
    time_us: float | None
    tried: int
    when: str

    @property
    def name(self) -> str:
        """The key as one text."""
        return name_of(self.key)

    def as_json(self) -> dict[str, Any]:
        """The entry as the file holds it."""
        tile = dataclasses.asdict(self.tile) if isinstance(self.tile, LinearTile) else _flat(self.tile)
        return {"key": dict(self.key), "tile": tile, "time_us": self.time_us, "tried": self.tried, "when": self.when}


class _Wrong(Exception):
    """What is wrong with an entry, in words that follow its name."""


def parse(text: str, where: str) -> list[Entry]:
    """The entries of a file's text. Raises TuneFileUnreadable, which names the file and the entry."""
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(where, f"it is not JSON ({error})") from error
    if not isinstance(held, dict) or not isinstance(held.get("entries"), list) or "schema" not in held:
        raise unreadable(where, 'it has no "schema" and "entries"')
    if held["schema"] != SCHEMA or isinstance(held["schema"], bool):
        raise TuneFileUnreadable(
            f"{where} has schema {held['schema']!r}, and this version reads schema {SCHEMA}.\n"
            "  It was left as it is. Name another file, or use the version of attention_engine that wrote it."
        )
    found = []
    for number, entry in enumerate(held["entries"], 1):
        try:
            found.append(_entry(entry))
        except _Wrong as wrong:
            raise refused(where, f"entry {number}{_called(entry)}", str(wrong)) from None
    return found


def unreadable(where: str, why: str) -> TuneFileUnreadable:
    """The error of a file that is none."""
    return TuneFileUnreadable(
        f"{where} is no tune file: {why}.\n  It was left as it is. Name another file, or move this one away."
    )


def refused(where: str, entry: str, why: str) -> TuneFileUnreadable:
    """The error of a file with an entry that no kernel can run with."""
    return TuneFileUnreadable(
        f"{entry} of {where}: {why}.\n  The file was left as it is. Mend or remove this entry, or name another file."
    )


def _called(entry: object) -> str:
    """An entry's problem in few words, as far as they can be read."""
    key = entry.get("key") if isinstance(entry, dict) else None
    words = [str(key[n]) for n in ("kernel", "dtype", "gpu", "arch") if n in key] if isinstance(key, dict) else []
    return f" ({', '.join(words)})" if words else ""


def _entry(held: object) -> Entry:
    if not isinstance(held, dict):
        raise _Wrong(f"it is {held!r}, not an object")
    for name in ("key", "tile", "time_us", "tried", "when"):
        if name not in held:
            raise _Wrong(f'it has no "{name}"')
    key, when = held["key"], held["when"]
    if not isinstance(key, dict):
        raise _Wrong(f"its key is {key!r}, not an object")
    if not isinstance(when, str):
        raise _Wrong(f"its when is {when!r}, not a text")
    tile = _tile(held["tile"], str(key.get("kernel", "")))
    if isinstance(tile, LinearTile) and key.get("chunk", tile.chunk) != tile.chunk:
        raise _Wrong(f"its tile has chunks of {tile.chunk}, and its key says {key['chunk']!r}")
    return Entry(key, tile, _time(held["time_us"]), _number("tried", held["tried"], (0, 1 << 53, 1)), when)


def _time(held: object) -> float | None:
    if held is None:
        return None
    if isinstance(held, bool) or not isinstance(held, int | float) or not math.isfinite(held) or held < 0:
        raise _Wrong(f"its time_us is {held!r}. It must be a number of microseconds, or null")
    return held


def _number(name: str, held: object, allowed: tuple[int, int, int]) -> int:
    least, most, step = allowed
    if isinstance(held, bool) or not isinstance(held, int):
        raise _Wrong(f"its {name} is {held!r}. It must be an integer")
    if not least <= held <= most or held % step:
        multiple = f"a multiple of {step}" if step > 1 else "an integer"
        raise _Wrong(f"its {name} is {held}. It must be {multiple} from {least} to {most}")
    return held


def _tile(held: object, kernel: str) -> AnyTile:
    """A tile of the kind that has these fields."""
    if not isinstance(held, dict):
        raise _Wrong(f"its tile is {held!r}, not an object")
    linear = kernel.startswith("linear ") or "chunk" in held
    numbers = NUMBERS[LinearTile if linear else Tile]
    fields = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(LinearTile)} if linear else FLAT
    for name in held:
        if name not in fields:
            raise _Wrong(f'its tile has a "{name}", which tiles of this version have not')
    for name, required in fields.items():
        if name not in held and required:
            raise _Wrong(f'its tile has no "{name}"')
    for name, value in held.items():
        if name in numbers:
            _number(f"tile's {name}", value, numbers[name])
        elif not isinstance(value, bool):
            raise _Wrong(f"its tile's {name} is {value!r}. It must be true or false")
    if linear:
        return LinearTile(**held)
    return Tile(held["q"], held["kv"], held["threads"], held["stages"], _form(held, kernel))


# A tile of attention in a file, by name: must it be there? A form is the flags that are true.
FLAGS = (
    "shared_weights", "specialised", "skewed_sums", "persistent", "lazy_rescale", "queries_ahead", "drops_apart",
    "woven",
)  # fmt: skip
FLAT = dict.fromkeys(NUMBERS[Tile], True) | dict.fromkeys(FLAGS, False)


def _flat(tile: Tile) -> dict[str, int | bool]:
    """A tile of attention as a file holds it."""
    numbers: dict[str, int | bool] = {name: getattr(tile, name) for name in NUMBERS[Tile]}
    flags = {field.name for field in dataclasses.fields(tile.form) if getattr(tile.form, field.name)}
    return numbers | {name: name in flags or (name == "specialised" and tile.hopper) for name in FLAGS}


def _form(held: Mapping[str, bool], kernel: str) -> Form:
    """The form that a file's flags say; "specialised" are those for Hopper."""
    kind: type[Form] = Straight
    if held.get("specialised"):
        kind = HopperForward if kernel == "forward" else HopperKeys
    flags = {name for name in FLAGS if held.get(name)} - {"specialised"}
    if odd := sorted(flags - {field.name for field in dataclasses.fields(kind)}):
        raise _Wrong(f"its tile's {odd[0]} is true, and no {kernel or 'such'} kernel of its form has that")
    try:
        return kind(**dict.fromkeys(flags, True))
    except ValueError as error:
        raise _Wrong(f"its tile is none: {error}") from None
