"""Compiles the kernels of test_numerics.py for a GPU that need not be here, so that a machine with one only runs them.

    ATTENTION_ENGINE_CACHE_DIR=kernels python -m tests.gpu.compile --arch H100 --jobs 2 --only float16-heads_equal

The GPU's machine then runs the tests with the same ATTENTION_ENGINE_CACHE_DIR, from the same sources.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ProcessPoolExecutor, as_completed

from attention_engine import arch
from tests.cases import CASES, Shape, engine_for
from tests.gpu.test_numerics import CAUSAL, DIMS, DTYPES, HEADS, LENGTHS

Group = tuple[str, str, str, str]  # dtype, heads, dims, case, as in the test's name


def compile_group(group: Group, gpu: str) -> int:
    """How many kernels a test runs, compiled."""
    dtype, heads, dims, name = group
    length = next(iter(LENGTHS))
    shape = Shape(LENGTHS[length], length, length, *HEADS[heads], *DIMS[dims])
    engines = [engine_for(CASES[name], shape, DTYPES[dtype], causal) for causal in CAUSAL.values()]
    return sum(len(engine.compile_for(getattr(arch, gpu)())) for engine in engines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="H100", help="of attention_engine.arch")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a test's name: dtype-heads-dims-case")
    args = parser.parse_args()
    groups = [g for g in itertools.product(DTYPES, HEADS, DIMS, CASES) if args.only in "-".join(g)]
    with ProcessPoolExecutor(args.jobs) as pool:
        running = {pool.submit(compile_group, group, args.arch): group for group in groups}
        for done, future in enumerate(as_completed(running), 1):
            print(f"{done}/{len(groups)} {'-'.join(running[future])}: {future.result()} kernels", flush=True)


if __name__ == "__main__":
    main()
