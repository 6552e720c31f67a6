"""python -m attention_engine cache: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Mapping
from typing import Any

from attention_engine import folders
from attention_engine.frontend.custom_io import counted


def add_options(parser: argparse.ArgumentParser) -> None:
    """--list and --clear."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="one line for each kernel, the newest first (the default)")
    which.add_argument("--clear", action="store_true", help="remove them all; they are compiled again when needed")


def run(args: argparse.Namespace) -> int:
    """Lists or clears."""
    from attention_engine.codegen.cache import clear, entries

    held_in = folders.kernel_folders()
    if args.clear:
        print(f"removed {counted(clear(), 'kernel')} from {held_in.writable}")
        return 0
    held = sorted(entries(), key=lambda entry: entry.written, reverse=True)
    if held:
        print(f"{'kernel':28} {'age':>9} {'size':>8}  what it is for")
    now = time.time()
    for entry in held:
        age, size = spell_age(now - entry.written), f"{entry.size / 2**10:.0f} KB"
        print(f"{name_of(entry.record):28} {age:>9} {size:>8}  {describe(entry.record)}  ({entry.digest[:12]})")
    where = ", ".join(map(str, held_in.readable))
    print(f"{counted(len(held), 'kernel')}, {sum(e.size for e in held) / 2**20:.1f} MB, in {where or 'no folder'}")
    return 0


def name_of(record: Mapping[str, Any]) -> str:
    """A kernel's name: whose it is and what it makes, as "hopper forward", "linear chunk output"."""
    family, *path = record["kernel"].split(".")
    words = list(dict.fromkeys([family, *path[-1:]]))
    return " ".join(words).replace("_", " ").strip()


def spell_age(seconds: float) -> str:
    """Seconds as a number of the largest unit that is there."""
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count != 1)}"
    return f"{max(int(seconds), 0)} s"


def describe(record: Mapping[str, Any]) -> str:
    """What a kernel is for, in few words: target, dtype, heads, dims, tile."""
    given = " ".join(record["given"])
    problem = {n: _field(given, n) for n in ("dtype", "heads", "kv_heads", "dim", "dim_v")}
    tile = re.search(r"Tile\(q=(\d+), kv=(\d+), threads=(\d+), stages=(\d+)", given)
    words = [record["target"], problem["dtype"]]
    shared = f"/{problem['kv_heads']}" if problem["kv_heads"] != "?" else ""  # a linear attention has one number
    words += [f"heads {problem['heads']}{shared}", f"dims {problem['dim']}/{problem['dim_v']}"]
    if tile:
        words.append("tile {}x{}, {} threads, {} stages".format(*tile.groups()))
        form = re.search(r"form=(\w+)\(([^()]*)\)", given)
        words += [form[1], *re.findall(r"(\w+)=True", form[2])] if form else []
    return " ".join([*words, f"TileLang {record['tilelang']}"])


def _field(text: str, name: str) -> str:
    found = re.search(rf"\b{name}='?(\w+)", text)
    return found[1] if found else "?"
