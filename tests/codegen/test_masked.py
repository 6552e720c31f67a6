"""The conditions of masks are hidden while TileLang lowers loops: it makes the same of them, by fewer questions."""

import pytest

pytest.importorskip("tilelang")
from tvm import ir, tirx

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
        hidden.append((len(self.formulas), masked.HIDDEN in made.script()))
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


def test_a_condition_that_reads_a_tile_is_not_hidden():
    i, j = numbers("i", "j")
    variable, table, tile, row = (
        tirx.decl_buffer((64,), "int32", scope=scope)
        for scope in ("local.var", "global", "shared.dyn", "local.fragment")
    )
    read = tirx.if_then_else(i < 3, table[i], 4)
    assert all(masked.hides(tirx.And(j < variable[0], i < number), j) for number in (i, variable[0], table[i], read))
    placed = tile[0], row[i], tirx.if_then_else(i < tile[0], i, 4)
    assert not any(masked.hides(tirx.And(j < variable[0], i < number), j) for number in placed)


def hidden_of(body, *variables, **annotations):
    """The formulas that a parallel loop over columns side by side is without; its body then, and with them again."""
    load_tilelang()
    from tilelang.layout import Fragment

    layout = Fragment([8, 8], forward_fn=lambda i, j: (i * 4 + j // 2, j % 2))
    inner = tirx.For(variables[1], 0, 8, tirx.ForKind.PARALLEL, body)
    loop = tirx.For(
        variables[0], 0, 8, tirx.ForKind.PARALLEL, inner,
        annotations={masked.LOOP_LAYOUT: layout, **annotations},
    )  # fmt: skip
    hidden = masked.Hidden()
    made = hidden.take(loop)
    return [formula for formula, _ in hidden.formulas], made.body.body, hidden.put_back(made).body.body


def reads(body):
    """The buffers that it names, in order."""
    found = []

    def visit(node):
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            found.append(node.buffer.name)

    tirx.stmt_functor.post_order_visit(body, visit)
    return list(dict.fromkeys(found))


def test_a_loop_that_names_a_value_is_without_all_that_reads_no_tile():
    """What is written to, where something stands, and a loop that defines variables of its own stay as they are."""
    i, j, n = numbers("i", "j", "n")
    scopes = {"name": "local.var", "table": "global", "tile": "local.fragment"}
    name, table, tile = (tirx.decl_buffer((64,), "int32", each, scope=scope) for each, scope in scopes.items())
    read = tirx.if_then_else(i < n, table[i], 0)
    value = tile[j] + (read + i) * name[0]
    body = tirx.SeqStmt([tirx.BufferStore(name, read, [0]), tirx.BufferStore(tile, value, [j])])
    found, inner, back = hidden_of(body, i, j)
    assert [str(each) for each in found] == [str(read), str((read + i) * name[0])]
    assert reads(inner) == ["name", "tile"] and ir.structural_equal(back, body)
    address = tirx.Call("handle", "tirx.address_of", [table[i]])
    call = tirx.Evaluate(tirx.call_extern("int32", "add", address, read))
    found, inner, _ = hidden_of(tirx.SeqStmt([body, call]), i, j)
    assert len(found) == 3 and reads(inner) == ["name", "tile", "table"]
    bound = tirx.SeqStmt([tirx.Bind(tirx.Var("rank", "int32"), read), body])
    assert not hidden_of(bound, i, j)[0] and not hidden_of(body, i, j, parallel_prefer_async=1)[0]


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
