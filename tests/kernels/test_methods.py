"""Macros as methods, and notes whose numbers have names."""

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("tilelang")
import tilelang.language as T

from attention_engine.codegen.interpreter import Interpreter
from attention_engine.kernels.common import build
from attention_engine.kernels.hopper.notes import note_in, number_of, size_of, values_of
from attention_engine.kernels.methods import macro_method


class Doubles:
    """Writes twice what it was made with."""

    def __init__(self, amount):
        self.amount = amount

    @macro_method
    def write(self, target, at):
        """target[at] = twice the amount"""
        target[at] = self.factor() * self.amount

    def factor(self):
        return 2


class Triples(Doubles):
    def factor(self):
        return 3


class Negates(Doubles):
    @macro_method
    def write(self, target, at):
        target[at] = -self.amount


class Where(NamedTuple):
    row: Any
    column: Any
    depth: Any


def run(*act):
    """What acts on a buffer of 8 numbers leave there."""
    found = torch.zeros(8, dtype=torch.int32)

    @T.macro
    def body(buffers):
        with T.Kernel(1, threads=32):
            for one in act:
                one(buffers["found"])

    Interpreter(build("acts", {"found": T.Tensor([8], "int32")}, body))(found)
    return found.tolist()


def test_a_macro_is_a_method_and_a_subclass_may_write_it_anew():
    made = [Doubles(5), Triples(5), Negates(5)]
    assert run(*(lambda found, n=n, one=one: one.write(found, n) for n, one in enumerate(made)))[:3] == [10, 15, -5]
    assert Doubles.__dict__["write"].__doc__ == "target[at] = twice the amount"


def test_the_numbers_of_a_note_have_names():
    @T.macro
    def copy(found):
        slots = T.alloc_shared([2, size_of(Where)], "int32")
        for slot in range(2):
            for number in range(size_of(Where)):
                slots[slot, number] = 10 * slot + number
        second = note_in(Where, slots, 1)
        row, column, depth = values_of(second)
        found[0] = row
        found[1] = column
        found[2] = depth
        found[3] = second.column
        slots[1, number_of(Where, "column")] = 7
        found[4] = second.column  # read anew
        found[5] = column  # read once

    assert run(copy)[:6] == [10, 11, 12, 11, 7, 11]
