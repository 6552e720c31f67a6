"""Golden files: a missing one fails and shows its text, a differing one shows the lines, an unused one fails."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")


@pytest.fixture
def run(pytester):
    """Run one test, given as its body, under the project's conftest."""
    folder = pytester.mkdir("inner")
    (folder / "conftest.py").write_text(CONFTEST.read_text())

    def run(body: str, *options: str):
        (folder / "test_it.py").write_text(f"def test_text(golden):\n    {body}\n")
        return pytester.runpytest_inprocess("inner", "--import-mode=importlib", *options)

    return run


def test_a_missing_file_fails_and_shows_the_text(run):
    run("assert 'a\\nb' == golden").stdout.fnmatch_lines(["*no golden/test_it/test_text.txt*", "a", "b"])


def test_update_writes_the_file_and_then_it_holds(run, pytester):
    run("assert 'a\\nb' == golden", "--update-golden").assert_outcomes(passed=1)
    assert (pytester.path / "inner/golden/test_it/test_text.txt").read_text() == "a\nb\n"
    run("assert 'a\\nb' == golden").assert_outcomes(passed=1)
    run("assert 'a\\nc' == golden").stdout.fnmatch_lines(["*-b", "*+c"])


def test_a_file_asked_for_and_never_compared_fails(run):
    run("pass").stdout.fnmatch_lines(["*compares nothing with it*"])
