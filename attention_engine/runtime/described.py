"""An engine in words: one line inside a model's repr, several where it is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attention_engine.frontend.meta import Meta
from attention_engine.frontend.online_func import OnlineFunc
from attention_engine.ir.program import Program
from attention_engine.passes.maths import Maths
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.engine import Engine
from attention_engine.runtime.program_text import Part

if TYPE_CHECKING:
    from attention_engine.runtime.linear_shown import LinearShown
    from attention_engine.runtime.shown import Shown

WIDTH = 112
BACKENDS = {
    "auto": "the kernels on CUDA tensors, the reference in PyTorch on CPU tensors",
    "tilelang": "the kernels, on CUDA tensors",
    "reference": "plain PyTorch; no kernel runs",
    "interpret": "the kernels, emulated tile by tile on CPU tensors",
}
PLAIN = {"layout": "bshd", "backend": "auto", "deterministic": False, "device": None}


def name_of(function: Any) -> str:
    """A function as it is called in its file: without the functions around it."""
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else str(name).rpartition("<locals>.")[2]


def line_of(function: Any) -> str:
    """Where a function stands, as `file.py:12`; nothing where it has no file."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}" if code else ""


def line_of_rows(online: OnlineFunc) -> str:
    """The same of a row function: of its `online_fwd`, where it wrote one."""
    return line_of(type(online).online_fwd)


def heads_of(metas: Sequence[Meta]) -> str:
    """Heads, dims and dtype in a few words."""
    q, k, v = metas
    parts = [f"{q.heads} heads of {q.dim}"]
    parts += [f"{k.heads} key heads"] if k.heads != q.heads else []
    parts += [f"{v.heads} value heads"] if v.heads != k.heads else []
    parts += [f"values of {v.dim}"] if v.dim != q.dim else []
    return ", ".join([*parts, q.dtype_name])


def _options(engine: Engine) -> list[str]:
    differ = [(name, getattr(engine, name)) for name, usual in PLAIN.items() if getattr(engine, name) != usual]
    return [f"{name}={value.name if name == 'device' else repr(value)}" for name, value in differ]


def in_one_line(engine: Shown) -> str:
    """The repr of an AttentionEngine."""
    parts = [heads_of(engine.qkv_meta)] if engine.qkv_meta else []
    for name in ("score_mod", "mask_mod"):
        if (function := getattr(engine, name)) is not None:
            parts.append(f"{name}={name_of(function)}")
    parts += [f"online_func={type(engine.online_func).__name__}()"]
    parts += [f"scale={engine.scale:.6g}"] if engine.qkv_meta else []
    return f"AttentionEngine({', '.join([*parts, *_options(engine)])})"


def linear_in_one_line(engine: LinearShown) -> str:
    """The repr of a LinearAttentionEngine."""
    parts = [heads_of(engine.qkv_meta)] if engine.qkv_meta else []
    parts += [f"{n}_mod={name_of(m)}" for n, m in engine.mods.items() if m is not None]
    return f"LinearAttentionEngine({', '.join([*parts, *_options(engine)])})"


def in_lines(engine: Shown) -> str:
    """An AttentionEngine as it is printed."""
    return _table("AttentionEngine", _lines_of(engine))


def _lines_of(engine: Shown) -> Iterator[tuple[str, str]]:
    yield from _shapes(engine)
    score, mask, online = engine.score_mod, engine.mask_mod, engine.online_func
    yield "score", "q . k" if score is None else _placed(score)
    yield "scale", engine._spell_scale()
    yield "mask", "none: every pair is kept" if mask is None else f"{_placed(mask)}; {_mask_in_words(engine)}"
    if engine._buffers.get("block_mask") is not None:
        yield "blocks", f"a block_mask of the engine, blocks of {engine.block_size[0]} x {engine.block_size[1]}"
    program = engine._program
    rows = ", ".join(state.name for state in program.states) or "none"
    returned = ", ".join(name for name, _ in program.finals) or "none"
    place = line_of_rows(online)
    written = [n for n in ("forward", "backward") if getattr(program, n) is not None]
    named = ", ".join([f"{type(online).__name__}()", *([place] if place else [])])
    yield "normaliser", f"{named}; row states: {rows}; returned rows: {returned}"
    yield from _inputs(engine)
    refusal = engine._maths().refusal
    derived = f"derived; yours: {', '.join(written)}" if written else "derived"
    yield "backward", derived if engine._maths().trained.backward is not None else f"none: {refusal}"
    yield from _running(engine)


def linear_in_lines(engine: LinearShown) -> str:
    """A LinearAttentionEngine as it is printed."""
    return _table("LinearAttentionEngine", _lines_of_linear(engine))


def _lines_of_linear(engine: LinearShown) -> Iterator[tuple[str, str]]:
    yield from _shapes(engine)
    yield "recurrence", "h = exp(decay) h + k^T v, o = q h, for each head, in fp32"
    for name, mod in engine.mods.items():
        yield name, f"as given: there is no {name}_mod" if mod is None else _placed(mod)
    yield from _inputs(engine)
    yield from _running(engine)


def _table(title: str, lines: Iterator[tuple[str, str]]) -> str:
    found = [title]
    for name, words in lines:
        found += textwrap.wrap(
            f"  {name:<12}{' '.join(words.split())}", WIDTH, subsequent_indent=" " * 14, break_on_hyphens=False
        )
    return "\n".join(found)


