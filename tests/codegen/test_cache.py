"""Kernels on disk: keys that hold what changes a kernel and nothing else, whole folders, one compilation for all."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, document_ids, folders, meta_tensor
from attention_engine.codegen import cache, compile
from attention_engine.codegen.cache import KernelKey, spell
from attention_engine.codegen.compile import CompiledKernel, LoweredKernel, Resources, find_nvcc
from attention_engine.compiler import Kernel
from attention_engine.errors import CustomInputMissing
from attention_engine.ir.expr import Type
from attention_engine.library import OnlineSoftmax, alibi, causal, dilated, document, scale
from attention_engine.passes.maths import analyse
from attention_engine.plan.forms import Tile
from attention_engine.runtime.program_kernels import ProgramKernels
from tests.codegen.text_compiler import H100, KEY, Compiler
from tests.test_structure import imports

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))


def engine(factor=0.125, length=256, dim=64, mask=causal, dtype="float16", device=H100, **options):
    metas = (meta_tensor(1, 2, length, dim, dtype=dtype),) * 3
    return AttentionEngine(metas, None, scale(factor), mask, OnlineSoftmax(), device=device, **options)


def digest(kernel="forward", **options):
    found = engine(**options)._source_kernel(kernel, "cuda")
    return KernelKey(found.builder, found.given, found.target, tuple(found.configs.items())).digest


def test_a_key_changes_with_all_that_changes_the_kernel_and_with_nothing_else():
    base = digest()
    assert digest() == base  # another engine, another program object
    assert digest(length=9999) == base
    smaller = replace(H100, name="H100 PCIe", sm_count=114)
    assert digest("backward", device=smaller) == digest("backward")
    assert digest(device=smaller) != base  # its blocks share all work: as many as the GPU runs at once
    changed = [digest("backward"), digest("backward", deterministic=True), digest(factor=0.25), digest(dim=128),
               digest(mask=None), digest(dtype="bfloat16"), digest(device=arch.A100())]  # fmt: skip
    assert len({base, *changed}) == 1 + len(changed)


def test_a_key_changes_with_the_versions_and_the_sources(monkeypatch):
    base = digest()
    for name in ("tilelang_version", "sources_digest"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, name, lambda *package: "another")
            assert digest() != base


def test_a_key_changes_with_what_tilelang_is_told():
    """compiler.py, which decides it, is not among the sources that a key digests."""
    told = [replace(KEY, pass_configs=configs).digest for configs in ((("fast", True),), (("fast", False),), ())]
    assert told[0] == KEY.digest and len(set(told)) == 3
    problem = KEY.given[0]
    made = [Kernel(KEY.builder, KEY.given, H100, problem, {"fast": fast})._key for fast in (True, False)]
    assert made[0] == KEY and made[1].digest == told[1]


def test_kernels_of_a_folder_have_sources_of_their_own():
    shared = cache.sources_digest("rows")
    assert cache.sources_digest("tile_map") == shared
    assert len({shared, *map(cache.sources_digest, ("straight", "hopper", "linear"))}) == 4


ONE_Z3 = """
from attention_engine.codegen.cache import load_runtime
from attention_engine.codegen.compile import load_tilelang
load_runtime()
load_tilelang()
with open("/proc/self/maps") as maps:
    print(len({line.split()[-1] for line in maps if "libz3" in line}))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of a process's libraries")
def test_a_process_that_found_kernels_and_compiles_others_has_one_z3():
    """TileLang asks one and we set the other's parameters, were it there by two names."""
    ran = subprocess.run([sys.executable, "-c", ONE_Z3], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "1"


def test_a_key_digests_all_that_its_makers_import():
    """What a maker has of elsewhere makes kernels too: it is digested, or says nothing of a kernel's text."""
    package = Path(cache.__file__).parent.parent
    # Where files lie; when garbage is collected; and what a GPU is, which stands in the key itself.
    silent = {"errors", "folders", "settings", "files", "collector", "arch"}
    types = "attention_engine.codegen.tir_types."  # Protocols alone
    makers = [package / maker for maker in cache.MAKERS]
    for file in (f for maker in makers for f in (maker.rglob("*.py") if maker.is_dir() else [maker])):
        for name, line, _ in imports(file):
            parts = name.split(".")[1:]
            if not name.startswith("attention_engine.") or parts[0] in silent or name.startswith(types):
                continue
            places = [package.joinpath(*parts[: n + 1]) for n in range(len(parts))]
            digested = any(place in makers or place.with_suffix(".py") in makers for place in places)
            assert digested, f"{file.name}:{line} imports {name}, which no key digests"


def test_a_key_is_the_same_in_another_process():
    code = "from tests.codegen.text_compiler import KEY; print(KEY.digest)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KEY.digest


def test_what_has_no_spelling_stands_in_no_key():
    assert spell((1, "a", None, Tile(1, 2, 3, 4))) == (
        "(1, 'a', None, Tile(q=1, kv=2, threads=3, stages=4, form=Straight(shared_weights=False)))"
    )
    with pytest.raises(TypeError, match="a kernel's key cannot hold <object"):
        spell(object())


# ---- finding and compiling, with a library that stands for a kernel's


@pytest.fixture
def loaded(monkeypatch):
    """Libraries are not loaded; the paths that would be are listed."""
    paths: list[Path] = []
    monkeypatch.setattr(cache, "load_library", lambda path: paths.append(path) or {"forward": lambda *_: None})
    return paths


def test_a_kernel_is_compiled_once_and_found_with_its_texts(tmp_path, loaded):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    again = cache.find_or_compile(KEY, compiler)
    assert compiler.count == 1 and len(loaded) == 1
    assert (again.source("cuda"), again.source("tilelang")) == ("cuda text", "# kernel")
    assert (again.lowered.host, again.lowered.flags, again.lowered.arch) == ("host text", ("--flag",), H100)
    (entry,) = cache.entries()
    assert entry.record["given"] == [spell(g) for g in KEY.given] and entry.record["target"] == "sm_90a"
    assert cache.clear() == 1 and not list(cache.entries())
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2


def folder():
    return folders.kernel_folders().writable


@pytest.mark.parametrize("name", [cache.LIBRARY, cache.KEY, cache.CUDA, cache.HOST, cache.SCRIPT])
def test_a_damaged_folder_is_made_again(tmp_path, loaded, name):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    path = folder() / KEY.digest / name
    if name == cache.SCRIPT:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:5])
    cache.find_or_compile(KEY, compiler)
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2


