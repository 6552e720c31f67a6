"""mypy over a user's script, as a user with a strict setting runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = """
[mypy]
strict = True
[mypy-torch.*,sympy.*,tilelang.*,transformers.*]
follow_imports = skip
ignore_missing_imports = True
[mypy-attention_engine.*]
follow_imports = silent
"""


def check(script: str, folder: Path) -> tuple[int, str]:
    """The exit status and what mypy says of user.py, which holds the script."""
    (folder / "user.py").write_text(script)
    (folder / "mypy.ini").write_text(SETTINGS)
    cache = str(ROOT / ".mypy_cache" / "user")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", cache, "user.py"]
    environment = {"MYPYPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout + done.stderr
