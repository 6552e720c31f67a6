"""Packed sequences, as programs know them: tables that say of each row which sequence it is of, and where that begins.

Rows of many sequences lie behind one another, and a kernel sees one batch of them. What a user's functions call b,
q_idx and kv_idx is made of the tables, which are custom inputs of int32.
"""

from __future__ import annotations

from enum import Enum

from attention_engine.ir.expr import Expr, Op, Type, make
from attention_engine.ir.program import KV_IDX, Q_IDX


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

_ALIKE = {SEQUENCE_Q: "seq_len", SEQUENCE_K: "seq_len_kv", FIRST: "seq_len"}
TABLES: dict[Packing, dict[str, str]] = {  # the tables that there are, with their axes
    Packing.ALIKE: _ALIKE,
    Packing.UNLIKE: {**_ALIKE, FIRST_K: "seq_len_kv", AHEAD: "seq_len"},
}
SEQUENCES = "sequences"  # the axis that "batch" becomes: as long as there are sequences


def of_query(name: str) -> Expr:
    """A table's number for the query."""
    return make(Op.LOAD, Q_IDX, arg=name, dtype=Type.INT)


def of_key(name: str) -> Expr:
    """A table's number for the key."""
    return make(Op.LOAD, KV_IDX, arg=name, dtype=Type.INT)