def test_what_a_kernel_takes_is_asked_once(tmp_path, loaded, monkeypatch):
    asked = []
    report = "Used 168 registers\n8 bytes spill stores, 4 bytes spill loads\n(C7512) serialized"
    monkeypatch.setattr(compile, "ptxas_report", lambda *_: asked.append(1) or report)
    lowered = cache.find_or_compile(KEY, Compiler(tmp_path)).lowered
    found = [cache.resources_of(KEY, lowered) for _ in range(2)]
    assert found == [Resources(168, 8, 4, 0, ("(C7512) serialized",))] * 2 and len(asked) == 1
    (folder() / KEY.digest / cache.RESOURCES).write_text("[]")
    assert cache.resources_of(KEY, lowered) == found[0] and len(asked) == 2


def test_a_compilation_that_fails_leaves_nothing(tmp_path, loaded):
    def fail():
        raise RuntimeError("nvcc failed")

    with pytest.raises(RuntimeError, match="nvcc failed"):
        cache.find_or_compile(KEY, fail)
    assert not list(cache.entries())
    assert [p.name for p in folder().iterdir()] == [".locks"]


def test_threads_that_want_one_kernel_compile_it_once(tmp_path, loaded):
    compiler = Compiler(tmp_path, seconds=0.2)
    threads = [threading.Thread(target=cache.find_or_compile, args=(KEY, compiler)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.count == 1


@pytest.mark.parametrize("count", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_processes_that_want_one_kernel_compile_it_once(count, tmp_path):
    code = "import sys; from pathlib import Path; from tests.codegen.text_compiler import compile_once; "
    code += "print(compile_once(Path(sys.argv[1])))"
    command = [sys.executable, "-c", code]
    running = [
        subprocess.Popen([*command, str(tmp_path / str(n))], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for n in range(count)
    ]
    assert sorted(process.communicate(timeout=120)[0].strip() for process in running) == [*["0"] * (count - 1), "1"]


@pytest.mark.parametrize("text", ["[]", "5", "null", "{}", '{"library_digest": 3}'])
def test_a_key_of_something_else_is_no_kernel_and_no_crash(tmp_path, loaded, text):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    (folder() / KEY.digest / cache.KEY).write_text(text)
    assert list(cache.entries()) == []
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2 and len(list(cache.entries())) == 1


def test_a_kernel_of_another_version_in_its_place_is_made_again(tmp_path, loaded):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    path = folder() / KEY.digest / cache.KEY
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 0'))
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2


def test_a_library_that_cannot_be_loaded_is_made_again(tmp_path, monkeypatch):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)  # its library is a text: loading it fails
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2


def test_nowhere_to_write_means_no_cache_and_kernels_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "kernel_folders", lambda: folders.Folders((), None))
    compiler = Compiler(tmp_path)
    assert cache.find_or_compile(KEY, compiler).source() == "cuda text"
    assert cache.find_or_compile(KEY, compiler).source() == "cuda text"
    assert compiler.count == 2


def test_a_full_disk_costs_the_copy_and_not_the_kernel(tmp_path, loaded, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    compiler = Compiler(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cache.find_or_compile(KEY, compiler).source() == "cuda text"
    assert "was compiled and could not be kept in" in caplog.text and "No space left" in caplog.text
    assert [p.name for p in folder().iterdir()] == [".locks"]
    cache.find_or_compile(KEY, compiler)
    assert len(list(cache.entries())) == 1


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_what_is_kept_has_the_modes_that_the_umask_gives(tmp_path, loaded, mask):
    before = os.umask(mask)
    try:
        cache.find_or_compile(KEY, Compiler(tmp_path))
    finally:
        os.umask(before)
    for path in (folder(), *folder().rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_a_kernel_that_everybody_may_write_is_not_run(tmp_path, loaded, caplog):
    compiler = Compiler(tmp_path)
    cache.find_or_compile(KEY, compiler)
    (folder() / KEY.digest / cache.LIBRARY).chmod(0o666)
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2 and "may be written by everybody" in caplog.text
    cache.find_or_compile(KEY, compiler)
    assert compiler.count == 2


def test_what_a_killed_writer_left_is_removed_when_it_is_old(tmp_path, loaded):
    old, new = folder() / ".new-old", folder() / ".new-young"
    for left in (old, new):
        left.mkdir(parents=True)
    os.utime(old, (0, 0))
    cache.find_or_compile(KEY, Compiler(tmp_path))
    assert not old.exists() and new.exists()


# ---- a real kernel

WARM = """
import json, sys, time
import torch
start = time.process_time()
from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.library import OnlineSoftmax, causal, scale
metas = (meta_tensor(1, 2, 256, 64, dtype="float16"),) * 3
engine = AttentionEngine(metas, None, scale(0.125), causal, OnlineSoftmax(), device=arch.H100())
kernel = engine._source_kernel("postprocess", "cuda")
run = kernel.run
seconds = time.process_time() - start
try:
    sums, counters = torch.zeros(2, 128 * 64), torch.zeros(2, 2, dtype=torch.int32)
    run(torch.zeros(1, 1, 2, 64, dtype=torch.float16), sums, counters, 1)
except RuntimeError as error:
    words = str(error)
slow = sorted({"tilelang", "sympy", "torch._dynamo"} & set(sys.modules))
print(json.dumps([seconds, slow, words, kernel.source("cuda")]))
"""


@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
def test_a_warm_process_is_ready_without_tilelang_or_nvcc(tmp_path):
    pytest.importorskip("tilelang")
    cold = engine()._source_kernel("postprocess", "cuda").compiled
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}  # where there is no nvcc
    done = subprocess.run([sys.executable, "-c", WARM], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    seconds, imported, words, cuda = json.loads(done.stdout)
    assert imported == []
    assert "device_type mismatch, expected cuda" in words
    assert cuda == cold.source("cuda") and "__global__" in cuda
    assert seconds < 2  # of a processor; 0.2 as a rule


def test_compile_for_fills_the_cache_with_what_a_call_needs(monkeypatch):
    wanted: list[str] = []
    monkeypatch.setattr(cache, "find_or_compile", lambda key, compile_now: wanted.append(key.digest) or FITS)
    assert engine(device=None).compile_for(H100) == ["forward", "preprocess", "backward", "postprocess"]
    assert wanted == [digest(kernel) for kernel in
                      ("forward", "preprocess", "backward", "postprocess")]  # fmt: skip
    assert engine(device=None, deterministic=True).compile_for(H100)[-1] == "postprocess"  # dQ is added in order
    assert engine(device=None, deterministic=True, mask=dilated(2)).compile_for(H100)[-1] == "queries"
    assert engine(device=None, mask=dilated(2)).compile_for(H100) == [
        "tile map of forward", "forward", "preprocess", "tile map of backward", "backward", "postprocess",
    ]  # fmt: skip


def test_compile_for_knows_custom_inputs_as_calls_give_them(monkeypatch):
    """Their dtypes, and whether their gradients are asked for: a call's kernels are among those that it keeps."""
    wanted: set[str] = set()
    monkeypatch.setattr(cache, "find_or_compile", lambda key, compile_now: wanted.add(key.digest) or FITS)
    axes = {"documents": ("batch", "seq_len"), "slopes": ("heads",)}
    made = AttentionEngine(
        [meta_tensor(1, 4, 256, 64, dtype=torch.float16)] * 3, CustomIO(axes), alibi(0.1), document(), OnlineSoftmax()
    )
    ids, slopes = document_ids([100, 156]), torch.ones(4)
    made.compile_for(H100, slopes=slopes, documents=ids)
    program = made._trace({"documents": Type.INT, "slopes": Type.FLOAT}, made.ORDINARY)
    program_kernels = ProgramKernels(analyse(program), list(made.custom_io.specs.values()), False, H100, False)
    q = torch.empty(1, 1, 4, 64, dtype=torch.float16)
    called = program_kernels.kernels(q, q, q, [ids, slopes])
    kernels = [*called.of_forward.values(), *called.of_backward.values()]
    assert wanted == {kernel._key.digest for kernel in kernels} and len(wanted) == len(kernels)
    wanted.clear()
    made.compile_for(H100, ids, slopes.requires_grad_())
    assert called.forward._key.digest in wanted and called.backward._key.digest not in wanted
    with pytest.raises(CustomInputMissing, match="'slopes' is missing"):
        made.compile_for(H100, ids)


FITS = CompiledKernel(LoweredKernel(cache.Script(""), H100, "", ""), lambda *_: None)
