"""Packed sequences, as programs know them: tables that say of each row which sequence it is of, and where that begins.

Rows of many sequences lie behind one another, and a kernel sees one batch of them. What a user's functions call b,
q_idx and kv_idx is made of the tables, which are custom inputs of int32.
"""

from __future__ import annotations

from enum import Enum

from attention_engine.ir.expr import Expr, Op, Type, const, make
from attention_engine.ir.program import KV_IDX, PLACES, Q_IDX, B


class Packing(Enum):
    """How the sequences of queries lie to those of keys."""

    ALIKE = "queries and keys are the same rows"
    UNLIKE = "queries and keys have lengths of their own"


SEQUENCE_Q = "_packed_sequence_q"  # of each query; -1 behind the last sequence
SEQUENCE_K = "_packed_sequence_k"  # of each key; there how many sequences there are, so that nobody meets it
FIRST = "_packed_first"  # of each query: the row of its sequence's first key
FIRST_K = "_packed_first_k"  # of each key: the same, where keys are not the queries' rows
AHEAD = "_packed_ahead"  # of each query, there too: by how many rows its sequence's keys end behind its queries
OF_PLACES = frozenset({SEQUENCE_Q, SEQUENCE_K, FIRST, FIRST_K, AHEAD})

# The numbers of a sequence, in PLACES: what is added to a row's number to be a query's place, and a key's; one past its
# last key's row; its queries' first row and one past the last. Behind the last sequence comes one more, which holds the
# rows that are of none, and no key.
NUMBERS = ("start of queries", "start of keys", "end of keys", "first query", "end of queries")
KEYS_START, KEYS_END, FIRST_QUERY, QUERIES_END = 1, 2, 3, 4

OWN_SEQUENCES = "sequences_and_rest"  # the axis of PLACES
_ALIKE = {SEQUENCE_Q: "seq_len", SEQUENCE_K: "seq_len_kv", FIRST: "seq_len"}
TABLES: dict[Packing, dict[str, tuple[int | str, ...]]] = {  # the tables that there are, with their axes
    Packing.ALIKE: {**{name: (axis,) for name, axis in _ALIKE.items()}, PLACES: (OWN_SEQUENCES, len(NUMBERS))},
}
TABLES[Packing.UNLIKE] = {**TABLES[Packing.ALIKE], FIRST_K: ("seq_len_kv",), AHEAD: ("seq_len",)}
SEQUENCES = "sequences"  # the axis that "batch" becomes: as long as there are sequences


def of_query(name: str) -> Expr:
    """A table's number for the query."""
    return make(Op.LOAD, Q_IDX, arg=name, dtype=Type.INT)


def of_key(name: str) -> Expr:
    """A table's number for the key."""
    return make(Op.LOAD, KV_IDX, arg=name, dtype=Type.INT)


def number_of_sequence(number: int) -> Expr:
    """One of the NUMBERS of the block's sequence, which is its b."""
    return make(Op.LOAD, B, const(number, Type.INT), arg=PLACES, dtype=Type.INT)


def start_in_sequence(index: Expr) -> Expr:
    """What is added to a row's number to be the place of a query, or of a key."""
    return number_of_sequence((Q_IDX, KV_IDX).index(index))
