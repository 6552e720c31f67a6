"""python -m attention_engine kernels build: a wheel of compiled kernels, for machines that should compile none."""

from __future__ import annotations

import argparse
import zipfile
from dataclasses import replace
from pathlib import Path

import attention_engine
from attention_engine import arch
from attention_engine.cli.tuning import arch_called
from attention_engine.errors import OptionsClash

EXAMPLE = "kernels build --arch H100 --out wheels"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to build, for which GPU, and where to."""
    names = ", ".join(gpu.__name__ for gpu in arch.KNOWN_GPUS)
    parser.add_argument("what", choices=["build"], help="build: compiles kernels and packs them as a wheel")
    parser.add_argument("--arch", default="H100", help=f"the GPU, which need not be here: {names}")
    parser.add_argument("--sms", type=int, help="how many SMs it has, if not as many as that one (114: H100 PCIe)")
    parser.add_argument("--out", type=Path, help="the folder for the wheel")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT",
                        help="attentions whose names hold this text, * any part; may be given again")  # fmt: skip
    parser.add_argument("-n", "--processes", type=int, help="how many compile at once, by default one for each core")
    parser.add_argument("--list", action="store_true", help="names the attentions, and compiles nothing")


def build(args: argparse.Namespace) -> int:
    """Lists, or builds and says where the wheel is."""
    from attention_engine.shipping.build import build as build_wheel
    from attention_engine.shipping.programs import cases
    from attention_engine.tuner.worker import worker_count

    gpu, wanted = arch_called(args.arch), cases(*args.only)
    gpu = gpu if args.sms is None else replace(gpu, sm_count=args.sms)
    if args.list:
        for case in wanted:
            print(case.name)
        print(f"{len(wanted)} attentions")
        return 0
    if args.out is None:
        raise OptionsClash("kernels build wants a folder for the wheel: --out DIR. --list names what would be built.")
    processes = args.processes or worker_count(len(wanted))
    version = attention_engine.__version__
    path = build_wheel(gpu, wanted, args.out, processes, version, lambda line: print(line, flush=True))
    with zipfile.ZipFile(path) as archive:
        count = sum(name.endswith("/key.json") for name in archive.namelist())
    print(f"{path}: {count} kernels, {path.stat().st_size / 2**20:.1f} MB. Install it by\n  pip install {path}")
    return 0
