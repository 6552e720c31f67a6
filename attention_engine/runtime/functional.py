"""`attention(q, k, v, score_mod=..., mask_mod=...)`: an attention in one call, without an engine to keep."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, overload

from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.errors import AttentionEngineError, NotYetSupported, UnknownArgument, UnknownOption
from attention_engine.frontend.custom_io import AxisSpec, CustomIO
from attention_engine.frontend.frames import brief
from attention_engine.frontend.made import Made, settled
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.frontend.signatures import Backend, Layout, MaskMod, ScoreMod
from attention_engine.runtime.blocks import GivenBlocks
from attention_engine.runtime.dropout import check_probability, seed_of_call
from attention_engine.runtime.finding import KEPT, Finder
from attention_engine.runtime.inputs import check_ranks, known_number
from attention_engine.runtime.masks import axes_of
from attention_engine.runtime.module import AttentionEngine, WithRows
from attention_engine.runtime.names import ELSEWHERE, declared, nearest
from attention_engine.runtime.recipes import Recipe

Specs = tuple[tuple[str, tuple[AxisSpec, ...]], ...]  # custom inputs: names and axes


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    online_func: OnlineFunc | None = None, scale: float | None = None, custom: Mapping[str, Tensor] | None = None,
    custom_io: CustomIO | None = None, block_mask: GivenBlocks | None = None, block_size: tuple[int, int] = (128, 128),
    layout: Layout = "bshd", backend: Backend = "auto", deterministic: bool = False, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_rowscales: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    online_func: OnlineFunc | None = None, scale: float | None = None, custom: Mapping[str, Tensor] | None = None,
    custom_io: CustomIO | None = None, block_mask: GivenBlocks | None = None, block_size: tuple[int, int] = (128, 128),
    layout: Layout = "bshd", backend: Backend = "auto", deterministic: bool = False, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_rowscales: Literal[True],
) -> WithRows: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    online_func: OnlineFunc | None = None, scale: float | None = None, custom: Mapping[str, Tensor] | None = None,
    custom_io: CustomIO | None = None, block_mask: GivenBlocks | None = None, block_size: tuple[int, int] = (128, 128),
    layout: Layout = "bshd", backend: Backend = "auto", deterministic: bool = False, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_rowscales: bool,
) -> Tensor | WithRows: ...  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod | None = None, mask_mod: MaskMod | None = None,
    online_func: OnlineFunc | None = None, scale: float | None = None, custom: Mapping[str, Tensor] | None = None,
    custom_io: CustomIO | None = None, block_mask: GivenBlocks | None = None, block_size: tuple[int, int] = (128, 128),
    layout: Layout = "bshd", backend: Backend = "auto", deterministic: bool = False, dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None, return_rowscales: bool = False, **unknown: Any,
) -> Tensor | WithRows:  # fmt: skip
    """An attention of q, k and v in one call: what `AttentionEngine(...)(q, k, v)` gives.

    An engine is made once for functions that are alike in code, numbers and options, also where they are defined anew
    in each call. The 64 engines that were used last are kept, with the tensors that their functions captured first.

    Args:
        q, k, v: (batch, length, heads, dim), or (batch, heads, length, dim) with layout="bhsd".
        score_mod, mask_mod, online_func, scale, block_size, layout, backend, deterministic: as AttentionEngine's.
        custom: custom inputs by name; the functions may as well capture tensors.
        custom_io: the axes of the custom inputs. Left out: a dimension is that of the batch, the heads, the queries or
            the keys where it is as long as one of them alone; any is read at explicit indices.
        block_mask: which blocks exist, int8 or bool (B or 1, H or 1, ceil(Sq/bq), ceil(Skv/bkv)), or a `BlockList`.
        dropout_p: each weight is dropped with this probability, and the others are divided by 1 - dropout_p.
        dropout_seed: 0 to 2^63 - 1, or a tensor of one integer: which are. Left out, torch's generator draws one.
        return_rowscales: return (o, {name: row (B, H, Sq), fp32}) too.

    Returns:
        o, like q with v's head dim; differentiable in q, k, v, and every floating custom or captured tensor.

    Raises:
        BadInput: tensors that don't fit each other.
        UnknownArgument, UnknownOption: an argument that it doesn't take, or whose value means nothing.

    Example:
        >>> import torch
        >>> from attention_engine import attention, library
        >>> q = k = v = torch.randn(1, 16, 2, 8)
        >>> bias = torch.zeros(2, 31, requires_grad=True)
        >>> def score_mod(score, custom, b, h, q_idx, kv_idx):
        ...     return score * 8**-0.5 + bias[h, q_idx - kv_idx + 15]
        >>> attention(q, k, v, score_mod=score_mod, mask_mod=library.causal).shape
        torch.Size([1, 16, 2, 8])
    """
    if unknown:
        raise _no_argument(*next(iter(unknown.items())))
    given = _by_name(custom)
    specs = _specs(custom_io, given, layout, q, k, v)
    options = (scale, specs, block_size, layout, backend, deterministic, check_probability(dropout_p))
    if is_compiling():
        given_functions = _sent(score_mod), _sent(mask_mod), (_guard(score_mod), _guard(mask_mod))
        engine = FOR_COMPILERS[_name_of(*given_functions, online_func, *_known(*options))]
        return engine(q, k, v, block_mask=block_mask, return_rowscales=return_rowscales, dropout_seed=dropout_seed,
                      **given)  # fmt: skip
    try:
        engine, captured = FINDER.find((score_mod, mask_mod, online_func), options)
        names = [name for name, _ in specs]
        seed = seed_of_call(dropout_p, dropout_seed, q)
        if given.keys() == set(names):
            return engine._call(q, k, v, [given[n] for n in names], captured, block_mask, return_rowscales, {}, seed)
        return engine._call(q, k, v, (), captured, block_mask, return_rowscales, given, seed)
    except AttentionEngineError as error:
        raise brief(error) from error.__cause__


def _by_name(custom: Any) -> Mapping[str, Any]:
    """Custom inputs, none for None."""
    if custom is not None and not isinstance(custom, Mapping):
        raise UnknownOption(f"custom is {type(custom).__name__}. Give tensors by name: custom={{'slopes': slopes}}.")
    return custom if custom is not None else {}


def _no_argument(name: str, value: Any) -> UnknownArgument:
    """What is said of an argument that `attention` doesn't take."""
    if isinstance(value, Tensor) and name not in ELSEWHERE:
        return UnknownArgument(
            f"attention has no argument {name!r}. Write custom={{{name!r}: ...}} for a custom input."
        )
    known = [n for n in inspect.signature(attention).parameters if n != "unknown"]
    return UnknownArgument(f"attention has no argument {name!r}. {nearest(name, known)}")


