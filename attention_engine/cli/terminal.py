"""Words in colour, on a terminal that wants it."""

from __future__ import annotations

import os
import sys

GREEN, RED, YELLOW = "32", "31", "33"


def coloured(text: str, colour: str) -> str:
    """The text in a colour where standard output is a terminal and NO_COLOR is not set."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{colour}m{text}\033[0m"
