"""Works round shortfalls of what TileLang 0.1.15 prints, by rules on the CUDA text.

A thread reduces its part of a row by one chain of dependent operations: of a row of 128 scores it has 32 numbers, whose
maximum waits for each result in turn (4 to 6 clocks each). Four chains side by side wait for 8. Sums are then taken in
another order, the same in every run.

Descriptors of wgmma's operands are made from the thread's index. That it gives all threads of a warp the same number
ptxas can't see, so it moves each descriptor to uniform registers (R2UR) before each product, which waits for it. An
index that one lane tells the others is uniform to ptxas too. The hand-placed kernels of dense attention ask for it;
walks of linear attention spilled.

The address of a barrier is a name to ptxas, which it works out again at each use (from the number of the block in its
cluster: 20 of a step's 500 instructions, and what a step's first product waits for). An address that comes out of an
assembly statement is held in a register. The forward pass asks for it, for the threads that compute.

So is the index of a thread: of a kernel whose registers are all taken, ptxas reads it anew in each step (S2R), before
the addresses that the step's first row values wait for. The backward pass asks for it: whether ptxas held the index had
changed with other parts of the kernel, by 6 % of its time. Its copying threads, of which each has 24 registers, read
the index at each use: what is worked out of it is then not held over their loops, for which products would wait for one
another (ptxas C7512). Stores to a swizzled tile, whose places are made of the index, find them by turned bits
(swizzled.py), and additions to sums keep their address (carried.py). At head dims 64 gradients are stored by matrices
(matrices.py).
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from typing import Any

from attention_engine.codegen.patches.carried import with_carried_sums
from attention_engine.codegen.patches.choices import with_pairs_dropped, with_whole_products
from attention_engine.codegen.patches.descriptors import with_whole_descriptors
from attention_engine.codegen.patches.ended_reads import with_ended_reads
from attention_engine.codegen.patches.matrices import with_stored_matrices
from attention_engine.codegen.patches.scope import Patch, Undo
from attention_engine.codegen.patches.swizzled import with_turned_bits

FLAGS = ["-DATTENTION_ENGINE_PRINTED=4"]  # in the compiler's cache key: another text is another kernel
UNIFORM_FLAGS = ["-DATTENTION_ENGINE_UNIFORM_GROUPS=1"]
HELD_FLAGS = ["-DATTENTION_ENGINE_HELD_BARRIERS=1"]
THREAD_FLAGS = ["-DATTENTION_ENGINE_HELD_THREADS=3"]
ONE_CHAIN_FLAGS = ["-DATTENTION_ENGINE_ONE_CHAIN=1"]
CHAINS = 4

# A loop over `step` whose only line joins a term to one total: total = max(total, term), or total = (total + term).
_LOOP = re.compile(
    r"(?P<clear>[ \t]*(?P<cleared>\w+\[\w+\])\ =\ -CUDART_INF_F;\n)?"
    r"(?P<indent>[ \t]*)\#pragma\ unroll\n"
    r"[ \t]*for\ \(int\ (?P<step>\w+)\ =\ 0;\ \w+\ <\ (?P<count>\d+);\ \+\+\w+\)\ \{\n"
    r"[ \t]*(?P<total>\w+\[(?!(?P=step)\])\w+\])\ =\ "
    r"(?:(?P<greatest>max)\((?P=total),\ (?P<of>.+)\)|\((?P=total)\ \+\ (?P<term>.+)\));\n"
    r"[ \t]*\}\n",
    re.VERBOSE,
)


CALLED_WITH_TEXT = "tilelang_callback_cuda_postproc"
_ours = threading.local()


def put() -> Undo:
    """What TileLang prints is rewritten where `rewriting` is entered, after what another user does to it."""
    import tvm_ffi
    from tilelang.engine import register_cuda_postproc

    before = tvm_ffi.get_global_func(CALLED_WITH_TEXT, allow_missing=True)
    register_cuda_postproc(lambda code, target: _printed(code, target, before))
    registered = tvm_ffi.get_global_func(CALLED_WITH_TEXT)

    def undo() -> bool:
        if tvm_ffi.get_global_func(CALLED_WITH_TEXT, allow_missing=True) != registered:
            return False
        if before is None:
            tvm_ffi.remove_global_func(CALLED_WITH_TEXT)
        else:
            register_cuda_postproc(before)
        return True

    return undo


@contextlib.contextmanager
def rewriting(
    uniform_groups: bool = False, one_chain: bool = False, held_barriers: bool = False, held_threads: bool = False,
    stored_matrices: bool = False, whole_descriptors: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Kernels that this thread compiles inside are ours; those of others stay as they are."""
    asked = {
        with_ended_reads: True, with_pairs_dropped: True, with_whole_products: True, in_chains: not one_chain,
        with_uniform_groups: uniform_groups, with_held_barriers: held_barriers, with_held_threads: held_threads,
        with_stored_matrices: stored_matrices, with_turned_bits: held_threads, with_carried_sums: held_threads,
        with_whole_descriptors: whole_descriptors,
    }  # fmt: skip
    _ours.rules = [rule for rule, wanted in asked.items() if wanted]
    try:
        yield
    finally:
        _ours.rules = []


def _printed(code: str, target: Any, before: Any) -> str:
    code = code if before is None else str(before(code, target))
    for rule in getattr(_ours, "rules", []):
        code = rule(code)
    return code


