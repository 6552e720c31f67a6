"""Parts of TVM that no kernel needs are imported when somebody asks for them: a quarter of TileLang's import.

TileLang 0.1.15 imports all of TVM, with its compiler of neural networks, its library of operators and its search for
schedules: 380 of 930 modules. It uses none of them, but for a class that an annotation names. A tenth of what is left
of its import is a dozen macros of its own that it rewrites: these are found on disk, as those of kernels are.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import LazyLoader

from attention_engine.codegen.patches import remembered
from attention_engine.codegen.patches.scope import Undo, within

VERSION = "0.1.15"  # of TileLang
PROOF = "test_tilelang_imports_what_no_kernel_needs"  # it fails once TileLang does without
NETWORKS = "tvm.relax"
LATER = (NETWORKS, "tvm.topi", "tvm.s_tir.meta_schedule", "tvm.s_tir.dlight", "tvm.s_tir.tensor_intrin", "tvm.rpc")
MACROS = "tilelang.language.eager.builder"  # whoever defines a macro imports it before


class _Loaded(Loader):
    """Hands out a module that its parent has imported meanwhile."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """That module."""
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        """It ran."""
        module.__spec__ = self.spec


class _WithMacros(Loader):
    """Runs the module as its own loader does; then macros are looked for on disk."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        """As its own loader does."""
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """The same, then ours."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _Finder.undo = remembered.put()


class _Finder:
    """Finds these modules as others do, and has them run at their first attribute."""

    importing = False  # TileLang, by us
    undo: Undo | None = None  # puts back what stood where macros are rewritten

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """None for any other."""
        if name in sys.modules and name.startswith(LATER):  # Python looked at its parent, which ran then
            return ModuleSpec(name, _Loaded(sys.modules[name]))
        if not cls.importing or name not in (*LATER, MACROS):
            return None
        others = (each for each in sys.meta_path if each is not cls)
        found = next(filter(None, (each.find_spec(name, path) for each in others)), None)
        if found is not None and found.loader is not None:
            found.loader = LazyLoader(found.loader) if name in LATER else _WithMacros(found.loader)
        return found


_one_thread = threading.Lock()


@contextlib.contextmanager
def imported_later() -> Iterator[None]:
    """TileLang is imported inside without them, where neither it nor TVM is there yet; by one thread, others wait."""
    with _one_thread:
        if {"tilelang", "tvm"} & sys.modules.keys():
            yield
        else:
            with _without():
                yield


@contextlib.contextmanager
def _without() -> Iterator[None]:
    asked = types.ModuleType(NETWORKS)
    asked.TensorType = object  # type: ignore[attr-defined] # what TileLang annotates parameters with
    sys.modules[NETWORKS] = asked
    sys.meta_path.insert(0, _Finder)
    _Finder.importing = True
    try:
        with within():
            yield
    finally:
        if _Finder.undo is not None:
            _Finder.undo()
            _Finder.undo = None
        if sys.modules.get(NETWORKS) is asked:
            del sys.modules[NETWORKS]
        with contextlib.suppress(ImportError):  # there is no TVM
            importlib.import_module(NETWORKS)
        _Finder.importing = False
