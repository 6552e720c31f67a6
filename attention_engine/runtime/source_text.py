"""A kernel as TileLang, to read: a title that says what it is, and no line that is too long."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

WIDTH = 118
BREAKS = (", ", " and ", " or ", " + ", " - ", " * ", " if ", " else ")  # a line may go on behind them, inside brackets


def titled(name: str, text: str, places: str) -> str:
    """A kernel's text under its title. places: the user's functions, by file and line."""
    head = [
        f"# {name}: TileLang's own print of the kernel. Your functions stand in it as arithmetic on tiles;",
        "# program() shows them by your names.",
        *wrap(f"They are {places or 'none'}.", WIDTH, initial_indent="# ", subsequent_indent="# "),
    ]
    return "\n".join([*head, *(part for line in text.splitlines() for part in fold(line))]) + "\n"


def fold(line: str) -> list[str]:
    """The line in parts of WIDTH, cut inside brackets, where Python reads on; whole where it has no place to cut."""
    indent = len(line) - len(line.lstrip())
    places, parts, start, deeper = list(_breaks(line)), [], 0, 0
    while len(line) - start + deeper > WIDTH:
        first = max(start, indent)
        fits = [(depth, place) for depth, place in places if first < place <= start + WIDTH - deeper]
        if not fits:
            break
        late = [each for each in fits if each[1] > start + (WIDTH - deeper) // 2] or fits
        place = min(late, key=lambda each: (each[0], -each[1]))[1]  # the outermost, and of those the last
        parts.append(" " * deeper + line[start:place].rstrip())
        start, deeper = place, indent + 8
    return [*parts, " " * deeper + line[start:]]


def _breaks(line: str) -> Iterator[tuple[int, int]]:
    """Where the line may be cut, behind a comma or an operator: how many brackets are open there, and the place."""
    depth, quote = 0, ""
    for n, sign in enumerate(line):
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif depth > 0:
            yield from ((depth, n + len(words)) for words in BREAKS if line.startswith(words, n))
