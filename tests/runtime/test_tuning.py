"""Engines that tune: what is measured once is never measured again, what differs is, and calls return the same bits."""

import json
import random
import re
from dataclasses import replace

import pytest
import torch

from attention_engine import arch, compiler
from attention_engine.codegen import interpreter
from attention_engine.errors import TuneFileUnreadable, UnknownOption
from attention_engine.runtime import tuning
from attention_engine.runtime.program_kernels import ProgramKernels
from attention_engine.tuner import entries, measure, search
from attention_engine.tuner.search import Budget
from tests.runtime.benches import SecondIsBest
from tests.runtime.engines import build, causal, qkv, same, scaled

HALF = torch.float16


@pytest.fixture(autouse=True)
def own_places(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTENTION_ENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "FOUND", {})


asked = SecondIsBest.asked


def engine(file=None, dtype=HALF, bench=SecondIsBest, **options):
    given = {"tune": True, "tune_file": file, **options}
    made = build(dtype=dtype, **given)
    made.tuning.budget, made.tuning.bench = Budget(3, 60), bench
    asked.clear()
    return made


def tiles_of(made):
    """The tiles of the kernels that an engine's calls have used."""
    (key,) = made._keys.values()
    return [k.tiles for k in launch_of(key)._kernels.values()]


def launch_of(key):
    from attention_engine.runtime import op

    return op.ATTENTIONS[key].program_kernels


def inputs(length=11, dtype=HALF):
    return [t.detach() for t in qkv(length, dtype=dtype)]


# ---- what is measured, and what is not


def test_a_file_that_holds_the_problem_spares_measuring_and_other_kernels(tmp_path, monkeypatch):
    file = tmp_path / "tiles.json"
    first = engine(file)
    o = first(*inputs())
    assert asked == ["forward"]
    (entry,) = json.loads(file.read_text())["entries"]
    assert entry["tried"] == 3 and entry["time_us"] == 1.0

    tuning.FOUND.clear()  # as in another process
    made = []
    build_interpreter = interpreter.Interpreter.__init__
    monkeypatch.setattr(interpreter.Interpreter, "__init__",
                        lambda self, function: made.append(1) or build_interpreter(self, function))  # fmt: skip
    second = engine(str(file), tune=False, deterministic=False, layout="bshd")
    assert torch.equal(second(*inputs()), o)
    assert (asked, len(made)) == ([], 1)  # nothing measured, one kernel made
    assert [t.forward for t in tiles_of(second)] == [t.forward for t in tiles_of(first)]
    (read,) = entries.parse(file.read_text(), "here")
    assert tiles_of(second)[0].forward == read.tile
    third = engine(str(file), tune=True)
    assert torch.equal(third(*inputs()), o) and asked == []


SAME = {
    "length in the bucket": {"length": 16},
    "another engine": {},
}
OTHER = {
    "another bucket": {"length": 17},
    "dtype": {"dtype": torch.bfloat16},
    "mask class": {"mask_mod": None},
    "score_mod": {"score_mod": lambda score, custom, b, h, q_idx, kv_idx: score * 0.5},
}


@pytest.mark.parametrize("kind", [*SAME, *OTHER])
def test_only_what_changes_the_answer_is_tuned_again(tmp_path, kind):
    file, changed = tmp_path / "tiles.json", {**SAME, **OTHER}[kind]
    engine(file)(*inputs())
    length, dtype = changed.pop("length", 11), changed.get("dtype", HALF)
    again = engine(file, **changed)
    again(*inputs(length, dtype))
    assert asked == ([] if kind in SAME else ["forward"])
    assert len(json.loads(file.read_text())["entries"]) == (1 if kind in SAME else 2)


@pytest.mark.parametrize(("gpu", "hits"), [
    (arch.H100(), True), (replace(arch.H100(), name="H200"), False), (replace(arch.H100(), sm_count=114), False),
    (arch.A100(), False),
])  # fmt: skip
def test_another_gpu_is_another_problem(tmp_path, gpu, hits):
    file = tmp_path / "tiles.json"
    on_h100 = build(dtype=HALF, tune_file=file)._asked(arch.H100(), False)
    tiles = tuning.default_tiles(on_h100.problem, on_h100.maths, on_h100.target)
    key = on_h100.key("forward", tiles)
    held = tuning.Entry(key, replace(tiles.forward, kv=80), 1.0, 1, "")
    tuning.TuneFile(file).add([held])
    made = build(dtype=HALF, tune_file=file)
    found = tuning.look_up(made.tuning, made._asked(gpu, False), tiles)
    assert found == ({"forward": held} if hits else {})
    assert made._asked(gpu, False).kernels_as_known(made.tuning).tiles.forward.kv == (80 if hits else
        tuning.default_tiles(on_h100.problem, on_h100.maths, gpu).forward.kv)  # fmt: skip


