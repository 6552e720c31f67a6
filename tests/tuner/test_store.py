"""Tune files: whole at every moment, whoever writes; never written over when they can't be read."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from attention_engine.errors import TuneFileUnreadable, TuneFileUnwritable
from attention_engine.plan.forms import Tile
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
                "drops_apart": False, "woven": False,
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
        '{"schema": 1, "entries": [{"key": {}}]}', "entry 1 of {path}: it has no \"tile\".",
    ),
    "a tile with a field of another version": (
        '{"schema": 1, "entries": [{"key": {}, "tile": {"rows": 1}, "time_us": 1, "tried": 1, "when": ""}]}',
        "entry 1 of {path}: its tile has a \"rows\", which tiles of this version have not.",
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
        assert "was left as it is." in str(caught.value)
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
from attention_engine.plan.forms import Tile
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


# ---- the one door

KEY = {"kernel": "forward", "dtype": "float16", "program": "p"}
TILE = {"q": 64, "kv": 64, "threads": 128, "stages": 2}
LINEAR = {"chunk": 64, "inner": 32, "outer": 64, "threads": 128, "stages": 1}
WRONG_TILES = {
    "a negative": ({"q": -64}, "its tile's q is -64. It must be a multiple of 16 from 16 to 256"),
    "a zero": ({"kv": 0}, "its tile's kv is 0. It must be a multiple of 16"),
    "a null": ({"q": None}, "its tile's q is None. It must be an integer"),
    "a text": ({"threads": "64"}, "its tile's threads is '64'. It must be an integer"),
    "a float": ({"q": 64.0}, "its tile's q is 64.0. It must be an integer"),
    "a bool": ({"stages": True}, "its tile's stages is True. It must be an integer"),
    "no multiple": ({"q": 65}, "its tile's q is 65. It must be a multiple of 16"),
    "half a warp": ({"threads": 48}, "its tile's threads is 48. It must be a multiple of 32 from 32 to 1024"),
    "too many stages": ({"stages": 9}, "its tile's stages is 9. It must be an integer from 0 to 8"),
    "too large": ({"kv": 1 << 20}, "its tile's kv is 1048576."),
    "a number for a form": ({"persistent": 1}, "its tile's persistent is 1. It must be true or false"),
    "an unknown field": ({"rows": 1}, 'its tile has a "rows", which tiles of this version have not'),
}


def text_of(tile=TILE, **changed):
    held = {"key": KEY, "tile": tile, "time_us": 1.0, "tried": 1, "when": "2026-01-01T00:00:00Z", **changed}
    return json.dumps({"schema": 1, "entries": [entry("fine").as_json(), held]})


def refused(path, text):
    path.write_text(text)
    file = TuneFile(path)
    said = set()
    fine = path.with_name("fine.json")
    TuneFile(fine).add([entry("b")])
    before = fine.read_bytes()
    for use in (file.read, lambda: file.find(KEY), lambda: file.add([entry("a")]), lambda: merge(path, fine),
                lambda: merge(fine, path)):  # fmt: skip
        with pytest.raises(TuneFileUnreadable) as caught:
            use()
        said.add(str(caught.value))
    assert path.read_text() == text and fine.read_bytes() == before
    (words,) = said
    return words


@pytest.mark.parametrize("kind", WRONG_TILES)
def test_a_tile_that_no_kernel_can_have_is_refused_at_every_use(kind, tmp_path):
    changed, words = WRONG_TILES[kind]
    said = refused(tmp_path / "tiles.json", text_of({**TILE, **changed}))
    assert said.startswith(f"entry 2 (forward, float16) of {tmp_path / 'tiles.json'}: {words}")
    assert said.endswith("The file was left as it is. Mend or remove this entry, or name another file.")


@pytest.mark.parametrize(("changed", "words"), [
    ({"tile": None}, "its tile is None, not an object"), ({"tile": {"q": 64}}, 'its tile has no "kv"'),
    ({"key": []}, "its key is [], not an object"), ({"time_us": "1"}, "its time_us is '1'."),
    ({"time_us": True}, "its time_us is True."), ({"time_us": float("nan")}, "its time_us is nan."),
    ({"time_us": -1.0}, "its time_us is -1.0."), ({"tried": "3"}, "its tried is '3'. It must be an integer"),
    ({"tried": 1.5}, "its tried is 1.5."), ({"tried": -1}, "its tried is -1."), ({"tried": None}, "its tried is None."),
    ({"when": None}, "its when is None, not a text"),
    ({"key": {"kernel": "linear forward walk"}}, 'its tile has a "q"'),
    ({"tile": {**LINEAR, "chunk": 63}}, "its tile's chunk is 63."),
    ({"tile": {**LINEAR, "heads": 0}}, "its tile's heads is 0."),
    ({"tile": {**LINEAR, "blocks": 1.0}}, "its tile's blocks is 1.0."),
    ({"tile": LINEAR, "key": {"kernel": "linear forward output", "chunk": 128}},
     "its tile has chunks of 64, and its key says 128"),
])  # fmt: skip
def test_an_entry_is_asked_for_types_and_ranges(changed, words, tmp_path):
    assert words in refused(tmp_path / "tiles.json", text_of(**changed))


def test_what_is_no_object_is_no_entry(tmp_path):
    for held in ("x", None, 3, ["key"]):
        path = tmp_path / "tiles.json"
        assert f"entry 1 of {path}: it is {held!r}" in refused(path, json.dumps({"schema": 1, "entries": [held]}))


def test_a_time_of_null_and_whole_microseconds_are_fine(tmp_path):
    for time_us in (None, 3, 0.5):
        (tmp_path / "tiles.json").write_text(text_of(time_us=time_us))
        assert TuneFile(tmp_path / "tiles.json").find(KEY).time_us == time_us


# ---- whose file it is


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(mask, tmp_path):
    before = os.umask(mask)
    try:
        TuneFile(tmp_path / "new.json").add([entry("a")])
        (tmp_path / "old.json").write_text('{"schema": 1, "entries": []}')
        (tmp_path / "old.json").chmod(0o640)
        TuneFile(tmp_path / "old.json").add([entry("a")])
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new.json") == mode_of(tmp_path / "new.json.lock") == 0o666 & ~mask
    assert mode_of(tmp_path / "old.json") == 0o640


def test_a_link_stays_and_its_target_is_written_under_the_target_s_lock(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "mine.json").symlink_to("shared/tiles.json")
    TuneFile(tmp_path / "mine.json").add([entry("a")])  # the target is not there yet
    TuneFile(tmp_path / "mine.json").add([entry("b")])
    assert (tmp_path / "mine.json").is_symlink()
    assert len(TuneFile(tmp_path / "shared" / "tiles.json").read()) == 2
    assert sorted(p.name for p in tmp_path.rglob("*.lock")) == ["tiles.json.lock"]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    for name in (".tiles.json.new-0123abcd", ".tiles.json.swp", ".other.json.new-0123abcd"):
        (tmp_path / name).write_text("half")
    TuneFile(tmp_path / "tiles.json").add([entry("a")])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".other.json.new-0123abcd", ".tiles.json.swp", "tiles.json", "tiles.json.lock",
    ]  # fmt: skip


def test_a_full_disk_leaves_the_old_file_whole_and_says_so(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    TuneFile(path).add([entry("a")])
    before = path.read_bytes()

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TuneFileUnwritable, match="No space left on device") as caught:
        TuneFile(path).add([entry("b")])
    assert "It is as it was before." in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiles.json", "tiles.json.lock"]


AS_NOBODY = """
import os, sys
from attention_engine.errors import TuneFileUnwritable
from attention_engine.plan.forms import Tile
from attention_engine.tuner.store import Entry, TuneFile
entry = Entry({"program": "theirs"}, Tile(64, 64, 128, 2), 1.0, 1, "2026-01-01T00:00:00Z")
TuneFile("warm up").find({})
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    TuneFile(sys.argv[1]).add([entry])
    print("added")
except TuneFileUnwritable as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")
def test_another_user_s_lock_is_waited_for_and_his_file_left_alone(tmp_path):
    def as_nobody(path):
        command = [sys.executable, "-c", AS_NOBODY, str(path)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    with tempfile.TemporaryDirectory() as place:  # pytest's folders are closed to others
        folder = Path(place)
        folder.chmod(0o1777)
        (folder / "tiles.json.lock").touch(0o644)
        assert as_nobody(folder / "tiles.json") == "added\n"
        assert {e.key["program"] for e in TuneFile(folder / "tiles.json").read()} == {"theirs"}
        TuneFile(folder / "tiles.json").add([entry("ours")])
        assert (folder / "tiles.json").stat().st_uid == 65534
        TuneFile(folder / "root.json").add([entry("a")])
        before = (folder / "root.json").read_bytes()
        assert "root.json may not be written by this user" in as_nobody(folder / "root.json")
        assert (folder / "root.json").read_bytes() == before
