"""Works round what makes TileLang 0.1.15 slow: Z3, asked thousands of times a kernel for what cannot be proved.

Its simplifier hands every comparison that it cannot decide to Z3: of the 16000 that a softmax's four kernels ask, all
but 12 have a counterexample, and to find it takes Z3's newer solver of linear arithmetic a millisecond each. The older
one, without searching for bounds and equalities that follow, takes half of that or less: lowering takes 40 to 55 % of
the time. The CUDA text stays the same, but for a condition that may stand twice where it stood once.

Z3 has these parameters for the whole process alone. So this is the one change that others may meet, who lower a kernel
by TileLang in another thread at the same time. Before and after, Z3 is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Lowered = TypeVar("Lowered")
_lock = threading.RLock()  # the parameters are the whole process's

VERSION = "0.1.15"  # of TileLang
PROOF = "test_tilelang_proves_slowly"  # it fails once TileLang is as quick without
QUICK = {
    "smt.arith.solver": 2,
    "smt.arith.propagation_mode": 0,
    "smt.arith.propagate_eqs": False,
    "smt.relevancy": 0,
}


@contextmanager
def quick_proofs() -> Iterator[None]:
    """Z3's global parameters, which each solver takes over when it is made, as QUICK says; as before afterwards."""
    import z3

    before = {name: z3.get_param(name) for name in QUICK}
    try:
        for name, value in QUICK.items():
            z3.set_param(name, value)
        yield
    finally:
        for name, value in before.items():
            z3.set_param(name, value)


def with_quick_proofs(lower: Callable[[], Lowered]) -> Lowered:
    """What `lower` returns, by quick proofs; by all that Z3 has where TileLang misses one that it needs."""
    from tvm.error import InternalError

    with _lock:
        try:
            with quick_proofs():
                return lower()
        except InternalError:
            return lower()
