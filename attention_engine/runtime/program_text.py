"""What `program()` returns: numbered lines with the user's file and line beside them, and LaTeX in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from attention_engine.ir import latex
from attention_engine.ir.expr import Expr
from attention_engine.ir.pretty import lines

PLACE = 58  # the column at which a line's place begins


@dataclass(frozen=True)
class Part:
    """Some lines of a program under a title.

    given: lines that are no expressions, as (name, number). places: by the result, or by what stands before its dot,
    the user's line that it is of.
    """

    title: str
    results: tuple[tuple[str, Expr], ...] = ()
    prefix: str = "v"
    given: tuple[tuple[str, float], ...] = ()
    places: Mapping[str, str] | None = None


class ProgramText(str):
    """The text of a program; in a notebook its formulas are drawn."""

    formulas: str

    def __repr__(self) -> str:
        return str(self)

    def _repr_latex_(self) -> str:
        return self.formulas


def program_text(parts: Iterable[Part]) -> ProgramText:
    """The parts one after the other, their lines numbered throughout."""
    said, drawn, number = [], [], 0
    for part in parts:
        said += [""] if number else []
        said.append(f"# {part.title}")
        drawn.append(rf"& \textit{{{_escaped(part.title)}}}")
        told = [f"{name} = {value}" for name, value in part.given] + lines(part.results, part.prefix)
        for line in told:
            number += 1
            left = line.split(" = ", 1)[0]
            place = (part.places or {}).get(left) or (part.places or {}).get(left.split(".")[0], "")
            numbered = f"{number:3}  {line}"
            said.append(f"{numbered + '  ':{PLACE}}# {place}" if place else numbered)
        drawn += [rf"{latex.name(name)} &= {_spell(value)}" for name, value in part.given]
        drawn += latex.aligned(part.results, part.prefix)
    text = ProgramText("\n".join(said))
    text.formulas = "$$\\begin{aligned}\n" + " \\\\\n".join(drawn) + "\n\\end{aligned}$$"
    return text


def _spell(value: float) -> str:
    return {float("-inf"): r"-\infty", float("inf"): r"\infty"}.get(value, f"{value:g}")


def _escaped(words: str) -> str:
    for sign, spelled in (("\\", ""), ("#", ""), ("_", r"\_"), ("&", r"\&"), ("**", "^"), ("^", r"\^{}")):
        words = words.replace(sign, spelled)
    return words
