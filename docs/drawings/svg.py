"""A few shapes, and an SVG picture of them: what the drawings of this folder are made with.

A picture is white, so that it reads on light and on dark pages. `crossings` names what cannot be read in one: lines of
text that meet, that leave the picture or the box in whose middle they stand, or that an arrow crosses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

INK, FAINT, PALE = "#263238", "#90a4ae", "#eceff1"
WIDEST = 0.62  # the mean width of a letter of a wide sans-serif face (DejaVu Sans), in units of its size


@dataclass(frozen=True)
class Text:
    """A line of text; y is its baseline."""

    x: float
    y: float
    words: str
    size: float = 11
    anchor: str = "middle"
    color: str = INK
    bold: bool = False

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom, of a wide face."""
        width = len(self.words) * self.size * WIDEST * (1.08 if self.bold else 1)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.78 * self.size, left + width, self.y + 0.22 * self.size

    def svg(self) -> str:
        """As an element."""
        weight = ' font-weight="bold"' if self.bold else ""
        return (
            f'<text x="{self.x:g}" y="{self.y:g}" font-size="{self.size:g}" text-anchor="{self.anchor}" '
            f'fill="{self.color}"{weight}>{escape(self.words)}</text>'
        )


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    line: str = "none"
    thick: float = 1

    def has_in_its_middle(self, text: Text) -> bool:
        """Does the text belong to it?"""
        return abs(self.x + self.width / 2 - text.x) < 1 and self.y < text.y < self.y + self.height

    def svg(self) -> str:
        """As an element."""
        place = f'x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"'
        return f'<rect {place} fill="{self.fill}" stroke="{self.line}" stroke-width="{self.thick:g}"/>'


@dataclass(frozen=True)
class Line:
    """Straight pieces from point to point; tip: with an arrow's head at the end."""

    points: Sequence[tuple[float, float]]
    color: str = INK
    thick: float = 1.2
    dashes: str = ""
    tip: bool = False

    def svg(self) -> str:
        """As one element, or two."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in self.points)
        dashed = f' stroke-dasharray="{self.dashes}"' if self.dashes else ""
        drawn = f'<path d="{path}" fill="none" stroke="{self.color}" stroke-width="{self.thick:g}"{dashed}/>'
        if not self.tip:
            return drawn
        (x0, y0), (x1, y1) = self.points[-2:]
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        left, right = (x1 - 7 * dx - 3.5 * dy, y1 - 7 * dy + 3.5 * dx), (x1 - 7 * dx + 3.5 * dy, y1 - 7 * dy - 3.5 * dx)
        corners = " L".join(f"{x:.4g} {y:.4g}" for x, y in ((x1, y1), left, right))
        return f'{drawn}<path d="M{corners} z" fill="{self.color}"/>'


Shape = Text | Box | Line


@dataclass(frozen=True)
class Picture:
    """Shapes on white, the first at the back; title: for readers who cannot see it."""

    width: float
    height: float
    title: str
    shapes: tuple[Shape, ...]

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="sans-serif" role="img">'
        )
        back = Box(0, 0, self.width, self.height, "white")
        drawn = [shape.svg() for shape in (back, *self.shapes)]
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *drawn, "</svg>\n"])


def crossings(picture: Picture) -> list[str]:
    """What nobody could read: texts that meet, leave the picture or their box, or are crossed by an arrow."""
    texts = [shape for shape in picture.shapes if isinstance(shape, Text)]
    found = []
    for text in texts:
        left, top, right, bottom = text.extent
        if left < 0 or top < 0 or right > picture.width or bottom > picture.height:
            found.append(f"{text.words!r} leaves the picture")
        for box in picture.shapes:
            if isinstance(box, Box) and box.has_in_its_middle(text) and right - left > box.width + 1:
                found.append(f"{text.words!r} leaves its box")
        for line in (shape for shape in picture.shapes if isinstance(shape, Line) and shape.tip):
            xs, ys = zip(*line.points, strict=True)
            if min(xs) < right and left < max(xs) and min(ys) < bottom - 1 and top + 1 < max(ys):
                found.append(f"an arrow crosses {text.words!r}")
    for one, other in itertools.combinations(texts, 2):
        a, b = one.extent, other.extent
        if a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]:
            found.append(f"{one.words!r} meets {other.words!r}")
    return found


def flatten(parts: Iterable[Shape | Iterable[Shape]]) -> tuple[Shape, ...]:
    """Shapes, and lists of them, in one row."""
    return tuple(s for part in parts for s in ([part] if isinstance(part, (Text, Box, Line)) else part))
