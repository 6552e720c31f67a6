"""Masks and scores as pictures: what their cells hold against plain torch, and what they print and draw."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from attention_engine import (
    AttentionEngine,
    CustomIO,
    create_block_mask,
    create_mask,
    document_ids,
    library,
    meta_tensor,
    show_mask,
    show_scores,
)
from attention_engine.errors import BadInput, CustomInputMissing, NotATensor, UnknownOption
from attention_engine.runtime import showing
from attention_engine.runtime.pictures import kinds_of_tiles, percent

CAUSAL_5 = """causal
60 % kept of 5 queries x 5 keys
██ kept  ·· masked
██········
████······
██████····
████████··
██████████"""


def plain_mask(mask, queries, keys, b=0, h=0):
    """The mask by torch alone."""
    return mask(b, h, torch.arange(queries)[:, None], torch.arange(keys)[None]).expand(queries, keys)


def shares_of(kept, cell):
    """The share of kept pairs of each cell, counted cell by cell."""
    rows = [band.split(cell[1], 1) for band in kept.double().split(cell[0])]
    return torch.tensor([[float(part.mean()) for part in row] for row in rows], dtype=torch.float64)


def test_a_mask_prints_as_block_characters():
    assert repr(show_mask(library.causal, Sq=5)) == CAUSAL_5


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (48, 49), (100, 333), (1, 500), (500, 3)])
@pytest.mark.parametrize("mask", [library.causal, library.sliding_window(20, 3), library.dilated(3)])
def test_cells_hold_the_share_of_kept_pairs(mask, queries, keys):
    found = show_mask(mask, Sq=queries, Skv=keys)
    want = plain_mask(mask, queries, keys)
    torch.testing.assert_close(torch.tensor(found.panels[0].rows, dtype=torch.float64), shares_of(want, found.cell))
    assert found.kept == pytest.approx(float(want.double().mean()))
    assert all(len(row) <= showing.CELLS for row in found.panels[0].rows) and len(found.panels[0].rows) <= showing.CELLS


def test_of_too_many_pairs_some_are_looked_at(monkeypatch):
    exact = show_mask(library.sliding_window(300), Sq=5000)
    monkeypatch.setattr(showing, "MOST_PAIRS", 1 << 20)
    found = show_mask(library.sliding_window(300), Sq=5000)
    assert exact.exact and not found.exact and not repr(exact).splitlines()[1].startswith("about ")
    assert repr(found).splitlines()[1].startswith("about ") and found.kept == pytest.approx(exact.kept, rel=0.05)


def test_heads_that_differ_have_panels_of_their_own():
    def per_head(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() <= h

    found = show_mask(per_head, 3, 6, 20)
    assert [p.title for p in found.panels] == ["head 0", "head 1", "head 2", "head 3"] and found.others == 2
    for h, panel in enumerate(found.panels):
        assert torch.equal(torch.tensor(panel.rows).bool(), plain_mask(per_head, 20, 20, h=h))
    assert [p.title for p in show_mask(per_head, 1, 6, 20, head=[5, 1]).panels] == ["head 5", "head 1"]
    with pytest.raises(UnknownOption, match=r"head=6 is asked for, and there are 6\. Choose 0 to 5"):
        show_mask(per_head, 1, 6, 20, head=6)
    assert max(map(len, repr(found).splitlines())) <= 120


def test_tiles_are_framed_by_their_kind():
    found = show_mask(library.causal, Sq=512, tile=(128, 64))
    assert "tiles of 128 x 64: 12 whole, 8 in part, 12 not visited" in repr(found)
    blocks = create_block_mask(library.causal, None, None, 512, 512, Q_BLOCK_SIZE=128, KV_BLOCK_SIZE=64)[0, 0]
    kinds = kinds_of_tiles(found.panels[0].rows, 128 // found.cell[0], 64 // found.cell[1])
    assert [[kind != "none" for kind in row] for row in kinds] == blocks.bool().tolist()
    with pytest.raises(UnknownOption, match="tiles of 2 can't be drawn for a length of 4096"):
        show_mask(library.causal, Sq=4096, tile=(2, 2))


PICTURES = {
    "mask": lambda: show_mask(library.causal, Sq=9),
    "tiles": lambda: show_mask(lambda b, h, i, j: i < j, Sq=300, tile=(64, 64)),
    "scores": lambda: show_scores(torch.randn(2, 9, 2, 4), torch.randn(2, 9, 2, 4), None, library.causal),
    "weights": lambda: show_scores(torch.randn(1, 9, 1, 4), torch.randn(1, 7, 1, 4), weights=True),
    "empty": lambda: show_mask(library.causal, Sq=0),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_notebook_gets_a_whole_svg(name):
    found = PICTURES[name]()
    drawn = ElementTree.fromstring(found._repr_html_())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    words = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert found.title in words and found.words() in words  # what the terminal says stands in the picture too
    assert repr(found).splitlines()[:2] == [found.title, found.words()]


# ---- tensors that masks and scores read


def test_custom_inputs_and_captured_tensors_are_read_by_masks():
    ids = document_ids([2, 4])
    want = ids[0][:, None] == ids[0]
    sizes = (1, None, 6, 6)

    def captured(b, h, q_idx, kv_idx):
        return ids[b, q_idx] == ids[b, kv_idx]

    for made in (
        create_mask(library.document(), *sizes, documents=ids),
        create_mask(lambda b, h, i, j, custom: custom["seg"][b, i] == custom["seg"][b, j], *sizes, seg=ids),
        create_mask(captured, *sizes),
    ):
        assert torch.equal(made[0, 0], want)
    padded = create_mask(library.padding("n"), 2, 3, 4, 5, n=torch.tensor([5, 2]))
    assert padded.shape == (2, 1, 4, 5) and padded.sum((1, 2, 3)).tolist() == [20, 8]
    blocks = create_block_mask(library.document(), *sizes, Q_BLOCK_SIZE=2, KV_BLOCK_SIZE=2, documents=ids)
    assert blocks[0, 0].tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    for picture in (show_mask(captured, *sizes), show_mask(library.document(), *sizes, documents=ids)):
        assert torch.equal(torch.tensor(picture.panels[0].rows).bool(), want)
    with pytest.raises(NotATensor, match=r"custom input 'documents' is list\. Give a tensor"):
        create_mask(library.document(), *sizes, documents=[[0, 0, 1]])


def test_an_engine_shows_its_mask_with_the_inputs_that_it_reads():
    io = CustomIO({"documents": ("batch", "seq_len"), "slopes": ("heads",)})
    mask = library.and_masks(library.causal, library.document())
    engine = AttentionEngine((meta_tensor(None, 2, None, 16),) * 3, io, library.alibi(0.25), mask)
    ids = document_ids([3, 5])
    want = plain_mask(library.causal, 8, 8) & (ids[0][:, None] == ids[0])
    for picture in (engine.show_mask(documents=ids), engine.show_mask(ids, torch.ones(2)), engine.show_mask(ids)):
        assert torch.equal(torch.tensor(picture.panels[0].rows).bool(), want)
    with pytest.raises(CustomInputMissing, match=re.escape("Give it: documents=tensor.")):
        engine.show_mask(Sq=8)
    plain = AttentionEngine((meta_tensor(1, 2, 32, 16),) * 3, block_size=(16, 8))
    assert plain.show_mask().kept == 1 and (plain.show_mask().queries, plain.show_mask(Sq=9).keys) == (32, 9)
    blocks = torch.tensor([[[[1, 0, 0, 1], [0, 0, 1, 0]]]], dtype=torch.int8)
    assert plain.show_mask(block_mask=blocks).kept == 3 / 8


# ---- scores


def exact_scores(q, k, slopes, b, h):
    """alibi(0.25) by torch, in float64."""
    at = torch.arange(q.shape[1])
    product = q[b, :, h].double() @ k[b, :, h // (q.shape[2] // k.shape[2])].double().T
    return product * 0.25 - slopes[h].double() * (at[:, None] - at)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_scores_and_weights_are_those_of_plain_torch(layout, engine):
    torch.manual_seed(0)
    q, k, slopes = torch.randn(2, 13, 4, 16), torch.randn(2, 13, 2, 16), torch.rand(4)
    given = [t.transpose(1, 2) for t in (q, k)] if layout == "bhsd" else [q, k]
    keep = plain_mask(library.causal, 13, 13)
    if engine:
        metas = (meta_tensor(2, 4, 13, 16), *(meta_tensor(2, 2, 13, 16),) * 2)
        io = CustomIO({"slopes": ("heads",)})
        made = AttentionEngine(metas, io, library.alibi(0.25), library.causal, layout=layout)
        scores, weights = (made.show_scores(*given, slopes, weights=w, batch=1, head=[0, 3]) for w in (False, True))
    else:
        functions = (library.alibi(0.25), library.causal)
        chosen = {"layout": layout, "slopes": slopes, "batch": 1, "head": [0, 3]}
        scores, weights = (show_scores(*given, *functions, weights=w, **chosen) for w in (False, True))
    assert [p.title for p in scores.panels] == ["batch 1, head 0", "batch 1, head 3"]
    for n, h in enumerate((0, 3)):
        want = exact_scores(q, k, slopes, 1, h).masked_fill(~keep, float("-inf"))
        found = torch.tensor(scores.panels[n].rows, dtype=torch.float64)
        torch.testing.assert_close(found, torch.where(keep, want, torch.nan), equal_nan=True, atol=1e-5, rtol=1e-5)
        found = torch.tensor(weights.panels[n].rows, dtype=torch.float64)
        want = torch.where(keep, want.softmax(-1), torch.nan)
        torch.testing.assert_close(found, want, equal_nan=True, atol=1e-6, rtol=1e-5)
    assert weights.high <= 1 and "weights of 13 queries x 13 keys" in repr(weights)


def test_a_cell_of_several_scores_is_the_mean_of_those_kept():
    q, k = torch.randn(1, 100, 1, 8), torch.randn(1, 120, 1, 8)
    found = show_scores(q, k, None, library.causal, scale=1.0)
    want, keep = q[0, :, 0].double() @ k[0, :, 0].double().T, plain_mask(library.causal, 100, 120)
    want = torch.where(keep, want, torch.nan)
    means = [[float(part.nanmean()) for part in band.split(found.cell[1], 1)] for band in want.split(found.cell[0])]
    torch.testing.assert_close(
        torch.tensor(found.panels[0].rows), torch.tensor(means), equal_nan=True, atol=1e-5, rtol=1e-5
    )


def test_weights_of_rows_that_are_too_long_are_refused():
    q = torch.randn(1, 2049, 1, 4)
    with pytest.raises(BadInput, match="rows are drawn up to 2048 keys"):
        show_scores(q, q, weights=True)


def test_a_share_is_never_rounded_to_all_or_nothing():
    assert [percent(s) for s in (0.0, 1e-6, 0.5, 0.125, 1 - 1e-6, 1.0)] == [
        "0 %", "under 0.1 %", "50 %", "12.5 %", "over 99.9 %", "100 %",
    ]  # fmt: skip
