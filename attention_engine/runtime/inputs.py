"""What an engine is given, held against what it was built for: options, q, k, v, custom inputs and block masks."""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attention_engine.arch import check_gpu
from attention_engine.errors import (
    AttentionEngineError,
    BadMeta,
    CustomInputMissing,
    DevicesDiffer,
    DtypesDiffer,
    HeadsDoNotGroup,
    LengthsDiffer,
    NoDevice,
    NotATensor,
    NotFloating,
    TooLong,
    UnknownOption,
    UnsupportedOperation,
    WrongBlockMask,
    WrongCustomDtype,
    WrongCustomShape,
    WrongDtype,
    WrongHeads,
    WrongPlacement,
    WrongRank,
    WrongResult,
    as_given,
    did_you_mean,
)
from attention_engine.frontend.custom_io import CustomIO, CustomSpec
from attention_engine.frontend.meta import DTYPES, Heads, Meta, check_heads, check_linear_heads
from attention_engine.ir.block_lists import BLOCK_LIST
from attention_engine.ir.expr import Expr, Op, Type, topological
from attention_engine.ir.program import QUERY_PLACES, STARTS
from attention_engine.passes.index_ranges import LONGEST, MOST_ENTRIES
from attention_engine.runtime.names import HABITS
from attention_engine.runtime.program_kernels import CUSTOM_NAMES

BACKENDS = ("auto", "tilelang", "tl", "reference", "interpret")
ORDERS = {"bshd": "(batch, length, heads, dim)", "bhsd": "(batch, heads, length, dim)"}
MOST_GUESSES = 256
BLOCKS = "_block_mask"  # the custom input that an outside block mask becomes


def check_options(backend: str, layout: str, mask_value: object, device: object, block_size: object) -> None:
    """Options whose values are few; UnknownOption for another."""
    if backend not in BACKENDS:
        raise UnknownOption(
            f"backend is {as_given(backend)}.{did_you_mean(backend, BACKENDS)} Choose {', '.join(map(repr, BACKENDS))}."
        )
    if layout not in ORDERS:
        known = " or ".join(f'"{name}" {order}' for name, order in ORDERS.items())
        raise UnknownOption(f"layout is {as_given(layout)}.{did_you_mean(layout, ORDERS)} Choose {known}.")
    if mask_value not in (None, "-inf", "0"):
        raise UnknownOption(
            f'mask_value is {as_given(mask_value)}. Choose "-inf" or "0"; both mean that a masked pair is left out.'
        )
    check_gpu(device)
    sizes = block_size if isinstance(block_size, (tuple, list)) else ()
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise UnknownOption(f"block_size is {as_given(block_size)}. Give (queries, keys) of a block: (128, 128).")


def check_scale(scale: object) -> None:
    """UnknownOption unless the scale is a finite number, or None."""
    if scale is None or (isinstance(scale, numbers.Real) and not isinstance(scale, bool) and math.isfinite(scale)):
        return
    raise UnknownOption(
        f"scale is {as_given(scale)}. "
        "Give a finite number, as 64 ** -0.5, or None: dim ** -0.5 where there is no score_mod.\n"
        "  A learned scale belongs in score_mod: score * temperature."
    )


def known_number(number: float) -> float:
    """The number, where torch.compile would leave it open: what it writes down, it compiles again for another one."""
    return float.fromhex(float(number).hex()) if is_compiling() else number


def check_flag(name: str, value: object) -> None:
    """UnknownOption unless the value is True or False."""
    if value is not True and value is not False:
        raise UnknownOption(f"{name} is {as_given(value)}. Give True or False.")


