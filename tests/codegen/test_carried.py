"""Additions at an address that lives on over steps: the rule on the text, and that each goes where it went before."""

import re

import pytest

from attention_engine.codegen.patches.carried import with_carried_sums

INDEX = "((((((int64_t)i_23) * (int64_t)1024) + (((int64_t)thread) * (int64_t)4)) + place_3) - (int64_t)512)"
PLACE = "((((int64_t)steps) - ((int64_t)step_1)) * ((int64_t)length))"
PRINTED = f"""\
extern "C" __global__ void __launch_bounds__(384, 1) backward_kernel(float* sums, int batch, int length) {{
    if (128 <= thread) {{
      for (int step_1 = 0; step_1 < steps; ++step_1) {{
        for (int i_1 = 0; i_1 < 8; ++i_1) {{
          products[i_1] = 0;
        }}
        v_48 = {PLACE};
        int64_t place_3 = v_48;
        #pragma unroll
        for (int i_23 = 0; i_23 < 8; ++i_23) {{
          AtomicAddx4((&(sums[{INDEX}])), *(float4*)(dq_3 + (i_23 * 4)));
        }}
      }}
    }}
}}
"""


def value_of(expression, **names):
    """What an expression of integers comes to."""
    return eval(expression.replace("(int64_t)", ""), names)


def test_each_addition_goes_where_it_went():
    found = with_carried_sums(PRINTED)
    assert "AtomicAddx4" not in found and found.count("{") == PRINTED.count("{") + 2
    first = re.search(r"address = __cvta_generic_to_global\(sums \+ (.*)\);", found)[1]
    added = re.search(r"add_four\(place_3_address \+ (.*), dq_3 \+ \(i_23 \* 4\)\);", found)[1]
    moved = re.search(r'"l"\((.*)\)\);', found)[1]
    place = re.search(r"int64_t place_3 = (.*);", found)[1]
    assert "const int length_held = __reduce_or_sync(0xffffffffu, length);" in found
    for thread in (128, 200, 383):
        address, before = 4 * value_of(first, thread=thread), 0
        for step in range(4):
            now = value_of(place, steps=7, step_1=step, length_held=2**31 - 1024)
            assert now == value_of(PLACE, steps=7, step_1=step, length=2**31 - 1024)
            address += value_of(moved, place_3=now, place_3_before=before)
            before = now
            for i in range(8):
                index = value_of(INDEX, i_23=i, thread=thread, place_3=now)
                assert address + value_of(added, i_23=i) == 4 * index


def test_the_variable_lives_as_long_as_the_loop_of_steps():
    lines = with_carried_sums(PRINTED).splitlines()
    at = {
        word: next(n for n, line in enumerate(lines) if word in line)
        for word in ("_before = 0", "for (int step_1", "add.s64")
    }
    assert at["_before = 0"] < at["for (int step_1"] < at["add.s64"]
    assert lines[at["add.s64"] - 1].strip().startswith("int64_t place_3 = (")
    assert lines[at["add.s64"] + 1].strip() == "place_3_before = place_3;"


@pytest.mark.parametrize(
    "change",
    [
        ("int64_t place_3 = v_48;", "int place_3 = v_48;"),  # a place that 32 bits hold
        ("+ place_3)", "+ place_3 + first_4)"),  # of two variables
        ("+ place_3)", "+ place_3 + i_23)"),  # an index that is in once more
        ("* (int64_t)1024", "* stride"),  # a distance that nobody knows
        ("products[i_1] = 0;", "products[i_1] = place_3;"),  # a place that others read
        ("AtomicAddx4", "AtomicAddx2"),
        ("        v_48 = ", "      }\n        v_48 = "),  # behind the loop
    ],
)  # fmt: skip
def test_what_the_rule_does_not_know_stays_as_it_was(change):
    other = PRINTED.replace(*change)
    assert other != PRINTED and with_carried_sums(other) == other
