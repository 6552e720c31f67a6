"""Parts of TVM that no kernel needs are imported when somebody asks for them: a quarter of TileLang's import.

TileLang 0.1.15 imports all of TVM, with its compiler of neural networks, its library of operators and its search for
schedules: 380 of 930 modules. It uses none of them, but for a class that an annotation names.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import LazyLoader

VERSION = "0.1.15"  # of TileLang
PROOF = "test_tilelang_imports_what_no_kernel_needs"  # it fails once TileLang does without
NETWORKS = "tvm.relax"
LATER = (NETWORKS, "tvm.topi", "tvm.s_tir.meta_schedule", "tvm.s_tir.dlight", "tvm.s_tir.tensor_intrin", "tvm.rpc")


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


class _Finder:
    """Finds these modules as others do, and has them run at their first attribute."""

    importing = False  # TileLang, by us

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """None for any other."""
        if name in sys.modules and name.startswith(LATER):  # Python looked at its parent, which ran then
            return ModuleSpec(name, _Loaded(sys.modules[name]))
        if not cls.importing or name not in LATER:
            return None
        others = (each for each in sys.meta_path if each is not cls)
        found = next(filter(None, (each.find_spec(name, path) for each in others)), None)
        if found is not None and found.loader is not None:
            found.loader = LazyLoader(found.loader)
        return found


@contextlib.contextmanager
def imported_later() -> Iterator[None]:
    """TileLang is imported inside without them, where neither it nor TVM is there yet."""
    if {"tilelang", "tvm"} & sys.modules.keys():
        yield
        return
    asked = types.ModuleType(NETWORKS)
    asked.TensorType = object  # type: ignore[attr-defined] # what TileLang annotates parameters with
    sys.modules[NETWORKS] = asked
    sys.meta_path.insert(0, _Finder)
    _Finder.importing = True
    try:
        yield
    finally:
        if sys.modules.get(NETWORKS) is asked:
            del sys.modules[NETWORKS]
        with contextlib.suppress(ImportError):  # there is no TVM
            importlib.import_module(NETWORKS)
        _Finder.importing = False
