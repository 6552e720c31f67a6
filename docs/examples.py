"""An extension of griffe, which reads docstrings for the API's pages: examples with >>> are shown as code.

Markdown takes >>> for quotes within quotes, wherever no section "Examples:" stands above them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*\n(?:\1\S.*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with each example, up to the next blank line, in a fence."""
    return EXAMPLE.sub(lambda m: f"\n{m[1]}```pycon\n{m[0].rstrip()}\n{m[1]}```\n", text)


class Examples(griffe.Extension):
    """mkdocs.yml names it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """griffe calls it with each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
