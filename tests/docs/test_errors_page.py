"""docs/errors.md: each mistake ends in its own class with the very message that the page shows, and each fix runs."""

import importlib.util
import sys
from pathlib import Path

import pytest

from attention_engine import errors

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("mistakes", ROOT / "docs" / "mistakes.py")
mistakes = importlib.util.module_from_spec(_spec)
sys.modules["mistakes"] = mistakes  # dataclasses look their module up
_spec.loader.exec_module(mistakes)
PAGE = mistakes.PAGE.read_text()


@pytest.mark.parametrize("mistake", mistakes.MISTAKES, ids=lambda m: m.title.replace(" ", "-"))
def test_a_mistake_is_named_and_its_mend_runs(mistake):
    error = mistakes.raised(mistake.wrong)
    assert type(error) is mistake.error
    assert f"```py\n{mistake.wrong}\n```\n\n```text\n{type(error).__name__}: {error}\n```" in PAGE
    assert mistakes.raised(mistake.right) is None
    assert f"```py\n{mistake.right}\n```" in PAGE


def test_the_page_is_what_the_script_writes():
    assert mistakes.page() == PAGE


def test_each_class_has_the_section_that_its_messages_name():
    headings = [line.removeprefix("## ") for line in PAGE.splitlines() if line.startswith("## ")]
    for name, kind in mistakes.classes().items():
        page, anchor = errors.section_of(kind).split("#")
        assert ROOT / page == mistakes.PAGE and anchor == name.lower()  # as mkdocs and GitHub spell a heading's anchor
        assert [heading.lower() for heading in headings].count(anchor) == 1
    assert headings == list(mistakes.classes())


def test_there_are_enough_and_no_two_are_one():
    assert len(mistakes.MISTAKES) >= 25
    for unlike in ({m.title for m in mistakes.MISTAKES}, {m.wrong for m in mistakes.MISTAKES}):
        assert len(unlike) == len(mistakes.MISTAKES)
    assert len({m.error for m in mistakes.MISTAKES}) >= 25


def test_code_without_a_mistake_is_no_example_of_one():
    fine = mistakes.Mistake(errors.BadInput, "none", "1 + 1", "1 + 1")
    with pytest.raises(AssertionError, match="none: nothing is wrong with"):
        mistakes.message_of(fine)


def test_every_error_that_a_user_can_meet_without_a_gpu_is_on_the_page():
    """Those left out need a GPU, another process, or no everyday attention; their tests are elsewhere."""
    elsewhere = {
        "AttentionEngineError", "BadInput", "BadCustomInput", "BackwardNotDerived", "NotInterpretable",
        "NoCudaCompiler", "NoHostCompiler", "NoHipCompiler", "NotLowered",
        "NotYetSupported", "TileDoesNotFit", "TooLong", "UnknownArch", "UnknownProgram",
        "WrongCustomDtype", "BadScript", "HazardInKernel", "NotWhileCapturing", "NothingRan", "TuneFileUnreadable",
        "TuneFileUnwritable", "KernelsNotBuilt", "RanksDisagree", "HeadsDoNotDivide", "LengthNotInLayout",
        "WrongPlacement",
    }  # fmt: skip
    classes = {n for n, c in vars(errors).items() if isinstance(c, type) and c.__module__ == errors.__name__}
    assert classes - {m.error.__name__ for m in mistakes.MISTAKES} - elsewhere == set()


def test_the_script_prints_every_message(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mistakes.py"])
    mistakes.main()
    out = capsys.readouterr().out
    assert out.count("\n\n") == len(mistakes.MISTAKES)
    assert "BranchOnSymbol: my_attention.py:2: Python asked for the truth" in out
