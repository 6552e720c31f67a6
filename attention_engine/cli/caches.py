"""python -m attention_engine cache: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from attention_engine import folders


def add_options(parser: argparse.ArgumentParser) -> None:
    """--list and --clear."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--list", action="store_true", help="one line for each kernel")
    which.add_argument("--clear", action="store_true", help="remove them all; they are compiled again when needed")


def run(args: argparse.Namespace) -> int:
    """Lists or clears."""
    from attention_engine.codegen.cache import clear, entries

    held_in = folders.kernel_folders()
    if args.clear:
        print(f"removed {clear()} kernels from {held_in.writable}")
        return 0
    held = list(entries())
    for entry in held:
        print(f"{entry.digest[:12]}  {entry.size / 2**10:7.0f} KB  {describe(entry.record)}")
    where = ", ".join(map(str, held_in.readable))
    print(f"{len(held)} kernels, {sum(e.size for e in held) / 2**20:.1f} MB, in {where}")
    return 0


def describe(record: Mapping[str, Any]) -> str:
    """A kernel in few words: name, target, dtype, heads, dims, tile."""
    given = " ".join(record["given"])
    problem = {n: _field(given, n) for n in ("dtype", "heads", "kv_heads", "dim", "dim_v")}
    tile = re.search(r"Tile\(q=(\d+), kv=(\d+), threads=(\d+), stages=(\d+)", given)
    words = [record["kernel"].split(".")[-1], record["target"], problem["dtype"]]
    words += [f"heads {problem['heads']}/{problem['kv_heads']}", f"dims {problem['dim']}/{problem['dim_v']}"]
    if tile:
        words.append("tile {}x{}, {} threads, {} stages".format(*tile.groups()))
        form = re.search(r"form=(\w+)\(([^()]*)\)", given)
        words += [form[1], *re.findall(r"(\w+)=True", form[2])] if form else []
    return " ".join([*words, f"TileLang {record['tilelang']}"])


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}='?(\w+)", text)
    return found[1] if found else "?"