def check_tuning(backend: str, **options: object) -> None:
    """UnknownOption for a value that means nothing, or for tuning what has no tiles."""
    for name, value in options.items():
        kind = bool if name in ("tune", "tune_bwd") else (str, os.PathLike, type(None))
        if not isinstance(value, kind):
            way_out = "True or False" if kind is bool else "the path of a JSON file, or None"
            raise UnknownOption(f"{name} is {as_given(value)}. Give {way_out}.")
        if value is True and backend == "reference":
            raise UnknownOption(f'{name}=True with backend="reference", which has no tiles. Leave one of them out.')


def backend_for(backend: str, device: torch.device) -> str:
    """Which backend runs on this device; NoDevice where the one asked for can't."""
    cuda = device.type == "cuda"
    if device.type == "meta":  # shapes alone
        return "reference"
    if backend == "auto":
        if not cuda and device.type != "cpu":
            raise NoDevice(f"tensors are on '{device}'. Kernels run on CUDA, the reference on the CPU.")
        return "tilelang" if cuda else "reference"
    if backend == "tilelang" and not cuda:
        raise NoDevice(
            f'backend="tilelang" needs CUDA tensors, and these are on \'{device}\'. On a CPU use "reference" or '
            '"interpret".'
        )
    if backend == "interpret" and device.type != "cpu":
        raise NoDevice(f"backend=\"interpret\" runs on CPU tensors, and these are on '{device}'.")
    return backend


def guess_types(names: Sequence[str], trace: Callable[[dict[str, Type]], object]) -> dict[str, Type]:
    """Which custom inputs are bools or integers: those that can't be floats. A call's tensors say what they are.

    Each error blames an expression. So only what that reads is taken for something else, a bool first.
    Raises what tracing finds wrong where all are floats, if no guess will do.
    """
    first: AttentionEngineError | None = None
    left: list[dict[str, Type]] = [{}]  # the last one first
    for _ in range(MOST_GUESSES):
        if not left:
            break
        types = left.pop()
        try:
            trace(types)
        except (UnsupportedOperation, WrongResult) as error:  # a float where a condition or an integer belongs
            first = first or error
            read = {n.name for e in error.blamed if isinstance(e, Expr) for n in topological(e) if n.op is Op.LOAD}
            open_names = [name for name in names if name in read and name not in types]
            left += [{**types, name: kind} for name in reversed(open_names) for kind in (Type.INT, Type.BOOL)]
        else:
            return types
    assert first is not None
    raise first


def check_type(name: str, value: object, kind: type, optional: bool = False) -> None:
    """UnknownOption unless the value is an instance of the class (or None, where optional)."""
    if isinstance(value, kind) or (optional and value is None):
        return
    hint = f" (is it missing brackets: {value.__name__}()?)" if isinstance(value, type) else ""
    raise UnknownOption(f"{name} is {as_given(value)}. Give an instance of {kind.__name__}{hint}.")


def type_of(tensor: Tensor) -> Type:
    """What a custom input holds."""
    kinds = {torch.bool: Type.BOOL, torch.int64: Type.LONG}
    return Type.FLOAT if tensor.is_floating_point() else kinds.get(tensor.dtype, Type.INT)


def stand_ins(specs: Iterable[CustomSpec], types: Mapping[str, Type], device: torch.device) -> list[Tensor]:
    """Custom inputs as far as dtypes go, of a call that is not there: bools or int32 where they are used so, else fp32
    ones whose gradients are asked for."""
    kinds = {Type.BOOL: torch.bool, Type.INT: torch.int32}
    dtypes = [kinds.get(types.get(spec.name, Type.FLOAT), torch.float32) for spec in specs]
    return [torch.empty(1, dtype=t, device=device, requires_grad=t.is_floating_point) for t in dtypes]


