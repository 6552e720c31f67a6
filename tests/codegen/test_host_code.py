"""The code that launches a kernel is compiled while nvcc is at work."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

tilelang = pytest.importorskip("tilelang")

from attention_engine import arch  # noqa: E402
from attention_engine.codegen import compile as codegen_compile  # noqa: E402
from attention_engine.codegen.patches import host_code  # noqa: E402
from attention_engine.codegen.patches.scope import inside  # noqa: E402
from tests.codegen import flash  # noqa: E402

needs_compilers = pytest.mark.skipif(
    codegen_compile.find_nvcc() is None or shutil.which("g++") is None, reason="needs nvcc and g++"
)
DATA = bytes(range(256)) * 40 + b"an end"


def as_text(data: bytes) -> str:
    """Machine code as TileLang writes it."""
    rows = "".join(f"\n  {','.join(f'0x{byte:02x}' for byte in data[n : n + 20])}," for n in range(0, len(data), 20))
    around = "#ifdef __cplusplus\n{}\n#endif\n"
    return (
        around.format('extern "C" {')
        + f"extern const unsigned char {host_code.BLOB}[];\n"
        + f"const unsigned char {host_code.BLOB}[{len(data)}] = {{{rows}\n}};\n"
        + around.format("}")
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_machine_code_is_linked_byte_by_byte(tmp_path):
    source = tmp_path / "devc.c"
    source.write_text(as_text(DATA))
    assembly = host_code.as_assembly(source, tmp_path)
    for name, given in ("theirs", source), ("ours", assembly):
        library = tmp_path / f"{name}.so"
        subprocess.run(["g++", "-shared", "-fPIC", "-o", library, given], check=True)
        held = (ctypes.c_ubyte * len(DATA)).in_dll(ctypes.CDLL(str(library)), host_code.BLOB)
        assert bytes(held) == DATA, name


@pytest.mark.parametrize("text", ["int other;", as_text(DATA).replace(f"[{len(DATA)}]", "[17]")])
def test_another_text_is_left_to_tilelang(tmp_path, text):
    source = tmp_path / "devc.c"
    source.write_text(text)
    assert host_code.as_assembly(source, tmp_path) is None


class Module:
    """The host's module, as much of it as is asked for."""

    def __init__(self, code: str) -> None:
        self.code = code

    def inspect_source(self) -> str:
        """Its text."""
        return self.code


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(("code", "linked", "taken"), [
    ("int answer() { return 42; }", "int answer() { return 42; }", True),
    ("int answer() { return 42; }", "int answer() { return 43; }", False),  # of another kernel
    ("no code at all", "no code at all", False),
])  # fmt: skip
def test_host_code_is_taken_where_it_is_what_tilelang_would_compile(tmp_path, code, linked, taken):
    host, machine = tmp_path / "lib0.c", tmp_path / "devc.c"
    host.write_text(linked)
    machine.write_text(as_text(DATA))
    begun = host_code.begin(Module(code), "g++", [])
    files = host_code.sooner([str(host), str(machine)], begun)
    assert (files is not None) == taken
    assert host_code.sooner([str(host)], begun) is None
    begun.end()
    assert not begun.folder.exists()


def watched(monkeypatch):
    """The compilers that are started, in their order."""
    started, real = [], subprocess.Popen

    class Watched(real):
        def __init__(self, command, *rest, **more):
            if isinstance(command, list) and {"-shared", "-fPIC", "--cubin"} & set(command):
                started.append([Path(str(word)).name for word in command])
            super().__init__(command, *rest, **more)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    return started


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """TileLang keeps nothing of what other tests compiled; files that are not wanted any more are counted here."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "theirs"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


@needs_compilers
def test_host_code_is_begun_before_nvcc_and_nothing_is_left(monkeypatch, empty):
    started = watched(monkeypatch)
    kernel = codegen_compile.compile_kernel(flash.largest_scores(keys=48), arch.H100())
    assert [("-c" in words, "--cubin" in words, "-shared" in words) for words in started] == [
        (True, False, False), (False, True, False), (False, False, True),
    ]  # fmt: skip
    assert "host.o" in started[-1] and "devc.c" not in started[-1]
    assert callable(kernel.run)
    assert not list(empty.iterdir()) and not inside()