def _placed(function: Callable[..., Any]) -> str:
    place = line_of(function)
    return f"{name_of(function)}, {place}" if place else name_of(function)


def _shapes(engine: Engine) -> Iterator[tuple[str, str]]:
    order = "(batch, length, heads, dim)" if engine.layout == "bshd" else "(batch, heads, length, dim)"
    if not engine.qkv_meta:
        yield "q, k, v", f"heads, dims and dtype are those of a call; {order}"
        return
    q, k, _ = engine.qkv_meta
    hints = [("batch", q.batch), ("queries", q.length), ("keys", k.length)]
    said = ", ".join(f"{name} {value}" for name, value in hints if value is not None)
    yield "q, k, v", f"{heads_of(engine.qkv_meta)}; tensors are {order}"
    yield "sizes", f"{said} (hints: calls may have others)" if said else "any batch and length"


def _mask_in_words(engine: Shown) -> str:
    """What kernels do with the mask."""
    plan = plan_tiles(engine._program.mask)
    if plan.mask is None:
        return "keeps every pair"
    if not plan.mapped:
        return "bounds of loops: tiles without a kept pair are not visited, and whole tiles are not tested"
    each = " and ".join([*(["batch"] if plan.by_batch else []), *(["head"] if plan.by_head else [])])
    reads = f", made of {', '.join(sorted(plan.reads))} in each call" if plan.reads else ""
    return f"a list of the tiles that hold a kept pair{' for each ' + each if each else ''}{reads}"


def _inputs(engine: Engine) -> Iterator[tuple[str, str]]:
    if engine.custom_io.specs:
        yield "inputs", ", ".join(f"{s.name} {_axes(s.axes)}" for s in engine.custom_io.specs.values())
    if engine._captured:
        yield "captured", ", ".join(c.name for c in engine._captured) + " (read anew in each call)"


def _axes(axes: Sequence[object]) -> str:
    return f"({', '.join(map(str, axes))})"


def _running(engine: Engine) -> Iterator[tuple[str, str]]:
    device = "" if engine.device is None else f"; kernels are compiled for {engine.device.name}"
    yield "backend", f"{engine.backend}: {BACKENDS[engine.backend]}{device}"
    if engine.deterministic:
        yield "gradients", "bitwise the same in every run"
    found = sorted(set(_compiled(engine)))
    yield "kernels", f"ready in this process: {', '.join(found)}" if found else "none compiled in this process so far"


def _compiled(engine: Engine) -> Iterator[str]:
    """The kernels of calls so far, by the functions that make them."""
    for key in engine._keys.values():
        for each in (key, f"{key} trained"):
            program_kernels = getattr(ATTENTIONS.get(each), "program_kernels", None)
            for kernels in program_kernels._kernels.values() if program_kernels is not None else ():
                yield from (k.builder for k in kernels._made.values() if "compiled" in vars(k))


def parts_of(engine: Shown, program: Program) -> list[Part]:
    """An attention's program, with the user's functions beside its lines."""
    online = type(engine.online_func)
    functions: dict[str, object] = {"score": engine.score_mod, "keep": engine.mask_mod}
    functions |= dict.fromkeys(("next", "weights", "rescale"), online.online_fwd)
    functions |= dict.fromkeys(("output", "final"), online.online_fwd_epilogue)
    functions |= {f"user.{name}": getattr(online, name, None) for name in ("forward", "backward")}
    places = {n: f"{line_of(f)} {name_of(f)}" for n, f in functions.items() if f is not None and line_of(f)}
    start = tuple((f"state.{s.name}", s.initial) for s in program.states)
    return [
        *([Part("before the first tile", given=start)] if start else []),
        Part("each tile, then the end of the row", tuple(program.named()), places=places),
    ]


def parts_of_backward(maths: Maths) -> list[Part]:
    """The derived backward pass, and what comes before it where the output is bent."""
    found = []
    if maths.bent is not None:
        inner, bend = maths.bent.maths.program, maths.bent.bend
        gradients = [(f"d_{target}", gradient) for target, gradient in bend.gradients]
        start = tuple((f"state.{s.name}", s.initial) for s in inner.states)
        found = [
            Part("with gradients: this program, and what is made of its o and rows", given=start),
            Part("each tile, then the end of the row", tuple(inner.named())),
            Part("of its o and rows", (("output", bend.output), *gradients), prefix="b"),
        ]
    backward = maths.trained.backward
    if backward is None:
        return [*found, Part(f"no backward pass: {maths.refusal}")]
    return [*found, Part("backward: dweight = dO . v, delta = dO . o", tuple(backward.named()), prefix="g")]


def places_of(engine: Shown) -> str:
    """The user's functions with their files and lines, one after the other."""
    given = [f for f in (engine.score_mod, engine.mask_mod) if f is not None]
    rows = type(engine.online_func)
    return ", ".join(
        [*map(_placed, given), ", ".join(p for p in (rows.__name__, line_of_rows(engine.online_func)) if p)]
    )


def linear_places_of(engine: LinearShown) -> str:
    """The same of a linear attention's mods."""
    return ", ".join(_placed(mod) for mod in engine.mods.values() if mod is not None)
