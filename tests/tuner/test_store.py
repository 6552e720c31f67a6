"""Tune files: whole at every moment, whoever writes; never written over when they can't be read."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_engine.errors import TuneFileUnreadable
from attention_engine.ir.problem import Tile
from attention_engine.tuner.store import Entry, TuneFile, join, merge

ROOT = Path(__file__).resolve().parent.parent.parent


def entry(name: str, time_us: float = 10.0, when: str = "2026-01-01T00:00:00Z", q: int = 128) -> Entry:
    return Entry({"kernel": "forward", "program": name}, Tile(q, 64, 256, 2), time_us, 3, when)


def test_what_is_added_is_found_by_its_key_alone(tmp_path):
    file = TuneFile(tmp_path / "tiles.json")
    assert file.find(entry("a").key) is None
    file.add([entry("a"), entry("b", q=64)])
    assert file.find({"program": "b", "kernel": "forward"}) == entry("b", q=64)  # the order of a key says nothing
    assert file.find({"kernel": "forward", "program": "c"}) is None
    assert file.find({"kernel": "forward"}) is None


def test_the_file_reads_as_the_design_says(tmp_path):
    TuneFile(tmp_path / "tiles.json").add([entry("a")])
    assert json.loads((tmp_path / "tiles.json").read_text()) == {
        "schema": 1,
        "entries": [{
            "key": {"kernel": "forward", "program": "a"},
            "tile": {
                "q": 128, "kv": 64, "threads": 256, "stages": 2, "shared_weights": False, "specialised": False,
                "skewed_sums": False, "persistent": False, "lazy_rescale": False, "queries_ahead": False,
            },
            "time_us": 10.0, "tried": 3, "when": "2026-01-01T00:00:00Z",
        }],
    }  # fmt: skip
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiles.json", "tiles.json.lock"]  # nothing half-made stays


def test_another_process_s_entry_is_seen_without_a_new_object(tmp_path):
    file = TuneFile(tmp_path / "tiles.json")
    file.add([entry("a")])
    assert file.find(entry("b").key) is None
    TuneFile(tmp_path / "tiles.json").add([entry("b")])
    assert file.find(entry("b").key) == entry("b")


def test_of_two_entries_with_one_key_the_later_stays():
    old, new = entry("a", 5.0, "2026-01-01T00:00:00Z"), entry("a", 9.0, "2026-01-02T00:00:00Z")
    assert join([old], [new]) == join([new], [old]) == [new]


BROKEN = {
    "not JSON": ("{", "{path} is no tune file: it is not JSON (Expecting property name"),
    "half a file": ('{"schema": 1, "entries": [{"key": {', "{path} is no tune file: it is not JSON ("),
    "a list": ("[]", '{path} is no tune file: it has no "schema" and "entries".'),
    "something else": ('{"name": "x"}', '{path} is no tune file: it has no "schema" and "entries".'),
    "a later version": ('{"schema": 2, "entries": []}', "{path} has schema 2, and this version reads schema 1."),
    "an entry without a tile": (
        '{"schema": 1, "entries": [{"key": {}}]}', "{path} is no tune file: an entry is not as it should be ('tile').",
    ),
    "a tile with a field of another version": (
        '{"schema": 1, "entries": [{"key": {}, "tile": {"rows": 1}, "time_us": 1, "tried": 1, "when": ""}]}',
        "{path} is no tune file: an entry is not as it should be (Tile.__init__() got an unexpected",
    ),
    "no text": (b"\xff\xfe\x00", "{path} is no tune file: it can't be read ('utf-8' codec"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_cannot_be_read_says_so_and_stays_as_it_is(kind, tmp_path):
    content, begins = BROKEN[kind]
    path = tmp_path / "tiles.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    file = TuneFile(path)
    for use in (file.read, lambda: file.find({}), lambda: file.add([entry("a")]), lambda: merge(path, path)):
        with pytest.raises(TuneFileUnreadable) as caught:
            use()
        assert str(caught.value).startswith(begins.format(path=path))
        assert "It was left as it is." in str(caught.value)
    assert path.read_bytes() == before


def test_merging_keeps_the_later_of_each_key(tmp_path):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    TuneFile(a).add([entry("x", 1.0, "2026-01-01T00:00:00Z"), entry("only a")])
    TuneFile(b).add([entry("x", 2.0, "2026-01-02T00:00:00Z"), entry("only b")])
    before = b.read_text()
    assert merge(a, b) == 3
    assert TuneFile(a).find(entry("x").key).time_us == 2.0
    assert b.read_text() == before
    assert merge(tmp_path / "new.json", a, b) == 3
    with pytest.raises(TuneFileUnreadable, match="there is no file"):
        merge(a, tmp_path / "missing.json")


WRITER = """
import random, sys, time
from attention_engine.ir.problem import Tile
from attention_engine.tuner.store import Entry, TuneFile
path, name = sys.argv[1:]
file = TuneFile(path)
while file.find({"program": name}) is None:
    for n in range(20):
        file.add([Entry({"program": name, "step": n % 3}, Tile(64, 64, 128, 2), 1.0, 1, f"2026-01-01T00:00:{n:02}Z")])
        time.sleep(random.random() * 0.005)
    file.add([Entry({"program": name}, Tile(64, 64, 128, 2), 1.0, 1, "2026-01-01T00:00:00Z")])
"""


def test_eight_writers_killed_at_random_and_restarted_lose_nothing(tmp_path):
    path, names, generator = tmp_path / "tiles.json", [f"program {n}" for n in range(8)], random.Random(0)

    def start(name: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], env=environment)

    running = {name: start(name) for name in names}
    killed = reads = 0
    until = time.monotonic() + 60
    while running and time.monotonic() < until:
        if path.exists():
            assert json.loads(path.read_text())["schema"] == 1  # at every moment a whole file
            reads += 1
        if killed < 8 and reads > 3 * killed:
            victim = generator.choice(sorted(running))
            if running[victim].poll() is None:
                running[victim].kill()
                running[victim].wait()
                running[victim] = start(victim)
                killed += 1
        for name in [n for n, process in running.items() if process.poll() is not None]:
            assert running.pop(name).returncode == 0, name
        time.sleep(0.02)
    assert not running and killed == 8
    found = TuneFile(path).read()
    assert {e.key["program"] for e in found if "step" not in e.key} == set(names)
    assert len(found) == 8 * 4
    assert {p.name for p in tmp_path.iterdir() if p.suffix == ".json"} == {"tiles.json"}
