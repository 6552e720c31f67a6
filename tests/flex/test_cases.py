"""Fifty score functions and masks of FlexAttention's kind: outputs, lse and every gradient, by the rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.flex.cases import CASES, Sizes, plain
from tests.flex.check import errors_of, ours, results

OFTEN = ("alibi_learned", "t5_buckets", "documents_with_alibi_and_softcap", "any_pairs", "forgetting")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(kv_heads=2, queries=33, keys=47)], ids=["self", "cross"])
def test_the_reference_is_the_formula(name, sizes):
    found = results(ours(sizes, "reference"), CASES[name], sizes, torch.float64, "cpu", torch.float64)
    exact = results(plain, CASES[name], sizes, torch.float64, "cpu", torch.float64)
    assert found.keys() == exact.keys()
    for part in exact:
        torch.testing.assert_close(found[part], exact[part], rtol=1e-9, atol=1e-10, msg=lambda m, p=part: f"{p}: {m}")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_kernels_keep_the_rule(name):
    errors_of(CASES[name], Sizes(batch=1, heads=2, kv_heads=2, queries=65, keys=65), torch.float32, "interpret")


def test_the_gallery_lists_them():
    page = (Path(__file__).resolve().parents[2] / "docs" / "flex-gallery.md").read_text()
    listed = page.split("## Fifty that are tested")[1]
    for name, learned in re.findall(r"`(\w+)`(?: \(([\w, ]+)\))?[,| ]", listed):
        assert set(learned.split(", ")) - {""} == set(CASES[name].learned), name
    assert len(CASES) == 50 and sorted(re.findall(r"`(\w+)`", listed)) == sorted(CASES)