def test_without_a_file_a_process_measures_once():
    engine()(*inputs())
    assert asked == ["forward"]
    second = engine(score_mod=scaled)
    second(*inputs())
    assert asked == []
    untuned = build(dtype=HALF)
    untuned(*inputs())
    assert tiles_of(untuned)[0].forward != tiles_of(second)[0].forward


def test_backward_tiles_have_their_own_switch_and_file(tmp_path):
    ahead, back = tmp_path / "forward.json", tmp_path / "backward.json"
    options = {"tune_file": ahead, "tune_file_bwd": back, "tune_bwd": True}
    leaves = qkv(dtype=HALF)
    engine(**options)(*leaves).sum().backward()
    assert asked == ["forward", "backward"]
    kernels = [[e["key"]["kernel"] for e in json.loads(f.read_text())["entries"]] for f in (ahead, back)]
    assert kernels == [["forward"], ["backward"]]
    engine(**options, deterministic=True)(*leaves).sum().backward()
    assert asked == ["backward", "queries"]  # dQ by a kernel of its own
    engine(tune_file=ahead, tune=False, tune_bwd=True)(*leaves).sum().backward()
    assert asked == ["backward"]  # without tune_file_bwd, the one file
    assert len(json.loads(ahead.read_text())["entries"]) == 2


def test_a_thousand_calls_of_any_size_compile_each_kernel_once_and_tune_nothing(tmp_path, monkeypatch):
    compiled: list[str] = []
    monkeypatch.setattr(
        compiler.Kernel, "compiled", property(lambda self: compiled.append(self.builder) or (lambda *_: None))
    )
    made = engine(tmp_path / "tiles.json", tune=False)
    generator = random.Random(0)
    most = [t.detach() for t in qkv(300, batch=4, dtype=HALF)]
    for number in range(1000):
        batch, q_len, kv_len = generator.randint(1, 4), generator.randint(1, 300), generator.randint(1, 300)
        leaves = [t[:batch, :n].requires_grad_(number % 4 == 0) for t, n in zip(most, (q_len, kv_len, kv_len))]
        o = made(*leaves)
        if o.requires_grad:
            torch.autograd.grad(o, leaves, torch.empty_like(o))
    per_kernel = {"straight.forward.forward", "rows.preprocess", "straight.backward.backward", "rows.postprocess"}
    kernels = launch_of(*made._keys.values())._kernels.values()
    used = {(k.builder, str(k.given)) for made in kernels for k in made._made.values()}
    assert set(compiled) == per_kernel and asked == []
    assert len(used) == len(per_kernel)


# ---- end to end, on the interpreter


@pytest.mark.slow  # test_linear_tuning.py has one from end to end, test_trials.py measures these kernels
def test_the_call_that_tunes_returns_what_the_next_returns_and_leaves_its_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(search, "ROUNDS", 1)
    made = engine(tmp_path / "tiles.json", bench=tuning.bench_for, tune_bwd=True, axes={"bias": ("heads",)},
                  score_mod=lambda score, custom, b, h, q_idx, kv_idx: score * 0.25 + custom["bias"])  # fmt: skip
    made.tuning.budget = Budget(2, 60)
    leaves = [*qkv(dtype=HALF), torch.randn(4).requires_grad_()]
    before = [t.detach().clone() for t in leaves]
    runs = []
    for _ in range(2):
        o = made(*leaves)
        runs.append([o.detach(), *torch.autograd.grad(o.sum(), leaves)])
    same(*runs)
    same(before, [t.detach() for t in leaves])
    results = made.tuning.results.values()
    assert len(results) == 3 and all(r.counts() == {"ok": 2} for r in results)
    assert all(r.best.time_us > 0 and r.default_us > 0 for r in results)


# ---- options and files


def test_a_file_that_cannot_be_read_is_told_when_the_engine_is_built(tmp_path):
    file = tmp_path / "tiles.json"
    file.write_text("{}")
    for option in ("tune_file", "tune_file_bwd"):
        with pytest.raises(TuneFileUnreadable, match="is no tune file"):
            build(**{option: file})
    assert file.read_text() == "{}"
    build(tune_file=tmp_path / "not there yet.json")


