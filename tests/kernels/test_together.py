"""What is told of kernels that are compiled together."""

from types import SimpleNamespace

import pytest

pytest.importorskip("tilelang")
from attention_engine import arch
from tests.kernels import together

NOTE = "ptxas info    : (C7512) wgmma.mma_async instructions are serialized for the function 'first_kernel'"
REPORT = f"""{NOTE}
ptxas info    : Compiling entry function 'first_kernel' for 'sm_90a'
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers
ptxas info    : Compiling entry function 'second_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""


def test_each_kernel_has_its_own_numbers_and_the_notes_that_name_it(monkeypatch):
    monkeypatch.setattr(together, "ptxas_report", lambda *_: REPORT)
    kernel = SimpleNamespace(cuda="void any_kernel()", flags=[], launch_shared_bytes=0)
    made = together.compile_together({"first": kernel, "second": kernel}, arch.H100())
    first, second = made["first"].used, made["second"].used
    assert (first.registers, first.spill_stores, first.spill_loads, first.notes) == (168, 8, 12, (NOTE,))
    assert (second.registers, second.spill_stores, second.spill_loads, second.notes) == (32, 0, 0, ())
