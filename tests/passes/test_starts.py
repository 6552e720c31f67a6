"""Programs whose indices start where a launch says: bounds of their masks, and which inputs hold own rows."""

import pytest

from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.evaluate import evaluate
from attention_engine.ir.expr import Op, topological
from attention_engine.ir.program import KV_IDX, Q_IDX, STARTS, B, H, is_start, start_of
from attention_engine.ir.verify import verify_program
from attention_engine.library import alibi, and_masks, causal, document, prefix_lm, relative_bias, sliding_window
from attention_engine.passes.analyse_mask import analyse_mask
from attention_engine.passes.ends import find_ends
from attention_engine.passes.row_terms import part_row_terms
from attention_engine.passes.starts import AXES, Moved, own_rows, with_starts

ALL = (B, H, Q_IDX, KV_IDX)
AXES_OF = {
    "slopes": ("heads",),
    "documents": ("batch", "seq_len"),
    "table": ("heads", 61),
    "bias": ("seq_len", "seq_len_kv"),
}


def program_of(score=None, mask=None, axes=()):
    return trace(score, mask, None, CustomIO({name: AXES_OF[name] for name in axes}))


def moved(program, indices=ALL, by_batch=False, axes=()):
    declared = {name: AXES_OF[name] for name in axes}
    found = with_starts(program, Moved(indices, by_batch, own_rows(program, declared, indices)))
    verify_program(found)
    return found


@pytest.mark.parametrize("mask", [causal, sliding_window(5, 2), and_masks(causal, sliding_window(3, 0))])
@pytest.mark.parametrize("by_batch", [False, True])
def test_bounds_know_starts(mask, by_batch):
    """Whatever the starts are, kept pairs are those within the bounds."""
    plain, found = program_of(mask=mask).mask, moved(program_of(mask=mask), by_batch=by_batch).mask
    plan = analyse_mask(found)
    assert plan.exact and all(bound.starts for bound in plan.bounds)
    numbers = {start_of(index, by_batch): n for index, n in ((Q_IDX, 7), (KV_IDX, 4))}
    for q in range(9):
        for kv in range(9):
            kept = evaluate(plain, {Q_IDX: q + 7, KV_IDX: kv + 4, B: 0, H: 0})
            within = all(
                b.q * q + b.kv * kv + b.offset + sum(n * numbers[start] for start, n in b.starts) >= 0
                for b in plan.bounds
            )
            assert kept == within == evaluate(found, {Q_IDX: q, KV_IDX: kv, B: 0, H: 0, **numbers})
    assert (plan.of_all_batches() == plan) is not by_batch


def test_only_what_moves_is_added():
    (bound,) = analyse_mask(moved(program_of(mask=causal), (Q_IDX,)).mask).bounds
    assert bound.starts == ((start_of(Q_IDX), 1),)


def test_other_masks_are_asked_as_before():
    found = moved(program_of(mask=and_masks(prefix_lm(9), document()), axes=["documents"]), axes=["documents"])
    assert not analyse_mask(found.mask).exact
    assert {n.name for n in topological(found.mask) if n.op is Op.LOAD} == {"documents", STARTS}


def test_own_rows_are_those_that_every_read_asks_at_its_index():
    score = lambda s, c, b, h, q, k: s + c["slopes"] * (q - k) + c["bias"][q, k - 1] + c["table"][h, q - k + 30]  # noqa: E731
    program = program_of(score, document(), ["slopes", "bias", "table", "documents"])
    assert own_rows(program, AXES_OF, ALL) == {("slopes", 0), ("bias", 0), ("table", 0), ("documents", 0)}
    assert own_rows(program, AXES_OF, [Q_IDX, KV_IDX]) == {("bias", 0)}
    how = Moved((Q_IDX, KV_IDX), own=own_rows(program, AXES_OF, [Q_IDX, KV_IDX]))
    assert how.axes_of("bias", AXES_OF["bias"]) == ("seq_len", "whole_seq_len_kv")
    assert how.axes_of("documents", AXES_OF["documents"]) == ("batch", "whole_seq_len")


def test_what_is_linear_in_indices_stays_so():
    """Terms of rows leave the tile, and clamped indices have their ends, as without starts."""
    score = moved(program_of(alibi(0.1), axes=["slopes"]), axes=["slopes"]).score
    of_pairs, of_row = part_row_terms(score)
    assert of_row is not None and not any(is_start(node) for node in topological(of_pairs))
    score = moved(program_of(relative_bias("table", 30, 0.1), axes=["table"]), axes=["table"]).score
    ends = find_ends(score)
    assert ends is not None and ends.factors() == (1, -1)


def test_every_index_has_a_start_of_its_own():
    assert [start_of(index).args[1].value for index in AXES] == [0, 1, 2, 3]