def order_custom(io: CustomIO, given: Sequence[Tensor], named: Mapping[str, Tensor]) -> list[Tensor]:
    """Custom inputs in declared order, from those given by position and by name."""
    if not named and len(given) == len(io.in_order) and all([isinstance(t, Tensor) for t in given]):
        return list(given)
    names = [spec.name for spec in io.in_order]
    known = ", ".join(map(repr, names)) or "none"
    if len(given) > len(names):
        many = "arguments follow" if len(given) > 1 else "argument follows"
        raise CustomInputMissing(
            f"{len(given)} {many} q, k and v, and the declared custom inputs are: {known}. Masks and scales are the "
            "engine's: AttentionEngine(mask_mod=..., scale=...)."
        )
    found = dict(zip(names, given, strict=False))
    for name, tensor in named.items():
        if name not in names:
            meant = did_you_mean(name, names) or " Leave it out, or declare it."
            way_out = f" {HABITS[name]}" if name in HABITS else f"{meant} Declared custom inputs: {known}."
            raise CustomInputMissing(f"{name!r} is no argument of a call and no custom input.{way_out}")
        if name in found:
            raise CustomInputMissing(f"custom input {name!r} was given twice, by position and by name. Give it once.")
        found[name] = tensor
    for name in names:
        if name not in found:
            raise CustomInputMissing(
                f"custom input {name!r} is missing. Declared: {known}; give them after q, k, v, or by name."
            )
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            given_as = type(tensor).__name__
            raise NotATensor(f"custom input {name!r} is {given_as}. Give a tensor: torch.tensor({tensor!r}).")
    return [found[n] for n in names]


def signature(*tensors: Tensor) -> object:
    """All that the checks and the launch of a call look at, for tensors without autocast; None where one is none."""
    try:
        return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    except AttributeError:
        return None


def is_cast(q: Tensor) -> bool:
    """Does autocast say the dtype of tensors where q is?"""
    return q.device.type in ("cuda", "cpu") and torch.is_autocast_enabled(q.device.type)


def follow_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As scaled_dot_product_attention does: under autocast q, k, v have autocast's dtype."""
    if not is_cast(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors)


