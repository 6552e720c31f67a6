"""Macros that are rewritten once: the kernels are those of macros that are rewritten each time."""

import pytest

pytest.importorskip("tilelang")
from tilelang.language.eager import builder

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen.patches import patched, remembered
from attention_engine.library import OnlineSoftmax, causal, scale


def scripts(dim):
    metas = (meta_tensor(1, 4, 64, dim, dtype="float16"),) * 3
    engine = AttentionEngine(metas, None, scale(0.1), causal, OnlineSoftmax(), device=arch.H100())
    return {name: kernel.prim_func.script() for name, kernel in engine._all_kernels(arch.H100()).items()}


def test_what_is_around_a_macro_is_its_own_in_every_kernel(monkeypatch):
    dims = (64, 128, 40)
    found = [scripts(dim) for dim in dims]
    known = len(remembered._rewritten)
    assert [scripts(dim) for dim in dims] == found and len(remembered._rewritten) == known > 0
    monkeypatch.setattr(remembered, "WHOSE", "nobody's")
    assert [scripts(dim) for dim in dims] == found
    assert found[0] != found[1] != found[2]


def test_macros_of_others_are_left_to_tilelang():
    def theirs(x):
        return x

    with patched():
        builder.mutate(theirs)
    assert all(code is not theirs.__code__ for code, _, _ in remembered._rewritten.values())
