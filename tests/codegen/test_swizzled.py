"""Places of stores by turned bits: the rule on the text, and that each place is the one that the sum said."""

import re

import pytest

from attention_engine.codegen.patches.swizzled import with_turned_bits

PLACE = (
    "((((((((((step & 1) * 8192) + ((thread >> 5) * 1024)) + ((i_2 & 1) * 512)) + (((thread & 31) >> 2) * 64))"
    " + (((((thread & 31) >> 4) + (i_2 >> 3)) & 1) * 32)) + (((((thread & 15) >> 3) + ((i_2 & 7) >> 2)) & 1) * 16))"
    " + (((((thread & 7) >> 2) + ((i_2 & 3) >> 1)) & 1) * 8)) + ((thread & 3) * 2)) - 4096)"
)
PRINTED = f"""\
        for (int i_2 = 0; i_2 < 16; ++i_2) {{
          *(uint1*)(((bfloat16_t*)gradients_out) + {PLACE}) = *(uint1*)(gradients_in + (i_2 * 2));
        }}
"""


def place_in(text):
    """What a text says of where a number stands, as Python."""
    found = re.search(r"gradients_out\) \+ (.*)\) = ", text)[1]
    return eval(f"lambda thread, step, i_2: {found}")


def test_each_number_stands_where_the_sum_said():
    rewritten = with_turned_bits(PRINTED)
    assert "i_2 >> 3" in PRINTED and "i_2 >> 3" not in rewritten
    old, new = place_in(PRINTED), place_in(rewritten)
    places = [(thread, step, i) for thread in range(128, 384) for step in (4, 7) for i in range(16)]
    assert [new(*at) for at in places] == [old(*at) for at in places]
    assert len({old(*at) for at in places}) == len(places)


@pytest.mark.parametrize(
    "change",
    [
        ("& 1) * 16))", "& 1) * 24))"),  # bits of other weights
        ("(i_2 & 1) * 512", "(i_2 & 1) * 100"),  # rows that would be turned too
        ("- 4096", "+ i_2"),  # a place that the index is in once more
        ("i_2 < 16", "i_2 < 32"),  # a piece that three bits don't count
        ("thread", "((int)threadIdx.x)"),  # a text before threads have a name
    ],
)
def test_what_the_rule_does_not_know_stays_as_it_was(change):
    other = PRINTED.replace(*change)
    assert other != PRINTED and with_turned_bits(other) == other
