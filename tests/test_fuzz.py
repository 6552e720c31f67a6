"""Random programs on the interpreter and the reference; the faults that `python -m tests.fuzz` found, as tests."""

import re

import pytest
import torch

from tests.fuzz.__main__ import main
from tests.fuzz.check import Measured, Outcome, attempt, names_of, plain_results, run
from tests.fuzz.normalisers import NORMALISERS
from tests.fuzz.packed import run_packed
from tests.fuzz.parts import worse_in_parts
from tests.fuzz.pieces import MASKS, SCORES
from tests.fuzz.scripts import draw

KNOWN = ("right", "refused")


@pytest.mark.parametrize("number", range(16))
def test_kernels_mean_what_plain_torch_does(number):
    drawn = draw(11, number)
    found = run(drawn.text, "interpret")
    assert found.kind in KNOWN, f"{found.detail}\n{drawn.paste('interpret', 'cpu')}"


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_the_reference_means_what_plain_torch_does(first):
    for number in range(first, first + 20):
        drawn = draw(12, number)
        found = run(drawn.text, "reference")
        assert found.kind in KNOWN, f"{found.detail}\n{drawn.paste('reference', 'cpu')}"


IN_PARTS = [*(("reference", range(first, first + 8)) for first in range(0, 40, 8)), ("interpret", range(100, 108))]


@pytest.mark.parametrize(("backend", "numbers"), IN_PARTS, ids=str)
def test_parts_of_keys_are_as_exact_as_all(backend, numbers):
    """Cut at random, whatever the score, mask and row function are: each has a merge."""
    cut = 0
    for number in numbers:
        drawn = draw(14, number)
        worse = worse_in_parts(drawn.text, backend, number)
        assert not worse, f"{worse}\n{drawn.text}"
        cut += worse is not None
    assert cut >= len(numbers) // 2


@pytest.mark.parametrize(("backend", "numbers"), [("reference", range(60)), ("interpret", range(100, 124))], ids=str)
def test_batches_packed_as_sequences_mean_what_plain_torch_does(backend, numbers):
    packed = 0
    for number in numbers:
        drawn = draw(15, number)
        found = run_packed(drawn.text, backend, unlike=number % 2 == 1)
        assert found is None or found.kind in KNOWN, f"{found.detail}\n{drawn.text}"
        packed += found is not None and found.kind == "right"
    assert packed >= len(numbers) // 6


def test_a_wrong_result_is_found_and_its_script_runs_alone(capsys):
    text = draw(12, 0).text
    scale = next(line for line in text.splitlines() if "score = score *" in line)
    wrong = text.replace(scale, scale + " * 1.05")
    assert run(wrong, "reference").kind == "wrong"
    names = {"__name__": "__main__"}
    exec(draw(12, 0).paste("reference", "cpu"), names)
    assert "Outcome(kind='right'" in capsys.readouterr().out


def test_failures_are_told_by_kind():
    names = names_of(draw(12, 0).text)
    names["engine"] = lambda backend: (_ for _ in ()).throw(KeyError("x"))
    found = attempt(names, "reference", "cpu")
    assert isinstance(found, Outcome) and (found.kind, found.of) == ("internal error", "KeyError")


def test_the_command_counts(capsys):
    assert main(["--seed", "12", "--count", "2", "--backend", "reference"]) == 0
    assert "2 right" in capsys.readouterr().out


def test_draws_are_the_same_in_every_process_and_use_every_piece():
    names = [draw(5, number).name for number in range(600)]
    assert names == [draw(5, number).name for number in range(600)]
    assert all(any(piece in name for name in names) for piece in (*SCORES, *MASKS, *NORMALISERS))


def test_the_yardstick_leaves_nothing_of_a_masked_pair():
    names = names_of(draw(12, 3).text)
    o, _, some, *_ = names["plain"](*(names[n].double() for n in "qkv"), names["custom"], torch.float64)
    assert bool((o[~some.transpose(1, 2)] == 0).all())


def test_a_row_of_one_key_may_be_off_by_the_rounding_of_its_delta_and_no_more():
    drawn = (draw(24, n) for n in range(9999))
    gated = next(d.text for d in drawn if "scores: plain; mask: full; gated softmax" in d.name)
    text = re.sub("SK, D, DV = .*", "SK, D, DV = 2, 4, 2, 63, 1, 32, 32", gated)
    text = re.sub("DTYPE, LAYOUT, FORM, (.*) = torch.[a-z0-9]+", r"DTYPE, LAYOUT, FORM, \1 = torch.bfloat16", text)
    names = names_of(text)
    exact, _, moved = plain_results(names, torch.float64, "cpu")
    group = names["H"] // names["HK"]
    keys = names["k"].double().repeat_interleave(group, 2)  # (batch, 1, heads, dim)
    off = ((exact["o"].bfloat16() - exact["o"]) * names["d_o"].double()).sum(-1, keepdim=True)
    scale = float(re.findall(r"score = score \* ([0-9.]+)", text)[0])
    assert moved["dq"] == pytest.approx(float((off * scale * keys).abs().mean()), rel=1e-3)
    assert moved["dv"] == 0 and exact["dq"].abs().max() < 1e-15
    wider = Measured(3 * moved["dq"], 0.0, moved["dq"], 0.0, 10**6, torch.bfloat16)
    assert wider.ratio > 1
    found = run(text, "interpret")
    assert found.kind == "right", found.detail
