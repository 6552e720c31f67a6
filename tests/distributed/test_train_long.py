"""The script that trains on sequences split among processes, started as users start it."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["--device", "cpu", "--steps", "3", "--context", "61"]  # no length that two processes share evenly


def losses_of_two(*options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "attn_script" / "train_long.py"), *SHORT, *options], env=environment, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 processes: [\d.]+ ms a step, \d+ tokens a second", done.stdout)
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_two_processes_learn_as_one_does():
    of_one = importlib.import_module("train_long").main([*SHORT, "--attention", "fading"])  # weights of its own
    assert losses_of_two("--attention", "fading") == pytest.approx(of_one, abs=1e-5)
    assert len(of_one) == 3 and of_one[-1] < of_one[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_two_processes_learn_as_one_does_by_each_method(method):
    of_one = importlib.import_module("train_long").main(SHORT)
    assert losses_of_two("--method", method) == pytest.approx(of_one, abs=1e-5)
