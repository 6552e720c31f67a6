"""Where a step adds to sums in memory is a variable of the steps' loop, by a rule on the CUDA text.

An addition of 16 bytes holds its registers until it leaves, some 700 clocks. ptxas gives the pair with the address to
the instructions that follow, which then wait for the additions: the next step's first products did, 16 % of a step of
packed sequences. A variable that lives on keeps its pair. It is moved on from where the step before added, by the
difference of their places, behind the step's first products; told as a sum of both, ptxas would see through it.
"""

from __future__ import annotations

import re

VERSION, PROOF = "0.1.15", "test_tilelang_works_out_where_sums_stand_at_each_addition"
# A loop over a thread's numbers, whose only line adds four of them.
_ADDITION = re.compile(
    r"(?P<head>for \(int (?P<i>\w+) = 0; [^\n]*\{\n *)"
    r"AtomicAddx4\(\(&\((?P<sums>\w+)\[(?P<index>[^\n]*)\]\)\), \*\(float4\*\)\((?P<four>\w+ \+ \((?P=i) \* 4\))\)\);\n"
)
_LOOP = re.compile(r"^(?P<indent> *)for \(int \w+ = 0; [^\n]*\{\n", re.MULTILINE)
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
    names = set(re.findall(r"\b[a-zA-Z_]\w*\b", index)) - {"int64_t", "thread", i}
    if of_number is None or len(re.findall(rf"\b{i}\b", index)) != 1 or len(names) != 1:
        return cuda
    (place,) = names
    declared = re.search(rf"^(?P<indent> *)int64_t {place} = \w+;\n", cuda, re.MULTILINE)
    if declared is None or len(re.findall(rf"\b{place}\b", cuda)) != 2:
        return cuda
    loops = [
        loop for loop in _LOOP.finditer(cuda, 0, declared.start()) if len(loop["indent"]) < len(declared["indent"])
    ]
    if not loops or f"\n{loops[-1]['indent']}}}\n" in cuda[loops[-1].end() : addition.end()]:
        return cuda
    loop, indent = loops[-1], declared["indent"]
    first = index.replace(of_number[0], "(int64_t)0").replace(place, "(int64_t)0")
    before = (
        f"{loop['indent']}int64_t {place}_before = 0;\n"
        f"{loop['indent']}uint64_t {place}_address = __cvta_generic_to_global({addition['sums']} + ({first}));\n"
    )
    moved = (
        f'{indent}asm volatile("add.s64 %0, %0, %1;" : "+l"({place}_address) : "l"(({place} - {place}_before) * 4));\n'
        f"{indent}{place}_before = {place};\n"
    )
    bytes_of_four = 4 * int(of_number[1])
    added = f"{addition['head']}add_four({place}_address + {i} * {bytes_of_four}, {addition['four']});\n"
    kernel = cuda.index(_KERNEL)
    return "".join(
        (
            cuda[:kernel], _ADD_FOUR, cuda[kernel : loop.start()], before, cuda[loop.start() : declared.end()], moved,
            cuda[declared.end() : addition.start()], added, cuda[addition.end() :],
        )
    )  # fmt: skip
