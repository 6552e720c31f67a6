"""The garbage collector runs seldom while we import and trace, and is as it was afterwards."""

import gc
import subprocess
import sys

import pytest

from attention_engine.collector import SELDOM, seldom_collected


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("before", [(700, 10, 10), (0, 10, 10), (10 * SELDOM, 5, 5)])
def test_thresholds_are_put_back(before):
    gc.set_threshold(*before)
    with seldom_collected(), seldom_collected():
        young, *older = gc.get_threshold()
        assert young == (max(SELDOM, before[0]) if before[0] else 0) and older == [*before[1:]]
    assert gc.get_threshold() == before


def test_thresholds_that_somebody_else_set_meanwhile_stay():
    with seldom_collected():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)
    with seldom_collected():
        assert gc.get_threshold()[0] == SELDOM
    assert gc.get_threshold() == (123, 4, 5)


def test_it_runs_seldom_while_this_package_is_imported():
    code = """
import gc, sys
found = {}
class Look:
    def find_spec(name, path=None, target=None):
        found[name] = gc.get_threshold()[0]
sys.meta_path.insert(0, Look)
before = gc.get_threshold()
from attention_engine import AttentionEngine, library
assert found["torch"] == found["attention_engine.runtime.op"] == found["attention_engine.library"] == 200_000
assert gc.get_threshold() == before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
