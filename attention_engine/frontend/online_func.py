"""What users write to say how a row of scores becomes weights: row states, their first values, and the base class."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from attention_engine.errors import BadInitialValue, UnknownArgument, as_given
from attention_engine.frontend.frames import where_from
from attention_engine.frontend.symbols import SymbolicArray, SymbolicTensor

Rows = Mapping[str, Any]
METHODS = ("online_fwd", "online_fwd_epilogue", "forward", "backward", "combine")


class Var:
    """The first value of a row state: a number, or its text ("-inf", "0.0")."""

    def __init__(self, value: str | float) -> None:
        if hasattr(type(value), "requires_grad"):
            raise BadInitialValue(
                f"{where_from()}Var was given a tensor. A row state starts at a number: Var('0.0').\n"
                "  Read the tensor where the state is used, in online_fwd or online_fwd_epilogue."
            )
        try:
            self.value = float(value)
        except (TypeError, ValueError, OverflowError):
            self.value = math.nan
        if math.isnan(self.value):
            raise BadInitialValue(
                f"{where_from()}Var({as_given(value)}) is no number. Write Var('-inf'), Var('0.0') or Var(1.0)."
            )

    def __repr__(self) -> str:
        return f'Var("{self.value}")'


class SymbolScalar:
    """Declares a row state or a returned row: SymbolScalar("m", Var("-inf")). The key it stands under is its name."""

    def __init__(self, name: str, value: Var | float) -> None:
        self.name = name
        self.value = value if isinstance(value, Var) else Var(value)

    def __repr__(self) -> str:
        return f'SymbolScalar("{self.name}", {self.value})'


class OnlineFunc:
    """How a row of scores becomes weights, tile by tile. Subclasses declare row states and write static methods.

    - `online_fwd(scores, online_rowscales, b, h, q_idx) -> (weights, new_rowscales, rescale)` takes one tile of scores
      and the states so far; `rescale` is the factor for the output so far, 1 for none.
    - `online_fwd_epilogue(o, online_rowscales, b, h, q_idx) -> (o, final_rowscales)` is the end of the row.
    - `forward(scores, final_rowscales, b, h, q_idx, kv_idx) -> weights`, which may be left out, makes final weights.
    - `backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx) -> dscores`, which may be left out,
      is the gradient of the scores. `scores` are the final weights, `dp` is dO . v, and `doosum_rowscales` is the row
      sum of O * dO.
    - `combine(final_rowscales) -> factor`, which may be left out, is what the outputs of parts of a row are multiplied
      with before they are added, of the rows that each part returned; `get_reduce` runs over parts.

    Each may take the custom inputs as one more, last argument. What isn't written is derived. States are fp32 numbers,
    one for each (batch, head, query).

    Args:
        online_rowscales: row states by name, each with its first value: a number, a Var or a SymbolScalar.
        final_rowscales: rows that the epilogue returns, by name.

    >>> class Mean(OnlineFunc):  # every key counts alike
    ...     def __init__(self):
    ...         super().__init__({"count": 0.0}, {})
    ...
    ...     @staticmethod
    ...     def online_fwd(scores, online_rowscales, b, h, q_idx):
    ...         ones = scores * 0 + 1
    ...         return ones, {"count": online_rowscales["count"] + ones.get_reduce("sum")}, 1
    ...
    ...     @staticmethod
    ...     def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
    ...         return o / online_rowscales["count"], {}
    >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
    >>> bool((AttentionEngine(online_func=Mean())(q, k, v) - v.mean(1, keepdim=True)).abs().max() < 1e-5)
    True
    """

    forward: Any = None
    backward: Any = None
    combine: Any = None

    def __init__(
        self,
        online_rowscales: Mapping[str, SymbolScalar | Var | float] | None = None,
        final_rowscales: Mapping[str, SymbolScalar | Var | float] | None = None,
    ) -> None:
        self.online_rowscales = dict(online_rowscales or {})
        self.final_rowscales = dict(final_rowscales or {})

    def __init_subclass__(cls, **named: Any) -> None:
        """UnknownArgument where a method's name is nearly that of one which the class leaves as it is."""
        super().__init_subclass__(**named)
        for name in [n for n in vars(cls) if not n.startswith("_") and n not in METHODS and callable(getattr(cls, n))]:
            for meant in difflib.get_close_matches(name, METHODS, 1, 0.8):
                if getattr(cls, meant) is getattr(OnlineFunc, meant):
                    raise UnknownArgument(
                        f"{cls.__name__} has a method {name!r}, which nobody calls. Name it {meant!r}."
                    )

    @staticmethod
    def online_fwd(
        scores: SymbolicTensor, online_rowscales: Rows, b: SymbolicArray, h: SymbolicArray, q_idx: SymbolicArray
    ) -> tuple[Any, dict[str, Any], Any]:
        """Weights are the scores, unless a subclass says otherwise."""
        return scores, dict(online_rowscales), 1.0

    @staticmethod
    def online_fwd_epilogue(
        o: SymbolicArray, online_rowscales: Rows, b: SymbolicArray, h: SymbolicArray, q_idx: SymbolicArray
    ) -> tuple[Any, dict[str, Any]]:
        """The output is the sum of weights times v, unless a subclass says otherwise."""
        return o, {}
