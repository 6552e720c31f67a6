"""The commands: what they print and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_engine.cli import doctor
from attention_engine.cli.doctor import Finding
from attention_engine.cli.main import main
from attention_engine.codegen import cache
from attention_engine.plan.forms import Tile
from attention_engine.tuner.store import Entry, TuneFile
from tests.codegen.text_compiler import KEY, Compiler

ROOT = Path(__file__).resolve().parent.parent.parent
MHA = str(ROOT / "attn_script" / "mha.py")


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def ran(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_help_names_every_command_and_has_examples():
    command = [sys.executable, "-m", "attention_engine", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    for command in ("doctor", "tune", "explain", "cache", "show", "check", "bench"):
        assert f"    {command} " in done.stdout
    assert "python -m attention_engine show attn_script/mha.py" in done.stdout


@pytest.mark.parametrize("command", ["doctor", "tune", "explain", "cache", "show", "check", "bench"])
def test_every_command_has_help_with_an_example(command, capsys):
    if command == "bench":
        return  # its help is the benchmark's
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"example:\n  python -m attention_engine {command}" in capsys.readouterr().out


def test_doctor_says_what_to_do_and_ends_with_1(monkeypatch, capsys):
    lines = [Finding("GPU", None, "none is here"), Finding("nvcc", False, "Install it.")]
    lines.append(Finding("cache", True, "fine"))
    monkeypatch.setattr(doctor, "CHECKS", [lambda line=line: line for line in lines])
    status, out, _ = ran(capsys, "doctor")
    assert status == 1
    assert out == "GPU          none: none is here\nnvcc         NOT ok: Install it.\ncache        ok: fine\n"
    monkeypatch.setattr(doctor, "CHECKS", [lambda: lines[0], lambda: lines[2]])
    assert ran(capsys, "doctor")[0] == 0


def test_what_doctor_looks_at_without_a_gpu(tmp_path, monkeypatch):
    assert doctor.versions().well and torch.__version__ in doctor.versions().words
    assert doctor.gpu().well is None and doctor.driver().well is None
    assert "232448 bytes of shared memory a block" in doctor.limits().words
    assert doctor.cache().well and str(tmp_path) in doctor.cache().words
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not doctor.compiler().well and "pip install 'tilelang[nvcc]'" in doctor.compiler().words
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "file"))
    assert not doctor.cache().well and "Set ATTENTION_ENGINE_CACHE_DIR" in doctor.cache().words


def test_no_colours_where_there_is_no_terminal():
    assert "\033" not in str(Finding("GPU", False, ""))


def test_show_prints_the_engine_and_its_program(capsys):
    status, out, _ = ran(capsys, "show", MHA, "--dim", "64")
    assert status == 0
    assert out.startswith("AttentionEngine\n  q, k, v     4 heads of 64, float16; ")
    assert "batch 1, queries 160, keys 160" in out
    assert "state.m = -inf" in out and "# backward: dweight = dO . v" in out


def test_show_takes_an_engine_or_a_function_by_name(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "from attention_engine import AttentionEngine, meta_tensor\n"
        "mine = AttentionEngine((meta_tensor(1, 2, 8, 16),) * 3)\n"
        "def make(metas, **options):\n    return AttentionEngine(metas, **options)\n"
        "def other(metas, **options):\n    return 5\n"
    )
    assert "2 heads of 16, float16" in ran(capsys, "show", f"{script}:mine")[1]
    assert "2 heads of 16, float16" in ran(capsys, "show", str(script))[1]  # the engine, as there is one
    out = ran(capsys, "show", f"{script}:make", "--heads", "6", "--kv-heads", "3", "--dim", "32")[1]
    assert "6 heads of 32, 3 key heads, float16" in out and "batch 1, queries 160, keys 160" in out
    for name, message in (("absent", "has no engine 'absent'. It has: mine."), ("other", "returned int.")):
        status, _, err = ran(capsys, "show", f"{script}:{name}")
        assert status == 1 and err.startswith("BadScript: ") and message in err
    status, _, err = ran(capsys, "show", str(tmp_path / "none.py"))
    assert status == 1 and "there is no file" in err


def test_check_compares_with_float64(capsys):
    pytest.importorskip("tilelang")
    status, out, _ = ran(capsys, "check", MHA, "--heads", "2", "--length", "40", "--dim", "32")
    assert status == 0
    assert "ok: the limit is 1.1 x" in out and "dv " in out


def test_tune_merges_files(tmp_path, capsys):
    for name in "ab":
        entry = Entry({"program": name}, Tile(64, 64, 128, 2), 1.0, 1, "2026-01-01T00:00:00Z")
        TuneFile(tmp_path / f"{name}.json").add([entry])
    into = tmp_path / "a.json"
    status, out, _ = ran(capsys, "tune", "--merge", str(into), str(tmp_path / "b.json"))
    assert (status, out) == (0, f"{into} holds 2 entries\n")
    assert len(json.loads(into.read_text())["entries"]) == 2
    status, _, err = ran(capsys, "tune", "--merge", str(into))
    assert status == 1 and "--merge takes INTO and at least one FROM" in err


def test_tune_says_what_it_wants(tmp_path, capsys):
    assert "tune wants cases and a file" in ran(capsys, "tune", "mha-128.softmax.causal.8192")[2]
    status, _, err = ran(capsys, "tune", "nothing", "--file", str(tmp_path / "f.json"))
    assert status == 1 and "no case is called 'nothing'." in err
    assert "shapes mha-128, mha-64, mha-128-b1, llama-8b" in err
    status, _, err = ran(capsys, "tune", "mha-128.softmax.causal.8192", "--file", str(tmp_path / "f.json"))
    assert status == 1 and "There is no GPU to measure on." in err


def test_explain_names_the_entry_of_a_file(tmp_path, capsys):
    argv = ("explain", "mha-128.softmax.causal.8192", "--arch", "H100", "--file", str(tmp_path / "f.json"))
    status, out, _ = ran(capsys, *argv)
    assert status == 0 and "forward: 128 queries x 128 keys" in out and "tiles may run;" in out
    (line, *_) = [text.strip() for text in out.splitlines() if text.startswith("  key ")]
    entry = Entry(json.loads(line.removeprefix("key ")), Tile(64, 96, 128, 3), 7.5, 11, "2026-01-01T00:00:00Z")
    TuneFile(tmp_path / "f.json").add([entry])
    out = ran(capsys, *argv)[1]
    assert f"forward: 64 queries x 96 keys, 128 threads, 3 stages\n  from {tmp_path / 'f.json'}: 7.5 us" in out
    assert "no GPU is called 'H300' here. Choose A100," in ran(capsys, *argv[:3], "H300")[2]


def test_cache_lists_and_clears(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cache, "load_library", lambda path: {"forward": None})
    cache.find_or_compile(KEY, Compiler(tmp_path))
    status, out, _ = ran(capsys, "cache", "--list")
    assert status == 0
    assert f"{KEY.digest[:12]}        1 KB  forward sm_90a float16 heads 2/2 dims 64/64 tile 64x64, 128 threads" in out
    assert "1 kernels, 0.0 MB, in" in out
    assert ran(capsys, "cache", "--clear")[1].startswith("removed 1 kernels from")
    assert ran(capsys, "cache", "--list")[1].startswith("0 kernels")


def test_bench_hands_its_options_on_or_says_where_it_is(monkeypatch, capsys, tmp_path):
    from attention_engine.cli import scripts

    (tmp_path / "benches_here.py").write_text("def main(argv):\n    print('ran with', argv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts, "BENCHMARKS", "benches_here")
    assert ran(capsys, "bench", "--length", "64")[:2] == (0, "ran with ['--length', '64']\n")
    monkeypatch.setattr(scripts, "BENCHMARKS", "benches_absent.run")
    status, _, err = ran(capsys, "bench")
    assert status == 1 and "run this in its folder" in err
