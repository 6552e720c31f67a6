"""Which folders kernels are kept in, and whether to trust them: what lies there runs with the rights of the user.

The first that serves of these is written to:
1. $ATTENTION_ENGINE_CACHE_DIR, where it is set;
2. $XDG_CACHE_HOME/attention_engine, by default ~/.cache/attention_engine;
3. attention_engine-UID in the folder for temporary files, of this user alone;
4. a folder of this process, which is removed when it ends.

Those before it that can be read are read: a cache that root filled serves everybody. After them come the folders of
wheels of kernels that are installed (shipping/), which nobody writes to. A folder is trusted where nobody
but its owner and group may write to it or to a folder around it (others may create, but not replace, in a sticky one as
/tmp), and where the owner is this user or root; where the user named the folder, whoever owns it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from attention_engine import files, settings

LOG = logging.getLogger("attention_engine")
SHIPPED = "attention_engine_kernels"  # a namespace package: each wheel of kernels brings a folder of it


@dataclass(frozen=True)
class Folders:
    """Where kernels are read from, in order, and where they are written; None: nowhere. passed_over: folders that were
    wanted before that one, each with what is wrong with it. shipped: the last of the readable ones, of wheels."""

    readable: tuple[Path, ...]
    writable: Path | None
    passed_over: tuple[str, ...] = ()
    shipped: tuple[Path, ...] = ()

    def __str__(self) -> str:
        where = "for this process alone, in memory" if self.writable is None else f"in {self.writable}"
        return f"kernels are kept {where}" + "".join(f"; {reason}" for reason in self.passed_over)


def kernel_folders() -> Folders:
    """Those of this user and this environment, looked for once; the log tells where they aren't the first choice."""
    return _found(settings.cache_dir(), settings.user_cache_dir())


@functools.lru_cache(maxsize=16)
def _found(named: Path | None, users: Path | None) -> Folders:
    found, shipped = _of_the_user(named, users), tuple(place for place, why in shipped_folders() if why is None)
    for why in (why for _, why in shipped_folders() if why is not None):
        LOG.warning("installed kernels are passed over: %s", why)
    return replace(found, readable=(*found.readable, *shipped), shipped=shipped)


@functools.cache
def shipped_folders() -> tuple[tuple[Path, str | None], ...]:
    """The folders of installed wheels of kernels, each with what is wrong with it; one look along sys.path."""
    spec = importlib.util.find_spec(SHIPPED)
    inside = [*(spec.submodule_search_locations or ())] if spec is not None else []
    places = [place for base in inside for place in sorted(Path(base).glob("*/kernels"))]
    return tuple((place, distrust(place)) for place in places)


def _of_the_user(named: Path | None, users: Path | None) -> Folders:
    readable: list[Path] = []
    passed_over: list[str] = []
    for base, anyones in ((named, True), (users, False)):
        if base is None:
            continue
        place = base / "kernels"
        why = _make(place) or distrust(place, anyones)
        if why is None and os.access(place, os.R_OK | os.X_OK):
            readable.append(place)
        why = why or (None if os.access(place, os.W_OK | os.X_OK) else f"{place} can't be written by this user")
        if why is None:
            return _told(Folders(tuple(readable), place, tuple(passed_over)))
        passed_over.append(why)
    if users is None:
        passed_over.append("there is no home folder: HOME is not set")
    last = _temporary_folder(passed_over)
    return _told(Folders((*readable, *([last] if last else [])), last, tuple(passed_over)))


def _told(folders: Folders) -> Folders:
    if folders.passed_over:
        LOG.warning("%s. Set ATTENTION_ENGINE_CACHE_DIR to a folder that is yours.", folders)
    return folders


def _make(place: Path) -> str | None:
    """Makes a folder, with the modes that the umask gives; why it couldn't be."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"{place} can't be made ({error.strerror or error})"
        try:
            return None if stat.S_ISDIR(place.stat().st_mode) else why
        except OSError:
            return why
    return None


def distrust(place: Path, anyones: bool = False) -> str | None:
    """Why kernels of a folder or a file in it may not be run; None: they may. anyones: whoever owns it."""
    try:
        status = place.stat()
        around = [parent for parent in place.resolve().parents if _others_may_replace(parent.stat())]
    except OSError as error:
        return f"{place} can't be read ({error.strerror or error})"
    if status.st_mode & stat.S_IWOTH:
        return f"{place} may be written by everybody (chmod o-w {place})"
    if around:
        return f"{place} may be replaced by everybody, who may write to {around[0]} (chmod o-w {around[0]})"
    if not anyones and hasattr(os, "getuid") and status.st_uid not in (0, os.getuid()):
        return f"{place} belongs to another user"
    return None


def _others_may_replace(status: os.stat_result) -> bool:
    return bool(status.st_mode & stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX


def _temporary_folder(passed_over: list[str]) -> Path | None:
    """A folder of this user's among temporary files, or of this process; None where nothing can be written at all."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    try:
        base = Path(tempfile.gettempdir()) / f"attention_engine-{user}"
    except OSError as error:
        passed_over.append(f"there is no folder for temporary files ({error.strerror or error})")
        return None
    why = None
    try:
        base.mkdir(mode=0o700, exist_ok=True)  # one that another user made first is his, and not trusted
        if base.is_symlink():
            why = f"{base} is a link"
        elif hasattr(os, "getuid") and base.stat().st_uid != os.getuid():
            why = f"{base} belongs to another user"
    except OSError as error:
        why = f"{base} can't be made ({error.strerror or error})"
    place = base / "kernels"
    why = why or _make(place) or distrust(place)
    if why is None and os.access(place, os.W_OK | os.X_OK):
        return place
    passed_over.append(why or f"{place} can't be written by this user")
    try:
        own = Path(tempfile.mkdtemp(prefix="attention_engine-")) / "kernels"
        own.mkdir()
    except OSError as error:
        passed_over.append(f"there is no folder for temporary files ({error.strerror or error})")
        return None
    atexit.register(shutil.rmtree, own.parent, ignore_errors=True)
    return own


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Inside, no other process that shares the folder is inside with this name; where there is none, nobody waits."""
    place = kernel_folders().writable
    with contextlib.ExitStack() as held:
        if place is not None:
            with contextlib.suppress(OSError):  # a full disk: each works for itself
                (place / ".locks").mkdir(parents=True, exist_ok=True)
                held.enter_context(files.locked(place / ".locks" / f"{name}.lock"))
        yield


def prepare_tilelang() -> None:
    """Tells TileLang, before it is imported, where its own cache is: beside ours, where the user named a folder or its
    own can't be written; else where TileLang has it.
    """
    home = settings.home()
    wanted = settings.tilelang_cache_dir() or (home and home / ".tilelang" / "cache")
    own = settings.cache_dir() is None and wanted is not None and _make(wanted) is None
    if own and wanted is not None and os.access(wanted, os.W_OK | os.X_OK):
        return
    place = kernel_folders().writable
    if place is not None:
        settings.set_tilelang_cache_dir(place.parent)
