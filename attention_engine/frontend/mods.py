"""Runs a user's mods of q, k, v and decay once, on symbols, and notes what they do as a LinearProgram."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attention_engine.errors import WrongResult
from attention_engine.frontend.advice import of_entries
from attention_engine.frontend.custom_io import CustomInputs, CustomIO
from attention_engine.frontend.symbols import convert, lift, wrap
from attention_engine.frontend.tracing import call, captured_names, is_number, place_of, wide_inputs
from attention_engine.ir.expr import Op, Type, const, substitute, topological
from attention_engine.ir.linear import LinearProgram, X
from attention_engine.ir.program import KV_IDX, Q_IDX
from attention_engine.ir.verify import checked, verify_linear
from attention_engine.passes.simplify import simplify
from attention_engine.passes.widths import widen

Mod = Callable[..., Any]


def trace_mods(
    mods: Mapping[str, Mod | None], custom_io: CustomIO, custom_types: Mapping[str, Type] | None = None,
    decay_given: bool = True,
) -> LinearProgram:  # fmt: skip
    """The program that the mods write. A mod that is None leaves its tensor as it is.

    mods: (x, custom) -> x, elementwise, for "q", "k", "v" and "decay". custom_types: as in tracing.py. Without a decay
    tensor its x is 0. Raises WrongResult, WrongArity, and what symbols raise.
    """
    custom = CustomInputs(custom_io, custom_types or {})
    with of_entries():
        traced = {name: _trace_mod(mods.get(name), name, custom) for name in ("q", "k", "v", "decay")}
    if not decay_given:
        (traced["decay"],) = simplify(substitute(traced["decay"], {X: const(0.0)}))
    wide = wide_inputs(custom_types or {})
    typed = {name: widen(expr, wide=wide)[0] for name, expr in traced.items()}
    return checked(verify_linear, LinearProgram(**typed, custom=tuple(custom_io.specs)), captured_names())


def _trace_mod(mod: Mod | None, name: str, custom: CustomInputs) -> Any:
    if mod is None:
        return X
    result = call(mod, "x", [wrap(X)], custom)
    if not is_number(result):
        hint = " (is a `return` missing?)" if result is None else ""
        raise WrongResult(
            f"{place_of(mod)} returned {type(result).__name__}. {name}_mod returns a symbolic value, or a number{hint}."
            + "\n  A tensor has an entry for each token or head: declare it, CustomIO({'s': ('heads',)}), and write "
            "custom['s']." * hasattr(type(result), "requires_grad")
        )
    expr = substitute(convert(lift(result), Type.FLOAT), {KV_IDX: Q_IDX})  # one token: "seq_len_kv" is "seq_len" here
    if any(n.op is Op.REDUCE for n in topological(expr)):
        raise WrongResult(f"{place_of(mod)} reduces over keys. {name}_mod is elementwise: nothing to reduce.")
    return simplify(expr)[0]
