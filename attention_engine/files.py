"""Files that users and processes share: one writer at a time, whole at every moment, with the modes they expect."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other thread or process is inside with this lock file; one that is killed lets go.

    The file stays: removing it would let two in. Another user's is opened to read, which is enough to lock it. Raises
    OSError where it can't be made or opened.
    """
    if sys.platform == "win32":
        with FileLock(path):
            yield
        return
    import fcntl

    handle = _open_lock(path)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks: files are whole all the same, by their renames
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a child that a fork made holds the handle too
        os.close(handle)


def _open_lock(path: Path) -> int:
    """A new one follows the umask. Without O_CREAT for one that is there: a sticky folder forbids it of another's."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def write_whole(path: Path, text: str) -> None:
    """Puts a text in a file's place at once; to be called under the file's lock. Raises OSError; the file is as before.

    Of a link the target is replaced. A new file follows the umask; an old one keeps its mode and, where that is
    allowed, its owner and group. What a killed writer left behind is removed.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not os.access(real, os.W_OK):
        raise PermissionError(f"{real} may not be written by this user")
    for left in real.parent.glob(f".{glob.escape(real.name)}.new-*"):
        with contextlib.suppress(OSError):  # another user's, in a folder where each removes only his own
            left.unlink()
    staging = real.with_name(f".{real.name}.new-{secrets.token_hex(4)}")
    handle = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            _as_before(real, handle)
            file.write(text)
            file.flush()
            os.fsync(handle)
        staging.replace(real)
    finally:
        staging.unlink(missing_ok=True)


def _as_before(real: Path, handle: int) -> None:
    """Gives a file that is being written the owner, group and mode of the one that it will replace."""
    try:
        old = real.stat()
    except FileNotFoundError:
        return
    if sys.platform != "win32":
        for owner in (old.st_uid, -1):
            try:
                os.fchown(handle, owner, old.st_gid)
                break
            except PermissionError:  # only root gives files away; a group may be given by its members
                continue
        os.fchmod(handle, stat.S_IMODE(old.st_mode))
