"""Compiles the kernels of the GPU tests for a GPU that need not be here, so that a machine with one only runs them.

    ATTENTION_ENGINE_CACHE_DIR=kernels python -m tests.gpu.compile --arch H100 -n 2 tests/gpu -k "float16 or masks"

The tests themselves run, on tensors of a CPU, with kernels that are compiled and do nothing, and with zeros for what
they are compared with: what they ask for is what gets compiled. Their outcome says nothing. What isn't known (-k,
paths, -n) goes to pytest. The GPU's machine then runs the tests with the same ATTENTION_ENGINE_CACHE_DIR, from the
same sources.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention_engine import arch, compiler
from attention_engine.runtime import built, cached, linear, linear_program_kernels, program_kernels
from tests import linear_cases, plain

ARCH = "ATTENTION_ENGINE_TEST_ARCH"  # for the worker processes


class Compiled:
    """A kernel that was compiled and does nothing."""

    def __init__(self, kernel: Any):
        self.lowered = kernel.lowered

    def __call__(self, *_: object) -> None:
        pass


class OnCpu(TorchFunctionMode):
    """What is asked of a GPU's memory comes from the CPU's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    return "cpu" if isinstance(value, str) and value.startswith("cuda") else value


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are not skipped here."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "skip"]


def silence(monkeypatch: pytest.MonkeyPatch, device: arch.Arch) -> None:
    """Engines compile for this GPU on tensors of a CPU, and their kernels do nothing."""
    compile_now = compiler.Kernel.__dict__["compiled"].func

    def compiled(kernel: Any) -> Any:
        return Compiled(compile_now(kernel)) if isinstance(kernel.target, arch.Arch) else compile_now(kernel)

    silent = cached_property(compiled)
    silent.__set_name__(compiler.Kernel, "compiled")
    monkeypatch.setattr(compiler.Kernel, "compiled", silent)
    for user in (built, linear):
        monkeypatch.setattr(user, "backend_for", lambda given, _: "tilelang" if given == "auto" else given)
    for user in (program_kernels, linear_program_kernels, cached):
        monkeypatch.setattr(user, "detect", lambda *_: device)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    silence(monkeypatch, getattr(arch, os.environ[ARCH])())
    monkeypatch.setattr(plain, "_dense", _no_pairs)
    compared = [plain.Error("nothing", 0.0, 1.0, 1.0, (), 0)]  # tests that ask for more than once go on
    monkeypatch.setattr(plain, "compare", lambda *_, **__: compared)
    monkeypatch.setattr(linear_cases, "plain_results", lambda *_, **__: {})
    with OnCpu():
        yield


def _no_pairs(
    q: Tensor, k: Tensor, v: Tensor, _kind: str, _causal: bool, score: plain.Score | None, _mask: object, *,
    rows: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Zeros, with gradients of zeros, for attention in plain torch; those of custom inputs by the score of one pair."""
    nothing = (q * 0).sum() + (k * 0).sum() + (v * 0).sum()
    if score is not None:
        first = torch.zeros(1, 1, 1, 1, dtype=torch.long)
        nothing = nothing + (score(q.new_zeros(1, 1, 1, 1), first, first, first, first) * 0).sum().to(q.dtype)
    return q.new_zeros(*q.shape[:3], v.shape[3]) + nothing, q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="H100", help="of attention_engine.arch")
    args, rest = parser.parse_known_args()
    os.environ[ARCH] = args.arch
    chosen = rest if any("tests" in word for word in rest) else [*rest, "tests/gpu"]
    return int(pytest.main(["-p", "tests.gpu.compile", "-m", "gpu", "-q", "--tb=line", *chosen]))


if __name__ == "__main__":
    sys.exit(main())
