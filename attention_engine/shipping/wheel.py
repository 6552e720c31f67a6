"""A wheel of kernels: a zip of their folders, with the three files that an installer reads.

The format is that of https://packaging.python.org/en/latest/specifications/binary-distribution-format/. It holds no
Python: `attention_engine_kernels` is a namespace package, and each wheel brings a folder of its GPU's kernels to it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import zipfile
from collections.abc import Sequence
from pathlib import Path

from attention_engine.arch import Arch
from attention_engine.codegen import cache
from attention_engine.folders import SHIPPED

FILES = (cache.LIBRARY, cache.CUDA, cache.HOST, cache.SCRIPT, cache.KEY)
ABOUT = "about.json"
WHEN = (2020, 1, 1, 0, 0, 0)  # of every file: equal kernels, equal wheels


def distribution(arch: Arch) -> str:
    """The name by which pip knows the kernels of a GPU."""
    return f"attention-engine-kernels-{arch.target.replace('_', '')}"


def write_wheel(out: Path, arch: Arch, kernels: Sequence[cache.Entry], version: str) -> Path:
    """The wheel of these kernels in a folder, which is made; whole or not at all. version: of this package."""
    name = distribution(arch)
    tag = f"py3-none-linux_{platform.machine()}"
    stem = f"{name.replace('-', '_')}-{version}"
    path, info = out / f"{stem}-{tag}.whl", f"{stem}.dist-info"
    inside = f"{SHIPPED}/{arch.target.replace('_', '')}"
    out.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".part")
    try:
        with zipfile.ZipFile(staging, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            record = [_add(archive, f"{inside}/{ABOUT}", _about(name, version, arch, len(kernels)))]
            for kernel in sorted(kernels, key=lambda kernel: kernel.digest):
                for file in FILES:
                    held = (kernel.folder / kernel.digest / file).read_bytes()
                    record.append(_add(archive, f"{inside}/kernels/{kernel.digest}/{file}", held))
            record.append(_add(archive, f"{info}/METADATA", _metadata(name, version, arch)))
            record.append(_add(archive, f"{info}/WHEEL", _wheel(tag)))
            _add(archive, f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,", ""]).encode())
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    return path


def _add(archive: zipfile.ZipFile, name: str, held: bytes) -> str:
    """Puts a file into the archive; its line of RECORD."""
    file = zipfile.ZipInfo(name, WHEN)
    file.compress_type, file.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    archive.writestr(file, held)
    digest = base64.urlsafe_b64encode(hashlib.sha256(held).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(held)}"


def _about(name: str, version: str, arch: Arch, count: int) -> bytes:
    about = {
        "distribution": name, "version": version, "arch": arch.name, "target": arch.target,
        "sm_count": arch.sm_count, "tilelang": cache.tilelang_version(), "kernels": count,
    }  # fmt: skip
    return json.dumps(about, indent=2).encode()


def _metadata(name: str, version: str, arch: Arch) -> bytes:
    """Needs this version of the package: another one would find none of the kernels."""
    lines = [
        "Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}",
        f"Summary: Compiled kernels of attention-engine for {arch.name} ({arch.target})", "License: MIT",
        f"Requires-Dist: attention-engine =={version}", f"Requires-Dist: tilelang =={cache.tilelang_version()}", "",
    ]  # fmt: skip
    return "\n".join(lines).encode()


def _wheel(tag: str) -> bytes:
    lines = ["Wheel-Version: 1.0", "Generator: attention_engine", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
    return "\n".join(lines).encode()
