"""Tune files: one readable JSON that holds many problems, each with the tile that was found for it.

    {"schema": 1, "entries": [
        {"key": {...}, "tile": {...}, "time_us": 812.4, "tried": 18, "when": "2026-01-31T12:00:00Z"}]}

A write takes the file's lock, reads it again, joins what is new, and puts a whole file in place by a rename; so many
processes may write one file. A file that can't be read, or has an entry that can't be right, is never written over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from attention_engine.errors import TuneFileUnreadable, TuneFileUnwritable
from attention_engine.files import locked, write_whole
from attention_engine.tuner.entries import SCHEMA, Entry, Key, name_of, parse, refused, unreadable


def now() -> str:
    """The time, as entries note it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser()
        self._seen: tuple[tuple[int, int, int], dict[str, Entry]] | None = None

    def read(self) -> list[Entry]:
        """The entries; none where there is no file. Raises TuneFileUnreadable."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(str(self.path), f"it can't be read ({error})") from error
        return parse(text, str(self.path))

    def find(self, key: Key) -> Entry | None:
        """The entry of this key; the file is read again where it has changed. Raises TuneFileUnreadable."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(str(self.path), f"it can't be read ({error})") from error
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if self._seen is None or self._seen[0] != stamp:
            self._seen = (stamp, {e.name: e for e in join(self.read())})
        return self._seen[1].get(name_of(key))

    def refuse(self, entry: Entry, why: str) -> TuneFileUnreadable:
        """The error of an entry that its own problem can't run with."""
        return refused(str(self.path), f"the entry {entry.name}", why)

    def add(self, entries: Iterable[Entry]) -> None:
        """Joins entries to the file, which other processes may be writing too. Raises TuneFileUnreadable and, where it
        can't be written, TuneFileUnwritable; it is then as before.
        """
        real = Path(os.path.realpath(self.path))  # one lock, whatever link leads to the file
        try:
            real.parent.mkdir(parents=True, exist_ok=True)
            with locked(real.with_name(f"{real.name}.lock")):
                joined = sorted(join(self.read(), entries), key=lambda e: e.name)
                held = {"schema": SCHEMA, "entries": [e.as_json() for e in joined]}
                write_whole(real, json.dumps(held, indent=1) + "\n")
        except OSError as error:
            raise TuneFileUnwritable(
                f"{self.path} can't be written: {error}.\n"
                "  It is as it was before. Name a file in a folder with room where you may write."
            ) from error


def merge(into: str | Path, *others: str | Path) -> int:
    """Joins the entries of other files, which must be there, to the first; how many it holds then."""
    found = []
    for other in others:
        if not Path(other).expanduser().is_file():
            raise TuneFileUnreadable(f"there is no file {other}. Give the tune files to merge.")
        found += TuneFile(other).read()
    TuneFile(into).add(found)
    return len(TuneFile(into).read())
