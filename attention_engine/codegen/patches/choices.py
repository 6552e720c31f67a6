"""Works round shortfalls of what TileLang 0.1.15 prints for dropout, by rules on the CUDA text.

Weights become 0 in pairs, as 16-bit numbers. A thread has two neighbouring columns of a row in one register once they
are, and a bit of each in two bytes of a word (kernels/hopper/chances.py). One permutation of bytes that copies their
first bits makes a mask of both, and one operation applies it: half of what it takes to ask each bit and to choose 0,
and no predicate. TileLang has no operation on such a register. So the loop that chooses 0 goes, and the loop behind it
that makes 16-bit numbers of the same scores applies masks.

Both words of a product of two words come of one instruction, where they are asked for in assembly. Where registers are
few, ptxas makes two of an upper word and a lower one.
"""

from __future__ import annotations

import re

VERSION, PROOF = "0.1.15", "test_tilelang_drops_weights_one_by_one"
_WORDS = """\
#ifndef WORDS_OF_PRODUCT
#define WORDS_OF_PRODUCT
static __device__ __forceinline__ uint64_t words_of_product(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}
#endif
"""
_UPPER = re.compile(r"__umulhi\((?P<value>[^,\n]+), \(uint\)(?P<by>\d+)\)")
_SIGNS = """\
#ifndef FIRST_BITS_OF_BYTES
#define FIRST_BITS_OF_BYTES
template <uint32_t SELECTOR>
static __device__ __forceinline__ uint32_t first_bits_of_bytes(uint32_t word) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(word), "n"(SELECTOR));
  return mask;
}
#endif
"""
# The loop over a thread's scores that chooses 0 where a bit of one of some words is 0, and the one that makes 16-bit
# numbers of them, four at a time.
_LOOPS = re.compile(
    r"(?P<indent> *)\#pragma unroll\n"
    r" *for \(int (?P<i>\w+) = 0; (?P=i) < (?P<count>\d+); \+\+(?P=i)\) \{\n"
    r"(?P<choice>(?:(?! *\#pragma)[^\n]*\n)*?)"
    r" *float (?P<value>\w+);\n"
    r" *if \(\(\(uint\)0 < \((?P<word>\w+) & \(\(uint\)1 << (?P<place>[^\n]*)\)\)\)\) \{\n"
    r" *(?P=value) = (?P<scores>\w+)\[(?P=i)\];\n"
    r" *\} else \{\n"
    r" *(?P=value) = 0x0p\+0f[^\n]*;\n"
    r" *\}\n"
    r" *(?P=scores)\[(?P=i)\] = (?P=value);\n"
    r" *\}\n"
    r"(?P<casts> *\#pragma unroll\n"
    r" *for \(int (?P<n>\w+) = 0; (?P=n) < \d+; \+\+(?P=n)\) \{\n"
    r" *uint2 (?P<packed>\w+);\n"
    r" *float4 \w+ = \*\(float4\*\)\((?P=scores) \+ \((?P=n) \* 4\)\);\n"
    r"(?: *\([^\n;]*&(?P=packed)\)\)\[[01]\] = [^\n;]*;\n){2})"
    r"(?P<stored> *\*\(uint2\*\)\(\w+ \+ \((?P=n) \* 4\)\) = (?P=packed);\n)",
)
_PLACE = "((uint)(((((({i} & 15) >> 3) * 16) + (({i} & 1) * 8)) + ((({i} & 3) >> 1) * 2)) + (({i} & 7) >> 2)) + 4))"
_WORD = re.compile(r"^ *\w+ = (\w+);$", re.MULTILINE)


def with_pairs_dropped(cuda: str) -> str:
    """The source with weights dropped two at a time."""
    return _with_function(_SIGNS, _LOOPS.sub(_rewritten, cuda), cuda)


def with_whole_products(cuda: str) -> str:
    """The source with products of whose words both are read as one instruction each."""
    factors = "|".join(sorted({found["by"] for found in _UPPER.finditer(cuda)}))
    if not factors:
        return cuda
    lower = re.compile(rf"\((?P<value>\w+|\(\(uint\)\w+\)) \* \(uint\)(?P<by>{factors})\)")
    found = _UPPER.sub(r"((uint)(words_of_product(\g<value>, (uint)\g<by>) >> 32))", cuda)
    return _with_function(_WORDS, lower.sub(r"((uint)words_of_product(\g<value>, (uint)\g<by>))", found), cuda)


def _with_function(function: str, cuda: str, before: str) -> str:
    if cuda == before:
        return cuda
    first = cuda.index('extern "C" __global__')
    return cuda[:first] + function + cuda[first:]


def _rewritten(loops: re.Match[str]) -> str:
    words = _words(loops["choice"], loops["word"])
    if _plain(loops["place"]) != _plain(_PLACE.format(i=loops["i"])) or len(words) * 16 != int(loops["count"]):
        return loops[0]
    indent, n, packed = loops["indent"], loops["n"], loops["packed"]
    lines = [
        f"  const uint32_t kept = words[{n} >> 2] << (({n} & 1) ^ 1);",
        "  const uint32_t first = kept << 2;",
        f"  {packed}.x &= {n} & 2 ? first_bits_of_bytes<0xbbaa>(first) : first_bits_of_bytes<0x9988>(first);",
        f"  {packed}.y &= {n} & 2 ? first_bits_of_bytes<0xbbaa>(kept) : first_bits_of_bytes<0x9988>(kept);",
    ]
    declared = f"{indent}const uint32_t words[{len(words)}] = {{{', '.join(words)}}};\n"
    return declared + loops["casts"] + "".join(f"{indent}{line}\n" for line in lines) + loops["stored"]


def _words(choice: str, word: str) -> list[str]:
    """The words in the order of columns; what the choice among them assigns is either a word or what it chose last."""
    assigned = _WORD.findall(choice)
    chosen = set(re.findall(r"^ *uint (\w+);$", choice, re.MULTILINE)) | {word}
    return [name for name in assigned if name not in chosen] or [word]


def _plain(text: str) -> str:
    return re.sub(r"[\s()]", "", text)
