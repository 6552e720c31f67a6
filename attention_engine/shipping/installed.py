"""What wheels of kernels are installed, and how many of their kernels this version of the package uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attention_engine import folders
from attention_engine.codegen import cache
from attention_engine.shipping.wheel import ABOUT


@dataclass(frozen=True)
class Installed:
    """A wheel. current: how many of its kernels this version would make the same; distrusted: why none is used."""

    place: Path
    distribution: str
    version: str
    target: str
    sm_count: int | None
    kernels: int
    current: int
    distrusted: str | None

    def __str__(self) -> str:
        name = f"{self.distribution} {self.version}"
        if self.distrusted is not None:
            return f"{name} is passed over: {self.distrusted}"
        held = f"{name} has {self.kernels} kernels for {self.target}"
        if self.current == self.kernels:
            return f"{held}, all of this version"
        newer = f"python -m attention_engine kernels build, then pip install --force-reinstall, or {self.remedy}"
        return f"{held}, of which {self.current} are of this version: the wheel is stale ({newer})"

    @property
    def remedy(self) -> str:
        """What rids of it."""
        return f"pip uninstall {self.distribution}"

    @property
    def well(self) -> bool:
        """Is every kernel used?"""
        return self.distrusted is None and self.current == self.kernels


def installed() -> Iterator[Installed]:
    """The wheels that are installed, those too that are not trusted."""
    for place, distrusted in folders.shipped_folders():
        try:
            about = json.loads((place.parent / ABOUT).read_text())
        except (OSError, ValueError):
            about = {}
        about = about if isinstance(about, dict) else {}
        held = [entry.record for entry in cache.entries((place,))]
        yield Installed(
            place, str(about.get("distribution", f"a wheel in {place.parent}")),
            str(about.get("version", "of unknown version")), str(about.get("target", place.parent.name)),
            about.get("sm_count"), len(held), sum(map(cache.is_current, held)), distrusted,
        )  # fmt: skip
