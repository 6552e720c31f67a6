"""Wheels of kernels: what is in them, that installed ones are found and stale ones are not, and that doctor tells."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import attention_engine
from attention_engine import arch, folders
from attention_engine.cli import doctor
from attention_engine.cli.main import main
from attention_engine.codegen import cache
from attention_engine.codegen.compile import find_nvcc
from attention_engine.shipping.installed import installed
from attention_engine.shipping.wheel import write_wheel
from tests.codegen.text_compiler import H100, KEY, Compiler

ROOT = Path(__file__).resolve().parent.parent.parent
VERSION = attention_engine.__version__
NAME = f"attention_engine_kernels_sm90a-{VERSION}"


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "load_library", lambda path: {"forward": lambda *_: None})
    forget()
    yield
    forget()


def forget():
    folders._found.cache_clear()
    folders.shipped_folders.cache_clear()


@pytest.fixture
def wheel(tmp_path):
    """Of two kernels that are text, which are then gone from the cache."""
    for key in (KEY, replace(KEY, builder="rows.preprocess")):
        cache.find_or_compile(key, Compiler(tmp_path))
    path = write_wheel(tmp_path / "wheels", H100, list(cache.entries()), VERSION)
    assert cache.clear() == 2
    return path


def install(path, into):
    """By pip, without a network."""
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check",
               "--quiet", "--target", str(into), str(path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return into


@pytest.fixture
def site(wheel, tmp_path, monkeypatch):
    """A folder of packages in which the wheel is installed."""
    found = install(wheel, tmp_path / "site")
    monkeypatch.syspath_prepend(str(found))
    forget()
    return found


def test_a_wheel_holds_whole_kernels_and_what_an_installer_reads(wheel):
    assert wheel.name.startswith(f"{NAME}-py3-none-linux_") and wheel.suffix == ".whl"
    assert [p.name for p in wheel.parent.iterdir()] == [wheel.name]
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    inside = "attention_engine_kernels/sm90a"
    texts = {f"{inside}/kernels/{KEY.digest}/{name}" for name in (
        "kernel.so", "device.cu", "host.c", "tilelang.py", "key.json")}  # fmt: skip
    assert texts <= held.keys() and len(held) == 2 * 5 + 4
    record = list(csv.reader(held[f"{NAME}.dist-info/RECORD"].decode().splitlines()))
    assert {name for name, *_ in record} == held.keys()
    for name, digest, size in record[:-1]:
        found = base64.urlsafe_b64encode(hashlib.sha256(held[name]).digest()).decode().rstrip("=")
        assert (digest, int(size)) == (f"sha256={found}", len(held[name]))
    assert record[-1] == [f"{NAME}.dist-info/RECORD", "", ""]
    metadata = held[f"{NAME}.dist-info/METADATA"].decode()
    assert "Name: attention-engine-kernels-sm90a\n" in metadata
    assert f"Requires-Dist: attention-engine =={VERSION}\n" in metadata
    about = json.loads(held[f"{inside}/about.json"])
    assert (about["target"], about["sm_count"], about["kernels"]) == ("sm_90a", 132, 2)


def test_equal_kernels_make_equal_wheels(wheel, site, tmp_path):
    again = write_wheel(tmp_path / "again", H100, list(cache.entries()), VERSION)
    assert again.read_bytes() == wheel.read_bytes()


def test_an_installed_kernel_is_found_and_not_compiled(site, tmp_path):
    compiler = Compiler(tmp_path)
    found = cache.find_or_compile(KEY, compiler)
    assert compiler.count == 0 and found.source("cuda") == "cuda text"
    place = site / "attention_engine_kernels" / "sm90a" / "kernels"
    held = folders.kernel_folders()
    assert held.readable == (tmp_path / "cache" / "kernels", place) and held.shipped == (place,)
    assert held.writable == tmp_path / "cache" / "kernels"
    assert cache.clear() == 0 and len(list(place.iterdir())) == 2  # nobody clears what pip installed


def test_the_users_own_kernel_comes_first(wheel, tmp_path, monkeypatch):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    monkeypatch.syspath_prepend(str(install(wheel, tmp_path / "site")))
    forget()
    loaded = []
    monkeypatch.setattr(cache, "load_library", lambda path: loaded.append(path) or {"forward": None})
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 1 and loaded == [tmp_path / "cache" / "kernels" / KEY.digest / "kernel.so"]


def test_a_stale_kernel_is_not_used_and_doctor_names_its_wheel(site, tmp_path, monkeypatch):
    words = f"attention-engine-kernels-sm90a {VERSION} has 2 kernels for sm_90a"
    assert doctor.shipped() == doctor.Finding("shipped", True, f"{words}, all of this version")
    digests = cache.sources_digest
    monkeypatch.setattr(cache, "sources_digest", lambda folder="": "new" if folder == "straight" else digests(folder))
    compiler = Compiler(tmp_path)
    stale = replace(KEY, pass_configs=KEY.pass_configs)  # whose digest is not known yet
    cache.find_or_compile(stale, compiler)
    assert compiler.count == 1
    (found,) = installed()
    assert (found.kernels, found.current) == (2, 1)
    finding = doctor.shipped()
    assert finding.well is False
    assert finding.words.startswith(f"{words}, of which 1 are of this version: the wheel is stale (")
    assert "pip uninstall attention-engine-kernels-sm90a" in finding.words


def test_what_others_may_write_is_passed_over_and_doctor_says_why(site, tmp_path, caplog):
    place = site / "attention_engine_kernels" / "sm90a" / "kernels"
    place.chmod(0o777)
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 1 and folders.kernel_folders().shipped == ()
    assert f"installed kernels are passed over: {place} may be written by everybody" in caplog.text
    finding = doctor.shipped()
    assert finding.well is False and "is passed over: " in finding.words


def test_doctor_says_that_no_wheel_is_installed():
    finding = doctor.shipped()
    assert finding.well is None and finding.words.startswith("no wheel of compiled kernels is installed")


def test_the_kernels_of_a_damaged_wheel_are_counted_all_the_same(site):
    (site / "attention_engine_kernels" / "sm90a" / "about.json").write_text("{")
    assert doctor.shipped().words.startswith("a wheel in ")


WITHOUT_A_COMPILER = """
import sys
from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen import compile as compiler
from attention_engine.library import causal

