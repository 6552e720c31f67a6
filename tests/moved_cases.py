"""Parts of attentions: the pairs of tests/mask_cases.py, asked for some batches, heads, queries and keys of a whole.

`errors` holds the output and every gradient of a part to the rule of tests/plain.py. The yardstick is plain torch of
that part's tensors alone, told by index tensors where they stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention_engine import AttentionEngine, CustomIO
from attention_engine.runtime.moved import Portion, call_portion, moved_of
from tests import plain
from tests.cases import Shape
from tests.mask_cases import MASKS, ONLINE, PAIRS, SCORES

AXES = ("batch", "heads", "seq_len", "seq_len_kv")
OF_PAIRS = ("of pairs", "times pairs")  # whose plain twins take the tensor as it stands beside the scores


@dataclass(frozen=True)
class Rectangle:
    """Where a part starts, and its sizes: batches, heads, queries and keys."""

    starts: tuple[int, int, int, int]
    sizes: tuple[int, int, int, int]
    moved: tuple[str, ...] = AXES

    @property
    def slices(self) -> dict[str, slice]:
        return {a: slice(s, s + n) for a, s, n in zip(AXES, self.starts, self.sizes, strict=True)}


def errors(
    score: str, mask: str, whole: Shape, part: Rectangle, dtype: torch.dtype, floor: float = 0.0,
    device: str = "cpu", dims: tuple[int, int] = (32, 32), kv_heads: int = 1, **options: Any,
) -> list[plain.Error]:  # fmt: skip
    """Output and all gradients of the part, by the rule."""
    kind = PAIRS[score, mask]
    of_score, of_mask = (
        {name: x.to(device) for name, x in each.custom(whole).items()} for each in (SCORES[score], MASKS[mask])
    )
    axes = {**SCORES[score].axes, **MASKS[mask].axes}
    engine = AttentionEngine(None, CustomIO(axes), SCORES[score].ours, MASKS[mask].ours, ONLINE[kind](), **options)
    own = moved_of(engine._program, axes, (part.moved, False, False)).own
    starts = torch.tensor([part.starts], dtype=torch.int32, device=device)
    sizes = dict(zip(AXES, (whole.batch, whole.heads, whole.q_len, whole.kv_len), strict=True))

    def as_given(name: str, tensor: Tensor) -> Tensor:
        """A custom input with its own rows alone."""
        return tensor[tuple(part.slices[a] if (name, n) in own else slice(None) for n, a in enumerate(axes[name]))]

    def ours(q: Tensor, k: Tensor, v: Tensor, **custom: Tensor) -> Tensor:
        given = {name: as_given(name, x) for name, x in {**custom, **of_mask}.items()}
        return call_portion(engine, Portion(starts, part.moved, sizes), q, k, v, [given[name] for name in axes])

    def by(function: Any) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, **custom: Tensor) -> Tensor:
            if score in OF_PAIRS:
                custom = {name: as_given(name, x) for name, x in custom.items()}

            def at(*local: Tensor) -> list[Tensor]:
                return [x + s for x, s in zip(local, part.starts, strict=True)]

            return function(
                q, k, v, kind,
                score=lambda s, *at_local: SCORES[score].plain(s, *at(*at_local), **custom).to(s.dtype),
                mask=lambda *at_local: MASKS[mask].plain(*at(*at_local), **of_mask),
            )  # fmt: skip

        return run

    batch, heads, queries, keys = part.sizes
    tensors = Shape(batch, queries, keys, heads, kv_heads, *dims).tensors(dtype, device, 0)
    double = {name: x.double() for name, x in tensors.items()}
    exact = {name: x.double() if x.is_floating_point() else x for name, x in of_score.items()}
    return plain.compare(
        results(ours, tensors, of_score), results(by(plain.attention), double, exact),
        results(by(plain.eager), tensors, of_score), dtype, floor,
    )  # fmt: skip


def results(function: Any, tensors: dict[str, Tensor], custom: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {n: x.detach().clone() for n, x in {**tensors, **custom}.items() if n != "do"}
    wanted = {n: x.requires_grad_() for n, x in given.items() if x.is_floating_point()}
    o = function(**given)
    found = torch.autograd.grad(o, list(wanted.values()), tensors["do"])
    return {"o": o.detach(), **{f"d{name}": gradient for name, gradient in zip(wanted, found)}}
