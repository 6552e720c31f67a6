"""Two neighbours of a tile take one reciprocal, by a rule on the CUDA text that TileLang 0.1.15 prints.

A sigmoid's weight takes an exponential and a reciprocal, and special functions of a tile of pairs then take as long as
its products: 16 a clock on an SM, where there are 128 multiplications. Of two numbers a and b one reciprocal r of their
product is enough: 1 / a = r b and 1 / b = r a. Numbers are 1 and an exponential, so at least 1. What is above 2**63 is
taken for that in the product, which is then no infinity, and has the reciprocal 0: a pair whose score is -inf keeps the
weight 0. NaN makes NaN of both. So the rule is for tiles that are named `scores`, as a forward pass has them: there
neighbours in a thread's registers are of one row.

TileLang takes one index of a tile in a loop over it, so that a kernel can't say it.
"""

from __future__ import annotations

import re

VERSION, PROOF = "0.1.15", "test_tilelang_inverts_weights_one_by_one"
HELPER = """\
#ifndef INVERT_TWO
#define INVERT_TWO
static __device__ __forceinline__ void invert_two(float& a, float& b) {
  const float large = 0x1p+63f;
  const bool a_is_large = a > large, b_is_large = b > large;
  const float of_a = a_is_large ? large : a, of_b = b_is_large ? large : b;
  const float of_both = tl::fast_rcp(of_a * of_b);
  a = a_is_large ? 0.0f : of_both * of_b;
  b = b_is_large ? 0.0f : of_both * of_a;
}
#endif
"""
# A loop over a thread's numbers whose only line makes each the reciprocal of 1 and an exponential.
_LOOP = re.compile(
    r"(?P<indent> *)\#pragma unroll\n"
    r" *for \(int (?P<i>\w+) = 0; (?P=i) < (?P<count>\d+); \+\+(?P=i)\) \{\n"
    r" *scores\[(?P=i)\] = tl::fast_rcp\(\((?P<large>exp2f\([^\n]*\) \+ 0x1p\+0f[^\n]*?)\)\);\n"
    r" *\}\n"
)
_KERNEL = re.compile(r"^extern \"C\" __global__ void ", re.MULTILINE)


def with_shared_reciprocals(cuda: str) -> str:
    """The source with each such loop in two: numbers, then reciprocals of two neighbours at a time."""
    shared, first = _LOOP.sub(_shared, cuda), _KERNEL.search(cuda)
    if shared == cuda or first is None:
        return cuda
    return shared[: first.start()] + HELPER + shared[first.start() :]


def _shared(loop: re.Match[str]) -> str:
    i, count = loop["i"], int(loop["count"])
    if count % 2:
        return loop[0]
    lines = [
        "#pragma unroll",
        f"for (int {i} = 0; {i} < {count}; ++{i}) {{",
        f"  scores[{i}] = {loop['large']};",
        "}",
        "#pragma unroll",
        f"for (int {i} = 0; {i} < {count}; {i} += 2) {{",
        f"  invert_two(scores[{i}], scores[{i} + 1]);",
        "}",
    ]
    return "".join(f"{loop['indent']}{line}\n" for line in lines)
