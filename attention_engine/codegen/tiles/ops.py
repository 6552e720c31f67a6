"""What the tile operations of TileLang (copy, fill, gemm, reduce, cumsum, atomics) do to windows of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch

from attention_engine.codegen.tiles.scalar_ops import as_matrix_operand
from attention_engine.codegen.tiles.windows import Frame, Run, Window, cropped
from attention_engine.codegen.tir_types import Call, Expression, Text
from attention_engine.errors import HazardInKernel, NotInterpretable


class Compiler(Protocol):
    """The part of the interpreter's compiler that tile operations need."""

    def region(self, node: Expression, *, keep_ones: bool = False) -> Window:
        """The window that a region argument names; axes of extent 1 are dropped unless kept."""

    def value(self, node: Expression) -> Run:
        """The code of an expression."""


def _copy(compiler: Compiler, call: Call) -> Run:
    if any(str(name) in ("is_gather4", "is_scatter4") for name in call.annotations):
        raise NotInterpretable("a gathering TMA copy")
    source, target = compiler.region(call.args[0]), compiler.region(call.args[1])
    if source.rank != target.rank:
        raise NotInterpretable(f"a copy of a rank {source.rank} tile to a rank {target.rank} tile")
    read, write = source.read, target.write
    return lambda frame: write(frame, read(frame))


def _fill(compiler: Compiler, call: Call) -> Run:
    write, value = compiler.region(call.args[0]).write, compiler.value(call.args[1])
    return lambda frame: write(frame, value(frame))


def _transpose(compiler: Compiler, call: Call) -> Run:
    read, write = compiler.region(call.args[0]).read, compiler.region(call.args[1]).write
    return lambda frame: write(frame, read(frame).transpose(-1, -2).clone())


def _gemm(compiler: Compiler, call: Call) -> Run:
    """C (+)= A B with products summed in fp32, whatever the operands' type."""
    left, right, total = (compiler.region(argument) for argument in call.args[:3])
    if (left.rank, right.rank, total.rank) != (2, 2, 2):
        raise NotInterpretable("a gemm of tiles that are not matrices")
    transpose_left, transpose_right = bool(int(call.args[3])), bool(int(call.args[4]))
    clear = compiler.value(call.args[9])

    def run(frame: Frame) -> None:
        a, b = as_matrix_operand(left.read(frame)), as_matrix_operand(right.read(frame))
        if transpose_left:
            a = a.T
        if transpose_right:
            b = b.T
        c = total.read(frame)
        if c.dtype == a.dtype:
            torch.mm(a, b, out=c) if clear(frame) else c.addmm_(a, b)
        else:
            product = torch.mm(a, b)
            c.copy_(product if clear(frame) else product + c)

    return run


def _sum(tile: torch.Tensor, axis: int) -> torch.Tensor:
    return tile.float().sum(axis) if tile.dtype.is_floating_point and tile.dtype.itemsize < 4 else tile.sum(axis)


