"""The conditions of masks are hidden while TileLang lowers loops: it makes the same of them, by fewer questions."""

import pytest

pytest.importorskip("tilelang")
from tvm import tirx

from attention_engine.codegen.compile import load_tilelang
from attention_engine.codegen.patches import masked
from tests.codegen.at_pass import at_pass


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 100)


@pytest.mark.parametrize(
    ("name", "mask", "count"),
    [
        ("forward", window, 2),  # where blocks begin and in the loop
        pytest.param("backward", window, 4, marks=pytest.mark.slow),  # the mask's and the length's, of two tiles each
        pytest.param("forward", None, 2, marks=pytest.mark.slow),  # the length's
    ],
)
def test_loops_are_what_tilelang_makes_of_them(monkeypatch, name, mask, count):
    hidden, take, with_hidden = [], masked.Hidden.take, masked.with_hidden

    def watched(self, body):
        made = take(self, body)
        hidden.append((len(self.conditions), masked.HIDDEN in made.script()))
        return made

    def look(module, whole):
        return with_hidden(module, whole).script(), whole(module).script()  # the nodes are new ones in each

    monkeypatch.setattr(masked.Hidden, "take", watched)
    ours, theirs = at_pass(monkeypatch, (masked, "with_hidden"), name, look, mask_mod=mask)
    assert hidden == [(count, True)]
    assert ours == theirs


def numbers(*names):
    return (tirx.Var(name, "int32") for name in names)


def test_a_condition_is_hidden_where_columns_side_by_side_differ_in_it():
    i, j, n = numbers("i", "j", "n")
    told = j < n, n - j * 2 >= i, tirx.bitwise_and(i < n, j <= i), tirx.Or(i < n, n > j), j + n * 8 < i + 5
    alike = i < n, j - j < n, j // 2 < n, tirx.bitwise_and(i < n, i > 3), j * 2 < j + n + j, tirx.EQ(j // 8, n)
    even = j < 100, j + n * 8 < 64, n * 64 + j + tirx.max(i, 0) * 16 >= 100  # pairs of columns are on one side
    assert [masked.hides(each, j) for each in told] == [True] * len(told)
    assert not any(masked.hides(each, j) for each in (*alike, *even))


def test_a_condition_that_reads_a_tile_or_makes_a_choice_is_not_hidden():
    i, j = numbers("i", "j")
    register, tile = (tirx.decl_buffer((1,), "int32", scope=scope) for scope in ("local.var", "shared.dyn"))
    assert masked.hides(j < register[0], j) and not masked.hides(j < tile[0], j)
    assert not masked.hides(j < tirx.if_then_else(i < 3, i, 4), j)


def test_lanes_are_columns_where_a_threads_entries_lie_side_by_side():
    load_tilelang()
    from tilelang.layout import Fragment

    products = Fragment([8, 8], forward_fn=lambda i, j: (i * 4 + j // 2, j % 2))
    rows = Fragment([8, 8], forward_fn=lambda i, j: (j, i))
    apart = Fragment([8, 8], forward_fn=lambda i, j: (j, i * 8 + j))
    twice = Fragment([8, 8], forward_fn=lambda i, j, rep: (rep * 32 + i * 4 + j // 2, j % 2), replicate=2)
    found = [masked.lanes_are_columns(layout, 2) for layout in (products, rows, apart, twice)]
    assert found == [True, False, False, False]
    assert not masked.lanes_are_columns(products, 1)
