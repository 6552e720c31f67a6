"""The commands: what they print and how they end."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import attention_engine
from attention_engine import arch
from attention_engine.cli import doctor
from attention_engine.cli.caches import describe, spell_age
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
    for command in ("doctor", "tune", "explain", "cache", "kernels", "show", "check", "bench"):
        assert f"    {command} " in done.stdout
    assert "python -m attention_engine show attn_script/mha.py" in done.stdout


@pytest.mark.parametrize("command", ["doctor", "tune", "explain", "cache", "kernels", "show", "check", "bench"])
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
    assert out.startswith("# make_engine\nAttentionEngine") and "160" in out
    assert "state.m = -inf" in out and "# backward: dweight = dO . v" in out


MINE = """
import torch
from attention_engine import AttentionEngine, LinearAttentionEngine, OnlineFunc, library, meta_tensor
class Block(torch.nn.Module):
    def __init__(self, metas, **options):
        super().__init__()
        self.near = AttentionEngine(metas, mask_mod=library.sliding_window(4), **options)
        self.far = torch.nn.ModuleList([LinearAttentionEngine(metas, **options)])
def make(metas, **options):
    return AttentionEngine(metas, **options)
def alone():
    return AttentionEngine((meta_tensor(1, 2, 8, 16),) * 3)
def block(metas, backend="auto"):
    return Block(metas, backend=backend)
def linear(metas, **options):
    return LinearAttentionEngine(metas, **options)
def softer(score, custom, b, h, q_idx, kv_idx):
    return score * 0.125 + 0.5
