"""Tune files: one readable JSON that holds many problems, each with the tile that was found for it.

    {"schema": 1, "entries": [
        {"key": {...}, "tile": {...}, "time_us": 812.4, "tried": 18, "when": "2026-01-31T12:00:00Z"}]}

A write takes the file's lock, reads it again, joins what is new, and puts a whole file in place by a rename; so many
processes may write one file. A file that can't be read is never written over.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock

from attention_engine.errors import TuneFileUnreadable
from attention_engine.ir.linear import LinearTile
from attention_engine.ir.problem import Tile

SCHEMA = 1
Key = Mapping[str, Any]


def now() -> str:
    """The time, as entries note it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def name_of(key: Key) -> str:
    """A key as one text; equal keys, equal names."""
    return json.dumps(key, sort_keys=True)


@dataclass(frozen=True)
class Entry:
    """The best tile found for a problem. time_us: of one call; None where it was chosen without measuring."""

    key: Key
    tile: Tile | LinearTile
    time_us: float | None
    tried: int
    when: str

    @property
    def name(self) -> str:
        """The key as one text."""
        return name_of(self.key)

    def as_json(self) -> dict[str, Any]:
        """The entry as the file holds it."""
        tile = dataclasses.asdict(self.tile)
        return {"key": dict(self.key), "tile": tile, "time_us": self.time_us, "tried": self.tried, "when": self.when}


def parse(text: str, where: str) -> list[Entry]:
    """The entries of a file's text. Raises TuneFileUnreadable."""
    try:
        held = json.loads(text)
    except ValueError as error:
        raise _unreadable(where, f"it is not JSON ({error})") from error
    if not isinstance(held, dict) or "entries" not in held or "schema" not in held:
        raise _unreadable(where, 'it has no "schema" and "entries"')
    if held["schema"] != SCHEMA:
        raise TuneFileUnreadable(
            f"{where} has schema {held['schema']!r}, and this version reads schema {SCHEMA}.\n"
            "  It was left as it is. Name another file, or use the version of attention_engine that wrote it."
        )
    try:
        return [
            Entry(dict(e["key"]), _tile(e["tile"]), e["time_us"], int(e["tried"]), str(e["when"]))
            for e in held["entries"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(where, f"an entry is not as it should be ({error})") from error


def _tile(fields: Mapping[str, Any]) -> Tile | LinearTile:
    """A tile of the kind that has these fields."""
    return LinearTile(**fields) if "chunk" in fields else Tile(**fields)


def _unreadable(where: str, why: str) -> TuneFileUnreadable:
    return TuneFileUnreadable(
        f"{where} is no tune file: {why}.\n  It was left as it is. Name another file, or move this one away."
    )


def join(*lists: Iterable[Entry]) -> list[Entry]:
    """All entries, one a key: the one noted last, of two noted at once the later listed."""
    found: dict[str, Entry] = {}
    for entry in (e for entries in lists for e in entries):
        held = found.get(entry.name)
        if held is None or entry.when >= held.when:
            found[entry.name] = entry
    return list(found.values())


class TuneFile:
    """A tune file, which need not exist yet: `TuneFile("mha.json").find(key)`, `.add([entry])`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._seen: tuple[tuple[int, int, int], dict[str, Entry]] | None = None

    def read(self) -> list[Entry]:
        """The entries; none where there is no file. Raises TuneFileUnreadable."""
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(str(self.path), f"it can't be read ({error})") from error
        return parse(text, str(self.path))

    def find(self, key: Key) -> Entry | None:
        """The entry of this key; the file is read again where it has changed."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self._seen is None or self._seen[0] != stamp:
            self._seen = (stamp, {e.name: e for e in self.read()})
        return self._seen[1].get(name_of(key))

    def add(self, entries: Iterable[Entry]) -> None:
        """Joins entries to the file, which other processes may be writing too. Raises TuneFileUnreadable."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock"):
            self._replace(join(self.read(), entries))

    def _replace(self, entries: Iterable[Entry]) -> None:
        held = {"schema": SCHEMA, "entries": [e.as_json() for e in sorted(entries, key=lambda e: e.name)]}
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(held, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(self.path)
        finally:
            Path(name).unlink(missing_ok=True)


def merge(into: str | Path, *others: str | Path) -> int:
    """Joins the entries of other files, which must be there, to the first; how many it holds then."""
    found = []
    for other in others:
        if not Path(other).is_file():
            raise TuneFileUnreadable(f"there is no file {other}. Give the tune files to merge.")
        found += TuneFile(other).read()
    TuneFile(into).add(found)
    return len(TuneFile(into).read())
