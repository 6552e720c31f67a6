"""A hook of mkdocs: formulas between dollar signs become MathML, which browsers draw without scripts or the network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **_: Any) -> str:
    """mkdocs calls it with a page's HTML; pymdownx.arithmatex has marked the formulas."""

    def drawn(match: re.Match[str]) -> str:
        display = "block" if match["open"] == "[" else "inline"
        return convert(html.unescape(match["latex"].strip()), display=display)

    return FORMULA.sub(drawn, content)
