"""Type checkers find users' mistakes by the package's types, and nothing where a call is right."""

import re
from pathlib import Path

from tests.typing.strict import check


def test_the_five_planted_mistakes_are_found_and_no_other(tmp_path):
    """basedpyright finds the same five; it is not installed here, as it brings 60 MB of node."""
    script = (Path(__file__).parent / "typing" / "planted_errors.py").read_text()
    _, said = check(script, tmp_path)
    planted = [n for n, line in enumerate(script.splitlines(), 1) if line.endswith("# planted")]
    found = [int(n) for n in re.findall(r"^user\.py:(\d+): error", said, re.MULTILINE)]
    assert len(planted) == 5 and found == planted, said
