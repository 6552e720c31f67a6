"""What a process does when it ends after a backward pass on a GPU. On a CPU: that it is asked for once, and runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from attention_engine.runtime import ends

CPU, GPU = torch.device("cpu"), [torch.device("cuda", n) for n in range(2)]


@pytest.fixture
def registered(monkeypatch):
    calls = []
    monkeypatch.setattr(ends, "_devices", set())
    monkeypatch.setattr(ends.atexit, "register", calls.append)
    return calls


def test_once_for_all_gpus_and_never_for_a_cpu(registered):
    ends.settle_at_exit(CPU)
    assert not registered
    for device in (GPU[0], GPU[1], GPU[0]):
        ends.settle_at_exit(device)
    assert registered == [ends.settle] and ends._devices == set(GPU)


def test_the_last_pass_leaves_nothing_that_must_be_freed(monkeypatch):
    kept = []
    monkeypatch.setattr(ends, "_devices", {CPU})
    monkeypatch.setattr(ends.ctypes.pythonapi, "Py_IncRef", lambda held: kept.append(held.value), raising=False)
    with torch.inference_mode():
        ends.settle()
    leaf, product, gradient = kept
    assert leaf.grad.item() == 1 and product.grad_fn is not None and gradient.item() == 1


def test_a_lost_gpu_is_passed_over(monkeypatch):
    def lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ends, "_devices", {GPU[0]})
    monkeypatch.setattr(ends, "_pass_through", lost)
    ends.settle()


@pytest.mark.slow
def test_a_process_ends_behind_it():
    code = "import torch; from attention_engine.runtime import ends; ends.atexit.register(ends.settle); "
    code += "ends._devices.add(torch.device('cpu'))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
