"""Notes: what one warp writes in shared memory for others to read, number by number, each under a name.

A kind of note is a NamedTuple: its fields say what the numbers are, their order where they stand.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

Note = TypeVar("Note", bound=NamedTuple)


def size_of(kind: type[Note]) -> int:
    """How many numbers a note of this kind has."""
    return len(kind._fields)


def number_of(kind: type[Note], name: str) -> int:
    """Where the number of this name stands in a note of this kind."""
    return kind._fields.index(name)


def note_in(kind: type[Note], buffer: Any, *slot: Any) -> Note:
    """The note that stands in a buffer, or in a slot of one; each number is read anew wherever it is used."""
    places = ((*slot, n) for n in range(size_of(kind)))
    return kind(*(buffer[place] for place in places))


def values_of(note: Note) -> Note:
    """The same, each number to be read once, where it gets a name of its own."""
    return type(note)(*(number + 0 for number in note))
