"""The rows of docs/levels.csv: what is known of a kernel on a GPU, and of which text of the kernel that is known."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from attention_engine.codegen.cache import tilelang_version
from attention_engine.compiler import Kernel
from attention_engine.files import write_whole
from tests.levels_table import PATH

Level: TypeAlias = Literal["compiles", "lowers", "refused", "unmade"]
Place: TypeAlias = tuple[str, str, int, str]  # GPU, family, head dim, program


@dataclass(frozen=True)
class Row:
    """What is known of a kernel. digest: of the text that it was made of; changed: has the kernel another one now?"""

    gpu: str
    family: str
    dim: int
    program: str
    dtype: str
    kernel: str
    level: Level
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    why: str = ""
    digest: str = ""
    changed: Literal["", "changed"] = ""

    def __str__(self) -> str:
        return f"{self.gpu} {self.family} {self.dim} {self.program}: {self.kernel} {self.changed or self.level}"

    @property
    def place(self) -> Place:
        """The GPU and the job that it belongs to."""
        return self.gpu, self.family, self.dim, self.program

    @property
    def current(self) -> bool:
        """Is it of the text that the kernel has?"""
        return self.level != "unmade" and not self.changed

    def beside(self, now: str) -> Row:
        """The row, marked by the digest of the text that the kernel has now."""
        return replace(self, changed="changed" if self.level != "unmade" and self.digest != now else "")


def digest(kernel: Kernel) -> str:
    """Of all that a kernel's text for its GPU's compiler is made of: its TileLang program, whatever its variables are
    called, what TileLang is told, for which target, and which TileLang that is. It takes milliseconds, where TileLang
    takes a second to make the text.

    What it can't tell: that our own changes of TileLang's work (codegen/) changed.
    """
    target: Any = kernel.target
    program = kernel.prim_func  # before the import: it is there where TileLang was imported
    from tvm.ir import structural_hash

    told = structural_hash(program), target.target, sorted(kernel.configs.items()), tilelang_version()
    return hashlib.blake2b(repr(told).encode(), digest_size=4).hexdigest()


def read(path: Path = PATH) -> list[Row]:
    """The rows of a file; none where it is not there."""
    if not path.exists():
        return []
    found = csv.reader(io.StringIO(path.read_text()))
    return [Row(r[0], r[1], int(r[2]), *r[3:7], *map(int, r[7:10]), *r[10:]) for r in found]  # type: ignore[arg-type]


def write(rows: Iterable[Row], path: Path, order: Callable[[Place], Any]) -> None:
    """Puts rows in a file's place, those of a job by their kernels' names: in the same order whoever made them when."""
    text = io.StringIO()
    ordered = sorted(rows, key=lambda row: (order(row.place), row.kernel))
    csv.writer(text, lineterminator="\n").writerows(vars(row).values() for row in ordered)
    write_whole(path, text.getvalue())