def _reduce_bits(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def reduce(tile: torch.Tensor, axis: int) -> torch.Tensor:
        parts = tile.unbind(axis)
        result = parts[0]
        for part in parts[1:]:
            result = function(result, part)
        return result

    return reduce


# How a reduction folds an axis, and how it joins what the target held before.
REDUCTIONS: dict[str, tuple[Callable[[torch.Tensor, int], torch.Tensor], Callable[..., torch.Tensor]]] = {
    "sum": (_sum, torch.add),
    "abssum": (lambda tile, axis: _sum(tile.abs(), axis), torch.add),
    "max": (lambda tile, axis: tile.amax(axis), torch.maximum),
    "min": (lambda tile, axis: tile.amin(axis), torch.minimum),
    "absmax": (lambda tile, axis: tile.abs().amax(axis), torch.maximum),
    "bitand": (_reduce_bits(torch.bitwise_and), torch.bitwise_and),
    "bitor": (_reduce_bits(torch.bitwise_or), torch.bitwise_or),
    "bitxor": (_reduce_bits(torch.bitwise_xor), torch.bitwise_xor),
}


def _reduce(compiler: Compiler, call: Call) -> Run:
    source, target = compiler.region(call.args[0], keep_ones=True), compiler.region(call.args[1], keep_ones=True)
    kind, axis, clear = str(cast(Text, call.args[2]).value), int(call.args[3]), bool(int(call.args[4]))
    if kind not in REDUCTIONS:
        raise NotInterpretable(f"a reduction of kind {kind!r}")
    fold, join = REDUCTIONS[kind]

    def run(frame: Frame) -> None:
        held = target.read(frame)
        result = fold(source.read(frame), axis).reshape(held.shape)
        target.write(frame, result if clear else join(result, held.to(result.dtype)))

    return run


def _scan(function: Callable[[torch.Tensor, int], torch.Tensor]) -> Callable[[Compiler, Call], Run]:
    def build(compiler: Compiler, call: Call) -> Run:
        source, target = compiler.region(call.args[0], keep_ones=True), compiler.region(call.args[1], keep_ones=True)
        axis, reverse = int(call.args[2]), bool(int(call.args[3]))

        def run(frame: Frame) -> None:
            tile = source.read(frame)
            result = function(tile.flip(axis), axis).flip(axis) if reverse else function(tile, axis)
            target.write(frame, result)

        return run

    return build


def _atomic(join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Compiler, Call], Run]:
    """A tile joined into memory; args[0] is a region, or one value for all elements."""

    def build(compiler: Compiler, call: Call) -> Run:
        target = compiler.region(call.args[1])
        is_region = getattr(getattr(call.args[0], "op", None), "name", "") == "tl.region"
        read = compiler.region(call.args[0]).read if is_region else compiler.value(call.args[0])

        def run(frame: Frame) -> None:
            view, size, crop = target.locate(frame)
            value = torch.as_tensor(read(frame), dtype=view.dtype)
            view.copy_(join(view, value if crop is None else cropped(value, size, crop)))

        return run

    return build


def _assume(compiler: Compiler, call: Call) -> Run:
    """What a kernel takes for granted has to hold."""
    holds = compiler.value(call.args[0])

    def run(frame: Frame) -> None:
        if not bool(holds(frame)):
            raise HazardInKernel(f"the kernel takes for granted what does not hold: {call.args[0]}")

    return run


TILE_OPS: dict[str, Callable[[Compiler, Call], Run]] = {
    "tl.tileop.copy": _copy,
    "tl.tileop.async_copy": _copy,
    "tl.tileop.fill": _fill,
    "tl.tileop.transpose": _transpose,
    "tl.tileop.gemm": _gemm,
    "tl.tileop.reduce": _reduce,
    "tl.tileop.cumsum": _scan(torch.cumsum),
    "tl.tileop.cummax": _scan(lambda tile, axis: torch.cummax(tile, axis).values),
    "tl.tileop.atomicadd": _atomic(torch.add),
    "tl.tileop.atomicmax": _atomic(torch.maximum),
    "tl.tileop.atomicmin": _atomic(torch.minimum),
    "tirx.assume": _assume,
}

# Synchronisation and hints: one block runs at a time and in order, so that they change nothing.
SILENT_OPS = frozenset(
    {
        "tl.warpgroup_arrive",
        "tl.warpgroup_commit_batch",
        "tl.warpgroup_wait",
        "tl.warpgroup_fence_operand",
        "tl.set_max_nreg",
        "tl.no_set_max_nreg",
        "tl.annotate_producer_reg_dealloc",
        "tl.annotate_consumer_reg_alloc",
        "tl.tma_store_arrive",
        "tl.pdl_trigger",
        "tl.pdl_sync",
        "tirx.ptx_commit_group",
        "tirx.ptx_wait_group",
    }
)
