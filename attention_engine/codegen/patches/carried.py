"""Where a step adds to sums in memory is a variable of the steps' loop, by a rule on the CUDA text.

An addition of 16 bytes holds its registers until it leaves, some 700 clocks. ptxas gives the pair with the address to
the instructions that follow, which then wait for the additions: the next step's first products did, 16 % of a step of
packed sequences. A variable that lives on keeps its pair. It is moved on from where the step before added, by the
difference of their places, behind the step's first products; told as a sum of both, ptxas would see through it. What
its place is made of and a launch gives is read once, by a reduction over a warp: else ptxas reads it anew (LDC) before
those products, by a count that additions are on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

VERSION, PROOF = "0.1.15", "test_tilelang_works_out_where_sums_stand_at_each_addition"
# A loop over a thread's numbers, whose only line adds four of them.
_ADDITION = re.compile(
    r"(?P<head>for \(int (?P<i>\w+) = 0; [^\n]*\{\n *)"
    r"AtomicAddx4\(\(&\((?P<sums>\w+)\[(?P<index>[^\n]*)\]\)\), \*\(float4\*\)\((?P<four>\w+ \+ \((?P=i) \* 4\))\)\);\n"
)
_LOOP = re.compile(r"^(?P<indent> *)for \(int \w+ = 0; [^\n]*\{\n", re.MULTILINE)
_GIVEN = re.compile(r"\bint (\w+)(?=[,)][^\n]*\{\n)")  # a number that a launch gives
_KERNEL = 'extern "C" __global__'
_ADD_FOUR = """\
#ifndef ADD_FOUR
#define ADD_FOUR
static __device__ __forceinline__ void add_four(uint64_t address, const float* numbers) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" :: "l"(address),
               "f"(numbers[0]), "f"(numbers[1]), "f"(numbers[2]), "f"(numbers[3]) : "memory");
}
#endif
"""


def with_carried_sums(cuda: str) -> str:
    """The source with such additions, where their place is a variable of a step, and all else is known before."""
    addition = _ADDITION.search(cuda)
    return cuda if addition is None else _rewritten(addition)


def _rewritten(addition: re.Match[str]) -> str:
    cuda, i, index = addition.string, addition["i"], addition["index"]
    of_number = re.search(rf"\(\(\(int64_t\){i}\) \* \(int64_t\)(\d+)\)", index)
    names = _names(index) - {"int64_t", "thread", i}
    if of_number is None or len(re.findall(rf"\b{i}\b", index)) != 1 or len(names) != 1:
        return cuda
    (place,) = names
    made = re.search(
        rf"^(?P<indent> *)(?P<in>\w+ = )(?P<value>[^\n]*;\n) *int64_t {place} = \w+;\n", cuda, re.MULTILINE
    )
    loop = None if made is None else _loop_around(made, addition)
    if made is None or loop is None or len(re.findall(rf"\b{place}\b", cuda)) != 2:
        return cuda
    first = index.replace(of_number[0], "(int64_t)0").replace(place, "(int64_t)0")
    given = sorted(_names(made["value"]) & set(_GIVEN.findall(cuda, 0, loop.start())))
    before = [
        *(f"const int {name}_held = __reduce_or_sync(0xffffffffu, {name});" for name in given),
        f"int64_t {place}_before = 0;",
        f"uint64_t {place}_address = __cvta_generic_to_global({addition['sums']} + ({first}));",
    ]
    moved = [
        f"int64_t {place} = {_renamed(made['value'], given)}",
        f'asm volatile("add.s64 %0, %0, %1;" : "+l"({place}_address) : "l"(({place} - {place}_before) * 4));',
        f"{place}_before = {place};",
    ]
    added = f"add_four({place}_address + {i} * {4 * int(of_number[1])}, {addition['four']});\n"
    kernel = cuda.index(_KERNEL)
    return "".join(
        (
            cuda[:kernel], _ADD_FOUR, cuda[kernel : loop.start()], _lines(before, loop["indent"]),
            cuda[loop.start() : made.start()], _lines(moved, made["indent"]), cuda[made.end() : addition.start()],
            addition["head"], added, cuda[addition.end() :],
        )
    )  # fmt: skip


def _names(text: str) -> set[str]:
    return set(re.findall(r"\b[a-zA-Z_]\w*\b", text))


def _renamed(text: str, names: Sequence[str]) -> str:
    """The text with the held number in the place of each."""
    return re.sub(r"\b[a-zA-Z_]\w*\b", lambda name: f"{name[0]}_held" if name[0] in names else name[0], text)


def _lines(lines: Sequence[str], indent: str) -> str:
    return "".join(f"{indent}{line.strip()}\n" for line in lines)


def _loop_around(made: re.Match[str], addition: re.Match[str]) -> re.Match[str] | None:
    """The innermost loop that a place is made in; None where the addition is not in it."""
    cuda = made.string
    outer = [loop for loop in _LOOP.finditer(cuda, 0, made.start()) if len(loop["indent"]) < len(made["indent"])]
    ended = not outer or f"\n{outer[-1]['indent']}}}\n" in cuda[outer[-1].end() : addition.end()]
    return None if ended else outer[-1]
