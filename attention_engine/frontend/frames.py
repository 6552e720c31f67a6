"""Which frames of a traceback are the user's: where messages point to, and what is left of a traceback.

A frame is the user's where its file belongs neither to this package nor to torch nor to Python's import system.
"""

from __future__ import annotations

import dis
import functools
import itertools
import linecache
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from attention_engine import settings
from attention_engine.errors import AttentionEngineError

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
Error = TypeVar("Error", bound=AttentionEngineError)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def is_torchs(filename: str) -> bool:
    """Does the file belong to torch, where torch is imported?"""
    return "torch" in sys.modules and filename.startswith(_folder_of_torch())


@functools.cache
def _folder_of_torch() -> str:
    return str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep


def _is_users(filename: str) -> bool:
    return not filename.startswith((_PACKAGE, "<frozen")) and not is_torchs(filename)


def users_frame() -> FrameType | None:
    """The innermost frame of the user's code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def where_from() -> str:
    """The file and line of the user's code that is running, as `file.py:12: `."""
    frame = users_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}: "


def spelled() -> str:
    """What the user's code is evaluating, as it is spelled there; "" where Python doesn't know or it has many lines."""
    frame = users_frame()
    positions: Callable[[], Any] | None = getattr(frame and frame.f_code, "co_positions", None)  # from Python 3.11
    if frame is None or positions is None:
        return ""
    first, last, start, end = next(itertools.islice(positions(), frame.f_lasti // 2, None))
    if None in (first, last, start, end) or first != last:
        return ""
    line = linecache.getline(frame.f_code.co_filename, first, frame.f_globals)
    return line.encode()[start:end].decode(errors="replace")


def is_calling() -> bool:
    """Does the user's code call a function, rather than read at an index, use an operator or branch?"""
    frame = users_frame()
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")


def brief(error: Error) -> Error:
    """The error without this package's and torch's frames, below the one that raises it anew. Where
    ATTENTION_ENGINE_ALL_FRAMES is set, all stay."""
    if settings.shows_all_frames():
        return error
    kept, entry = [], error.__traceback__
    while entry is not None:
        if _is_users(entry.tb_frame.f_code.co_filename):
            kept.append(entry)
        entry = entry.tb_next
    shown: TracebackType | None = None
    for entry in reversed(kept):
        shown = TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(shown)


def briefly(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, whose errors show the user's frames, and one of this package."""

    @functools.wraps(function)
    def call(*args: Given.args, **named: Given.kwargs) -> Result:
        try:
            return function(*args, **named)
        except AttentionEngineError as error:
            raise brief(error) from error.__cause__
        except TypeError as error:  # arguments that it doesn't take, or lacks: a user knows the class of an instance
            if args and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                public = f"{type(args[0]).__name__}.{function.__name__}"
                raise TypeError(str(error).replace(function.__qualname__, public)) from None
            raise

    return call


def warn(message: str, category: type[Warning]) -> None:
    """Warns of the user's line that is running."""
    level, frame = 1, sys._getframe(0)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
