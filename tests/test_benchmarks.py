"""The benchmarks' formulas, counts, refusals and files, where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from attention_engine import AttentionEngine
from attention_engine.tuner import cases as named
from attention_engine.tuner.cases import Case, Shape
from benchmarks import flex_cudnn, history, plot, run, tables
from benchmarks.cases import make_inputs, make_references, moved_bytes
from benchmarks.peers import PEERS, Peer, Unavailable
from benchmarks.timing import Ceilings, Clock, Timing, summarise

CEILINGS = Ceilings(matmul_tflops=700.0, copy_gbs=3000.0, highest_tflops=800.0)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(named.SHAPES, "tiny", Shape(4, 2, 32, 16, 2))
    return "tiny"


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("program", named.PROGRAMS)
def test_a_case_and_its_formula_agree(tiny, program, mask):
    """The formula's own error in bf16 bounds that of the engine: layout, scale, mask and maths are the same."""
    case = Case(tiny, program, mask, 40)
    inputs = make_inputs(case, torch.bfloat16, "cpu")
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    o = AttentionEngine(case.metas("bfloat16"), **case.options(), backend="interpret")(*leaves, **inputs.custom)
    found = [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]
    references = make_references(case, inputs)
    ratio, worst = run.worst_ratio(references, found)
    assert ratio <= 1.1, worst
    without = [*found[:2], torch.zeros_like(found[2]), found[3]]
    assert references.ratios(without)["dk"] > 20, "a gradient of zeros must show"
    assert run.worst_ratio(references, [found[0] * torch.nan, *found[1:]])[1] == "o"


def test_masks_are_intervals_of_keys_for_cudnn():
    documents = torch.tensor([0, 0, 0, 1, 1])
    causal, of_documents, dilated = (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: (q >= k) & (documents[q] == documents[k]),
        lambda b, h, q, k: (q >= k) & ((q - k) % 2 == 0),
    )
    assert flex_cudnn.intervals(causal, "cpu", 5).tolist() == [[[1, 2, 3, 4, 5]]]
    assert flex_cudnn.intervals(of_documents, "cpu", 5).tolist() == [[[0] * 5, [0, 0, 0, 3, 3], [1, 2, 3, 4, 5]]]
    with pytest.raises(Unavailable, match="several runs of keys"):
        flex_cudnn.intervals(dilated, "cpu", 5)
    with pytest.raises(Unavailable, match="import cudnn"):
        flex_cudnn.cudnn((None, causal), "cpu")


def test_a_run_says_of_each_peer_what_became_of_it(tiny, monkeypatch):
    case, seen = Case(tiny, "softmax", "causal", 40), []

    class Watch:
        def times(self, calls, rounds):
            seen.extend(calls)
            return {name: Timing(100.0, 90.0, 110.0, 5.0) for name, call in calls.items() if call() is not None}

    def shifted(case, dtype):
        plain = PEERS["attention_engine"].make(case, dtype)
        return lambda *given: plain(*given) * 1.1

    def absent(case, dtype):
        raise Unavailable("import nothing: no such module")

    def failing(case, dtype):
        raise RuntimeError("out of memory\nand more")

    made = {"shifted": shifted, "absent": absent, "failing": failing}
    monkeypatch.setattr(run, "PEERS", {**PEERS, **{n: Peer(make, "bshd") for n, make in made.items()}})
    monkeypatch.setattr(run, "clock", Watch)
    monkeypatch.setattr(run, "peak_bytes", lambda call: 1 << 20)
    found = run.measure(case, ["attention_engine", *made], torch.bfloat16, CEILINGS, 3, device="cpu")
    status = {(row.peer, row.direction): row.status for row in found}
    assert seen == ["attention_engine forward", "attention_engine backward"]
    assert status["attention_engine", "forward"] == status["attention_engine", "backward"] == "ok"
    assert status["shifted", "forward"].startswith("wrong: ") and "x eager's error" in status["shifted", "backward"]
    assert status["absent", "backward"] == "unavailable: import nothing: no such module"
    assert status["failing", "forward"] == "failed: RuntimeError: out of memory"
    (ours,) = [row for row in found if (row.peer, row.direction) == ("attention_engine", "forward")]
    assert ours.tflops == pytest.approx(case.flops("forward") / 100 * 1e-6) and ours.peak_mib == 1.0


