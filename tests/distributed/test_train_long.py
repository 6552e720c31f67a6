"""The script that trains on sequences split among processes: losses are those of one process."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.distributed.ranks import run_ranks

ROOT = Path(__file__).parents[2]
SHORT = ["--device", "cpu", "--steps", "3", "--context", "61"]  # no length that two processes share evenly
FADING = [*SHORT, "--attention", "fading"]


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


def learn(mesh):
    """The script's losses on a process that runs already: torchrun's three would import torch first."""
    script = importlib.import_module("train_long")
    with patch.object(script, "begin", lambda device: mesh):
        return script.main(FADING)


def test_two_processes_learn_as_one_does():
    of_one = importlib.import_module("train_long").main(FADING)  # with weights of its own
    for losses in run_ranks(2, learn):
        assert losses == pytest.approx(of_one, abs=1e-5)  # of 4.7 in fp32: 20 units in the last place
    assert len(of_one) == 3 and of_one[-1] < of_one[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ("--attention", "fading"), ("--method", "gather"), ("--method", "ring"), ("--method", "heads"),
], ids=lambda options: options[1])  # fmt: skip
def test_two_processes_that_torchrun_starts_learn_as_one_does(options):
    of_one = importlib.import_module("train_long").main([*SHORT, *(options if "fading" in options else ())])
    assert losses_of_two(*options) == pytest.approx(of_one, abs=1e-5)
