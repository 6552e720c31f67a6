"""How a kernel cuts its work: its tile, and the form of the kernel that takes it.

A form is which of several kernels makes the same results. `Straight` kernels run on every GPU: all warps of a block
copy and compute. The others are for Hopper (kernels/hopper/): one more group of warps copies. plan/choice.py chooses
once, and says why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, assert_never

KernelName: TypeAlias = Literal["forward", "backward", "queries"]  # the fields of Tiles
KERNEL_NAMES: tuple[KernelName, ...] = ("forward", "backward", "queries")
ROW_PAD = 128  # the backward pass pads its rows to a multiple of it, which blocks of rows divide


@dataclass(frozen=True)
class Straight:
    """Of any direction, on any GPU.

    shared_weights: the backward pass over keys hands weights to its products through shared memory, not in registers,
    so that warps can share rows where a tile has fewer rows than the warps of a block need.
    """

    shared_weights: bool = False


@dataclass(frozen=True)
class HopperForward:
    """The forward pass for Hopper.

    persistent: as many blocks as the GPU runs at once walk over all work. queries_ahead: a persistent block's next
    queries come while it works on the present ones, where shared memory has room; it costs each step a little, so it is
    for few steps. lazy_rescale: a warp rescales the output only where one of its rows has a factor that is not 1, as
    after a new maximum. within_sequences: of packed sequences, each block of queries lies in one. drops_apart: a group
    of warps of its own chooses which weights dropout drops. woven: three warpgroups wait for the output as soon as two
    do, and take sums in the order of columns, so that both stand among exponentials.
    """

    persistent: bool = False
    queries_ahead: bool = False
    lazy_rescale: bool = False
    within_sequences: bool = False
    drops_apart: bool = False
    woven: bool = False

    def __post_init__(self) -> None:
        if self.queries_ahead and not self.persistent:
            raise ValueError("a block that ends with its item has no next queries: queries_ahead asks for persistent")


@dataclass(frozen=True)
class HopperKeys:
    """The backward pass over keys for Hopper.

    shared_weights: warpgroups share the keys of a tile; else each has keys of its own. persistent: as in HopperForward.
    skewed_sums: diagonals of tiles are summed by walks over a copy (kernels/diagonals.py). within_sequences: of packed
    sequences, each block's keys are of one. by_heads: such a block then walks over all queries of one head, and then
    over those of the next; else over all heads of a tile of queries. drops_apart: as in HopperForward. in_order: blocks
    add to dQ one after another: it has the same bits in every run (kernels/hopper/keys/order.py). stores_first: the
    first of them stores, and nobody zeroes the sums before.
    """

    shared_weights: bool = False
    persistent: bool = False
    skewed_sums: bool = False
    within_sequences: bool = False
    by_heads: bool = False
    drops_apart: bool = False
    in_order: bool = False
    stores_first: bool = False

    def __post_init__(self) -> None:
        if self.by_heads and not self.within_sequences:
            raise ValueError("by_heads asks for within_sequences")
        if self.drops_apart and (self.persistent or self.shared_weights):
            raise ValueError(
                "drops_apart asks for a block that ends with its item, and warpgroups with keys of their own"
            )


Form: TypeAlias = Straight | HopperForward | HopperKeys
HOPPER_FORMS = (HopperForward, HopperKeys)


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile, threads of a block that compute, stages of the copy pipeline (0: none), the form."""

    q: int
    kv: int
    threads: int
    stages: int
    form: Form = Straight()

    def in_form(self, **changes: bool) -> Tile:
        """The tile with its form changed."""
        form: Any = self.form  # whose fields depend on its class
        return replace(self, form=replace(form, **changes))

    @property
    def hopper(self) -> bool:
        """Is its form one of those for Hopper?"""
        return isinstance(self.form, HOPPER_FORMS)

    @property
    def persistent(self) -> bool:
        """Do as many blocks as the GPU runs at once walk over all work?"""
        return isinstance(self.form, HOPPER_FORMS) and self.form.persistent

    @property
    def shared_weights(self) -> bool:
        """Do weights go to products through shared memory?"""
        return isinstance(self.form, (Straight, HopperKeys)) and self.form.shared_weights

    @property
    def queries_ahead(self) -> bool:
        """Do a persistent block's next queries come while it works on the present ones?"""
        return isinstance(self.form, HopperForward) and self.form.queries_ahead

    @property
    def within_sequences(self) -> bool:
        """Does each block, of queries or of keys, lie in one of the packed sequences?"""
        return isinstance(self.form, HOPPER_FORMS) and self.form.within_sequences

    @property
    def by_heads(self) -> bool:
        """Does a block of keys within a sequence walk over the queries of one head after another?"""
        return isinstance(self.form, HopperKeys) and self.form.by_heads

    @property
    def lazy_rescale(self) -> bool:
        """Is the output rescaled only where a row has a factor that is not 1?"""
        return isinstance(self.form, HopperForward) and self.form.lazy_rescale

    @property
    def woven(self) -> bool:
        """Do multiplications of the output and sums of weights stand among exponentials?"""
        return isinstance(self.form, HopperForward) and self.form.woven

    @property
    def drops_apart(self) -> bool:
        """Does a group of warps of its own choose which weights dropout drops?"""
        return isinstance(self.form, HOPPER_FORMS) and self.form.drops_apart

    @property
    def skewed_sums(self) -> bool:
        """Are diagonals summed by walks over a copy?"""
        return isinstance(self.form, HopperKeys) and self.form.skewed_sums

    @property
    def in_order(self) -> bool:
        """Do blocks add to dQ one after another, in the same order in every run?"""
        return isinstance(self.form, HopperKeys) and self.form.in_order

    @property
    def stores_first(self) -> bool:
        """Does the first of them store in place of adding?"""
        return isinstance(self.form, HopperKeys) and self.form.stores_first

    @property
    def row_pad(self) -> int:
        """What the backward pass pads its rows to a multiple of, so that no block of rows ends outside."""
        assert self.q <= ROW_PAD, "a tile may begin at any piece, and then ends within ROW_PAD of the last query"
        return math.lcm(ROW_PAD, self.q)


def padded_rows(queries: int, row_pad: int) -> int:
    """The length of the backward pass's own rows, past which no tile and no block of rows ends."""
    return -(-(queries + ROW_PAD) // row_pad) * row_pad


def words(form: Form) -> list[str]:
    """A form in words: whose it is, and what of it is on."""
    match form:
        case Straight():
            of = []
        case HopperForward() | HopperKeys():
            of = ["for Hopper"]
        case _:
            assert_never(form)
    return of + [field.name.replace("_", " ") for field in fields(form) if getattr(form, field.name)]
