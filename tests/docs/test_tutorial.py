"""The steps from naive to flash: each agrees with torch, on the interpreter and, where there is one, on a GPU."""

import importlib
from pathlib import Path

import pytest
import torch

STEPS = sorted(p.stem for p in (Path(__file__).parents[2] / "docs" / "tutorial").glob("step_*.py"))
LIMITS = {"step_3_softmax": 10, "step_5_online_softmax": 10}  # these are fp32


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_near_to_float64_as_torch(name, capsys):
    ours, torchs = importlib.import_module(name).main()
    assert 0 < ours <= LIMITS.get(name, 1.1) * torchs
    assert "mean error" in capsys.readouterr().out


def test_there_are_six_steps():
    assert [int(name.split("_")[1]) for name in STEPS] == [1, 2, 3, 4, 5, 6]


def test_a_wrong_kernel_is_seen():
    machine = importlib.import_module("machine")
    inputs = [machine.random(64, 64), machine.random(64, 64, seed=1)]
    ours, torchs = machine.compare("wrong", lambda a, b: (a @ b) * 1.01, torch.matmul, inputs)
    assert ours > 10 * torchs


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_step_runs_on_a_gpu(name, capsys):
    ours, torchs = importlib.import_module(name).main()
    assert 0 < ours <= LIMITS.get(name, 1.1) * torchs
    assert "us, torch's" in capsys.readouterr().out
