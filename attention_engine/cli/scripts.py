"""python -m attention_engine show, check, bench: attentions in Python files, and the repository's benchmarks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attention_engine.cli.targets import engines_of

if TYPE_CHECKING:
    from torch import Tensor

    from attention_engine.cli.targets import AnyEngine

BENCHMARKS = "benchmarks.run"
SCRIPT_HELP = (
    "a Python file, and in it an engine, a module with engines, a score_mod, a mask_mod, an OnlineFunc, or a function "
    "that makes engines"
)
SHOW_EXAMPLE = "show attn_script/mha.py:make_engine --stage cuda --arch H100"
CHECK_EXAMPLE = "check attn_script/gqa.py --heads 8 --kv-heads 2"


def add_options(show_parser: argparse.ArgumentParser, check_parser: argparse.ArgumentParser) -> None:
    """SCRIPT[:NAME], sizes, and what to show."""
    for parser in (show_parser, check_parser):
        parser.add_argument(
            "script",
            metavar="SCRIPT[:NAME]",
            help="a Python file, and what in it: an engine, a module "
            "with engines, a score_mod, a mask_mod, an OnlineFunc, or a function that makes engines",
        )
        parser.add_argument("--heads", type=int, default=4, help="query heads, if the script does not say (default 4)")
        parser.add_argument("--kv-heads", type=int, help="key heads (default: as many)")
        parser.add_argument("--dim", type=int, help="head dim (default: the script's D, or 64)")
        parser.add_argument("--length", type=int, default=160, help="queries and keys (default 160)")
        parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    show_parser.add_argument("--stage", default="program", choices=("program", "tilelang", "cuda"),
                             help="the maths, the kernel, or what TileLang makes of it (default: program)")  # fmt: skip
    show_parser.add_argument("--kernel", default="forward", help="forward, backward, ... (default: forward)")
    show_parser.add_argument("--arch", default="H100", help="the GPU to compile for where none is here (default: H100)")


def show(args: argparse.Namespace) -> int:
    """Prints the program, or a kernel."""
    import torch

    from attention_engine.cli.tuning import arch_called

    device = arch_called(args.arch)
    options = {"device": device} if args.stage == "cuda" and not torch.cuda.is_available() else {}
    for number, (name, engine) in enumerate(engines_of(args, **options).items()):
        print("\n" * min(number, 1) + f"# {name}\n{engine}\n")
        print(engine.program() if args.stage == "program" else engine.source(args.kernel, form=args.stage))
    return 0


def check(args: argparse.Namespace) -> int:
    """Runs engine.check on random tensors; 1 where it is not ok."""
    import torch

    here = torch.cuda.is_available()
    well = True
    for name, engine in engines_of(args, **({} if here else {"backend": "interpret"})).items():
        print(f"# {name}")
        report = engine.check(*_drawn(engine, args, "cuda" if here else "cpu"))
        print(report, flush=True)
        well = well and report.ok
    return 0 if well else 1


def _drawn(engine: AnyEngine, args: argparse.Namespace, place: str) -> list[Tensor]:
    """Random tensors of a call: q, k, v, log decays of at most 0 for a linear attention, custom inputs."""
    import torch

    from attention_engine import LinearAttentionEngine, meta_tensor

    linear, kv_heads = isinstance(engine, LinearAttentionEngine), args.kv_heads or args.heads
    counts = (kv_heads, kv_heads, args.heads) if linear else (args.heads, kv_heads, kv_heads)
    asked = tuple(meta_tensor(1, n, args.length, args.dim or 64, dtype=args.dtype) for n in counts)
    q, k, v = engine.qkv_meta or asked
    sizes = {"batch": 1, "heads": v.heads if linear else q.heads, "seq_len": args.length, "seq_len_kv": args.length}
    tensors = [torch.randn(1, args.length, m.heads, m.dim, device=place).to(getattr(torch, m.dtype_name))
               for m in (q, k, v)]  # fmt: skip
    if linear:
        tensors.append(-torch.rand(1, args.length, v.heads, device=place))
    if engine.layout == "bhsd":
        tensors = [t.transpose(1, 2) for t in tensors]
    return tensors + [
        torch.rand([sizes[a] if isinstance(a, str) else a for a in s.axes], device=place)
        for s in engine.custom_io.in_order
    ]


def bench(args: argparse.Namespace) -> int:
    """Runs the benchmarks where the repository's folder is at hand."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(BENCHMARKS)
    except ModuleNotFoundError:
        found = None
    if found is None:
        print("The benchmarks come with the repository, not the package: run this in its folder.", file=sys.stderr)
        return 1
    importlib.import_module(BENCHMARKS).main(args.rest)
    return 0
