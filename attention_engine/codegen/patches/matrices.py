"""Tiles of 16-bit numbers go from registers to shared memory by matrices of 8 x 8, by a rule on the CUDA text.

TileLang stores one stage of a tile by 4 bytes a lane, where stmatrix stores 16: four matrices at once, of which lanes
8 m to 8 m + 7 say where the rows of matrix m stand. Registers lie as products leave them, so that the four lanes of a
row store 16 bytes in a row. That is tried on numbers, for all lanes, before a loop is rewritten.
"""

from __future__ import annotations

import re

VERSION, PROOF = "0.1.15", "test_tilelang_stores_a_stage_of_a_tile_by_four_bytes"
FLAGS = ["-DATTENTION_ENGINE_STORED_MATRICES=1"]
# A loop over a thread's numbers, whose only line stores two of them.
_LOOP = re.compile(
    r"(?P<indent> *)#pragma unroll\n *for \(int (?P<i>\w+) = 0; (?P=i) < (?P<count>\d+); \+\+(?P=i)\) \{\n"
    r" *\*\(uint1\*\)\((?P<tile>\(\(\w+\*\)\w+\)) \+ (?P<at>[^\n]*)\) = "
    r"\*\(uint1\*\)\((?P<from>\w+) \+ \((?P=i) \* 2\)\);\n *\}\n"
)
_KERNEL = 'extern "C" __global__'
_STORE = """\
#ifndef STORE_FOUR_MATRICES
#define STORE_FOUR_MATRICES
static __device__ __forceinline__ void store_four_matrices(const void* row, const void* numbers) {
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(numbers);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(smem_ptr_to_uint(row)), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]) : "memory");
}
#endif
"""


def with_stored_matrices(cuda: str) -> str:
    """The source with each such loop by matrices."""
    found = _LOOP.sub(_rewritten, cuda)
    kernel = found.index(_KERNEL) if found != cuda else 0
    return found[:kernel] + _STORE * (found != cuda) + found[kernel:]


def _rewritten(loop: re.Match[str]) -> str:
    count, at, i, indent = int(loop["count"]), loop["at"], loop["i"], loop["indent"]
    if count % 4 or not _by_rows(at, i, count):
        return loop[0]
    row = re.sub(r"\bthread\b", "row_thread", re.sub(rf"\b{i}\b", f"({i} * 4 + matrix)", at))
    lines = [
        "{", "  const int matrix = (thread >> 3) & 3, row_thread = (thread & ~31) | ((thread & 7) << 2);",
        "  #pragma unroll", f"  for (int {i} = 0; {i} < {count // 4}; ++{i}) {{",
        f"    store_four_matrices({loop['tile']} + {row}, {loop['from']} + {i} * 8);", "  }", "}",
    ]  # fmt: skip
    return "".join(f"{indent}{line}\n" for line in lines)


def _by_rows(at: str, i: str, count: int) -> bool:
    """Do four lanes of each row store 16 bytes in a row, at a multiple of 16?"""
    others = set(re.findall(r"[a-zA-Z_]\w*", at)) - {"thread", i}
    if not re.fullmatch(r"[\w\s()+\-*&|^<>]*", at) or len(others) > 1:
        return False
    place = compile(at, "a store's place", "eval")
    for step in range(2):
        for thread in (*range(128, 160), *range(352, 384)):
            for number in range(count):
                names = dict.fromkeys(others, step)
                own, first = (
                    eval(place, {"__builtins__": {}}, {**names, "thread": t, i: number}) for t in (thread, thread & ~3)
                )
                if first % 8 or own != first + 2 * (thread & 3):
                    return False
    return True
