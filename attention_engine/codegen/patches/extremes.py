"""Works round a defect of ptxas: where it takes the extreme of three integers at once, it loses the minus of one.

GPUs from Hopper on have an instruction for the least or the largest of three integers (VIMNMX3). ptxas makes it of two
instructions, and folds the negation of an operand into it, which the instruction does not have: `max(max(a, -b), c)`
becomes the maximum of a, b and c. CUDA 12.8 and 13.0 do so for sm_90a and sm_100a, not for sm_120a. PyTorch's issue
190973 tells it of 12.8 to 13.3.

So the tile map of a window in packed sequences missed a tile that only one query saw, and the gradients of its keys
were 0. On unsigned integers ptxas keeps the minus. A kernel's PTX is looked at when nvcc has compiled it. Extremes of
three signed integers, one of which may be a negation, become extremes of unsigned ones, and the PTX is compiled anew.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

FLAGS = ["-DATTENTION_ENGINE_EXTREMES=1"]  # in the compiler's cache key: another PTX is another kernel
FIRST = 90  # sm_90 has such instructions
SIGN = 1 << 31

_FUNCTIONS = re.compile(r"^(?=[.\w ]*\.(?:entry|func)\b)", re.MULTILINE)
_EXTREME = re.compile(r"^([ \t]*)(min|max)\.s32\s+(%\w+), ([^,;]+), ([^,;]+);", re.MULTILINE)
_MADE = re.compile(r"^[ \t]*(?:@!?%p\d+[ \t]+)?([a-z]+)[\w.]*\s+(%\w+), ([^;]+);", re.MULTILINE)
_PASSES_ON = {"mov", "selp", "mul", "mad", "shl", "cvt", "xor", "or"}
_LESS_THAN_0 = re.compile(r"-\d+")


def with_minus_kept(ptx: str) -> str:
    """The PTX with extremes that ptxas can't make wrong; itself, where it has none that it could."""
    return "".join(_kept(function) for function in _FUNCTIONS.split(ptx))


def _kept(function: str) -> str:
    extremes = list(_EXTREME.finditer(function))
    if len(extremes) < 2:
        return function
    made = [(m[1], m[2], [word.strip(" {}") for word in m[3].split(",")]) for m in _MADE.finditer(function)]
    copies = {to: words[0] for operation, to, words in made if operation == "mov" and words[0].startswith("%")}
    endangered = _with_minus(_joined(extremes, copies), _may_be_negations(made))
    return _EXTREME.sub(lambda m: _of_unsigned(m) if m.start() in endangered else m[0], function)


def _may_be_negations(made: Sequence[tuple[str, str, list[str]]]) -> set[str]:
    """The registers that ptxas may hold as the negation of another."""
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        for operation, to, words in made:
            if operation in ("neg", "not"):
                is_one = True
            elif operation == "sub":
                is_one = words[0] == "0" or words[0] in found
            elif operation == "add":
                is_one = found.issuperset(words)
            else:
                of_one = operation in _PASSES_ON and not found.isdisjoint(words)
                is_one = of_one or (operation in ("mul", "mad") and any(map(_LESS_THAN_0.fullmatch, words)))
            if is_one:
                found.add(to)
    return found


def _joined(extremes: Iterable[re.Match[str]], copies: Mapping[str, str]) -> list[list[re.Match[str]]]:
    """Extremes of one kind, each with those whose results it takes: ptxas may make one of them."""

    def source(word: str) -> str:
        seen = {word}
        while (before := copies.get(word)) is not None and before not in seen:
            seen.add(word := before)
        return word

    groups: list[list[re.Match[str]]] = []
    of_result: dict[tuple[str, str], list[re.Match[str]]] = {}
    for one in extremes:
        asked = ((one[2], source(word.strip())) for word in (one[4], one[5]))
        group = [one]
        for other in {id(g): g for key in asked if (g := of_result.get(key)) is not None}.values():
            group += other
            groups.remove(other)
        groups.append(group)
        of_result |= {(each[2], each[3]): group for each in group}
    return [group for group in groups if len(group) > 1]


def _with_minus(groups: Iterable[Sequence[re.Match[str]]], negations: set[str]) -> set[int]:
    """Where the extremes stand of groups that take a negation."""
    taking = (g for g in groups if any(not negations.isdisjoint((one[4].strip(), one[5].strip())) for one in g))
    return {one.start() for group in taking for one in group}


def _of_unsigned(one: re.Match[str]) -> str:
    """The same extreme, of integers whose signs are turned."""
    space, kind, to, left, right = one.groups()
    lines = [
        ".reg .b32 %turned_left, %turned_right;",
        f"xor.b32 %turned_left, {left}, {SIGN:#x};",
        f"xor.b32 %turned_right, {right}, {SIGN:#x};",
        f"{kind}.u32 %turned_left, %turned_left, %turned_right;",
        f"xor.b32 {to}, %turned_left, {SIGN:#x};",
    ]
    return space + "{ " + f"\n{space}".join(lines) + " }"


def has_such(target: str) -> bool:
    """Has this GPU, "sm_90a", such instructions?"""
    number = re.match(r"sm_(\d+)", target)
    return number is not None and int(number[1]) >= FIRST


def compiled(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str] | None:
    """Compiles the PTX anew that nvcc kept in a folder, where ptxas could make it wrong; None where it could not.
    command: nvcc with its options, which ends with where the machine code is to stand."""
    (kept,) = folder.glob("*.ptx")
    text = kept.read_text()
    mended = with_minus_kept(text)
    if mended == text:
        return None
    kept.write_text(mended)
    return subprocess.run([*command, str(kept)], capture_output=True, text=True, check=False)


def put() -> Undo:
    """nvcc compiles our kernels anew where ptxas may have lost a minus."""
    from tilelang.contrib import nvcc

    whole = nvcc.compile_cuda

    def compile_cuda(code: str, target_format: str = "ptx", arch: Any = None, options: Any = None, **more: Any) -> Any:
        wanted = inside() and target_format == "cubin" and isinstance(arch, list) and isinstance(options, list)
        if not wanted or not has_such(arch[0].removeprefix("-arch=")):
            return whole(code, target_format, arch, options, **more)
        with tempfile.TemporaryDirectory() as name:
            data = whole(code, target_format, arch, [*options, "--keep", f"--keep-dir={name}"], **more)
            made = Path(name) / "kept.cubin"
            command = [nvcc.get_nvcc_compiler(), "--cubin", "-O3", "-lineinfo", *arch, *options, "-o", str(made)]
            done = compiled(command, Path(name))
            if done is None:
                return data
            if done.returncode != 0:
                raise RuntimeError(f"nvcc refused PTX whose extremes are unsigned:\n{done.stdout}{done.stderr}")
            return bytearray(made.read_bytes())

    return replace((nvcc, "compile_cuda", compile_cuda))


PATCH = Patch(
    defect="ptxas loses the minus of an operand where it takes the extreme of three integers at once",
    version="0.1.15",
    proof="test_tilelang_leaves_to_ptxas_a_minus_that_it_loses",
    put=put,
)
