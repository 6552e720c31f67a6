"""The commands, their options and help."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import attention_engine
from attention_engine.cli import caches, doctor, kernels, scripts, tuning
from attention_engine.errors import AttentionEngineError, did_you_mean, message_of

EXAMPLES = """examples:
  python -m attention_engine doctor
  python -m attention_engine show attn_script/mha.py --stage program
  python -m attention_engine tune "llama-8b.softmax.causal.*" --file tiles.json --backward
  python -m attention_engine COMMAND --help
"""


class _Parser(argparse.ArgumentParser):
    """Says of a command or a choice that is none which was meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        known = [n.strip(" '") for n in wrong[2].split(",")] if wrong else []
        super().error(message + (f".{did_you_mean(wrong[1], known)}" if wrong else ""))


def version() -> str:
    """Of this package, and of what it runs with."""
    found = [f"attention_engine {attention_engine.__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "tilelang"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = _Parser(
        "attention_engine", description="Write the maths of an attention, get fused kernels.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    top.add_argument("--version", action="version", version=version())
    commands = top.add_subparsers(dest="command", metavar="COMMAND")

    def add(name: str, run: object, help: str, example: str) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=help, description=help, epilog=f"example:\n  python -m attention_engine {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        made.set_defaults(run=run)
        return made

    doctor.add_options(
        add("doctor", doctor.run, "says what works on this machine, and what to do about the rest", "doctor --json")
    )
    tuning.add_options(
        add("tune", tuning.tune, "measures tiles of benchmark cases, or merges tune files", tuning.TUNE_EXAMPLE),
        add("explain", tuning.explain, "says which tile a case runs with, and why others fell", tuning.EXPLAIN_EXAMPLE),
    )
    caches.add_options(add("cache", caches.run, "lists or clears the compiled kernels on disk", "cache"))
    words = "compiles the library's kernels ahead, as a wheel for machines without a compiler"
    kernels.add_options(add("kernels", kernels.build, words, kernels.EXAMPLE))
    scripts.add_options(
        add("show", scripts.show, "prints what is made of a script's attention", scripts.SHOW_EXAMPLE),
        add("check", scripts.check, "compares a script's attention with float64", scripts.CHECK_EXAMPLE),
    )
    bench = add(
        "bench", scripts.bench, "runs the benchmarks of the repository", "bench --case mha-128.softmax.full.8192"
    )
    bench.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="given to the benchmark as it is")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status: 0 all well, 1 something is not, 2 wrong usage."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["bench"]:  # argparse would take the benchmark's options for its own
        return scripts.bench(argparse.Namespace(rest=given[1:]))
    made = parser()
    if not given:
        made.print_help()
        return 0
    args = made.parse_args(given)
    try:
        status: int = args.run(args)
    except BrokenPipeError:  # the reader has seen enough: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except AttentionEngineError as error:
        print(message_of(error), file=sys.stderr)
        return 1
    return status
