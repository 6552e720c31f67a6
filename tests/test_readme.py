"""The README's code runs as it stands, and what it says of the repository is so."""

import re
from pathlib import Path

import torch

from tests import plain

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def python_blocks():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(blocks):
    """The blocks one after another in a namespace of their own, as a user would paste them."""
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    return names


def test_the_quick_start_runs_and_is_right():
    names = run(python_blocks()[:2])
    q, k, v, out = (names[name] for name in ("q", "k", "v", "out"))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = plain.attention(*exact, "softmax", causal=True)
    want.sum().backward()
    torch.testing.assert_close(out.double(), want, atol=2e-3, rtol=0)
    for x, y in zip((q, k, v), exact):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=1e-2, rtol=5e-3)


def test_seeing_inside_shows_what_it_says(capsys):
    run(python_blocks())
    out = capsys.readouterr().out
    for shown in ("AttentionEngine(", "T.prim_func", "dq"):
        assert shown in out, shown


def test_every_file_named_exists():
    for name in re.findall(r"`([\w/]+\.py)`", README):
        assert (ROOT / name).exists() or (ROOT / "attn_script" / name).exists(), name
    for link in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / link).exists(), link


def test_every_make_target_named_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"make ([a-z]+)", README))
    assert named and named <= set(targets)
