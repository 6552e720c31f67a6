"""What SCRIPT[:NAME] names: the engines of a Python file.

NAME is an engine, a torch.nn.Module that holds engines, an OnlineFunc, a score_mod, a mask_mod, or a function that
makes engines or modules. Without NAME it is the file's first engine or module, else its make_engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attention_engine.errors import BadScript, did_you_mean

if TYPE_CHECKING:
    from attention_engine import AttentionEngine, LinearAttentionEngine

    AnyEngine = AttentionEngine | LinearAttentionEngine

MAKER = "make_engine"
WAY_OUT = (
    "Name an engine, a module that holds engines, an OnlineFunc, a score_mod, a mask_mod, or a function of (qkv_meta, "
    "**options)\n  that returns an engine or a module: {}:NAME."
)


def load(path: Path) -> ModuleType:
    """A script as a module, its own folder importable."""
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise BadScript(f"there is no file {path}.{near} Give a Python file: show attn_script/mha.py.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadScript(f"{path} is no Python file. Give one: show attn_script/mha.py.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engines_of(args: argparse.Namespace, **options: Any) -> dict[str, AnyEngine]:
    """The engines that SCRIPT[:NAME] names, each with its place there. Raises BadScript."""
    file, _, name = args.script.partition(":")
    module = load(Path(file))
    usable = {n: v for n, v in vars(module).items() if not n.startswith("_") and _is_usable(v, module)}
    if not name:
        held = [n for n, v in usable.items() if _engines_in(n, v)]
        name = held[0] if held else MAKER
    if name not in vars(module):
        known = ", ".join(usable) or "none that can be shown"
        raise BadScript(
            f"{file} has no {name!r}.{did_you_mean(name, usable)} It has: {known}.\n  {WAY_OUT.format(file)}"
        )
    found = vars(module)[name]
    held_in = _engines_in(name, found)
    if held_in:
        return held_in
    made = _made(found, module, args, options)
    if not (held_in := _engines_in(name, made)):
        verb = "is" if made is found else "returned"
        raise BadScript(f"{file}:{name} {verb} {type(made).__name__}, with no engine in it.\n  {WAY_OUT.format(file)}")
    return held_in


def _is_usable(value: object, module: ModuleType) -> bool:
    """An engine, a module with engines, or a function or row function that was written in the file."""
    from attention_engine import OnlineFunc

    own = getattr(value, "__module__", None) == module.__name__
    kind = inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, OnlineFunc))
    return bool(_engines_in("", value)) or isinstance(value, OnlineFunc) or (own and kind)


def _engines_in(name: str, value: object) -> dict[str, AnyEngine]:
    """The value itself, or the engines that a module holds, by their places."""
    import torch

    from attention_engine import AttentionEngine, LinearAttentionEngine

    if not isinstance(value, torch.nn.Module):
        return {}
    inner = {f"{name}.{n}" if n else name: m for n, m in value.named_modules()}
    return {n: m for n, m in inner.items() if isinstance(m, (AttentionEngine, LinearAttentionEngine))}


def _made(found: Any, module: ModuleType, args: argparse.Namespace, options: Mapping[str, Any]) -> object:
    """What a function makes, or an engine with this function or row function in it."""
    from attention_engine import AttentionEngine, OnlineFunc, meta_tensor

    dim = args.dim or getattr(module, "D", 64)
    heads = (args.heads, args.kv_heads or args.heads, args.kv_heads or args.heads)
    metas = tuple(meta_tensor(1, n, args.length, dim, dtype=args.dtype) for n in heads)
    if isinstance(found, type) and issubclass(found, OnlineFunc):
        found = found()
    if isinstance(found, OnlineFunc):
        return AttentionEngine(metas, online_func=found, **options)
    if not callable(found):
        return found
    names = _parameters(found)
    if names[:1] == ["score"]:
        return AttentionEngine(metas, score_mod=found, **options)
    if len(names) in (4, 5) and names[:2] == ["b", "h"]:
        return AttentionEngine(metas, mask_mod=found, **options)
    return _call(found, names, metas, options)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _call(maker: Callable[..., Any], names: list[str], metas: object, options: Mapping[str, Any]) -> Any:
    """What a maker returns: of the metas, where it takes anything, and of the options that it takes."""
    if not names:
        return maker()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(maker).parameters.values())
    return maker(metas, **{n: value for n, value in options.items() if takes_all or n in names})