def test_options_of_tuning_that_mean_nothing_are_refused():
    for options, message in (
        ({"tune": "yes"}, "tune is 'yes'. Give True or False."),
        ({"tune_file": 3}, "tune_file is 3. Give the path of a JSON file, or None."),
        ({"tune_bwd": True, "backend": "reference"},
         'tune_bwd=True with backend="reference", which has no tiles. Leave one of them out.'),
    ):  # fmt: skip
        with pytest.raises(UnknownOption) as caught:
            build(**options)
        assert str(caught.value) == message


def test_explain_says_where_a_tile_comes_from_and_why_others_fell(tmp_path):
    made = engine(tmp_path / "tiles.json", mask_mod=causal)
    text = made.explain()
    assert ", on a CPU, which emulates the kernels of an H100" in text.splitlines()[0]
    assert "forward: 128 queries x 128 keys, 256 threads, 2 stages\n  the default (measured on H100" in text
    assert "were rejected before compiling:" in text and max(map(len, text.split("  key ")[0].splitlines())) < 120
    assert re.search(r"\n  of [\d ]+ tiles \d+ may run; ", text)
    assert re.search(r"\n +\d+  \d[\d, orto]* rows don't cut into \d[\d, orto]* what \d", text), text
    made.qkv_meta = tuple(replace(m, length=11) for m in made.qkv_meta)
    made(*inputs())
    text = made.explain()
    assert f"from {tmp_path / 'tiles.json'}: 1.0 us, the best of 3," in text
    assert "tried by this process: 3 ok" in text


def test_tiles_of_each_direction_are_asked_for_once_a_bucket():
    seen = []
    made = build(dtype=HALF, tune_file="unused.json")
    made(*inputs())
    program_kernels = launch_of(*made._keys.values())
    honest = program_kernels.choose
    program_kernels.choose = lambda *given: seen.append(given[3:4] + given[6:7]) or honest(*given)
    for length in (12, 13, 14, 15, 16, 17, 31, 32):
        made(*inputs(length))
    assert seen == [((2, 17, 17), False)]  # 12 to 16 share the bucket of 11
    assert isinstance(program_kernels, ProgramKernels)


@pytest.mark.parametrize(("changed", "reason"), [
    ({"threads": 96}, "wgmma wants whole warpgroups of 128 threads"),
    ({"q": 48}, "48 rows don't cut into"),
    ({"specialised": True, "kv": 24 * 16}, "its tile's kv is 384"),  # no such tile anywhere: refused at the door
    ({"lazy_rescale": True}, "its tile's lazy_rescale is true, and no forward kernel of its form has that"),
    ({"specialised": True, "q": 64}, "no kernel placed by hand has this form for this problem"),
    ({"shared_weights": True}, "only a 16-bit backward pass over keys hands weights on"),
])  # fmt: skip
def test_a_tile_that_its_own_problem_cannot_run_with_is_refused_by_file_and_entry(tmp_path, changed, reason):
    file = tmp_path / "tiles.json"
    on_h100 = build(dtype=HALF, tune_file=file)._asked(arch.H100(), False)
    tiles = tuning.default_tiles(on_h100.problem, on_h100.maths, on_h100.target)
    key = on_h100.key("forward", tiles)
    plain = {"q": 64, "kv": 64, "threads": 128, "stages": 2}
    held = {"key": key, "tile": {**plain, **changed}, "time_us": 1, "tried": 1, "when": ""}
    text = json.dumps({"schema": 1, "entries": [held]})
    file.write_text(text)
    if reason.startswith("its tile's "):
        with pytest.raises(TuneFileUnreadable, match=re.escape(reason)):
            build(dtype=HALF, tune_file=file)
        return
    made = build(dtype=HALF, tune_file=file)
    with pytest.raises(TuneFileUnreadable) as caught:
        tuning.look_up(made.tuning, made._asked(arch.H100(), False), tiles)
    said = str(caught.value)
    assert said.startswith(f"the entry {tuning.name_of(key)} of {file}: ") and reason in said
    assert file.read_text() == text


def test_every_default_tile_and_every_tile_that_is_tried_may_come_from_a_file():
    for gpu in (arch.H100(), arch.A100()):
        for dtype in (HALF, torch.float32):
            asked_for = build(dtype=dtype)._asked(gpu, False)
            tiles = tuning.default_tiles(asked_for.problem, asked_for.maths, gpu)
            for kernel in ("forward", "backward"):
                for tile in asked_for.space(kernel, tiles).tiles:
                    assert asked_for.refusal(kernel, tiles, tile) is None
                    held = tuning.Entry({"kernel": kernel}, tile, 1.0, 1, "")
                    text = json.dumps({"schema": 1, "entries": [held.as_json()]})
                    assert entries.parse(text, "here") == [held]
