"""Calls of flex_attention that were made before, with functions made anew or kept: what they ran, and nothing else.

A call is known by the codes of its functions, the mask's lengths and the options. It is alike where the functions fit
their patterns (numbers and modules that they hold are the same) and torch's guards let all tensors pass: q, k, v, and
whichever tensors the functions hold now. So nothing else of a first call need be asked again: no check, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial as bind
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, is_grad_enabled

from attention_engine.flex.masks import BlockMask, noop_mask
from attention_engine.flex.options import Options
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.runtime import op
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.attention_op import PairAttention
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.inputs import signature
from attention_engine.runtime.module import AttentionEngine
from attention_engine.runtime.patterns import fits, pattern_of
from attention_engine.runtime.pointers import pointed
from attention_engine.runtime.program_kernels import Direct
from attention_engine.runtime.seen import TensorGuards

Form: TypeAlias = tuple[Any, ...]  # all of a call that is neither a tensor nor inside its functions
MOST = 1024  # kinds of calls
MOST_ALIKE = 8  # of one kind, which differ in tensors or in numbers; the oldest goes


class Known(NamedTuple):
    """What a call ran.

    patterns: of score_mod and mask_mod. places: where the program's captured tensors stand among those that the
    functions hold. pointed: the launch of tensors as they come, without views. lse: where it stands among the results,
    if it is returned.
    """

    patterns: tuple[Any, Any]
    places: tuple[int, ...]
    guards: Callable[..., bool]
    key: str
    direct: Direct | None
    pointed: bind[tuple[Tensor, ...]] | None
    requires_grad: bool
    lse: int
    lists_tiles: bool


KNOWN: dict[object, list[Known]] = {}


def form_of(
    query: Tensor, key: Tensor, score_mod: Any, block_mask: Any, scale: float | None, enable_gqa: bool,
    return_lse: bool, options: Options,
) -> Form | None:  # fmt: skip
    """None where such a call is not known again."""
    if scale is not None and type(scale) is not float:
        return None
    score = None
    if score_mod is not None:
        if type(score_mod) is not FunctionType:
            return None
        score = id(score_mod.__code__)  # held by the pattern
    if block_mask is None:
        return score, query.shape, key.shape, scale, enable_gqa, return_lse, options
    mask = getattr(block_mask, "mask_mod", None)
    if type(mask) is not FunctionType or type(block_mask) is not BlockMask:
        return None
    lengths, batch, heads = block_mask.seq_lengths, block_mask.batch, block_mask.heads
    return score, id(mask.__code__), query.shape, lengths, batch, heads, scale, enable_gqa, return_lse, options


def again(
    form: Form, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask_mod: Any, return_lse: bool,
    block_mask: BlockMask | None = None,
) -> Any:  # fmt: skip
    """The result of a call that is alike one before; None where there was none, or something watches."""
    if mask_mod is noop_mask:
        mask_mod = None
    tensors: list[Tensor] = []
    known = _find(form, (query, key, value), score_mod, mask_mod, tensors)
    if known is None or op.watched():
        return None
    lists = None
    if block_mask is not None and known.lists_tiles:
        lists = block_mask.hold([tensors[n] for n in known.places])
    if known.pointed is not None:
        given = query, key, value, *[tensors[n] for n in known.places]
        launch = known.pointed if lists is None else bind(known.pointed.func, lists)
        found = op.run_heads_first(known.key, return_lse, given, launch, known.requires_grad and is_grad_enabled())
        return (found[0], found[known.lse]) if return_lse else found[0]
    given = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), *[tensors[n] for n in known.places]
    if known.direct is None:
        found = op.run(known.key, return_lse, given)
    else:
        wanted = known.requires_grad and is_grad_enabled()
        found = op.run_unwatched(known.key, return_lse, given, known.direct, wanted)
    output = found[0].transpose(1, 2)
    return (output, found[known.lse]) if return_lse else output


def _find(
    form: Form, qkv: tuple[Tensor, Tensor, Tensor], score_mod: Any, mask_mod: Any, tensors: list[Tensor]
) -> Known | None:  # fmt: skip
    """The call that is alike. tensors: what the functions hold is added."""
    try:
        for known in KNOWN.get(form, ()):
            of_score, of_mask = known.patterns
            if fits(score_mod, of_score, tensors) and fits(mask_mod, of_mask, tensors):
                alone = len(tensors) < 2 or len(set(map(id, tensors))) == len(tensors)
                if alone and known.guards(*qkv, *tensors):
                    return known
            tensors.clear()
    except (TypeError, ValueError):  # a length without a hash; a cell that is empty
        pass
    return None


def note(
    form: Form, qkv: tuple[Tensor, Tensor, Tensor], score_mod: Any, mask_mod: Any,
    engine: AttentionEngine, captured: Sequence[Tensor],
) -> None:  # fmt: skip
    """Keeps what a call has run, where nothing but guards and patterns need be asked to run it again."""
    if TensorGuards is None or not op.unwatched() or not isinstance(engine, AttentionEngine):
        return
    tensors: list[Tensor] = []
    try:
        patterns = pattern_of(score_mod), pattern_of(mask_mod)
        if not (fits(score_mod, patterns[0], tensors) and fits(mask_mod, patterns[1], tensors)):
            return
        standing = {id(t): n for n, t in enumerate(tensors)}
        if len(standing) < len(tensors):
            return
        places = tuple([standing[id(t)] for t in captured])
        seen = engine._seen[None, signature(*qkv, *captured)]
        alike = KNOWN.setdefault(form, [])
    except (KeyError, TypeError, ValueError):  # not plain, not seen, or no hash
        return
    finals = [name for name, _ in engine._program.finals]
    lse = 1 + finals.index("lse") if "lse" in finals else 0
    guards = TensorGuards(*qkv, *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    required = any([t.requires_grad for t in (*qkv, *captured)])
    launch = None if seen.direct is None else _pointed(seen.key, *qkv, captured)
    plan = plan_tiles(engine._program.mask)
    lists = plan.mapped and bool(plan.reads)
    alike.insert(0, Known(patterns, places, guards, seen.key, seen.direct, launch, required, lse, lists))
    del alike[MOST_ALIKE:]
    while len(KNOWN) > MOST:
        del KNOWN[next(iter(KNOWN))]


def _pointed(key: str, query: Tensor, k: Tensor, value: Tensor, captured: Sequence[Tensor]) -> bind[Any] | None:
    """The launch of tensors as they come; None where there is none."""
    attention = ATTENTIONS[key]
    if not isinstance(attention, PairAttention) or attention.program_kernels is None or attention.trained is not None:
        return None
    turned = query.transpose(1, 2), k.transpose(1, 2), value.transpose(1, 2)
    bound = attention.program_kernels.bound(*turned, [as_parameter(c) for c in captured])
    return pointed(bound, query, k, value, captured)