def is_dtensor(tensor: object) -> bool:
    """Is it a torch.distributed.tensor.DTensor? Their module takes seconds to import: who has one has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_dtensor(name: str, tensor: object, what: str = "only engine(q, k, v) takes one") -> None:
    """WrongPlacement where a DTensor is given to what takes none."""
    if type(tensor) is not Tensor and is_dtensor(tensor):
        raise WrongPlacement(f"{name} is a DTensor, and {what}. Give each rank its own: {name}.to_local().")


def check_ranks(layout: str, q: Tensor, k: Tensor, v: Tensor, sharded: bool = False) -> None:
    """BadInput unless q, k, v are tensors of four dimensions, and no DTensors. sharded: they are."""
    for name, tensor in zip("qkv", (q, k, v), strict=True):
        if not sharded:
            refuse_dtensor(name, tensor)
        if not isinstance(tensor, Tensor):
            raise NotATensor(f"{name} is {type(tensor).__name__}. Give a tensor {ORDERS[layout]}.")
        if tensor.ndim != 4:
            raise WrongRank(f"{name} has {tensor.ndim} dimensions, {tuple(tensor.shape)}. Give {ORDERS[layout]}.")


def check_qkv(
    metas: Sequence[Meta] | None, layout: str, kernels: bool, q: Tensor, k: Tensor, v: Tensor, linear: bool = False
) -> None:
    """BadInput unless q, k, v, as (batch, length, heads, dim), fit the description (the dtype too, for kernels) or,
    without one, each other.

    linear: must q be as long as k and v, and v's heads the most?
    """
    if metas is None:
        _check_heads(layout, linear, q, k, v)
    for number, (name, tensor) in enumerate(zip("qkv", (q, k, v), strict=True)):
        heads, dim = tensor.shape[2], tensor.shape[3]
        if metas is not None and (heads, dim) != (metas[number].heads, metas[number].dim):
            raise WrongHeads(_other_heads(name, tensor, metas[0], metas[number], layout))
        if tensor.device != q.device:
            raise DevicesDiffer(
                f"q is on '{q.device}' and {name} on '{tensor.device}'. Put them on one device: {name}.to(q.device)."
            )
        if tensor.dtype != q.dtype:
            raise DtypesDiffer(f"q is {q.dtype} and {name} is {tensor.dtype}. Give one dtype: {name}.to(q.dtype).")
    if linear:
        _check_one_length(q, k, v)
    elif q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
        batches, lengths = (", ".join(str(t.shape[n]) for t in (q, k, v)) for n in (0, 1))
        raise LengthsDiffer(
            f"q, k, v have batches {batches} and lengths {lengths}. Give k and v one length, and all one batch (k and "
            "v may have a batch of 1)."
        )
    if kernels:
        check_lengths(q.shape[1], k.shape[1])
    if not q.is_floating_point():
        raise NotFloating(f"q, k and v are {q.dtype}. Give floating tensors.")
    dtype = str(q.dtype).removeprefix("torch.")
    if metas is None and kernels and dtype not in DTYPES:
        raise WrongDtype(
            f"q, k and v are {q.dtype}, and kernels take float16, bfloat16 or float32.\n"
            '  Convert them, or use backend="reference".'
        )
    if metas is not None and kernels and not is_cast(q) and dtype != metas[0].dtype_name:
        raise WrongDtype(
            f"q, k and v are {q.dtype}, and the engine was built for {metas[0].dtype}. Convert them, or build another."
        )


def heads_of(tensor: Tensor) -> Heads:
    """Heads and dim of a tensor (batch, length, heads, dim), as plain numbers under a compiler too: who asks how long
    a range is, is told a number that the compiled graph then stands for."""
    return len(range(tensor.shape[2])), len(range(tensor.shape[3]))


def _check_heads(layout: str, linear: bool, q: Tensor, k: Tensor, v: Tensor) -> None:
    check = check_linear_heads if linear else check_heads
    try:
        check(heads_of(q), heads_of(k), heads_of(v))
    except (BadMeta, HeadsDoNotGroup) as mistake:
        raise WrongHeads(f'{mistake}\n  Shapes must be {ORDERS[layout]}, layout="{layout}".') from None


def _other_heads(name: str, tensor: Tensor, queries: Meta, meta: Meta, layout: str) -> str:
    """Heads or a head dim that aren't the engine's: is it the layout, the description or the number of heads?"""
    length, heads, dim = tensor.shape[1:]
    built = f"the engine was built for {meta.heads} of {meta.dim}"
    shape = f'Its shape must be {ORDERS[layout]}, layout="{layout}".'
    if dim != meta.dim:
        return f"{name} has {heads} heads of dim {dim}, and {built}. Give dim {meta.dim}, or build another.\n  {shape}"
    other = next(order for order in ORDERS if order != layout)
    if length == meta.heads:
        swapped = f'Heads and length look swapped: in the tensors (layout="{other}"?), or in meta_tensor('
        return f"{name} has {heads} heads of dim {dim}, and {built}. {swapped}batch, heads, length, dim).\n  {shape}"
    divisors = ", ".join(str(n) for n in range(1, queries.heads + 1) if queries.heads % n == 0)
    shares = "" if name == "q" else f" Key heads of {queries.heads} query heads can be {divisors}."
    return (
        f"{name} has {heads} heads of dim {dim}, and {built}. Give {meta.heads}, or build another.{shares}\n  {shape}"
    )


def _check_one_length(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[:2] != q.shape[:2]:
            raise LengthsDiffer(
                f"q has batch {q.shape[0]} and length {q.shape[1]}, {name} has {tensor.shape[0]} and "
                f"{tensor.shape[1]}. They must be equal, but k and v may have one batch for all."
            )


def check_lengths(*lengths: int) -> None:
    """TooLong where kernels can't count so far: their indices have 32 bits (passes/index_ranges.py).

    Traced lengths are any: a bound would be one of the exported program's.
    """
    if not torch.compiler.is_compiling() and max(lengths) > LONGEST:
        raise TooLong(
            f"a length is {max(lengths)}, and kernels count to {LONGEST} (2^26).\n"
            '  Cut the sequence into parts, or use backend="reference".'
        )


def share_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v for every batch of q, where they have one for all; their gradients are sums."""
    shared = [t.expand(q.shape[0], *t.shape[1:]) if t.shape[0] == 1 else t for t in (k, v)]
    return shared[0], shared[1]


