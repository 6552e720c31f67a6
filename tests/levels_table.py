"""The table of docs/limits.md that says what is known of kernels on each GPU, made of the rows of docs/levels.csv."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PATH, PAGE = DOCS / "levels.csv", DOCS / "limits.md"
BEGIN, END = "<!-- levels: python -m tests.levels --write -->\n", "<!-- end of levels -->\n"
FAMILIES = ("forward", "backward", "decoding", "linear")
MEASURED = ("H100",)  # the GPU tests and the benchmarks ran there


def with_table(page: str, rows: list[Any], asked: Mapping[str, int]) -> str:
    """The page with this table in place of its own. asked: how many problems each family has."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(rows, asked) + END + rest.split(END)[1]


def table(rows: list[Any], asked: Mapping[str, int]) -> str:
    """A line for each GPU, a column for each family of kernels."""
    lines = [f"| GPU | {' | '.join(FAMILIES)} |", "| --- |" + " --- |" * len(FAMILIES)]
    lines += [f"| {gpu} |" + " runs, measured |" * len(FAMILIES) for gpu in MEASURED]
    for gpu in dict.fromkeys(row.gpu for row in rows):
        of = {f: [row for row in rows if (row.gpu, row.family) == (gpu, f)] for f in FAMILIES}
        lines.append(f"| {gpu} | {' | '.join(_cell(found, asked[f]) for f, found in of.items())} |")
    return "\n".join(lines + _refusals(rows)) + "\n"


def _refusals(rows: list[Any]) -> list[str]:
    """A line for each reason for which kernels were refused; none where none was."""
    refused = [row for row in rows if row.level == "refused"]
    lines = ["", "| refused | on | of | reason |", "| --- | --- | --- | --- |"] if refused else []
    for gpu, family, kernel, why in dict.fromkeys((row.gpu, row.family, row.kernel, row.why) for row in refused):
        alike = [row for row in refused if (row.gpu, row.family, row.kernel, row.why) == (gpu, family, kernel, why)]
        of = ", ".join(dict.fromkeys(f"{row.program} {row.dim}" for row in alike))
        lines.append(f"| {kernel} | {gpu} | {family}: {of} | {why.replace('|', '/')} |")
    return lines


def _cell(rows: list[Any], asked: int) -> str:
    """Of how many problems it is known; how many of their kernels have which level; the most that one takes."""
    problems = {(row.program, row.dim) for row in rows if row.level != "unmade"}
    if not problems:
        return "not looked at"
    parts = [f"{len(problems)} of {asked} problems"]
    for level in ("compiles", "lowers", "refused"):
        found = [row for row in rows if row.level == level]
        if found:
            parts.append(f"{level}: {len(found)} of {len(rows)} kernels")
    if unmade := sum(row.level == "unmade" for row in rows):
        parts.append(f"not looked at: {unmade}")
    if changed := sum(bool(row.changed) for row in rows):
        parts.append(f"as they were before a change: {changed}")
    compiled = [row for row in rows if row.level == "compiles"]
    if compiled:
        parts.append(f"spills: {sum(row.spilled > 0 for row in compiled)}")
        parts.append(f"at most {max(row.registers for row in compiled)} registers")
    if kept := [row for row in rows if row.level in ("compiles", "lowers")]:
        parts.append(f"at most {max(row.shared for row in kept) / 1024:.1f} KB of shared memory")
    return "; ".join(parts)
