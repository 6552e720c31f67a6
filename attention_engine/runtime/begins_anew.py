"""A module whose copies and pickles begin anew: what one process found out of it stays there."""

from __future__ import annotations

from typing import Any, ClassVar

import torch


class BeginsAnew(torch.nn.Module):
    """of_this_process: names of what stays; `_begin` makes that of a copy."""

    of_this_process: ClassVar[tuple[str, ...]]

    def _begin(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """What was given, and what was told since."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {n: value for n, value in state.items() if n not in self.of_this_process}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()
