"""Works round what makes TileLang 0.1.15 slow: Z3, asked thousands of times a kernel for what cannot be proved.

Its simplifier hands every comparison that it cannot decide to Z3: of the 16000 that a softmax's four kernels ask, all
but 12 have a counterexample, and to find it takes Z3's newer solver of linear arithmetic a millisecond each. The older
one, without searching for bounds and equalities that follow, takes half of that or less: lowering takes 40 to 55 % of
the time. The CUDA text stays the same, but for a condition that may stand twice where it stood once.

Where a product of two variables, or an integer taken as bits, is known of, it proves nothing at all, not even that 0
is not 0, until its budget is spent: 1.4 ms a question, 2000 of the 5300 of a backward kernel. So it takes them for any
number. The texts of the shared programs' kernels stayed the same.

Z3 has these parameters for the whole process alone. So this is the one change that others may meet, who lower a kernel
by TileLang in another thread at the same time. Before the first of our threads lowers and after the last, Z3 is as it
was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Lowered = TypeVar("Lowered")

VERSION = "0.1.15"  # of TileLang
PROOF = "test_tilelang_proves_slowly"  # it fails once TileLang is as quick without
QUICK = {
    "smt.arith.solver": 2,
    "smt.arith.propagation_mode": 0,
    "smt.arith.propagate_eqs": False,
    "smt.relevancy": 0,
    "smt.arith.nl": False,
    "smt.bv.enable_int2bv": False,
}


class _Threads:
    """The threads that lower by quick proofs, and what Z3's parameters were before the first of them."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.inside = 0
        self.before: dict[str, object] = {}


_threads = _Threads()


@contextmanager
def quick_proofs() -> Iterator[None]:
    """Z3's global parameters, which each solver takes over when it is made, are QUICK while any thread is inside."""
    import z3

    with _threads.changed:
        if not _threads.inside:
            _threads.before = {name: z3.get_param(name) for name in QUICK}
            for name, value in QUICK.items():
                z3.set_param(name, value)
        _threads.inside += 1
    try:
        yield
    finally:
        with _threads.changed:
            _threads.inside -= 1
            if not _threads.inside:
                for name, was in _threads.before.items():
                    z3.set_param(name, was)
                _threads.changed.notify_all()


def with_quick_proofs(lower: Callable[[], Lowered]) -> Lowered:
    """What `lower` returns, by quick proofs; by all that Z3 has where TileLang misses one that it needs."""
    from tvm.error import InternalError

    try:
        with quick_proofs():
            return lower()
    except InternalError:
        with _threads.changed:  # held: no thread sets quick ones meanwhile
            _threads.changed.wait_for(lambda: not _threads.inside)
            return lower()
