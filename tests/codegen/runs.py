"""What TileLang's passes do to a kernel placed by hand, of those that patches/idle.py leaves out."""

from __future__ import annotations

import tilelang
import torch
from tvm import ir, s_tir, tirx

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen.compile import lower_kernel
from attention_engine.plan.rules import NO_STORAGE_SYNC

PASSES = (
    (tilelang.transform, "LegalizeNegativeIndex", "LegalizeNegativeIndex"),
    (tilelang.transform, "Simplify", "Simplify"),
    (tirx.transform, "Simplify", "TVM's Simplify"),
    (s_tir.transform, "HoistIfThenElse", "HoistIfThenElse"),
)


def placed_by_hand():
    """A small one."""
    meta = meta_tensor(1, 1, 256, 64, dtype=torch.float16)
    kernel = AttentionEngine((meta,) * 3, device=arch.H100())._source_kernel("forward", "cuda")
    assert kernel.builder == "hopper.forward.forward" and kernel.configs[NO_STORAGE_SYNC]
    return kernel


def passes_of(monkeypatch, kernel):
    """Each run of these passes in its order (its name, did anything change?), and the CUDA text."""
    found = []

    def watched(name, theirs):
        def made():
            run = theirs()

            def watch(module):
                after = run(module)
                found.append((name, not ir.structural_equal(module, after, map_free_vars=True)))
                return after

            return watch

        return made

    with monkeypatch.context() as patch:
        for owner, name, called in PASSES:
            patch.setattr(owner, name, watched(called, getattr(owner, name)))
        return found, lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
