"""What Python asks of a value and a symbol can't answer: its truth, a number, an entry. Errors say what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from attention_engine.errors import BranchOnSymbol, SymbolAsIndex, UnsupportedOperation
from attention_engine.frontend.advice import instead_of, said_of_count, said_of_index, said_of_lookup
from attention_engine.frontend.frames import is_calling, spelled, where_from
from attention_engine.ir.expr import Expr, Op, topological


class Unanswered:
    """Questions whose answer differs from pair to pair, so that none can be given while a function is traced."""

    __slots__ = ()
    FUNCTIONS: ClassVar[dict[str, Callable[..., Any]]]
    expr: Expr

    def __bool__(self) -> NoReturn:
        hint = any(node.op in (Op.BIT_AND, Op.BIT_OR, Op.BIT_XOR) for node in topological(self.expr))
        raise BranchOnSymbol(
            f"{where_from()}Python asked for the truth of a symbolic value, {self.expr}. "
            "Write where(condition, a, b), and & | ~ between conditions.\n"
            "  So for `if`, and for `and`, `or`, `not` (with brackets around comparisons). a < x < b becomes "
            "(a < x) & (x < b),\n  max(a, b) becomes a.max(b)."
            + "\n  Python reads a < b & c < d as a < (b & c) < d: put brackets around comparisons."
            * hint
        )

    def _no_number(self) -> NoReturn:
        way_out = instead_of(spelled(), self.FUNCTIONS)
        raise UnsupportedOperation(f"{where_from()}a symbolic value, {self.expr}, has no number yet. {way_out}")

    def _no_index(self) -> NoReturn:
        said = said_of_count(self.expr) if is_calling() else said_of_index(self.expr, spelled())
        raise SymbolAsIndex(f"{where_from()}{said}")

    def __array__(self, *asked: object, **named: object) -> NoReturn:
        """numpy asks where an array is read at a symbol, and where it would make an array of one."""
        if is_calling():
            self._no_number()
        self._no_index()

    def __hash__(self) -> NoReturn:  # as another object than any number it would be in no set, and no key of a dict
        raise SymbolAsIndex(f"{where_from()}{said_of_lookup(self.expr, spelled())}")

    __index__ = _no_index
    __float__ = __int__ = __len__ = __iter__ = __complex__ = __round__ = _no_number

    def _refuse(self, what: str, way_out: str) -> NoReturn:
        raise UnsupportedOperation(f"{where_from()}{what} has no meaning on a symbolic value, {self.expr}. {way_out}")

    def __divmod__(self, other: object) -> NoReturn:
        self._refuse("divmod", "Write a // b and a % b.")

    def __matmul__(self, other: object) -> NoReturn:
        self._refuse("@", "It is one number: multiply by *.")

    __rdivmod__, __rmatmul__ = __divmod__, __matmul__

    def __getitem__(self, index: object) -> NoReturn:
        custom = (
            "; the argument custom is another: score_mod(score, custom, ...), mask_mod(b, h, q_idx, kv_idx, custom)"
        )
        self._refuse(f"[{index!r}]", f"It is one number{custom * isinstance(index, str)}.")

    def __setitem__(self, index: object, value: object) -> NoReturn:
        self._refuse("x[...] = y", "Nothing is changed in place: x = where(condition, y, x).")

    def __contains__(self, other: object) -> NoReturn:
        self._refuse("`in`", "It is one number: compare with ==.")
