"""Random programs on the interpreter and the reference; the faults that `python -m tests.fuzz` found, as tests."""

import pytest
import torch

from tests.fuzz.__main__ import main
from tests.fuzz.check import Outcome, attempt, names_of, run
from tests.fuzz.normalisers import NORMALISERS
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
    o, _, some = names["plain"](*(names[n].double() for n in "qkv"), names["custom"], torch.float64)
    assert bool((o[~some.transpose(1, 2)] == 0).all())
