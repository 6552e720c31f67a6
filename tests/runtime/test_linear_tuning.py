"""Linear attention that tunes: right numbers on the way, one entry a kernel, and files that spare measuring."""

import json
from dataclasses import replace

import pytest
import torch

from attention_engine import CustomIO, LinearAttentionEngine, arch, meta_tensor
from attention_engine.compiler import Kernel
from attention_engine.errors import TuneFileUnreadable, UnknownOption
from attention_engine.ir.linear import LinearTile
from attention_engine.runtime import linear_tuning, tuning
from attention_engine.tuner import measure, search
from attention_engine.tuner.entries import Entry
from attention_engine.tuner.linear import default_linear_tiles
from attention_engine.tuner.search import Budget
from attention_engine.tuner.store import TuneFile, merge
from tests.runtime.benches import SecondIsBest

CUSTOM = {"dt": ("batch", "heads", "seq_len")}


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "FOUND", {})
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(search, "ROUNDS", 1)


asked = SecondIsBest.asked


def engine(file=None, bench=SecondIsBest, heads=2, **options):
    metas = tuple(meta_tensor(1, h, 40, 32, dtype=torch.float16) for h in (heads, heads, 2))
    given = {"backend": "interpret", "tune": True, "tune_file": file, **options}
    made = LinearAttentionEngine(metas, v_mod=lambda x, c: x * c["dt"], custom_io=CustomIO(CUSTOM), **given)
    made.tuning.budget, made.tuning.bench = Budget(2, 60), bench
    asked.clear()
    return made


def inputs(length=40, heads=2):
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, h, 32, generator=make).half().requires_grad_() for h in (heads, heads, 2))
    decay = (-torch.rand(1, length, 2, generator=make)).requires_grad_()
    return q, k, v, decay, torch.rand(1, 2, length, generator=make)


def kernels_of(file):
    return sorted(e["key"]["kernel"] for e in json.loads(file.read_text())["entries"])


def test_a_file_spares_measuring_and_holds_linear_tiles(tmp_path):
    file = tmp_path / "tiles.json"
    o = engine(file)(*inputs())
    assert asked == ["forward walk"] and kernels_of(file) == ["linear forward walk"]
    (entry,) = TuneFile(file).read()
    assert isinstance(entry.tile, LinearTile)
    tuning.FOUND.clear()  # as in another process
    second = engine(str(file))
    torch.testing.assert_close(second(*inputs()), o)
    assert asked == []
    engine(str(file))(*inputs(70))
    assert asked == ["forward walk"]  # another bucket of lengths


def test_backward_kernels_are_tuned_where_asked_states_first(tmp_path):
    file = tmp_path / "tiles.json"
    engine(file, tune_bwd=True)(*inputs()).sum().backward()
    assert asked[:2] == ["forward walk", "backward states"]
    assert {"backward dq", "backward dk"} <= set(asked)
    engine(file, tune_bwd=True)(*inputs()).sum().backward()
    assert asked == []
    leaves = inputs()
    engine(file, tune_bwd=True)(*leaves[:3], leaves[3].detach(), leaves[4]).sum().backward()
    assert all(a.startswith("backward") for a in asked) and asked  # no gradient of decays: another problem


@pytest.fixture
def traced_once(monkeypatch):
    """Engines and trials share their kernels; each would trace its own, which takes most of the time."""
    made, compiled = {}, Kernel.compiled.func

    def shared(kernel):
        key = (kernel.builder, kernel.given, kernel.target)
        if key not in made:
            made[key] = compiled(kernel)
        return made[key]

    monkeypatch.setattr(Kernel, "compiled", property(shared))


@pytest.mark.usefixtures("traced_once")
def test_measured_on_the_interpreter_end_to_end(tmp_path):
    file, leaves = tmp_path / "tiles.json", inputs()
    made = engine(file, bench=tuning.bench_for, tune_bwd=True)
    before = [t.detach().clone() for t in leaves]
    runs = []
    for _ in range(2):
        o = made(*leaves)
        runs.append([o.detach(), *torch.autograd.grad(o.sum(), leaves[:4])])
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    assert all(torch.equal(a, b.detach()) for a, b in zip(before, leaves))
    assert all(e.tried == 2 and e.time_us for e in TuneFile(file).read())
    plain = engine(tune=False)(*leaves)
    torch.testing.assert_close(runs[0][0], plain.detach(), rtol=2e-2, atol=2e-2)
    text = made.explain()
    assert "linear forward walk: chunks of " in text and f"from {file}" in text
    assert "tried by this process: 2 ok" in text


