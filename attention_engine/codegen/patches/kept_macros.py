"""What TileLang makes of macros, on disk beside the kernels: another process that traces a kernel rewrites none.

One file holds all that processes of one Python and one TileLang rewrote. A macro is found in it by the text of its
file, its place there and the names around it, of which its rewriting is made (remembered.py).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import marshal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from attention_engine import files, folders

Macro = tuple[str, str, str, int, tuple[str, ...]]  # file, its digest, name, line, names around it
Kept = dict[Macro, tuple[CodeType, str]]  # what makes the closure; the rewritten source
_lock = threading.Lock()
_fresh: Kept = {}


def find(func: FunctionType, names: tuple[str, ...]) -> tuple[Callable[..., Any], str] | None:
    """What makes the rewritten function of the values around it, and its source; None where it isn't known."""
    macro = _macro(func, names)
    found = _known().get(macro) if macro is not None else None
    return None if found is None else (FunctionType(found[0], func.__globals__), found[1])


def add(func: FunctionType, names: tuple[str, ...], closure: Callable[..., Any], source: str) -> None:
    """Notes what TileLang made of a macro; `keep` writes it."""
    macro = _macro(func, names)
    assert isinstance(closure, FunctionType)
    bare = not (closure.__defaults__ or closure.__kwdefaults__ or closure.__closure__)
    if macro is not None and bare:
        with _lock:
            _fresh[macro] = closure.__code__, source


def keep() -> None:
    """Writes what was noted since the last time beside what other processes wrote; nothing where that can't be done."""
    with _lock:
        fresh = dict(_fresh)
        _fresh.clear()
    place = _place()
    if not fresh or place is None:
        return
    now = dict(macro[:2] for macro in fresh)  # files' digests: of a text that was changed, nothing is kept
    with contextlib.suppress(OSError), folders.locked(place.name.removeprefix(".")):
        before = {macro: held for macro, held in _read(place).items() if now.get(macro[0], macro[1]) == macro[1]}
        files.write_whole(place, base64.b64encode(marshal.dumps({**before, **fresh})).decode())


def _place() -> Path | None:
    writable = folders.kernel_folders().writable
    if writable is None:
        return None
    makers = importlib.metadata.version("tilelang"), importlib.util.MAGIC_NUMBER, sys.flags.optimize, sys.version
    return writable / f".macros-{hashlib.blake2b(repr(makers).encode(), digest_size=12).hexdigest()}"


def _known() -> Kept:
    place = _place()
    return {} if place is None else _read_once(place)


@functools.lru_cache(maxsize=4)
def _read_once(place: Path) -> Kept:
    return _read(place)


def _read(place: Path) -> Kept:
    if not place.exists() or folders.distrust(place) is not None:
        return {}
    try:
        found = marshal.loads(base64.b64decode(place.read_text()))
    except (OSError, ValueError, EOFError, TypeError):  # damaged: it is written again
        return {}
    return found if isinstance(found, dict) else {}


def _macro(func: FunctionType, names: tuple[str, ...]) -> Macro | None:
    code = func.__code__
    digest = _digest(code.co_filename)
    return None if digest is None else (code.co_filename, digest, func.__qualname__, code.co_firstlineno, names)


@functools.lru_cache(maxsize=1024)
def _digest(file: str) -> str | None:
    try:
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None