assert compiler.find_nvcc() is None
metas = (meta_tensor(None, 8, None, 64, dtype="float16"),) * 3
print(AttentionEngine(metas, mask_mod=causal).compile_for(arch.H100()))
print([name for name in ("tilelang", "tvm") if name in sys.modules])
"""


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_a_real_wheel_spares_a_machine_the_compiler_and_the_import_of_tilelang(tmp_path, capsys):
    out, case = tmp_path / "wheels", "softmax.causal.64.float16.heads-8-8"
    assert main(["kernels", "build", "--arch", "H100", "--out", str(out), "--only", case, "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert f"] {case}: 4 kernels" in said and "4 kernels, 0." in said and f"pip install {out}" in said
    site = install(next(out.iterdir()), tmp_path / "site")
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "CUDA_HOME": str(tmp_path), "PATH": "",
        "ATTENTION_ENGINE_CACHE_DIR": str(tmp_path / "empty"),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_COMPILER], env=environment, capture_output=True, text=True,
                          cwd=tmp_path, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["['forward', 'preprocess', 'backward', 'postprocess']", "[]"]
    assert not any((tmp_path / "empty" / "kernels").glob("[!.]*"))


def test_a_gpu_with_other_kernels_has_another_wheel(site, tmp_path, monkeypatch):
    path = write_wheel(tmp_path / "other", arch.A100(), list(cache.entries()), VERSION)
    assert path.name.startswith(NAME.replace("sm90a", "sm80"))
    monkeypatch.syspath_prepend(str(install(path, tmp_path / "another site")))
    forget()
    assert sorted(found.target for found in installed()) == ["sm_80", "sm_90a"]
