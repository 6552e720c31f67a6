"""The only reader of environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path | None:
    """Where the user wants every cache: ATTENTION_ENGINE_CACHE_DIR; None leaves TileLang's own in its place."""
    value = os.environ.get("ATTENTION_ENGINE_CACHE_DIR")
    return Path(value).expanduser().resolve() if value else None


def kernel_dir() -> Path:
    """Where compiled kernels are kept: in the cache folder, by default $XDG_CACHE_HOME/attention_engine."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return (cache_dir() or Path(home).expanduser() / "attention_engine") / "kernels"


def verbose() -> bool:
    """Whether to report each compilation: ATTENTION_ENGINE_VERBOSE set to anything but 0 or nothing."""
    return os.environ.get("ATTENTION_ENGINE_VERBOSE", "0") not in ("", "0")


def cuda_home() -> Path | None:
    """The CUDA toolkit that the user named: CUDA_HOME, else CUDA_PATH."""
    value = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(value) if value else None
