"""Tiles that leave registers by matrices: the rule on the text, and that each number goes where it went before."""

import re

import pytest

from attention_engine.codegen.patches.matrices import with_stored_matrices

# Of 128 keys and 64 queries in blocks of 128 bytes a row, whose pieces of 16 bytes are turned by the row.
AT = (
    "((((((((step_1 & 1) * 8192) + ((thread >> 5) * 1024)) + ((i_8 & 1) * 512)) + (((thread & 31) >> 2) * 64)) + "
    "(((((thread & 31) >> 2) ^ (i_8 >> 1)) & 7) * 8)) + ((thread & 3) * 2)) - 4096)"
)


def printed(at=AT, count=16, source="gradients_in"):
    return f"""\
extern "C" __global__ void __launch_bounds__(384, 1) backward_kernel(float* sums) {{
    for (int step_1 = 0; step_1 < steps; ++step_1) {{
      #pragma unroll
      for (int i_8 = 0; i_8 < {count}; ++i_8) {{
        *(uint1*)(((half_t*)gradients_out) + {at}) = *(uint1*)({source} + (i_8 * 2));
      }}
    }}
}}
"""


def test_each_row_of_a_matrix_goes_where_its_lanes_stored_it():
    found = with_stored_matrices(printed())
    assert "uint1" not in found and found.count("{") == found.count("}") and found.count("stmatrix") == 1
    call = re.search(r"store_four_matrices\(\(\(half_t\*\)gradients_out\) \+ (.*), gradients_in \+ (.*)\);", found)
    row_thread, stored = re.search(r"row_thread = (.*);", found)[1], {}
    for thread in range(128, 384):  # lane l has numbers 2 (l % 4) and the next of row l / 4 of each matrix
        for i in range(4):
            for matrix in range(4):
                says = thread // 32 * 32 + 8 * matrix + thread % 32 // 4  # the lane that says where that row stands
                row = eval(row_thread, {"thread": says})
                at = eval(call[1], {"step_1": 1, "i_8": i, "matrix": matrix, "row_thread": row}) + 2 * (thread % 4)
                stored[at] = thread, eval(call[2], {"i_8": i}) + 2 * matrix
    before = {eval(AT, {"step_1": 1, "thread": t, "i_8": i}): (t, 2 * i) for t in range(128, 384) for i in range(16)}
    assert stored == before and len(before) == 128 * 64 // 2


@pytest.mark.parametrize("text", [
    printed(count=6),  # no whole matrices
    printed(AT.replace("thread & 3) * 2", "thread & 3) * 4")),  # not in a row
    printed(AT.replace("- 4096", "- 4098")),  # not at a multiple of 16 bytes
    printed(AT.replace("step_1", "step_of(step_1)")),
    printed().replace("uint1", "uint2"),
], ids=["count", "apart", "odd", "call", "wide"])  # fmt: skip
def test_other_stores_stay(text):
    assert with_stored_matrices(text) == text
