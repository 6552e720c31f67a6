"""python -m attention_engine show, check, bench: attentions in Python files, and the repository's benchmarks.

A script defines an AttentionEngine, or a function make_engine(qkv_meta, **options) that returns one, as those of
attn_script/ do.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attention_engine.errors import BadScript

if TYPE_CHECKING:
    from attention_engine import AttentionEngine

MAKER = "make_engine"
BENCHMARKS = "benchmarks.run"
SHOW_EXAMPLE = "show attn_script/mha.py:make_engine --stage cuda --arch H100"
CHECK_EXAMPLE = "check attn_script/gqa.py --heads 8 --kv-heads 2"


def add_options(show_parser: argparse.ArgumentParser, check_parser: argparse.ArgumentParser) -> None:
    """SCRIPT[:NAME], sizes, and what to show."""
    for parser in (show_parser, check_parser):
        parser.add_argument("script", metavar="SCRIPT[:NAME]", help="a Python file, and the engine or function in it")
        parser.add_argument("--heads", type=int, default=4, help="query heads, for make_engine (default 4)")
        parser.add_argument("--kv-heads", type=int, help="key heads (default: as many)")
        parser.add_argument("--dim", type=int, help="head dim (default: the script's D, or 64)")
        parser.add_argument("--length", type=int, default=160, help="queries and keys (default 160)")
        parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))
    show_parser.add_argument("--stage", default="program", choices=("program", "tilelang", "cuda"),
                             help="the maths, the kernel, or what TileLang makes of it (default: program)")  # fmt: skip
    show_parser.add_argument("--kernel", default="forward", help="forward, backward, ... (default: forward)")
    show_parser.add_argument("--arch", default="H100", help="the GPU to compile for where none is here (default: H100)")


def load(path: Path) -> ModuleType:
    """A script as a module, its own folder importable."""
    if not path.is_file():
        raise BadScript(f"there is no file {path}. Give a Python file: show attn_script/mha.py.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine_of(args: argparse.Namespace, **options: Any) -> AttentionEngine:
    """The engine that SCRIPT[:NAME] names. Raises BadScript."""
    from attention_engine import AttentionEngine, meta_tensor

    file, _, name = args.script.partition(":")
    module = load(Path(file))
    if not name:
        engines = [n for n, value in vars(module).items() if isinstance(value, AttentionEngine)]
        name = engines[0] if engines else MAKER
    found = getattr(module, name, None)
    if isinstance(found, AttentionEngine):
        return found
    if not callable(found):
        held = [n for n, v in vars(module).items() if isinstance(v, AttentionEngine) or n == MAKER]
        raise BadScript(
            f"{file} has no engine {name!r}. It has: {', '.join(held) or 'none'}.\n"
            f"  Name an AttentionEngine, or a function that takes (qkv_meta, **options): {file}:NAME."
        )
    dim = args.dim or getattr(module, "D", 64)
    metas = [
        meta_tensor(1, n, args.length, dim, dtype=args.dtype)
        for n in (args.heads, args.kv_heads or args.heads, args.kv_heads or args.heads)
    ]
    made = found(tuple(metas), **options)
    if not isinstance(made, AttentionEngine):
        raise BadScript(f"{file}:{name} returned {type(made).__name__}. It must return an AttentionEngine.")
    return made


def show(args: argparse.Namespace) -> int:
    """Prints the program, or a kernel."""
    import torch

    from attention_engine.cli.tuning import arch_called

    options = {}
    if args.stage == "cuda" and not torch.cuda.is_available():
        options["device"] = arch_called(args.arch)
    engine = engine_of(args, **options)
    print(engine)
    print()
    print(engine.program() if args.stage == "program" else engine.source(args.kernel, form=args.stage))
    return 0


def check(args: argparse.Namespace) -> int:
    """Runs engine.check on random tensors; 1 where it is not ok."""
    import torch

    here = torch.cuda.is_available()
    engine = engine_of(args, **({} if here else {"backend": "interpret"}))
    place, dtype = "cuda" if here else "cpu", getattr(torch, args.dtype)
    q, k, v = engine._metas()
    sizes = {"batch": 1, "heads": q.heads, "seq_len": args.length, "seq_len_kv": args.length}
    tensors = [torch.randn(1, args.length, m.heads, m.dim, device=place).to(dtype) for m in (q, k, v)]
    if engine.layout == "bhsd":
        tensors = [t.transpose(1, 2) for t in tensors]
    custom = [
        torch.rand([sizes[a] if isinstance(a, str) else a for a in s.axes], device=place)
        for s in engine.custom_io.specs.values()
    ]
    report = engine.check(*tensors, *custom)
    print(report)
    return 0 if report.ok else 1


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
