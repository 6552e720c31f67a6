"""Layouts of fragments, found operation by operation (patches/layouts.py), are those that TileLang finds at once."""

import pytest

from attention_engine.codegen.patches import layouts
from tests.codegen.at_pass import at_pass

tilelang = pytest.importorskip("tilelang")
from tvm import ir  # noqa: E402


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

    same, fused = at_pass(monkeypatch, (layouts, "one_by_one"), name, look, **options)
    assert same == [True, True] and fused == ("packed" in options)