def _specs(
    custom_io: CustomIO | None, custom: Mapping[str, Tensor], layout: str, q: Tensor, k: Tensor, v: Tensor
) -> Specs:
    """Names and axes of the custom inputs: as declared, else by the sizes of the call."""
    if custom_io is not None:
        return tuple([(s.name, s.axes) for s in declared(custom_io, ("score_mod", "mask_mod")).in_order])
    if not custom:
        return ()
    check_ranks(layout if layout == "bhsd" else "bshd", q, k, v)
    length, heads = (2, 1) if layout == "bhsd" else (1, 2)
    sizes = (q.shape[0], q.shape[heads], q.shape[length], k.shape[length])
    return tuple([(name, axes_of(name, tensor, sizes)) for name, tensor in custom.items()])


def _build(functions: tuple[Any, ...], options: tuple[Any, ...]) -> AttentionEngine:
    score_mod, mask_mod, online_func = functions
    scale, specs, block_size, layout, backend, deterministic, dropout_p = options
    return AttentionEngine(
        None, CustomIO(dict(specs)), score_mod, mask_mod, online_func, scale=scale, block_size=block_size,
        layout=layout, backend=backend, deterministic=deterministic, dropout_p=dropout_p,
    )  # fmt: skip


FINDER = Finder(_build)


# ---- under torch.compile

FOR_COMPILERS: dict[str, AttentionEngine] = {}


def _name_of(score_mod: Any, mask_mod: Any, guarded: object, *options: object) -> str:
    """Where the engine of a compiled call stands among FOR_COMPILERS. A graph whose engine has gone is compiled again.

    guarded: what the compiler has looked at, so that it compiles again where that changes.
    """
    recipe = Recipe(_received(score_mod), _received(mask_mod), *options)
    name = f"{hash((recipe, *map(id, recipe.tensors)))}"
    if name not in FOR_COMPILERS:
        while len(FOR_COMPILERS) >= KEPT:
            del FOR_COMPILERS[next(iter(FOR_COMPILERS))]
        FOR_COMPILERS[name] = _build(recipe.values[:3], recipe.values[3:])
    return name


_name_of._dynamo_marked_constant = True  # type: ignore[attr-defined] # as Engine._key is


def _known(scale: Any, specs: Specs, block_size: Any, layout: Any, backend: Any, deterministic: Any, dropout_p: Any
             ) -> Any:  # fmt: skip
    """Options without a number that the compiler leaves open."""
    scale = known_number(scale) if isinstance(scale, (int, float)) else scale
    if isinstance(block_size, (tuple, list)):
        block_size = tuple([len(range(n)) if isinstance(n, int) else n for n in block_size])
    return scale, specs, block_size, layout, backend, deterministic, known_number(dropout_p)


def _sent(mod: Any) -> Any:
    """A function in a form that a compiler takes for a constant; a factory's one as the call that makes it."""
    if isinstance(mod, Made):
        return mod.factory, tuple([_sent(a) for a in mod.args]), tuple([(n, _sent(a)) for n, a in mod.named.items()])
    return settled(mod)


def _received(sent: Any) -> Any:
    """The function that was sent."""
    if not isinstance(sent, tuple) or len(sent) != 3:
        return sent
    factory, args, named = sent
    return factory(*map(_received, args), **{name: _received(a) for name, a in named})


def _made_inside(function: Any) -> bool:
    """Was the function made in the function that a compiler traces? PyTorch 2.11 alone answers with True: it gives
    such a function every attribute, and can't read what the function captured."""
    try:
        _ = function.__no_such_attribute__
    except AttributeError:
        return False
    return True


def _guard(function: Any) -> tuple[object, ...]:
    """What a function captured, in a form that makes a compiler look at it anew in each call.

    A compiler itself takes two functions of the same code for the same.
    """
    try:
        cells = () if _made_inside(function) else function.__closure__ or ()
    except AttributeError:  # none, a factory's, or made in the compiled function: there numbers are looked at anyway
        return ()
    found: list[object] = []
    for cell in cells:
        value = cell.cell_contents
        if isinstance(value, bool) or value is None or isinstance(value, str):
            found.append(value)
        elif isinstance(value, (int, float)):
            found.append(settled(value))
        elif callable(value) and not isinstance(value, Tensor):
            found.append(_guard(value))
        else:
            raise NotYetSupported(
                "attention() in a compiled function was given a function that captured a tensor or an object.\n"
                "  Give tensors by name, custom={'bias': bias}, build an AttentionEngine outside, or call\n"
                "  attention_engine.flex.flex_attention, which takes such functions."
            )
    return tuple(found)