def test_wrong_numbers_are_found_out(monkeypatch):
    job_made = []
    monkeypatch.setattr(linear_tuning.LinearPrepared, "_run",
                        lambda self, tiles, given, custom: lambda: [torch.zeros_like(given[2])])  # fmt: skip

    class Keeping(SecondIsBest):
        def __init__(self, job, custom):
            super().__init__(job, custom)
            job_made.append(job.prepared(list(custom)).measure(job.tiles.forward))

    made = engine(bench=Keeping)
    with torch.no_grad():
        made(*inputs())
    ((off, time_us),) = job_made
    assert off > 1 and time_us == 0.0


def test_step_never_tunes():
    made = engine()
    with torch.no_grad():
        made.step(*inputs(1), state=None)
    assert asked == []


def test_explain_for_a_gpu_that_is_not_here():
    metas = tuple(meta_tensor(8, h, 2048, d, dtype=torch.bfloat16) for h, d in ((1, 128), (1, 128), (80, 64)))
    text = LinearAttentionEngine(metas, device=arch.H100()).explain()
    assert text.startswith("bfloat16, a batch of 8 and 2048 tokens, on H100, 132 SMs")
    assert "linear forward walk: chunks of 64" in text and "linear backward dq: " in text and "were rejected" in text


def test_options_and_files_are_checked(tmp_path):
    with pytest.raises(UnknownOption, match='tune=True with backend="reference"'):
        engine(backend="reference")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    with pytest.raises(TuneFileUnreadable):
        engine(bad)


def entry_of(kernel, tile, chunk=None):
    metas = tuple(meta_tensor(8, h, 2048, d, dtype=torch.bfloat16) for h, d in ((1, 128), (1, 128), (80, 64)))
    asked_for = LinearAttentionEngine(metas, device=arch.H100())._asked()
    tiles = linear_tuning.with_tile(default_linear_tiles(asked_for.program, asked_for.problem, asked_for.target),
                                    "backward states", LinearTile(chunk or 64, 64, 64, 128, 1))  # fmt: skip
    return asked_for, tiles, Entry(asked_for.key(kernel, tiles), tile, 1.0, 1, "2026-01-01T00:00:00Z")


def test_files_that_are_joined_never_mix_chunk_lengths(tmp_path):
    """One was tuned with states 64 tokens apart, the other 128: each kernel finds the tile for the states it reads."""
    rows = {chunk: LinearTile(chunk, 32, 32, 128, 1, specialize=False) for chunk in (64, 128)}
    for chunk, name in ((64, "a.json"), (128, "b.json")):
        asked_for, tiles, of_rows = entry_of("backward dv", rows[chunk], chunk)
        states = Entry(asked_for.key("backward states", tiles), replace(tiles.states), 1.0, 1, f"2026-0{chunk // 64}")
        TuneFile(tmp_path / name).add([states, of_rows])
    merge(tmp_path / "a.json", tmp_path / "b.json")
    made = tuning.Tuning(files=(None, tmp_path / "a.json"))
    found = tuning.choose(made, asked_for, default_linear_tiles(asked_for.program, asked_for.problem, asked_for.target),
                          True, [])  # fmt: skip
    assert found.states.chunk == 128 and {t.chunk for t in found.rows.values()} == {128}
    assert found.rows["dv"] == rows[128]


@pytest.mark.parametrize(("tile", "reason"), [
    (LinearTile(64, 32, 64, 96, 1), "96 threads aren't whole warpgroups of 128"),
    (LinearTile(64, 40, 64, 128, 1), "a step of 40 of the summed dim is no multiple of 32"),
    (LinearTile(64, 128, 256, 128, 8), "bytes of shared memory"),
])  # fmt: skip
def test_a_linear_tile_that_cannot_run_is_refused(tmp_path, tile, reason):
    asked_for, tiles, held = entry_of("backward dv", tile)
    TuneFile(tmp_path / "tiles.json").add([held])
    made = tuning.Tuning(files=(None, tmp_path / "tiles.json"))
    with pytest.raises(TuneFileUnreadable, match=reason):
        tuning.choose(made, asked_for, tiles, True, [])
