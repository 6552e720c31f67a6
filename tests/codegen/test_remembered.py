"""Macros that are rewritten once: the kernels are those of macros that are rewritten each time."""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tilelang")
from tilelang.language.eager import builder

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen.patches import kept_macros, patched, remembered
from attention_engine.library import OnlineSoftmax, causal, scale


def engine(dim):
    metas = (meta_tensor(1, 4, 64, dim, dtype="float16"),) * 3
    return AttentionEngine(metas, None, scale(0.1), causal, OnlineSoftmax(), device=arch.H100())


def scripts(dim):
    return {name: kernel.prim_func.script() for name, kernel in engine(dim)._all_kernels(arch.H100()).items()}


def test_what_is_around_a_macro_is_its_own_in_every_kernel(monkeypatch):
    dims = (64, 128, 40)
    found = [scripts(dim) for dim in dims]
    known = len(remembered._rewritten)
    assert [scripts(dim) for dim in dims] == found and len(remembered._rewritten) == known > 0
    monkeypatch.setattr(remembered, "WHOSE", "nobody's")
    assert [scripts(dim) for dim in dims] == found
    assert found[0] != found[1] != found[2]


def test_macros_of_others_are_left_to_tilelang():
    def theirs(x):
        return x

    with patched():
        builder.mutate(theirs)
    assert all(code is not theirs.__code__ for code, _, _ in remembered._rewritten.values())


# ---- on disk


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kept_macros, "_fresh", {})
    monkeypatch.setattr(remembered, "_rewritten", {})
    kept_macros._read_once.cache_clear()
    yield tmp_path / "kernels"
    kept_macros._read_once.cache_clear()


CODE = """
from attention_engine.codegen.compile import load_tilelang
from attention_engine.codegen.patches import kept_macros, remembered
load_tilelang()
of_tilelang = len(kept_macros._fresh)
from tilelang.language.eager import builder
from tests.codegen.test_remembered import engine
rewrite, made = builder.mutate, []
builder.mutate = lambda func: (made.append(func), rewrite(func))[1]
script = engine(64)._source_kernel("preprocess", "tilelang").prim_func.script()
kept_macros.keep()
import hashlib
print(of_tilelang, len(made), hashlib.sha256(script.encode()).hexdigest())
"""


def trace(folder):
    """How many macros a process rewrites, of TileLang while it is imported and later, and a digest of its kernel."""
    env = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "ATTENTION_ENGINE_CACHE_DIR": str(folder.parent),
        "HOME": str(folder.parent),
    }
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, env=env)
    of_tilelang, count, digest = ran.stdout.split()[-3:]
    return int(of_tilelang), int(count), digest


@pytest.mark.slow  # test_cache has one warm process in make test
def test_another_process_rewrites_none(folder):
    of_tilelang, count, digest = trace(folder)
    assert of_tilelang > 5 and count > 5
    assert trace(folder) == (0, 0, digest)


def macro_of(path, text):
    """A function of a module that is written to a file."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("tilelang.kept_for_a_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.macro


def rewritten(macro):
    """The source of what it becomes."""
    kept_macros._digest.cache_clear()
    remembered._rewritten.clear()
    kept_macros._read_once.cache_clear()
    with patched():
        made = builder.mutate(macro).source
    kept_macros.keep()
    return made


def test_of_a_text_that_was_changed_nothing_is_kept(folder, tmp_path):
    path = tmp_path / "kept_for_a_test.py"
    first = rewritten(macro_of(path, "def macro(x):\n    return x + 1\n"))
    (kept,) = folder.glob(".macros-*")
    assert len(kept_macros._read(kept)) == 1
    second = rewritten(macro_of(path, "def macro(x):\n    return x + 22\n"))
    assert "+ 22)" in second and "+ 22)" not in first  # a folder's name may hold 22
    assert [source for _, source in kept_macros._read(kept).values()] == [second]


def test_a_damaged_file_is_written_again(folder, tmp_path):
    macro = macro_of(tmp_path / "kept_for_a_test.py", "def macro(x):\n    return x + 1\n")
    source = rewritten(macro)
    (kept,) = folder.glob(".macros-*")
    whole = kept.read_text()
    for damaged in ("", whole[: len(whole) // 2], "no base64 \u00fc", "AAAA"):
        kept.write_text(damaged)
        assert rewritten(macro) == source
        assert kept.read_text() == whole


def test_a_file_that_everybody_may_write_is_not_read(folder, tmp_path):
    macro = macro_of(tmp_path / "kept_for_a_test.py", "def macro(x):\n    return x + 1\n")
    rewritten(macro)
    (kept,) = folder.glob(".macros-*")
    kept.chmod(0o666)
    assert kept_macros._read(kept) == {}