@pytest.mark.parametrize("direction, flops, moved", [
    ("forward", 2 * 2 * 16 * 8192**2 * 256 / 2, 2 * 4 * 2 * 16 * 8192 * 128),
    ("backward", 2 * 2 * 16 * 8192**2 * 640 / 2, 2 * 8 * 2 * 16 * 8192 * 128),
])  # fmt: skip
def test_what_is_counted(direction, flops, moved):
    case = named.CASES["mha-128.softmax.causal.8192"]
    assert case.flops(direction) == flops and moved_bytes(case, direction, 2) == moved


def test_grouped_keys_are_counted_once():
    case = named.CASES["llama-8b.softmax.full.512"]
    assert moved_bytes(case, "forward", 2) == 2 * 512 * 128 * (2 * 32 + 2 * 8)


@pytest.mark.parametrize("us, status", [
    (1000.0, "ok"), (700.0, "ok"), (650.0, "broken: faster than this device's plain product or copy"),
])  # fmt: skip
def test_what_is_faster_than_the_device_is_refused(us, status):
    case = named.CASES["mha-128.softmax.causal.8192"]
    row = run.rate(("c", "float16"), case, "cudnn", "forward", Timing(us, us, us, 5.0), 0, CEILINGS, 0.5, torch.float16)
    assert row.status == status and row.tflops == pytest.approx(case.flops("forward") / us * 1e-6)


def test_peers_say_what_they_cannot_run():
    case = named.CASES["mha-128.sigmoid.causal.8192"]
    with pytest.raises(Unavailable, match="can't express sigmoid causal"):
        PEERS["cudnn"].make(case, torch.float16)
    with pytest.raises(Unavailable, match="import flash_attn"):
        PEERS["flash_attention_4"].make(case, torch.float16)


class Noting(Clock):
    """Notes which calls are timed, and needs no GPU."""

    def __init__(self):
        self.timed = []

    def once(self, call):
        self.timed.append(call())
        return float(len(self.timed)), 1.0


def test_each_round_times_each_call_in_an_order_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clocks, names = [Noting(), Noting()], "abcd"
    for clock in clocks:
        assert [*clock.times({n: lambda n=n: n for n in names}, rounds=6)] == [*names]
    first, second = (clock.timed for clock in clocks)
    rounds = [tuple(first[n : n + 4]) for n in range(0, 24, 4)]
    assert first == second and all(sorted(each) == [*names] for each in rounds) and len(set(rounds)) > 3


def test_a_timing_is_the_median_with_its_spread():
    timing = summarise([(float(n), 2.0) for n in range(11)])
    assert timing == Timing(5.0, 1.0, 9.0, 2.0)


def rows() -> list[run.Row]:
    case = named.CASES["mha-128.softmax.full.8192"]
    found = [run.Row(case.name, "float16", "cudnn", d, "unavailable: no GPU") for d in run.DIRECTIONS]
    for length, us in ((4096, 600.0), (8192, 2000.0)):
        at = named.CASES[f"mha-128.softmax.full.{length}"]
        for d in run.DIRECTIONS:
            timing = Timing(us * (2.5 if d == "backward" else 1), us, us, 50.0)
            label = (at.name, "float16")
            found.append(run.rate(label, at, "attention_engine", d, timing, 1 << 20, CEILINGS, 0.5, torch.float16))
    return found


def test_files_hold_every_row_and_pictures_come_from_them(tmp_path):
    run.write(tmp_path / "here", rows(), {"device": "none"})
    whole = json.loads((tmp_path / "here.json").read_text())
    assert whole["environment"] == {"device": "none"} and len(whole["rows"]) == 6
    found = plot.read([tmp_path / "here.csv"])
    assert len(found.rows) == 4 and found.where == {"device": "none"}
    plot.main([str(tmp_path / "here.csv"), "--to", str(tmp_path)])
    pictures = sorted(path.stem for path in tmp_path.glob("*.svg"))
    drawn = ["here_mha-128.softmax.full", "here_mha-128_4096", "here_mha-128_8192"]
    assert pictures == sorted([*drawn, *(f"{name}_dark" for name in drawn)])
    text = (tmp_path / "here_mha-128_8192.svg").read_text()
    for shown in ("AttentionEngine", "none, float16, batch 2, 16 heads, head dim 128, length 8192", ">softmax<"):
        assert shown in text, shown


def test_results_of_two_machines_are_no_one_picture(tmp_path):
    run.write(tmp_path / "one", rows(), {"device": "none"})
    run.write(tmp_path / "two", rows(), {"device": "another"})
    with pytest.raises(ValueError, match=r"two\.csv was measured with another device"):
        plot.read([tmp_path / "one.csv", tmp_path / "two.csv"])


