"""The code that launches a kernel is compiled while nvcc compiles the kernel, and machine code is linked as bytes.

TileLang hands the C++ compiler both at the end, the machine code as text: half a second after nvcc is done.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

BLOB = "__tvm_ffi__library_bin"  # under this name a library holds its kernels' machine code
_BYTES = re.compile(rf"^const unsigned char {BLOB}\[(\d+)\] = \{{([^}}]*)\}};$", re.MULTILINE)
_ASSEMBLY = """
.section .rodata
.balign 64
.globl {name}
.type {name}, @object
{name}:
.incbin "{bytes}"
.size {name}, . - {name}
.section .note.GNU-stack,"",@progbits
"""


@dataclass
class Begun:
    """Host code, as TileLang wrote it and as a module of its compiler, and who compiles it, in which folder."""

    code: str
    module: Any
    compiler: subprocess.Popen[bytes]
    temporary: tempfile.TemporaryDirectory[str]

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return Path(self.temporary.name)

    @property
    def compiled(self) -> Path | None:
        """The object file; None where the compiler refused."""
        return self.folder / "host.o" if self.compiler.wait() == 0 else None

    def end(self) -> None:
        """Leaves nothing running, and no files."""
        if self.compiler.poll() is None:
            self.compiler.kill()
            self.compiler.wait()
        self.temporary.cleanup()


class _Thread(threading.local):
    """What a thread that compiles a kernel has lowered, and what it has begun."""

    lowered: tuple[Any, Any] | None = None  # the host's module, and for what it is compiled
    begun: Begun | None = None


_thread = _Thread()


def begin(module: Any, compiler: str, includes: Sequence[str]) -> Begun:
    """Starts compiling the host code of a module."""
    temporary, code = tempfile.TemporaryDirectory(), str(module.inspect_source())
    source = Path(temporary.name) / "host.c"
    source.write_text(code)
    folders, made = [f"-I{place}" for place in includes], str(source.with_suffix(".o"))
    command = [compiler, "-O1", "-c", "-fPIC", *folders, "-o", made, str(source)]  # a sixth of a launch's time less
    silent = subprocess.DEVNULL
    return Begun(code, module, subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent), temporary)


def as_assembly(source: Path, folder: Path) -> Path | None:
    """A file that says the same as this C text of machine code, sooner read; None where that is something else."""
    found = _BYTES.search(source.read_text())
    if found is None:
        return None
    data = bytes.fromhex(found[2].replace("0x", "").replace(",", " "))  # which passes over spaces
    if len(data) != int(found[1]):
        return None
    (folder / "blob.bin").write_bytes(data)
    assembly = folder / "blob.s"
    assembly.write_text(_ASSEMBLY.format(name=BLOB, bytes=folder / "blob.bin"))
    return assembly


def sooner(objects: Sequence[str], begun: Begun) -> list[str] | None:
    """Files in place of those that TileLang would have compiled and linked; None where they aren't those."""
    try:
        host, machine = (Path(name) for name in objects)
        if host.read_text() != begun.code or begun.compiled is None:
            return None
        assembly = as_assembly(machine, begun.folder)
    except (OSError, ValueError):
        return None
    return [str(begun.compiled), str(assembly)] if assembly is not None else None


def put() -> Undo:
    """What TileLang does between the lowered program and the shared library, in another order."""
    from tilelang.env import env
    from tvm.contrib import cc
    from tvm.libinfo import find_include_path

    lower = importlib.import_module("tilelang.engine.lower")
    to_host_and_device, device_codegen = lower.lower_to_host_device_ir, lower.device_codegen
    host_codegen, create_shared = lower.host_codegen, cc.create_shared

    def lowered(given: Any, context: Any, *rest: Any, **more: Any) -> Any:
        made = to_host_and_device(given, context, *rest, **more)
        _thread.lowered = (made[0], context) if inside() else None
        return made

    def device(module: Any, context: Any) -> Any:
        """It runs nvcc."""
        _end()
        wanted = inside() and env.is_cache_enabled()  # else TileLang links when the kernel is first loaded
        compiler = cc.get_cc() if wanted else None
        if compiler is not None and _thread.lowered is not None:
            host = host_codegen(*_thread.lowered)
            with contextlib.suppress(OSError):  # no compiler, no room: TileLang will say so
                _thread.begun = begin(host, compiler, find_include_path())
        try:
            return device_codegen(module, context)
        except BaseException:
            _end()
            raise

    def host(module: Any, context: Any) -> Any:
        begun, before = _thread.begun, _thread.lowered
        if inside() and begun is not None and before is not None and module is before[0]:
            return begun.module
        return host_codegen(module, context)

    def shared(output: str, objects: Any, options: Any = None, *rest: Any, **more: Any) -> Any:
        begun = _thread.begun if inside() else None
        if begun is None:
            return create_shared(output, objects, options, *rest, **more)
        try:
            return create_shared(output, sooner(objects, begun) or objects, options, *rest, **more)
        finally:
            _end()

    return replace(
        (lower, "lower_to_host_device_ir", lowered), (lower, "device_codegen", device), (lower, "host_codegen", host),
        (cc, "create_shared", shared),
    )  # fmt: skip


def _end() -> None:
    if _thread.begun is not None:
        _thread.begun.end()
        _thread.begun = None


PATCH = Patch(
    defect="the host's code is compiled after the kernel, and machine code goes through the C++ compiler as text",
    version="0.1.15",
    proof="test_tilelang_compiles_host_code_last",
    put=put,
)
