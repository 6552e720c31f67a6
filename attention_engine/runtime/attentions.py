"""What the keys of the torch.library ops stand for, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_engine.errors import UnknownProgram
from attention_engine.frontend.custom_io import CustomSpec
from attention_engine.ir.program import Program
from attention_engine.passes.bent_output import Bend
from attention_engine.passes.maths import Maths
from attention_engine.runtime.launch import Launcher


@dataclass
class Attention:
    """One traced program with the way it runs: what a key of the ops stands for.

    trained: the key of what runs in its place when gradients are wanted (None: itself). bend: what is made there of the
    output of kernels, which the forward op returns behind all rows.
    """

    maths: Maths
    specs: Sequence[CustomSpec]
    launcher: Launcher | None  # None: the reference
    trained: str | None = None
    bend: Bend | None = None
    row_names: list[str] = field(init=False)  # that the forward op returns: the program's, then what is kept for later
    returned: int = field(init=False)  # how many of them are the program's own

    def __post_init__(self) -> None:  # attributes, not cached properties: a compiler can't follow their locks
        self.row_names = [n for n, _ in self.maths.forward_schedule.rows]
        self.returned = len(self.program.finals)

    @property
    def program(self) -> Program:
        return self.maths.program if self.bend is None else self.bend.whole

    def named_rows(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """Rows of the forward op by name."""
        return dict(zip(self.row_names, rows, strict=True))

    def inner_dtype(self, q: Tensor) -> torch.dtype:
        """Of the output that `bend` takes, for such queries."""
        wide = self.launcher is not None and self.launcher.leaves_range(q)
        return torch.float32 if wide else q.dtype

    def named(self, custom: Sequence[Tensor]) -> dict[str, Tensor]:
        """Custom inputs by name."""
        return {s.name: c for s, c in zip(self.specs, custom, strict=True)}


ATTENTIONS: dict[str, Attention] = {}  # a plain one: torch.compile guards on the key alone


def find(key: str) -> Attention:
    """What an op was called with; UnknownProgram where a graph came from another process."""
    if key not in ATTENTIONS:
        raise UnknownProgram(
            f"no attention with the key {key} has been built in this process.\n"
            "  Build the same AttentionEngine and call it once before an exported or loaded graph runs."
        )
    return ATTENTIONS[key]
