"""What to write in place of a function that has no meaning in a mod."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

ADVICE = {
    "softmax": "A row's normaliser is the engine's online_func: OnlineSoftmax(), or one of your own.",
    "mean": "A mean over a row is scores.get_reduce('sum') over a row state that counts keys.",
    "shape": "A mod sees one pair at a time. Put lengths into it as Python numbers, or as a custom input.",
    "dtype": "Values in a mod are fp32 numbers, ints (the indices) or conditions; x.to(torch.float32) converts.",
    "item": "A symbol stands for a value of every pair: it has no number yet.",
}


def known_functions(names: Iterable[str]) -> str:
    """The sentence that lists what symbols can do."""
    listed = ", ".join([*sorted(names), "get_reduce"])
    return "\n  ".join(textwrap.wrap(f"Known: + - * / ** // %, comparisons, & | ^ ~ << >>, {listed}.", 110))


def way_out(name: str, names: Iterable[str]) -> str:
    """What to write instead of this function, where the functions with these names are known."""
    if name in ADVICE:
        return ADVICE[name]
    if name.endswith("_") and name[:-1] in names:
        return f"Nothing is changed in place: use x = x.{name[:-1]}(...)."
    return known_functions(names)
