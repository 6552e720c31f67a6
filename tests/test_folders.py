"""Where kernels are kept: the first folder that serves, shared ones read, untrusted ones left alone, one line of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from attention_engine import folders

ROOT = Path(__file__).resolve().parent.parent
only_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTENTION_ENGINE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("TILELANG_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folders._found.cache_clear()


def test_the_first_choice_says_nothing(tmp_path, monkeypatch, caplog):
    at_home = tmp_path / "home" / ".cache" / "attention_engine" / "kernels"
    assert folders.kernel_folders() == folders.Folders((at_home,), at_home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert folders.kernel_folders().writable == tmp_path / "xdg" / "attention_engine" / "kernels"
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "named"))
    assert folders.kernel_folders().writable == tmp_path / "named" / "kernels"
    assert caplog.text == ""


def test_a_folder_that_cannot_be_made_gives_way_to_the_user_s_with_one_line(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "file"))
    at_home = tmp_path / "home" / ".cache" / "attention_engine" / "kernels"
    for _ in range(3):
        assert folders.kernel_folders().writable == at_home
    assert [r.getMessage() for r in caplog.records] == [
        f"kernels are kept in {at_home}; {tmp_path / 'file' / 'kernels'} can't be made (Not a directory). "
        "Set ATTENTION_ENGINE_CACHE_DIR to a folder that is yours."
    ]


def test_without_a_home_kernels_are_among_temporary_files_of_this_user_alone(tmp_path, monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    place = tmp_path / "temporary" / f"attention_engine-{os.getuid()}" / "kernels"
    assert folders.kernel_folders() == folders.Folders((place,), place, ("there is no home folder: HOME is not set",))
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert "HOME is not set" in caplog.text


def test_a_temporary_folder_that_is_a_link_is_left_for_one_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "temporary" / f"attention_engine-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    found = folders.kernel_folders()
    assert found.writable.parent.parent == tmp_path / "temporary" and found.readable == (found.writable,)
    assert any(reason.endswith("is a link") for reason in found.passed_over)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_nothing_that_can_be_written_is_said_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    found = folders.kernel_folders()
    assert found.writable is None and found.readable == ()
    assert str(found).startswith("kernels are kept for this process alone, in memory; ")
    with folders.locked("anything"):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_everybody_may_write_is_not_used(tmp_path, monkeypatch, mode):
    named = tmp_path / "named"
    (named / "kernels").mkdir(parents=True)
    (named / "kernels").chmod(mode)
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(named))
    found = folders.kernel_folders()
    assert named / "kernels" not in (*found.readable, found.writable)
    assert found.passed_over == (f"{named / 'kernels'} may be written by everybody (chmod o-w {named / 'kernels'})",)


def test_nor_one_that_everybody_may_put_another_in_the_place_of(tmp_path, monkeypatch):
    named = tmp_path / "open" / "named"
    named.mkdir(parents=True)
    named.parent.chmod(0o777)
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(named))
    assert "may be replaced by everybody, who may write to" in folders.kernel_folders().passed_over[0]
    named.parent.chmod(0o1777)  # sticky: others may add, and not replace
    folders._found.cache_clear()
    assert folders.kernel_folders().writable == named / "kernels"


def test_tilelang_s_own_cache_is_put_where_it_can_be_written(tmp_path, monkeypatch):
    folders.prepare_tilelang()
    assert "TILELANG_CACHE_DIR" not in os.environ and (tmp_path / "home" / ".tilelang" / "cache").is_dir()
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "named"))
    folders.prepare_tilelang()
    assert os.environ["TILELANG_CACHE_DIR"] == str(tmp_path / "named")
    monkeypatch.delenv("ATTENTION_ENGINE_CACHE_DIR")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").touch()
    folders.prepare_tilelang()
    assert os.environ["TILELANG_CACHE_DIR"] == str(tmp_path / "home" / ".cache" / "attention_engine")


AS_NOBODY = """
import logging, os, sys, tempfile
from pathlib import Path
from attention_engine import folders
from attention_engine.codegen import cache
from tests.codegen.text_compiler import KEY, Compiler
cache.load_runtime = lambda: None
cache.load_library = lambda path: {"forward": None}
work = Path(tempfile.mkdtemp())
work.chmod(0o777)
KEY.digest  # what is imported is imported: others may not be able to read root's Python
os.setgroups([]); os.setgid(65534); os.setuid(65534)
compiler = Compiler(work)
cache.find_or_compile(KEY, compiler)
print(compiler.count, len(list(cache.entries())), folders.kernel_folders().writable)
"""


@only_root
@pytest.mark.parametrize("trusted", [True, False])
def test_a_cache_that_root_filled_serves_others_who_cannot_write_there(trusted, tmp_path, monkeypatch):
    from attention_engine.codegen import cache
    from tests.codegen.text_compiler import KEY, Compiler

    monkeypatch.setattr(cache, "load_library", lambda path: {"forward": None})
    with tempfile.TemporaryDirectory(dir="/tmp") as place:  # pytest's folders are closed to others
        Path(place).chmod(0o755)
        theirs = Path(place) / "home of nobody"
        theirs.mkdir()
        os.chown(theirs, 65534, 65534)
        monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", f"{place}/shared")
        cache.find_or_compile(KEY, Compiler(tmp_path))
        if not trusted:
            (Path(place) / "shared" / "kernels").chmod(0o777)
        environment = {**os.environ, "HOME": str(theirs), "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
        command = [sys.executable, "-c", AS_NOBODY]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        writable = theirs / ".cache" / "attention_engine" / "kernels"
        assert done.stdout == f"{0 if trusted else 1} 1 {writable}\n"
        assert done.stderr.count("kernels are kept in") == 1