def check_custom(
    specs: Iterable[CustomSpec], tensors: Sequence[Tensor], q: Tensor, k: Tensor,
    whole: Mapping[str, int] | None = None, batch: int | None = None,
) -> None:  # fmt: skip
    """BadInput unless the custom inputs have the shapes that their axes ask for, on q's device. whole: sizes of the
    whole attention, where a call holds a part of one. batch: q's, unless sequences are packed in it."""
    batch = q.shape[0] if batch is None else batch
    sizes = {"batch": batch, "heads": q.shape[2], "seq_len": q.shape[1], "seq_len_kv": k.shape[1]}
    if whole is not None:
        sizes |= {f"whole_{axis}": size for axis, size in whole.items()}
    for spec, tensor in zip(specs, tensors, strict=True):
        if spec.name in (BLOCKS, BLOCK_LIST, STARTS, QUERY_PLACES):
            continue
        what = f"custom input {spec.name!r}"
        expected = tuple(sizes[a] if isinstance(a, str) else a for a in spec.axes)
        if tuple(tensor.shape) != expected and not (tensor.ndim == 0 and expected in ((), (1,))):
            raise WrongCustomShape(
                f"{what} has shape {tuple(tensor.shape)}. Its axes {spec.axes} ask for {expected}: give that shape."
            )
        if not torch.compiler.is_compiling() and max(tensor.shape, default=0) > MOST_ENTRIES:
            raise TooLong(f"{what} has shape {tuple(tensor.shape)}. An axis may have {MOST_ENTRIES} (2^30) entries.")
        if tensor.device != q.device:
            raise DevicesDiffer(f"{what} is on '{tensor.device}' and q on '{q.device}'. Put them on one device.")
        if tensor.dtype not in CUSTOM_NAMES and tensor.dtype not in (torch.bool, torch.float64):
            raise WrongCustomDtype(f"{what} is {tensor.dtype}. Give a floating, integer or bool tensor.")


def check_blocks(blocks: Tensor, block_size: tuple[int, int], q: Tensor, k: Tensor) -> Tensor:
    """An outside block mask as int8; BadInput unless its shape is that of the blocks."""
    if not isinstance(blocks, Tensor):
        raise WrongBlockMask(
            f"block_mask is {type(blocks).__name__}. A call takes a tensor of blocks or a BlockList; give other masks, "
            "FlexAttention's too, where functions are given: mask_mod=..."
        )
    rows, columns = (-(-t.shape[1] // size) for t, size in zip((q, k), block_size, strict=True))
    fits = blocks.ndim == 4 and blocks.shape[0] in (1, q.shape[0]) and blocks.shape[1] in (1, q.shape[2])
    if not fits or tuple(blocks.shape[2:]) != (rows, columns):
        raise WrongBlockMask(
            f"block_mask has shape {tuple(blocks.shape)}. With block_size={block_size} and lengths {q.shape[1]}, "
            f"{k.shape[1]} give ({q.shape[0]} or 1, {q.shape[2]} or 1, {rows}, {columns})."
        )
    if blocks.dtype not in (torch.int8, torch.bool):
        raise WrongBlockMask(f"block_mask is {blocks.dtype}. Give int8 or bool, 1 (True) where a block exists.")
    if blocks.device != q.device:
        raise DevicesDiffer(f"block_mask is on '{blocks.device}' and q on '{q.device}'. Put them on one device.")
    return blocks.to(torch.int8)
