"""Extremes of three integers keep a minus that ptxas would lose."""

from __future__ import annotations

import re
import subprocess

import pytest

from attention_engine import arch
from attention_engine.codegen import compile as codegen_compile
from attention_engine.codegen.patches import extremes
from attention_engine.codegen.patches.extremes import with_minus_kept

LOAD = "ld.global.u32 %r{n}, [%rd1+{at}];"
HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry of_three(.param .u64 given, .param .u64 made)
{
    .reg .b32 %r<20>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [given];
    ld.param.u64 %rd2, [made];
"""


def kernel(*lines: str) -> str:
    """PTX that reads %r1 to %r4, and writes %r9."""
    loads = [LOAD.format(n=n, at=4 * n) for n in range(1, 5)]
    text = "\n".join(f"    {line}" for line in [*loads, *lines, "st.global.u32 [%rd2], %r9;", "ret;"])
    return f"{HEAD}{text}\n}}\n"


def outcome(lines: list[str], numbers: dict[str, int]) -> int:
    """What these lines of PTX leave in %r9: operations on 32 bits, one after another."""
    held = dict(numbers)

    def signed(number: int) -> int:
        return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)

    def of(word: str) -> int:
        return signed(held[word] if word in held else int(word, 0))

    operations = {
        "neg.s32": lambda a: -a, "mov.b32": lambda a: a, "not.b32": lambda a: ~a,
        "add.s32": lambda a, b: a + b, "sub.s32": lambda a, b: a - b, "mul.lo.s32": lambda a, b: a * b,
        "xor.b32": lambda a, b: a ^ b, "max.s32": max, "min.s32": min,
        "max.u32": lambda a, b: max(a & 0xFFFFFFFF, b & 0xFFFFFFFF),
        "min.u32": lambda a, b: min(a & 0xFFFFFFFF, b & 0xFFFFFFFF),
    }  # fmt: skip
    for line in lines:
        operation, to, words = re.fullmatch(r"([a-z]+\.[\w.]+) (%\w+), (.*);", line).groups()
        held[to] = operations[operation](*(of(word.strip()) for word in words.split(",")))
    return signed(held["%r9"])


def operations_of(ptx: str) -> list[str]:
    """The lines between loads and the store."""
    lines = [line.strip(" {}") for line in ptx.splitlines()]
    begin = next(n for n, line in enumerate(lines) if line.startswith("ld.global.u32 %r4"))
    found = lines[begin + 1 : next(n for n, line in enumerate(lines) if line.startswith("st.global"))]
    return [line for line in found if line and not line.startswith(".reg")]


ENDANGERED = {
    "a minus": ["neg.s32 %r5, %r2;", "max.s32 %r6, %r1, %r5;", "max.s32 %r9, %r6, %r3;"],
    "the last": ["max.s32 %r6, %r1, %r2;", "neg.s32 %r5, %r3;", "max.s32 %r9, %r6, %r5;"],
    "least of sums": [
        "neg.s32 %r5, %r2;", "sub.s32 %r6, %r5, %r4;", "min.s32 %r7, %r6, %r1;", "min.s32 %r9, %r3, %r7;",
    ],
    "a copy": ["sub.s32 %r5, 0, %r2;", "mov.b32 %r6, %r5;", "max.s32 %r7, %r6, %r1;", "mov.b32 %r8, %r7;",
               "max.s32 %r9, %r8, -7;"],
    "a factor": ["mul.lo.s32 %r5, %r2, -2;", "min.s32 %r6, %r1, %r5;", "min.s32 %r9, %r6, %r3;"],
    "four": ["neg.s32 %r5, %r2;", "max.s32 %r6, %r1, %r5;", "max.s32 %r7, %r3, %r4;", "max.s32 %r9, %r6, %r7;"],
}  # fmt: skip
SAFE = {
    "no minus": ["max.s32 %r6, %r1, %r2;", "max.s32 %r9, %r6, %r3;"],
    "two": ["neg.s32 %r5, %r2;", "max.s32 %r9, %r1, %r5;"],
    "clamped": ["neg.s32 %r5, %r2;", "max.s32 %r6, %r1, %r5;", "min.s32 %r9, %r6, %r3;"],
    "a difference": ["sub.s32 %r5, %r2, %r4;", "max.s32 %r6, %r1, %r5;", "max.s32 %r9, %r6, %r3;"],
    "elsewhere": ["neg.s32 %r5, %r4;", "max.s32 %r6, %r1, %r2;", "max.s32 %r7, %r6, %r3;", "add.s32 %r9, %r7, %r5;"],
}


@pytest.mark.parametrize("name", ENDANGERED)
def test_extremes_of_three_with_a_minus_are_of_unsigned_integers(name):
    lines = ENDANGERED[name]
    mended = operations_of(with_minus_kept(kernel(*lines)))
    assert not any(re.match(r"(min|max)\.s32", line) for line in mended)
    for numbers in ((5, 9, 3, 2), (-5, -9, -3, 4), (0, 0, 0, 0), (2**31 - 1, 7, -(2**31) + 1, 1), (-6, 5, 1, -8)):
        given = {f"%r{n}": number for n, number in enumerate(numbers, 1)}
        assert outcome(mended, given) == outcome(lines, given), numbers


@pytest.mark.parametrize("name", SAFE)
def test_other_extremes_stay(name):
    text = kernel(*SAFE[name])
    assert with_minus_kept(text) == text


def test_functions_are_looked_at_one_by_one():
    safe, other = kernel(*SAFE["no minus"]), kernel(*ENDANGERED["a minus"])
    assert with_minus_kept(safe + other) == safe + with_minus_kept(other)


def machine_code(ptx, folder):
    """What nvcc makes of PTX."""
    source, made = folder / "kernel.ptx", folder / "kernel.cubin"
    source.write_text(ptx)
    command = [str(codegen_compile.find_nvcc()), "--cubin", "-arch=sm_90a", "-o", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return made.read_bytes()


def loses_a_minus(folder):
    """Does ptxas make one code of the largest of a, -b, c and of a, b, c?"""
    with_it = kernel(*ENDANGERED["a minus"])
    code = machine_code(with_it, folder)
    without = kernel("mov.b32 %r5, %r2;", *ENDANGERED["a minus"][1:])
    assert machine_code(with_minus_kept(with_it), folder) != code
    return code == machine_code(without, folder)


@pytest.mark.skipif(codegen_compile.find_nvcc() is None, reason="needs nvcc")
def test_nvcc_takes_the_mended_text(tmp_path):
    for lines in ENDANGERED.values():
        assert machine_code(with_minus_kept(kernel(*lines)), tmp_path)


def test_gpus_from_hopper_on_have_such_instructions():
    asked = (arch.A100(), arch.RTX4090(), arch.H100(), arch.B200(), arch.RTX5090(), arch.MI300X())
    assert [extremes.has_such(gpu.target) for gpu in asked] == [False, False, True, True, True, False]
    flags = [codegen_compile.work_arounds(gpu, {}) for gpu in (arch.A100(), arch.H100())]
    assert [set(extremes.FLAGS) <= set(each) for each in flags] == [False, True]
