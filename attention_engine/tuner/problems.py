"""What a tune file calls a problem: everything that changes which tile is best, readably."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from attention_engine.arch import Arch
from attention_engine.codegen.cache import tilelang_version
from attention_engine.ir.problem import Problem
from attention_engine.passes.analyse_mask import MaskPlan, analyse_mask
from attention_engine.passes.maths import Maths
from attention_engine.plan.forms import KernelName
from attention_engine.plan.targets import Target


def bucket(length: int) -> int:
    """The power of two at or above a length; lengths of one bucket share a tile."""
    return 1 << max(length - 1, 0).bit_length()


def mask_class(plan: MaskPlan) -> str:
    """What kind of mask it is, as tiles see it: full, causal, band (several bounds) or pairs (asked one by one)."""
    if not plan.exact:
        return "pairs"
    match plan.bounds:
        case ():
            return "full"
        case (bound,) if bound.q > 0 > bound.kv:
            return "causal"
        case _:
            return "band"


def gpu_name(target: Target) -> str:
    """The GPU as keys name it: one chip is sold with several numbers of SMs."""
    return f"{target.name}, {target.sm_count} SMs" if isinstance(target, Arch) else target


def problem_key(
    kernel: KernelName, maths: Maths, problem: Problem, target: Target, lengths: tuple[int, int], over_queries: bool,
    wanted: tuple[str, ...] = (),
) -> dict[str, Any]:  # fmt: skip
    """The key of a problem. lengths: queries and keys; over_queries: is dQ made without atomics? wanted: the custom
    inputs whose gradients are asked for."""
    named = {"forward": "forward", "backward": "backward", "queries": "backward over queries"}[kernel]
    key: dict[str, Any] = {
        "kernel": "backward over keys" if kernel == "backward" and over_queries else named,
        "program": maths.program.fingerprint,
        "mask": mask_class(analyse_mask(maths.program.mask)),
        "dtype": "tf32" if problem.tf32 else problem.dtype,
        "dim": problem.dim,
        "dim_v": problem.dim_v,
        "group": problem.group,
        "q_length": bucket(lengths[0]),
        "kv_length": bucket(lengths[1]),
    }
    return key | common_key(target, problem.custom, wanted if kernel != "forward" else ())


def common_key(target: Target, custom: Iterable[tuple[str, str, Any]], gradients: Collection[str]) -> dict[str, Any]:
    """What all keys end with: where a kernel runs, its custom inputs' dtypes, and which of their gradients it makes."""
    key: dict[str, Any] = {
        "arch": target.target if isinstance(target, Arch) else target,
        "gpu": gpu_name(target),
        "tilelang": tilelang_version(),
    }
    dtypes = {name: dtype for name, dtype, _ in custom}
    return key | ({"custom": dtypes} if dtypes else {}) | ({"gradients": sorted(gradients)} if gradients else {})
