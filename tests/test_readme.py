"""The README's code runs as it stands, and what it says of the repository, of speeds and of limits is so."""

import csv
import re
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def example():
    """The names of the first block, run in a namespace of its own, as a user would paste it."""
    names = {"__name__": "readme"}
    exec(compile(python_blocks()[0], "README.md", "exec"), names)
    return names


def test_the_example_runs_and_is_right(example):
    q, k, v, bias, out = (example[name] for name in ("q", "k", "v", "bias", "out"))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    place = torch.arange(q.shape[1], device=q.device)
    scores = torch.einsum("bqhd,bkhd->bhqk", *exact[:2]) * q.shape[-1] ** -0.5 + exact[3][:, None, None]
    weights = scores.sigmoid().masked_fill(place[:, None] < place, 0.0)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, exact[2])
    want.sum().backward()
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=1e-3)
    for x, y in zip((q, k, v, bias), exact):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-2, rtol=1e-2)


def test_the_example_shows_what_it_says(example, capsys):
    report = example["engine"].check(*(example[name] for name in "qkv"))
    assert report.ok
    for shown in ("o", "dq", "dk", "dv"):
        assert re.search(rf"^{shown}\b", str(report), re.MULTILINE), shown


def test_the_first_screen_is_short():
    assert len(README.splitlines()) < 150
    assert len(python_blocks()[0].splitlines()) <= 22
    order = ["## Install", "## An example", "## Speed", "## What it is not for", "## Where next", "make demo"]
    assert sorted(order, key=README.index) == order


def test_what_it_needs_is_what_the_package_asks_for():
    pyproject = (ROOT / "pyproject.toml").read_text()
    (python,), (torchs,) = (re.findall(rf"{name}>=([\d.]+)", pyproject.replace(' = "', "")) for name in
                            ("requires-python", "torch"))  # fmt: skip
    assert f"Python {python} or newer, PyTorch {torchs} or newer" in README
    assert f"version-{re.search(r'^version = .(.*?).$', pyproject, re.MULTILINE)[1]}-" in README


def measured(file):
    """TFLOP/s by case, peer and direction."""
    with (RESULTS / f"{file}.csv").open(newline="") as rows:
        return {(r["case"], r["peer"], r["direction"]): float(r["tflops"]) for r in csv.DictReader(rows) if r["tflops"]}


def ratio(file, peer, direction, case=None):
    found = measured(file)
    times = [
        found[c, "attention_engine", d] / speed
        for (c, p, d), speed in found.items()
        if p == peer and d == direction and case in (None, c)
    ]
    return geometric_mean(times), len(times)


SOFTMAX = "h100_softmax_peers_fp16"


@pytest.mark.parametrize(("said", "file", "peer", "direction", "case", "count"), [
    ("softmax runs forward at {:.2f} times cuDNN's speed", SOFTMAX, "cudnn", "forward", None, 20),
    ("at {:.2f} times FlashAttention-4's. ALiBi", SOFTMAX, "flash_attention_4", "forward", None, 20),
    ("backward pass runs at {:.2f} times cuDNN's speed", SOFTMAX, "cudnn", "backward", None, 20),
    ("and at {:.2f} times FlashAttention-4's. [All", SOFTMAX, "flash_attention_4", "backward", None, 20),
    ("ALiBi runs at {:.1f} times FlexAttention's speed", "h100_flex", "flex_attention", "forward",
     "mha-128.alibi.full.8192", 1),
    ("and softcap at {:.1f} times", "h100_flex", "flex_attention", "forward", "mha-128.softcap.full.8192", 1),
])  # fmt: skip
def test_speeds_are_those_of_the_files(said, file, peer, direction, case, count):
    found, cases = ratio(file, peer, direction, case)
    assert cases == count and said.format(found) in " ".join(README.split()), said.format(found)


def test_linear_attention_s_speed_is_that_of_the_file():
    with (RESULTS / "h100_linear.csv").open(newline="") as rows:
        ms = {r["name"]: float(r["ms"]) for r in csv.DictReader(rows)
              if (r["case"], r["direction"]) == ("mamba2", "forward")}  # fmt: skip
    said = f"Mamba-2 at {ms['mamba-ssm'] / ms['attention_engine']:.1f} times mamba-ssm's speed forward"
    assert said in " ".join(README.split())


def test_every_file_named_exists():
    for name in re.findall(r"`([\w/]+\.py)`", README):
        assert (ROOT / name).exists() or (ROOT / "attn_script" / name).exists(), name
    links = re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", README)
    links += re.findall(r'(?:src|srcset)="([^"]+)"', README)
    here = [link for link in links if not link.startswith("../../actions/workflows/checks.yml")]  # a page of GitHub's
    assert len(links) - len(here) == 2 and len(here) > 20 and (ROOT / ".github/workflows/checks.yml").exists()
    for link in here:
        assert (ROOT / link).exists(), link


def test_the_picture_has_a_dark_one():
    assert re.search(r'<source media="\(prefers-color-scheme: dark\)" srcset="[\w/]+_dark\.svg">', README)


def test_every_make_target_named_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"make ([a-z]+)", README))
    assert named >= {"demo", "test", "docs"} and named <= set(targets)
