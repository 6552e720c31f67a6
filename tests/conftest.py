"""What every test shares: fixed seeds, golden files, and no GPU tests without a GPU."""

from __future__ import annotations

import difflib
import functools
import gc
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from attention_engine import compiler
from attention_engine.runtime import program_kernels
from attention_engine.runtime.attentions import ATTENTIONS

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"

# Files of many cases, each of seconds: `make test` runs one case in so many, by its name, and `make slow` the rest.
SAMPLED = {
    16: ("kernels/test_hopper_interpret", "kernels/test_linear_interpret", "kernels/test_key_items",
        "kernels/test_tile_map", "runtime/test_integers", "runtime/test_extremes", "runtime/test_bent_outputs",
        "kernels/test_hopper_unseen", "kernels/test_each_gpu"),
    12: ("runtime/test_functions", "runtime/test_masks", "runtime/test_captured", "runtime/test_absent_pairs",
        "runtime/test_linear", "runtime/test_custom_inputs", "runtime/test_linear_shared_keys"),
}  # fmt: skip
# Files of many cases, each cheap, along backends, dtypes and layouts: one in so many, and of each test at least one.
THINNED = {
    6: ("runtime/test_engine", "runtime/test_defaults", "runtime/test_doubts", "runtime/test_wide_values",
        "kernels/test_items", "runtime/test_without_metas", "runtime/test_block_mask", "runtime/test_both_engines",
        "runtime/test_integration", "runtime/test_check", "runtime/test_functional", "flex/test_flex",
        "flex/test_sdpa", "integrations/test_transformers", "integrations/test_transformers_masks",
        "passes/test_verify_schedule", "passes/test_derive_backward", "passes/test_drop_weights",
        "passes/test_schedule", "plan/test_hopper", "shipping/test_programs", "codegen/test_interpreter",
        "runtime/test_trials", "plan/test_linear_plan", "ir/test_chance", "test_benchmarks",
        "kernels/test_block_lists", "runtime/test_block_list", "codegen/test_dialects", "kernels/test_each_gpu"),
    12: ("runtime/test_cached", "runtime/test_packed", "runtime/test_linear_packed", "runtime/test_moved",
        "runtime/test_parted", "kernels/test_starts_hopper", "flex/test_cases", "passes/test_derive_merge",
        "test_fuzz", "kernels/test_deal", "kernels/test_within_sequences", "kernels/test_keys_within_sequences",
        "runtime/test_cached_again", "runtime/test_odd_programs", "kernels/test_first_tiles", "kernels/test_combine",
        "integrations/test_continuous", "integrations/test_families", "reference/test_linear", "passes/test_widths",
        "runtime/test_transforms", "runtime/test_shared_keys", "kernels/test_decay_sums", "passes/test_half_range",
        "runtime/test_unseen_keys", "kernels/test_lengths", "plan/test_attention_plan", "reference/test_dense",
        "runtime/test_op", "runtime/test_gradients", "kernels/test_lanes", "kernels/test_absent_hopper",
        "runtime/test_forward_mode", "runtime/test_cached_shown", "passes/test_simplify", "runtime/test_tuning",
        "test_attn_script", "test_plain", "test_soak"),
    48: ("kernels/test_latent", "kernels/test_placed", "runtime/test_dropout", "kernels/test_numerics_interpret"),
}  # fmt: skip
ONE_IN = {f"tests/{name}.py": of for of, names in [*SAMPLED.items(), *THINNED.items()] for name in names}
ONE_OF_EACH = {f"tests/{name}.py" for names in THINNED.values() for name in names}

os.environ.setdefault("ATTENTION_ENGINE_VERIFY", "1")  # passes check what they hand on; processes of tests too

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores already


@pytest.fixture(autouse=True)
def compiles_anew(request: pytest.FixtureRequest) -> None:
    """torch compiles one function for so many engines, then refuses: where a file compiles, each test begins anew."""
    file = getattr(request.module, "__file__", None) if request.node.getparent(pytest.Module) else None
    if file is not None and _compiles(file):
        import torch._dynamo

        torch._dynamo.reset()


