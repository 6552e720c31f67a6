"""Type checkers find users' mistakes by the package's types, and nothing where a call is right."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.typing.strict import ROOT, check

SCRIPT = (Path(__file__).parent / "typing" / "planted_errors.py").read_text()
PLANTED = [n for n, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# planted")]


def test_the_five_planted_mistakes_are_found_and_no_other(tmp_path):
    _, said = check(SCRIPT, tmp_path)
    found = [int(n) for n in re.findall(r"^user\.py:(\d+): error", said, re.MULTILINE)]
    assert len(PLANTED) == 5 and found == PLANTED, said


@pytest.mark.skipif(find_spec("basedpyright") is None, reason="needs basedpyright, which brings 60 MB: make pyright")
def test_pyright_finds_the_same_five(tmp_path):
    (tmp_path / "user.py").write_text(SCRIPT)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert [int(n) for n in re.findall(r"user\.py:(\d+):\d+ - error", said)] == PLANTED, said
