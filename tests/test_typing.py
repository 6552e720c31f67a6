"""Type checkers find users' mistakes by the package's types, and nothing where a call is right."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TYPES = """
[mypy]
strict = True
[mypy-torch.*,sympy.*,tilelang.*,transformers.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-attention_engine.*]
follow_imports = silent
"""


def test_the_five_planted_mistakes_are_found_and_no_other(tmp_path):
    """basedpyright finds the same five; it is not installed here, as it brings 60 MB of node."""
    script = (ROOT / "tests" / "typing" / "planted_errors.py").read_text()
    (tmp_path / "planted.py").write_text(script)
    (tmp_path / "mypy.ini").write_text(TYPES)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir",
               str(ROOT / ".mypy_cache" / "user"), "planted.py"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False,
                          env={"MYPYPATH": str(ROOT), "PATH": ""})  # fmt: skip
    planted = [n for n, line in enumerate(script.splitlines(), 1) if line.endswith("# planted")]
    found = [int(n) for n in re.findall(r"^planted\.py:(\d+): error", done.stdout, re.MULTILINE)]
    assert len(planted) == 5 and found == planted, done.stdout + done.stderr