def near(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 5
class Sigmoid(library.OnlineSigmoid):
    pass
def other(metas, **options):
    return 5
size = 3
"""
EITHER = "mine = AttentionEngine((meta_tensor(1, 2, 8, 16),) * 3)\nwhole = Block((meta_tensor(1, 2, 8, 16),) * 3)\n"


@pytest.mark.parametrize(("name", "shown"), [
    ("", ["# mine\nAttentionEngine", "# backward: dweight"]),  # the first that is one, or holds some
    (":mine", ["# mine\nAttentionEngine"]),
    (":whole", ["# whole.near\nAttentionEngine", "\n\n# whole.far.0\nLinearAttentionEngine"]),
    (":make", ["# make\nAttentionEngine", "6 heads", "3"]),
    (":alone", ["# alone\nAttentionEngine"]),
    (":block", ["# block.near\n", "# block.far.0\n"]),
    (":linear", ["# linear\nLinearAttentionEngine"]),
    (":softer", ["# softer\nAttentionEngine", "0.125"]),
    (":near", ["# near\nAttentionEngine", "< 5"]),
    (":Sigmoid", ["# Sigmoid\nAttentionEngine", "sigmoid"]),
])  # fmt: skip
def test_show_takes_engines_modules_and_functions_by_name(name, shown, tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(MINE + EITHER)
    heads = ("--heads", "6", "--kv-heads", "3", "--dim", "32") if name == ":make" else ("--dim", "32")
    status, out, err = ran(capsys, "show", f"{script}{name}", *heads)
    assert (status, err) == (0, "")
    for text in shown if name != ":make" else shown[:1]:
        assert text in out, out


def test_what_holds_no_engine_is_refused_with_what_does(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(MINE)
    for name, message in (
        (
            "alon",
            "has no 'alon'. Did you mean 'alone'? It has: make, alone, block, linear, softer, near, Sigmoid, other.",
        ),
        ("other", ":other returned int, with no engine in it."),
        ("size", ":size is int, with no engine in it."),
        ("", "has no 'make_engine'. It has: make,"),
    ):
        status, _, err = ran(capsys, "show", f"{script}:{name}" if name else str(script))
        assert status == 1 and err.startswith("BadScript: ") and message in err and "Name an engine, a module" in err
    status, _, err = ran(capsys, "show", str(tmp_path / "mien.py"))
    assert status == 1 and "mien.py. Did you mean 'mine.py'? Give a Python file" in err
    (tmp_path / "notes.txt").touch()
    assert "notes.txt is no Python file." in ran(capsys, "show", str(tmp_path / "notes.txt"))[2]
    status, _, err = ran(capsys, "show", MHA, "--arch", "H10")
    assert status == 1 and "no GPU is called 'H10' here. Did you mean 'H100'" in err
    assert "See docs/errors.md#unknownoption." in err


def test_check_compares_with_float64(capsys):
    pytest.importorskip("tilelang")
    status, out, _ = ran(capsys, "check", MHA, "--heads", "2", "--length", "40", "--dim", "32")
    assert status == 0
    assert "ok: the limit is 1.1 x" in out and "dv " in out


@pytest.mark.parametrize("name", ["block", "near"])
def test_check_compares_all_that_a_module_holds(name, tmp_path, capsys):
    pytest.importorskip("tilelang")
    (tmp_path / "mine.py").write_text(MINE)
    status, out, _ = ran(capsys, "check", f"{tmp_path / 'mine.py'}:{name}", "--heads", "2", "--length", "20",
                         "--dim", "32")  # fmt: skip
    assert status == 0 and "NOT ok" not in out
    assert out.count("ok: the limit is") == out.count("\n# ") + 1 == (2 if name == "block" else 1)


def test_alone_it_prints_help_and_it_knows_its_version(capsys):
    status, out, err = ran(capsys)
    assert (status, err) == (0, "") and out.startswith("usage: attention_engine") and "examples:" in out
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    found = capsys.readouterr().out
    assert ended.value.code == 0 and found.startswith(f"attention_engine {attention_engine.__version__}, Python 3.")
    assert f"torch {importlib.metadata.version('torch')}" in found


def test_a_command_that_is_none_is_told_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["shwo"])
    assert ended.value.code == 2 and "Did you mean 'show'?" in capsys.readouterr().err


def test_the_console_script_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"attention-engine": f"{main.__module__}:{main.__name__}"}


def test_doctor_gives_json_alone(monkeypatch, capsys):
    def noisy():
        print("a compiler's words")
        return Finding("nvcc", False, "Install it.")

    monkeypatch.setattr(doctor, "CHECKS", [lambda: Finding("GPU", None, "none is here"), noisy])
    status, out, err = ran(capsys, "doctor", "--json")
    assert status == 1 and err == "a compiler's words\n"
    assert json.loads(out) == {
        "well": False, "version": attention_engine.__version__,
        "findings": [{"what": "GPU", "state": "none", "words": "none is here"},
                     {"what": "nvcc", "state": "NOT ok", "words": "Install it."}],
    }  # fmt: skip
    monkeypatch.setattr(doctor, "CHECKS", [lambda: Finding("GPU", None, "none is here")])
    status, out, _ = ran(capsys, "doctor", "--json")
    assert status == 0 and json.loads(out)["well"]


def test_doctor_names_the_folder_that_is_used_in_place_of_another(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    found = doctor.cache()
    assert not found.well and f"kernels are kept in {tmp_path / 'users'}" in found.words
    assert f"{tmp_path / 'file' / 'kernels'} can't be made" in found.words


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
    err = ran(capsys, "tune", "mha-128.sofmax.causal.8192", "--file", str(tmp_path / "f.json"))[2]
    assert "Did you mean 'mha-128.softmax.causal.8192'" in err
    status, _, err = ran(capsys, "tune", "mha-128.softmax.causal.8192", "--file", str(tmp_path / "f.json"))
    assert status == 1 and "There is no GPU to measure on." in err


def test_explain_names_the_entry_of_a_file(tmp_path, capsys):
    argv = ("explain", "mha-128.softmax.causal.8192", "--arch", "H100", "--file", str(tmp_path / "f.json"))
    status, out, _ = ran(capsys, *argv)
    assert status == 0 and "forward: 128 queries x 128 keys" in out and re.search(r"of [\d ]+ tiles \d+ may run;", out)
    (line, *_) = [text.strip() for text in out.splitlines() if text.startswith("  key ")]
    entry = Entry(json.loads(line.removeprefix("key ")), Tile(64, 96, 128, 3), 7.5, 11, "2026-01-01T00:00:00Z")
    TuneFile(tmp_path / "f.json").add([entry])
    out = ran(capsys, *argv)[1]
    assert f"forward: 64 queries x 96 keys, 128 threads, 3 stages\n  from {tmp_path / 'f.json'}: 7.5 us" in out
    assert (
        "no GPU is called 'H300' here. Did you mean 'H200' or 'H100'? Choose A100," in ran(capsys, *argv[:3], "H300")[2]
    )


@pytest.mark.parametrize("may_write", [False, True])
def test_doctor_says_that_tilelang_has_no_bytecode_where_none_will_be_written(tmp_path, monkeypatch, may_write):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", not may_write)
    monkeypatch.setattr("os.access", lambda path, mode: True)
    assert ("without bytecode: its import takes a second more. python -m comp" in doctor.versions().words) != may_write


def test_a_linear_attentions_kernels_have_one_number_of_heads():
    given = ["LinearProblem(heads=4, dim=32, dim_v=16, dtype='bfloat16')"]
    record = {"target": "sm_90a", "given": given, "tilelang": "0.1.15"}
    assert describe(record) == "sm_90a bfloat16 heads 4 dims 32/16 TileLang 0.1.15"


def test_cache_lists_and_clears(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cache, "load_library", lambda path: {"forward": None})
    cache.find_or_compile(KEY, Compiler(tmp_path))
    status, out, _ = ran(capsys, "cache", "--list")
    assert status == 0 and out == ran(capsys, "cache")[1]
    head, line, _ = out.splitlines()
    assert head.split() == ["kernel", "age", "size", "what", "it", "is", "for"]
    assert re.match(r"straight forward +\d s +1 KB  sm_90a float16 heads 2/2 dims 64/64 tile 64x64, 128 threads", line)
    assert line.endswith(f"({KEY.digest[:12]})")
    assert "1 kernel, 0.0 MB, in" in out
    assert ran(capsys, "cache", "--clear")[1].startswith("removed 1 kernel from")
    assert ran(capsys, "cache", "--list")[1].startswith("0 kernels")


def test_ages_are_read_at_a_glance():
    ages = {-1: "0 s", 59.9: "59 s", 60: "1 minute", 7199: "1 hour", 7200: "2 hours", 86400 * 3.5: "3 days"}
    assert [spell_age(seconds) for seconds in ages] == list(ages.values())


def test_bench_hands_its_options_on_or_says_where_it_is(monkeypatch, capsys, tmp_path):
    from attention_engine.cli import scripts

    (tmp_path / "benches_here.py").write_text("def main(argv):\n    print('ran with', argv)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scripts, "BENCHMARKS", "benches_here")
    assert ran(capsys, "bench", "--length", "64")[:2] == (0, "ran with ['--length', '64']\n")
    monkeypatch.setattr(scripts, "BENCHMARKS", "benches_absent.run")
    status, _, err = ran(capsys, "bench")
    assert status == 1 and "run this in its folder" in err


@pytest.mark.parametrize(("made", "words"), [
    (arch.H100(), "as H100 (sm_90a); its default tiles were measured on H100"),
    (arch.RTX5090(), f"as RTX 5090 (sm_120a); its default tiles were chosen by what fits. {doctor.NEVER_RUN}"),
    (arch.MI300X(), f"as MI300X (gfx942); its default tiles were chosen by what fits. {doctor.NEVER_RUN}"),
])  # fmt: skip
def test_the_doctor_says_whether_a_gpu_was_measured(made, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(doctor, "detect", lambda: made)
    assert words in doctor.gpu().words


def test_the_doctor_asks_for_amds_own_on_an_amd_gpu(monkeypatch):
    from attention_engine.codegen import dialects

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    monkeypatch.setattr(doctor, "detect", lambda: arch.MI300X())
    assert str(doctor.driver()) == "driver       ok: ROCm 6.3 in torch"
    monkeypatch.setattr(dialects, "find_hipcc", lambda: None)
    assert "hipcc        NOT ok: No HIP compiler" in str(doctor.compiler())
    monkeypatch.setattr(dialects, "find_hipcc", lambda: "/opt/rocm/bin/hipcc")
    assert str(doctor.compiler()) == "hipcc        ok: /opt/rocm/bin/hipcc"