@pytest.mark.parametrize("path", sorted(plot.RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_every_file_of_results_can_be_drawn(path):
    """One picture of each: the others are drawn alike."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    found = plot.pictures_of([path])
    assert found
    plt.close(next(iter(found.values()))(plot.LOOKS["light"]))


def test_results_in_milliseconds_and_in_tflops_are_no_one_picture():
    paths = [plot.RESULTS / f"{name}.csv" for name in ("h100_linear", "h100_turns")]
    with pytest.raises(ValueError, match="some milliseconds"):
        plot.pictures_of(paths)


def test_the_documents_tables_are_those_of_the_files():
    page = tables.PAGE.read_text()
    assert tables.rewritten(page) == page, "python -m benchmarks.tables"
    for name, table in tables.TABLES.items():
        assert f"<!-- table: {name} -->" in page
        for file in table.files:
            where = plot.of_files(file).where
            assert where["device"] in tables.text(name) and where["commit"][:9] in tables.text(name)


def test_a_version_gets_a_line_and_a_loss_is_said(tmp_path):
    path = tmp_path / "history.csv"
    history.write(["# where figures are from"], [], path)
    case = history.FIGURES["full_forward"].case

    def measured(commit, tflops, dtype="float16", status="ok"):
        row = {"case": case, "peer": "attention_engine", "direction": "forward", "dtype": dtype, "status": status}
        where = {"commit": commit, "device": "none", "date": "2026-11-26"}
        return history.add(where, [{**row, "tflops": tflops}], f"{commit}.json", path)

    assert measured("one", 700.0) == measured("two", 650.0) == ["float16"]
    assert measured("two", 660.0) == ["float16"], "the same version again"
    assert measured("two", 600.0, status="wrong") == [] and measured("two", 720.0, "bfloat16") == ["bfloat16"]
    said, versions = history.read(path)
    assert said == ["# where figures are from"]
    assert [(v["commit"], v["dtype"], v["full_forward"]) for v in versions] == [
        ("one", "float16", "700.0"), ("two", "float16", "660.0"), ("two", "bfloat16", "720.0"),
    ]  # fmt: skip
    (sixteen, brain) = history.losses(versions)
    assert "660 (two) of    700 (one)  LOSS" in sixteen and "LOSS" not in brain


def test_the_figures_that_are_followed_are_cases_and_peers_of_the_benchmark():
    for figure in history.FIGURES.values():
        assert figure.case in named.CASES and figure.peer in PEERS and figure.direction in run.DIRECTIONS
    said, versions = history.read()
    assert len(history.FIGURES) == 10 and said and all(v["from"] and v["commit"] for v in versions)


@pytest.mark.parametrize("name", plot.PICTURES)
def test_a_picture_of_the_documents_shows_the_files_numbers_and_what_was_measured(name, monkeypatch):
    """Its text, not its bytes: a newer matplotlib may draw the same another way."""
    import matplotlib as mpl

    mpl.use("Agg")
    for kind, look in plot.LOOKS.items():
        shown = (plot.DOCS / f"{name}{'_dark' * (kind == 'dark')}.svg").read_text()
        figure = plot.PICTURES[name](look)
        said = [text.get_text().strip() for text in figure.findobj(mpl.text.Text)]
        for text in filter(None, said):
            assert all(f">{line}<" in shown for line in text.split("\n")), text
        plain = " ".join(said)
        for word in ("NVIDIA H100 80GB HBM3", "PyTorch 2.", "TileLang 0.", "AttentionEngine"):
            assert word in plain, word
        assert ("head dim" in plain or "dims" in plain) and ("float16" in plain or "bf16" in plain)
        assert "mha-" not in plain and ".full" not in plain, "users' words"
        mpl.pyplot.close(figure)


def test_the_table_shows_speeds_and_reasons():
    text = run.table(rows())
    assert "cudnn              unavailable: no GPU" in text and "550 /   550 TFLOP/s  host   50 /   50 us" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="needs a CUDA device"):
        run.main(["--case", "mha-128.softmax.full.512"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels would compile")
def test_host_times_are_a_table_of_calls():
    """In a process of its own: launches are left out there for good."""
    code = "from benchmarks import host; host.CALLS = host.ROUNDS = 2; host.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    head, *lines = done.stdout.splitlines()
    times = {line[:32].strip(): float(line[32:]) for line in lines}
    assert "launches left out" in head
    of_caches = ["a call with a cache", "the same, out given"]
    assert list(times) == ["a call", "a call with gradients", "a call and its backward", "the launch alone", *of_caches]
    assert all(us > times["the launch alone"] > 0 for name, us in times.items() if name != "the launch alone")