def in_chains(cuda: str) -> str:
    """The source with each such loop over float32 in CHAINS chains."""
    return _LOOP.sub(_rewritten, cuda)


def _rewritten(loop: re.Match[str]) -> str:
    count, total, step, indent = int(loop["count"]), loop["total"], loop["step"], loop["indent"]
    declared = re.search(rf"\bfloat {re.escape(total.split('[')[0])}\[", loop.string)
    if declared is None or count % CHAINS or count < 4 * CHAINS or total in (loop["of"] or loop["term"]):
        return loop[0]
    term = loop["of"] or loop["term"]
    part = f"{total.split('[')[0]}_part"
    each = f"{part}[{step} & {CHAINS - 1}]"
    cleared = loop["clear"] is not None and loop["cleared"] == total and bool(loop["greatest"])
    if loop["greatest"]:
        first, joined = term if cleared else f"max({total}, {term})", f"max({each}, {term})"
        end = f"max(max({part}[0], {part}[1]), max({part}[2], {part}[3]))"
    else:
        first, joined = f"{total} + {term}", f"{each} + {term}"
        end = f"({part}[0] + {part}[1]) + ({part}[2] + {part}[3])"
    lines = [
        "{",
        f"  float {part}[{CHAINS}];",
        "  #pragma unroll",
        f"  for (int {step} = 0; {step} < {count}; ++{step}) {{",
        f"    {each} = {step} == 0 ? {first} : {step} < {CHAINS} ? {term} : {joined};",
        "  }",
        f"  {total} = {end};",
        "}",
    ]
    return (loop["clear"] or "") + "".join(f"{indent}{line}\n" for line in lines)


_GROUP = "(((int)threadIdx.x) >> 7)"
_BODY = re.compile(r"^extern \"C\" __global__ void .*\{$\n", re.MULTILINE)


def with_uniform_groups(cuda: str) -> str:
    """The source with the number of a thread's warpgroup worked out once a kernel, by one lane for its warp."""
    if "wgmma" not in cuda or _GROUP not in cuda:
        return cuda
    declared = f"  const int warpgroup = __shfl_sync(0xffffffffu, {_GROUP}, 0);\n"
    return _BODY.sub(lambda body: body[0] + declared, cuda.replace(_GROUP, "warpgroup"))


_THREAD = "((int)threadIdx.x)"


# The index of a thread, read here and now.
_AGAIN = """\
#ifndef THREAD_AGAIN
#define THREAD_AGAIN
static __device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
#endif
"""
_COPYING = re.compile(r"tl::warpgroup_reg_dealloc<\d+>\(\);\n.*?tl::warpgroup_reg_alloc<", re.DOTALL)


# A loop of statements that hold no other, and a statement, which ask for it.
_LOOPS = re.compile(r"^( *)(?:#pragma unroll[^\n]*\n *)?for \([^\n]*\) \{\n(?:\1  [^\n{}]*;\n)+\1\}\n", re.MULTILINE)
_TWICE = ".*".join(["", re.escape(_THREAD), re.escape(_THREAD), ""])
_OFTEN = re.compile(rf"^( *)(?:\(\(|\w+(?:\[[^=]*\])? = ){_TWICE};\n", re.MULTILINE)


def _read_once(found: re.Match[str]) -> str:
    """The same with the index read once, before it."""
    if _THREAD not in found[0]:
        return found[0]
    return f"{found[1]}{{ const int again = thread_again();\n{found[0].replace(_THREAD, 'again')}{found[1]}}}\n"


def with_held_threads(cuda: str) -> str:
    """The source with the index of a thread in a register; read anew at each statement or innermost loop by the threads
    that gave theirs up."""
    copying = _COPYING.search(cuda)
    if copying is not None:
        again = _OFTEN.sub(_read_once, _LOOPS.sub(_read_once, copying[0])).replace(_THREAD, "thread_again()")
        cuda = cuda[: copying.start()] + again + cuda[copying.end() :]
    held = "  const int thread = thread_again();\n"
    return _BODY.sub(lambda body: _AGAIN + body[0] + held, cuda.replace(_THREAD, "thread"))


# The barriers, at an address that is in a register.
_HELD = """\
const auto held = [](uint64_t* barriers) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
  asm volatile("mov.u32 %0, %0;" : "+r"(address));
  return reinterpret_cast<Barrier*>(__cvta_shared_to_generic(address));
};
"""
_BARRIERS = re.compile(r"^  auto (\w+) = reinterpret_cast<Barrier\*>\(\1_mem\);\n", re.MULTILINE)
_COMPUTING = re.compile(r"^([ ]+)tl::warpgroup_reg_alloc<\d+>\(\);\n", re.MULTILINE)


def with_held_barriers(cuda: str) -> str:
    """The source with addresses of barriers in registers, of the threads that ask for more of those."""
    start = _COMPUTING.search(cuda)
    if start is None:
        return cuda
    used = [name for name in _BARRIERS.findall(cuda) if f" {name}[" in cuda[start.end() :]]
    lines = [*_HELD.splitlines(), *(f"Barrier* const {name} = held({name}_mem);" for name in used)]
    return cuda[: start.end()] + "".join(f"{start[1]}{line}\n" for line in lines) + cuda[start.end() :]


PATCH = Patch(
    defect="rows are reduced in one chain; warpgroups, barriers and threads are numbered anew at each use",
    version="0.1.15",
    proof="test_tilelang_prints_what_our_rules_rewrite",
    put=put,
)
