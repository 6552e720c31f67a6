"""What flex_attention's kernel_options mean here, and which are refused."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from attention_engine.errors import UnknownOption, as_given, did_you_mean
from attention_engine.runtime.inputs import check_options


class Options(NamedTuple):
    """What is asked of an engine beside its functions."""

    backend: str = "auto"
    deterministic: bool = False
    dropout_p: float = 0.0


USUAL = Options()
# What these promise of a mask, or choose among FlexAttention's kernels, holds of each kernel here.
HOLDS_ANYWAY = frozenset({"ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "FORCE_USE_FLEX_ATTENTION", "WRITE_DQ"})
TILES = frozenset({"BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_warps", "num_stages"})
OF_TRITON = frozenset({"PRESCALE_QK", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu"})
OURS = ("backend", "deterministic")


def read_options(given: Mapping[str, Any] | None) -> Options:
    """The options that an engine has; UnknownOption names one that has no meaning here."""
    if given is None:
        return USUAL
    if not isinstance(given, Mapping):
        raise UnknownOption(f"kernel_options is {type(given).__name__}. Give a dict.")
    try:
        return _read(tuple([(name, value, type(value)) for name, value in given.items()]))
    except TypeError:  # a value without a hash
        return _read.__wrapped__(tuple([(name, value, type(value)) for name, value in given.items()]))


@functools.lru_cache(maxsize=64)
def _read(items: tuple[tuple[str, Any, type], ...]) -> Options:
    """The same of a dict's items; types keep 1 and True apart."""
    given = {name: value for name, value, _ in items}
    for name, value in given.items():
        _check(name, value)
    backend, deterministic = given.get("backend", "auto"), given.get("deterministic", False)
    check_options(backend, "bhsd", None, None, (1, 1))
    if not isinstance(deterministic, bool):
        raise UnknownOption(f"kernel_options['deterministic'] is {as_given(deterministic)}. Give True or False.")
    return Options(backend, deterministic)


def _check(name: str, value: object) -> None:
    bare = str(name).removeprefix("fwd_").removeprefix("bwd_")
    if name in OURS or bare in HOLDS_ANYWAY or (name, value) == ("BACKEND", "AUTO"):
        return
    if bare in OF_TRITON and value is False:
        return
    found = f"kernel_options[{name!r}]"
    if bare in TILES:
        raise UnknownOption(
            f"{found} chooses a tile of FlexAttention's Triton kernels. Leave it out: the problem chooses tiles.\n"
            "  An AttentionEngine with tune=True measures them."
        )
    if bare in OF_TRITON:
        raise UnknownOption(f"{found} is for FlexAttention's Triton kernels. Leave it out.")
    if name == "BACKEND":
        raise UnknownOption(
            f'{found} is {as_given(value)}, one of FlexAttention\'s kernels. Leave it out, or give "AUTO". '
            'Which of this package\'s backends runs is kernel_options={"backend": "reference"}.'
        )
    known = [*OURS, *HOLDS_ANYWAY, "BACKEND"]
    raise UnknownOption(f"{found} is unknown.{did_you_mean(name, known)} Choose {', '.join(map(repr, sorted(known)))}.")
