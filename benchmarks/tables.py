"""Tables of the documents, from files of results alone: each stands between two comments that name its file.

python -m benchmarks.tables          writes them anew, where docs/performance.md has `<!-- table: NAME -->` and its end

A table is of one question, and of one file: rows are cases, columns peers, forward and backward in TFLOP/s. The line
below it says what was measured where: card, dtype, versions, commit and day.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.plot import DIRECTIONS, PEERS, RESULTS, ROOT, Results, read, shape_words, split, versions, words

PAGE = ROOT / "docs" / "performance.md"
MARKED = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->\n", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """files: of results, each of one dtype. ratio: the peer that ours are divided by, in columns of their own."""

    files: tuple[str, ...]
    ratio: str


TABLES = {
    "head_dims": Table(("h100_dims_bf16",), "cudnn"),
    "grouped": Table(("h100_grouped_bf16", "h100_grouped_fp16"), "flash_attention_4"),
    "few_key_heads": Table(("h100_few_key_heads_bf16",), "flash_attention_4"),
    "masks": Table(("h100_flex_backends",), "flex_flash"),
    "lengths": Table(("h100_softmax_peers_bf16", "h100_softmax_peers_fp16"), "flash_attention_4"),
}


def text(name: str) -> str:
    """A table and the line below it, between its comments."""
    table = TABLES[name]
    parts = [part for file in table.files for part in _of_file(read([RESULTS / f"{file}.csv"]), table.ratio)]
    return "\n".join([f"<!-- table: {name} -->", *parts, "<!-- end of table -->", ""])


def _of_file(results: Results, ratio: str) -> list[str]:
    rows = results.rows
    peers = [peer for peer in PEERS if any(row["peer"] == peer for row in rows)]
    measured = {(row["case"], row["peer"], row["direction"]): float(row["tflops"]) for row in rows}
    head = ["TFLOP/s", *(f"{_name(peer)}, {d}" for peer in peers for d in DIRECTIONS)]
    head += [f"over {_name(ratio)}, {d}" for d in DIRECTIONS]
    lines = [_line(head), _line(["---"] * len(head))]
    for case in dict.fromkeys(row["case"] for row in rows):
        family, length = split(case)
        cells = [f"{shape_words(family.split('.')[0])}, {words(family)}, length {length}"]
        cells += [f"{measured[case, p, d]:.0f}" if (case, p, d) in measured else "" for p in peers for d in DIRECTIONS]
        for direction in DIRECTIONS:
            pair = [measured.get((case, peer, direction)) for peer in ("attention_engine", ratio)]
            cells.append(f"{pair[0] / pair[1]:.2f}" if pair[0] and pair[1] else "")
        lines.append(_line(cells))
    where = results.where
    about = [where.get("device", ""), rows[0]["dtype"], versions(where, peers), f"commit {where.get('commit', '')[:9]}"]
    return [*lines, "", f"{', '.join(filter(None, about))}.", ""]


def _name(peer: str) -> str:
    return "deterministic" if peer == "deterministic" else PEERS[peer].split(",")[0]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rewritten(page: str) -> str:
    """A page with its tables anew."""
    return MARKED.sub(lambda found: text(found[1]), page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
