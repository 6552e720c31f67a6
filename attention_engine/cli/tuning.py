"""python -m attention_engine tune, explain: tiles of the benchmark cases."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from attention_engine import arch
from attention_engine.errors import UnknownOption, did_you_mean

if TYPE_CHECKING:
    from attention_engine import AttentionEngine
    from attention_engine.tuner.cases import Case

TUNE_EXAMPLE = """tune "mha-128.softmax.*.8192" --file tiles.json --backward
  python -m attention_engine tune --merge all.json a.json b.json"""
EXPLAIN_EXAMPLE = "explain llama-8b.softmax.causal.8192 --file tiles.json --arch H100"


def add_options(tune_parser: argparse.ArgumentParser, explain_parser: argparse.ArgumentParser) -> None:
    """Cases, files and budgets."""
    names = "shape.program.mask.length, * stands for any; a wrong name lists them"
    tune_parser.add_argument("cases", nargs="*", metavar="CASE", help=names)
    tune_parser.add_argument("--file", help="the tune file; what it holds is not measured again")
    tune_parser.add_argument("--backward", action="store_true", help="the backward kernels too")
    tune_parser.add_argument("--trials", type=int, default=24, help="most tiles to try for a kernel (default 24)")
    tune_parser.add_argument("--seconds", type=float, default=75, help="most seconds for a kernel (default 75)")
    tune_parser.add_argument("--merge", nargs="+", metavar="FILE", help="INTO FROM...: join tune files to the first")
    explain_parser.add_argument("cases", nargs="+", metavar="CASE", help=names)
    explain_parser.add_argument("--file", help="a tune file to look in")
    explain_parser.add_argument("--arch", help=f"the GPU, if not this machine's: {', '.join(_archs())}")
    for parser in (tune_parser, explain_parser):
        parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16", "float32"))


def _archs() -> dict[str, Any]:
    return {gpu.__name__: gpu for gpu in arch.KNOWN_GPUS}


def arch_called(name: str) -> arch.Arch:
    """The description of a GPU. Raises UnknownOption."""
    known = _archs()
    if name not in known:
        raise UnknownOption(f"no GPU is called {name!r} here.{did_you_mean(name, known)} Choose {', '.join(known)}.")
    found: arch.Arch = known[name]()
    return found


def engine_for(case: Case, dtype: str, **options: Any) -> AttentionEngine:
    """The engine of a case."""
    from attention_engine import AttentionEngine

    return AttentionEngine(case.metas(dtype), **case.options(), **options)


def tune(args: argparse.Namespace) -> int:
    """Merges, or measures the cases one after the other."""
    from attention_engine.tuner import store

    if args.merge:
        into, *others = args.merge
        if args.cases or not others:
            raise UnknownOption("--merge takes INTO and at least one FROM, and no cases: tune --merge all.json a.json.")
        print(f"{into} holds {store.merge(into, *others)} entries")
        return 0
    import torch

    from attention_engine.tuner.cases import find

    if not args.cases or not args.file:
        raise UnknownOption("tune wants cases and a file: tune mha-128.softmax.causal.8192 --file tiles.json.")
    found = find(*args.cases)
    if not torch.cuda.is_available():
        print("There is no GPU to measure on. Default tiles are used.", file=sys.stderr)
        return 1
    failed = sum(not _tune(case, args) for case in found)
    return 1 if failed else 0


def _tune(case: Case, args: argparse.Namespace) -> bool:
    import torch

    from attention_engine.errors import AttentionEngineError
    from attention_engine.tuner.search import Budget

    engine = engine_for(case, args.dtype, tune=True, tune_bwd=args.backward, tune_file=args.file)
    engine.tuning.budget = Budget(args.trials, args.seconds)
    dtype, sizes = getattr(torch, args.dtype), {"heads": case.shape.heads}
    shape = case.shape
    q, k, v = (
        torch.randn(shape.batch, case.length, heads, dim, device="cuda").to(dtype)
        for heads, dim in ((shape.heads, shape.dim), (shape.kv_heads, shape.dim), (shape.kv_heads, shape.dim_v))
    )
    custom = [
        torch.full([sizes[a] if isinstance(a, str) else a for a in s.axes], 0.1, device="cuda")
        for s in engine.custom_io.specs.values()
    ]
    try:
        output = engine(q.requires_grad_(args.backward), k, v, *custom)
        if args.backward:
            output.backward(torch.ones_like(output))
    except AttentionEngineError as error:
        print(f"{case.name}: {type(error).__name__}: {error}", flush=True)
        return False
    if not engine.tuning.results:
        print(f"{case.name}: {args.file} holds it", flush=True)
    for result in engine.tuning.results.values():
        both = result.default_us and result.best.time_us and result.default_us / result.best.time_us
        default = f"{both:.3f}" if both else "the default did not run"
        print(f"{case.name}: {result.best.tile}, {result.best.time_us:.1f} us, default / tuned {default}, "
              f"{result.counts()}", flush=True)  # fmt: skip
    return True


def explain(args: argparse.Namespace) -> int:
    """Prints engine.explain() of the cases."""
    from attention_engine.tuner.cases import find

    device = arch_called(args.arch) if args.arch else None
    for number, case in enumerate(find(*args.cases)):
        if number:
            print()
        print(case.name)
        print(engine_for(case, args.dtype, device=device, tune_file=args.file).explain())
    return 0
