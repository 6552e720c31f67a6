"""The only reader of environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path | None:
    """The user's folder; None where there is none, as in a container without HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cache_dir() -> Path | None:
    """Where the user wants every cache: ATTENTION_ENGINE_CACHE_DIR; None leaves TileLang's own in its place."""
    value = os.environ.get("ATTENTION_ENGINE_CACHE_DIR")
    if not value:
        return None
    return Path(os.path.expanduser(value)).absolute()  # noqa: PTH111 - a "~" stays where there is no home


def user_cache_dir() -> Path | None:
    """Where kernels are kept by default: $XDG_CACHE_HOME/attention_engine, else in ~/.cache; None without a home."""
    value, at_home = os.environ.get("XDG_CACHE_HOME"), home()
    caches = Path(value) if value and Path(value).is_absolute() else at_home and at_home / ".cache"
    return caches and caches / "attention_engine"


def tilelang_cache_dir() -> Path | None:
    """Where the user wants TileLang's own cache: TILELANG_CACHE_DIR."""
    value = os.environ.get("TILELANG_CACHE_DIR")
    return Path(value) if value else None


def set_tilelang_cache_dir(path: Path) -> None:
    """Says where TileLang's cache is, to TileLang in this process and to processes that it starts."""
    os.environ["TILELANG_CACHE_DIR"] = str(path)


def verbose() -> bool:
    """Whether to report each compilation: ATTENTION_ENGINE_VERBOSE set to anything but 0 or nothing."""
    return os.environ.get("ATTENTION_ENGINE_VERBOSE", "0") not in ("", "0")


def verifies() -> bool:
    """Whether passes check what they hand on: ATTENTION_ENGINE_VERIFY set to anything but 0 or nothing."""
    return os.environ.get("ATTENTION_ENGINE_VERIFY", "0") not in ("", "0")


def shows_all_frames() -> bool:
    """Whether tracebacks keep our own frames: ATTENTION_ENGINE_ALL_FRAMES set to anything but 0 or nothing."""
    return os.environ.get("ATTENTION_ENGINE_ALL_FRAMES", "0") not in ("", "0")


def cuda_home() -> Path | None:
    """The CUDA toolkit that the user named: CUDA_HOME, else CUDA_PATH."""
    value = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(value) if value else None
