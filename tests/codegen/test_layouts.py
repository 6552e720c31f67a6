"""Layouts of fragments, found operation by operation (patches/layouts.py), are those that TileLang finds at once."""

import pytest
import torch

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen.compile import lower_kernel
from attention_engine.codegen.patches import layouts

tilelang = pytest.importorskip("tilelang")
from tvm import ir  # noqa: E402


class Reached(Exception):
    """A kernel has come to its layouts."""


def at_layouts(monkeypatch, name, look, packed=None, **options):
    """Has `look` see a small kernel that is placed by hand when it wants layouts, and TileLang's pass; returns what it
    makes of them. The kernel is not lowered further."""
    meta = meta_tensor(1, 1, 256, 64, dtype=torch.float16)
    kernel = AttentionEngine((meta,) * 3, device=arch.H100(), **options)._source_kernel(name, "cuda", packed)
    made = []

    def seen(module, whole):
        made.append(look(module, whole))
        raise Reached

    with monkeypatch.context() as patch, pytest.raises(Reached):
        patch.setattr(layouts, "one_by_one", seen)
        lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs)
    return made[0]


class Watched:
    """TileLang's pass, which notes what it is asked, and refuses one question."""

    def __init__(self, whole, refused=None):
        self.whole, self.refused, self.asked = whole, refused, []

    def __call__(self, module):
        self.asked.append(module)
        if len(self.asked) == self.refused:
            raise RuntimeError("Layout infer conflict")
        return self.whole(module)

    def was_asked_of(self, module):
        """Whether it was asked of the whole kernel."""
        return any(asked.same_as(module) for asked in self.asked)


@pytest.mark.parametrize(
    "name, options",
    [
        ("forward", {"packed": "alike"}),  # TileLang makes one loop of two that zero rows of a tile in shared memory
        pytest.param("forward", {"dropout_p": 0.1}, marks=pytest.mark.slow),  # operations in an if of threads
        pytest.param("backward", {}, marks=pytest.mark.slow),
    ],
)
def test_layouts_are_those_of_all_operations_at_once(monkeypatch, name, options):
    one_by_one = layouts.one_by_one

    def look(module, whole):
        watched, refusing = Watched(whole), Watched(whole, refused=3)
        found, after_refusal, theirs = one_by_one(module, watched), one_by_one(module, refusing), whole(module)
        assert len(watched.asked) > 5 and not watched.was_asked_of(module)
        assert len(refusing.asked) == 4 and refusing.was_asked_of(module)
        return [ir.structural_equal(ours, theirs) for ours in (found, after_refusal)], "_fused" in str(theirs)

    same, fused = at_layouts(monkeypatch, name, look, **options)
    assert same == [True, True] and fused == ("packed" in options)
