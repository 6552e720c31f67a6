"""The command that counts how processes end: one of each kind that any machine can run, and one that is killed."""

from __future__ import annotations

import pytest

from tests import exits


@pytest.mark.parametrize("kind", [pytest.param("reference", marks=pytest.mark.slow), "tuner"])
def test_a_process_that_trains_a_step_ends_with_0(kind):
    assert exits.end_of(kind) == (kind, 0, "")


def test_a_process_that_aborts_at_its_end_is_told_of(monkeypatch, capsys):
    monkeypatch.setattr(exits, "STEP", "import atexit, os; atexit.register(os.abort)")
    assert exits.main(["--count", "2", "--kinds", "reference", "--together", "1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "    2 reference ended with -6"
