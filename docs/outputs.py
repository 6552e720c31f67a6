"""Runs the Python blocks of the pages for maintainers, and holds what they print to the `text` blocks behind them.

    python docs/outputs.py           says which pages print something else
    python docs/outputs.py --write   writes what they print into the pages

A block behind the line `<!-- slow -->` takes more than a moment (it lowers a kernel to CUDA). What one behind
`<!-- varies -->` prints is not the same everywhere: it runs, and what stands below it stays.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "maintainers"
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>slow|varies) -->\n)?```python\n(?P<code>.*?)```\n(?:\n```text\n.*?```\n)?", re.DOTALL
)


def run(page: Path, *, slow: bool = True) -> str:
    """The page with what its blocks print now, each run in its turn; without the slow ones, those stay as they are."""
    text, names = page.read_text(), {"__name__": page.stem}

    def with_output(match: re.Match[str]) -> str:
        if match["mark"] == "slow" and not slow:
            return match[0]
        line = text[: match.start("code")].count("\n")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile("\n" * line + match["code"], str(page), "exec"), names)
        if match["mark"] == "varies":
            return match[0]
        printed = "".join(line for line in said.getvalue().splitlines(True) if "[TileLang:" not in line)
        shown = f"\n```text\n{printed}```\n" if printed else ""
        return text[match.start() : match.end("code")] + "```\n" + shown

    return BLOCK.sub(with_output, text)


def main(arguments: list[str]) -> int:
    """Of all pages; 1 where one prints something else."""
    changed = 0
    for page in sorted(FOLDER.glob("*.md")):
        now = run(page)
        if now != page.read_text():
            changed += 1
            print(f"{page.name} prints something else")
            if "--write" in arguments:
                page.write_text(now)
    return int(changed > 0 and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
