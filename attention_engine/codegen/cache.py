"""Compiled kernels on disk: found by what they are made of, before anything is traced or TileLang is imported.

A folder for each kernel: kernel.so (loads without TileLang's compiler), device.cu, host.c, tilelang.py and key.json,
which says readably what it was made of; resources.json, once someone asked what the kernel takes. Keys hold no length,
batch or address. Folders appear whole, by a rename; of several processes one compiles. What is
half there, damaged, of another version or not to be trusted is passed over, and made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from attention_engine import folders
from attention_engine.arch import Arch
from attention_engine.codegen.compile import CompiledKernel, LoweredKernel, Resources, load_library, load_tilelang
from attention_engine.ir.expr import Expr

SCHEMA = 1
LIBRARY, CUDA, HOST, SCRIPT, KEY = "kernel.so", "device.cu", "host.c", "tilelang.py", "key.json"
RESOURCES = "resources.json"
ABANDONED = 24 * 3600  # seconds after which nobody is still writing a folder
LOG = logging.getLogger("attention_engine")
# What turns a key into a kernel.
MAKERS = ("ir", "passes", "plan", "kernels", "codegen/compile.py", "codegen/patches")


def spell(value: object) -> str:
    """A value as text that is the same in every process: equal texts, equal kernels. TypeError for what has none."""
    match value:
        case Expr():
            return value.digest
        case Enum():
            return f"{type(value).__name__}.{value.name}"
        case None | bool() | int() | float() | str():
            return repr(value)
        case Arch():
            return value.target  # kernels know of a GPU what its target says, not its name or number of SMs
        case tuple() | list():
            return "(" + ", ".join(spell(v) for v in value) + ")"
        case Mapping():
            return "{" + ", ".join(f"{spell(k)}: {spell(v)}" for k, v in value.items()) + "}"
        case _ if dataclasses.is_dataclass(value):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return f"{type(value).__name__}({', '.join(f'{name}={spell(held)}' for name, held in fields)})"
        case _:
            raise TypeError(f"a kernel's key cannot hold {value!r}")


@functools.cache
def sources_digest(folder: str = "") -> str:
    """A digest of the files that make the kernels of a folder in kernels/: another text, other kernels.

    A folder's kernels depend on what lies in kernels/ itself, and on no other folder (tests/test_structure.py).
    """
    digest = _digest_of_all().copy()
    for inside, path in _sources():
        if inside.startswith(f"kernels/{folder}/"):
            digest.update(inside.encode() + b"\0" + Path(path).read_bytes())
    return digest.hexdigest()


@functools.cache
def _digest_of_all() -> hashlib.blake2b:
    """Of what makes the kernels of every folder."""
    digest = hashlib.blake2b(digest_size=10)
    for inside, path in _sources():
        if not inside.startswith("kernels/") or inside.count("/") == 1:
            digest.update(inside.encode() + b"\0" + Path(path).read_bytes())
    return digest


@functools.cache
def _sources() -> list[tuple[str, str]]:
    """The files that kernels are made by: where they are in the package, and on disk. As text: pathlib takes longer
    than reading them."""
    root = f"{Path(__file__).parent.parent}{os.sep}"
    found: list[str] = []
    for maker in (root + maker.replace("/", os.sep) for maker in MAKERS):
        files = (f"{folder}{os.sep}{name}" for folder, _, names in os.walk(maker) for name in names)
        found += [maker] if maker.endswith(".py") else [path for path in files if path.endswith(".py")]
    return sorted((path.removeprefix(root).replace(os.sep, "/"), path) for path in found)


@functools.cache
def tilelang_version() -> str:
    """The version of TileLang, without importing it."""
    return importlib.metadata.version("tilelang")


@dataclass(frozen=True)
class KernelKey:
    """What a kernel is made of: its builder with all that it is given, the target, and the versions of the makers."""

    builder: str  # "straight.forward.forward": module and function in kernels/
    given: tuple[object, ...]
    arch: Arch
    pass_configs: tuple[tuple[str, Any], ...]

    def record(self) -> dict[str, Any]:
        """The key, readable."""
        return {
            "schema": SCHEMA,
            "kernel": self.builder,
            "given": [spell(value) for value in self.given],
            "target": self.arch.target,
            "pass_configs": dict(self.pass_configs),
            "tilelang": tilelang_version(),
            "machine": platform.machine(),
            "sources": sources_digest(self.builder.split(".")[0]),
        }

    @functools.cached_property
    def digest(self) -> str:
        """The name of the kernel's folder."""
        text = json.dumps(self.record(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def is_current(record: Mapping[str, Any]) -> bool:
    """Of a kernel's key.json: is it made by the sources and the versions that are here?"""
    here = {"schema": SCHEMA, "tilelang": tilelang_version(), "machine": platform.machine()}
    here["sources"] = sources_digest(str(record.get("kernel")).split(".")[0])
    return all(record.get(name) == value for name, value in here.items())


def find_or_compile(key: KernelKey, compile_now: Callable[[], CompiledKernel]) -> CompiledKernel:
    """The kernel of the key: from disk, or compiled once among all processes and put there.

    Where nothing can be written, or TileLang's own cache is off, kernels are compiled for this process alone.
    """
    kernel = _look(key)
    if kernel is not None:
        return kernel
    with folders.locked(key.digest):
        kernel = _look(key)  # another process may have been compiling it
        if kernel is not None:
            return kernel
        started = time.perf_counter()
        kernel = compile_now()
        place = folders.kernel_folders().writable
        if kernel.library is not None and place is not None:
            try:
                _save(place / key.digest, key, kernel.lowered, kernel.library, time.perf_counter() - started)
            except OSError as error:  # a full disk, or what was there can't be removed
                LOG.warning("%s was compiled and could not be kept in %s: %s", key.builder, place, error)
        return kernel


def is_kept(key: KernelKey) -> bool:
    """Is there a kernel of this key on disk? Whether it is whole is seen when it is loaded."""
    return any((place / key.digest / LIBRARY).exists() for place in folders.kernel_folders().readable)


def _look(key: KernelKey) -> CompiledKernel | None:
    """The kernel in the first folder that has it whole."""
    found = (_load(place / key.digest, key) for place in folders.kernel_folders().readable)
    return next((kernel for kernel in found if kernel is not None), None)


def resources_of(key: KernelKey, lowered: LoweredKernel) -> Resources:
    """What a kernel takes, asked of nvcc once: then it stands beside the kernel."""
    for place in folders.kernel_folders().readable:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # not asked yet, or damaged
            known = json.loads((place / key.digest / RESOURCES).read_text())
            return Resources(**{**known, "notes": tuple(known["notes"])})
    found, writable = lowered.resources(), folders.kernel_folders().writable
    if writable is None:
        return found
    with contextlib.suppress(OSError):  # the kernel stands in another folder, or a full disk
        path = writable / key.digest / RESOURCES
        staging = path.with_suffix(f".{os.getpid()}")
        staging.write_text(json.dumps(asdict(found)))
        staging.replace(path)
    return found


def _save(place: Path, key: KernelKey, lowered: LoweredKernel, library: Path, seconds: float) -> None:
    """The folder, whole or not at all, with the modes that the umask gives."""
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    staging = place.parent / f".new-{secrets.token_hex(6)}"
    staging.mkdir()
    try:
        shutil.copyfile(library, staging / LIBRARY)
        texts = {CUDA: lowered.cuda, HOST: lowered.host, SCRIPT: lowered.source("tilelang")}
        for name, text in texts.items():
            (staging / name).write_text(text)
        record = {**key.record(), "flags": list(lowered.flags), "symbol": lowered.symbol}
        record["seconds"] = round(seconds, 3)
        record["library_digest"] = _digest(staging / LIBRARY)
        record["texts_digest"] = _digest(*(staging / name for name in texts))
        (staging / KEY).write_text(json.dumps(record, indent=2))
        with (staging / LIBRARY).open("rb+") as file:
            os.fsync(file.fileno())
        shutil.rmtree(place, ignore_errors=True)  # one that was damaged
        staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sweep(place: Path) -> None:
    """Removes what writers that were killed left behind, once it is old."""
    for left in place.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED:
                shutil.rmtree(left, ignore_errors=True)


def _digest(*paths: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Script:
    """The text of a kernel that was traced in another process."""

    text: str

    def script(self) -> str:
        """The text."""
        return self.text


def _load(place: Path, key: KernelKey) -> CompiledKernel | None:
    """The kernel of a folder; None where there is none, or a damaged one, one of another key or not to be trusted."""
    if not os.access(place, os.F_OK):
        return None
    why = next(filter(None, (folders.distrust(p, anyones=True) for p in (place, place / LIBRARY))), None)
    if why is not None or not _same_owner(place.parent, place, place / LIBRARY):
        LOG.warning("a kernel is passed over: %s", why or f"{place} belongs to another user than {place.parent}")
        return None
    try:
        record = json.loads((place / KEY).read_text())
        if {name: record[name] for name in key.record()} != json.loads(json.dumps(key.record())):
            return None
        texts = [(place / name).read_text() for name in (SCRIPT, CUDA, HOST)]
        whole = _digest(place / LIBRARY), _digest(*(place / name for name in (CUDA, HOST, SCRIPT)))
        if (record["library_digest"], record["texts_digest"]) != whole:
            return None
        flags, symbol = tuple(record["flags"]), record["symbol"]
        load_runtime()
        run = load_library(place / LIBRARY)[symbol]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # RuntimeError: it can't be loaded
        return None
    lowered = LoweredKernel(Script(texts[0]), key.arch, texts[1], texts[2], flags, symbol)
    return CompiledKernel(lowered, run)


def _same_owner(folder: Path, *inside: Path) -> bool:
    """Whether what is inside a folder is its owner's, root's or this user's: a sticky folder lets others add to it."""
    if not hasattr(os, "getuid"):
        return True
    trusted = {folder.stat().st_uid, 0, os.getuid()}
    return all(path.stat().st_uid in trusted for path in inside)


@functools.cache
def load_runtime() -> None:
    """The libraries that compiled kernels call, without the import of TileLang (seconds) where that can be spared."""
    import torch  # noqa: F401 - its libraries come first
    import tvm_ffi  # noqa: F401

    def library(package: str, name: str) -> str:
        found = importlib.util.find_spec(package)
        return str(Path(found.origin).parent / "lib" / name) if found is not None and found.origin else name

    with contextlib.suppress(OSError):  # by the name that TileLang loads it by: else it is there twice, and proofs.py
        ctypes.CDLL(library("z3", "libz3.so"))  # tells the other to be quick
    try:
        for name in ("libtvm_runtime.so", "libtilelang.so"):
            ctypes.CDLL(library("tilelang", name), mode=ctypes.RTLD_GLOBAL | os.RTLD_LAZY)
    except OSError:
        load_tilelang()


@dataclass(frozen=True)
class Entry:
    """A kernel on disk: what it was made of, its size in bytes, where it is, and when it was written (Unix time)."""

    digest: str
    record: Mapping[str, Any]
    size: int
    folder: Path
    written: float


def entries(places: Sequence[Path] | None = None) -> Iterator[Entry]:
    """The kernels on disk, in these folders or in all that are read."""
    places = folders.kernel_folders().readable if places is None else places
    for place in [p for held in places for p in sorted(held.glob("[!.]*"))]:
        try:
            record = json.loads((place / KEY).read_text())
            size = sum(f.stat().st_size for f in place.iterdir())
            written = (place / KEY).stat().st_mtime
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and {"kernel", "given", "target", "tilelang"} <= record.keys():
            yield Entry(place.name, record, size, place.parent, written)


def clear() -> int:
    """Removes the kernels of the folder that is written to; how many there were."""
    place = folders.kernel_folders().writable
    found = [entry for entry in entries() if entry.folder == place]
    if place is not None:
        for held in place.iterdir():
            shutil.rmtree(held, ignore_errors=True)
    return len(found)