@functools.cache
def _compiles(file: str) -> bool:
    return "torch.compile(" in Path(file).read_text()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files; then read the diff")


def _drawn(item: pytest.Item) -> int:
    """0 of a case that its name draws for `make test`."""
    return zlib.crc32(item.nodeid.encode()) % ONE_IN.get(item.nodeid.split("::")[0], 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kept: set[str] = set()
    for item in sorted(items, key=lambda item: _drawn(item) != 0):  # those drawn come first
        test, _, case = item.nodeid.partition("[")
        wanted = test.split("::")[0] in ONE_OF_EACH and test not in kept and not item.get_closest_marker("slow")
        if case and _drawn(item) and not wanted:
            item.add_marker(pytest.mark.slow)
        elif not item.get_closest_marker("slow"):
            kept.add(test)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """The modules and the cases live as long as the run: no garbage collection need visit them again, and what tests
    leave behind is little beside them: a twenty-fifth of the run went into looking for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 25, 25)


@pytest.fixture(autouse=True)
def seed() -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed notes the stack for each absent device, which takes longer than most tests
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def attentions() -> Iterator[None]:
    """Engines that other tests keep find what they registered, where a test empties the table to make its own anew."""
    before = dict(ATTENTIONS)
    yield
    ATTENTIONS.update(before)


class Golden:
    """The text a test expects, kept in a file named after it: `assert str(program) == golden`."""

    def __init__(self, path: Path, update: bool):
        self.path, self.update, self.compared = path, update, False

    def __eq__(self, got: object) -> bool:
        assert isinstance(got, str), f"a golden file holds text, not a {type(got).__name__}"
        self.compared = True
        if self.update:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(got + "\n")
            return True
        if not self.path.exists():
            pytest.fail(f"no {self.path.relative_to(HERE)}; --update-golden writes this to it:\n{got}", pytrace=False)
        return self.path.read_text() == got + "\n"

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.path.relative_to(HERE)}>"

    def diff(self, got: str) -> list[str]:
        want = self.path.read_text().splitlines()
        return list(difflib.unified_diff(want, got.splitlines(), "expected", "got", lineterm=""))


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    folder = request.path.relative_to(HERE).with_suffix("")
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in request.node.name).strip("-")
    expected = Golden(GOLDEN / folder / f"{name}.txt", request.config.getoption("--update-golden"))
    yield expected
    assert expected.compared, f"{request.node.name} asks for its golden file and compares nothing with it"


def pytest_terminal_summary(terminalreporter) -> None:
    """Tests that compare with eager PyTorch record their worst ratio; a run ends with the worst of each label."""
    worst: dict[str, tuple[float, str, int]] = {}
    for kind in ("passed", "failed"):
        for report in terminalreporter.stats.get(kind, []):
            for name, value in report.user_properties:
                if name == "worst ratio":
                    label, ratio, where, count = value
                    top = max(worst.get(label, (0.0, "", 0)), (ratio, where, 0))
                    worst[label] = (*top[:2], worst.get(label, (0.0, "", 0))[2] + count)
    if worst:
        terminalreporter.write_sep("=", "worst error over eager PyTorch's")
    for label, (ratio, where, count) in sorted(worst.items()):
        terminalreporter.write_line(f"{label:26} {ratio:7.3f}  {where}, of {count} compared")


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    if op == "==" and isinstance(right, Golden) and isinstance(left, str):
        return [f"the text differs from {right!r} (--update-golden writes it)", *right.diff(left)]
    return None


@pytest.fixture
def chosen_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a test puts in here replaces parts of the default tiles. Blocks over keys have all heads of a group."""
    ATTENTIONS.clear()
    monkeypatch.setattr(compiler, "suits_a_head_each", lambda *_: False)
    chosen: dict[str, Any] = {}
    default = program_kernels.default_tiles
    monkeypatch.setattr(program_kernels, "default_tiles", lambda *given: replace(default(*given), **chosen))
    yield chosen
    ATTENTIONS.clear()
