"""Names of torch and TileLang that they promise nobody, and we use: an upgrade shows at once what is gone."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tilelang")

PACKAGE = Path(__file__).resolve().parent.parent / "attention_engine"
LIBRARIES = ("torch", "tilelang", "tvm", "tvm_ffi")
# Parts of TileLang that its documents don't name.
INNER = ("tilelang.cuda", "tilelang.engine", "tilelang.language.eager", "tvm.script.ir_builder")

# Named in an import, or as an attribute of a library.
NAMED = {
    "tilelang.cuda.intrinsics.macro.wgmma_macro_generator.TensorCoreIntrinEmitter",
    "tilelang.engine.lower.lower_with_context",
    "tilelang.engine.register_cuda_postproc",
    "tilelang.language.eager.ast.IRGenerator",
    "tilelang.language.eager.builder",
    "tilelang.language.eager.builder.Builder",
    "tilelang.language.eager.builder._patch_prim_func_attrs",
    "tilelang.language.eager.utils",
    "tilelang.language.eager.utils.get_func_nonlocals",
    "torch._C._are_functorch_transforms_active",
    "torch._C._autograd._profiler_enabled",
    "torch._C._cuda_getCurrentRawStream",
    "torch._C._cuda_getDevice",
    "torch._C._cuda_isCurrentStreamCapturing",
    "torch._C._dynamo.guards._empty_strided_cpu",
    "torch._C._dynamo.guards._empty_strided_cuda",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._functorch.is_legacy_batchedtensor",
    "torch._C._functorch.unwrap_if_dead",
    "torch._C._len_torch_dispatch_stack",
    "torch._add_batch_dim",
    "torch._higher_order_ops.wrap.dynamo_bypassing_wrapper",
    "torch._remove_batch_dim",
    "torch.ops._c10d_functional",
    "torch.utils._pytree",
    "tvm.script.ir_builder.IRBuilder",
    "tvm.script.ir_builder.tirx",
}
# A torch without CUDA hasn't got them, nor needs them.
ON_GPUS = {"torch._C._cuda_getCurrentRawStream", "torch._C._cuda_getDevice"}
# Reached by what those are, or by a text.
REACHED = {
    "tilelang.cuda.intrinsics.macro.wgmma_macro_generator.TensorCoreIntrinEmitter.wgmma_accum_regs",
    "tilelang.engine.lower._prepare_device_codegen_mod",
    "tilelang.env.Environment.is_print_on_compilation_enabled",
    "tilelang.env.Environment.is_span_enable",
    "tilelang.language.eager.builder.mutate",
    "tilelang.language.eager.utils.get_compiled_object",
    "tvm_ffi.remove_global_func",
}


def resolve(name: str) -> Any:
    """The thing of this name: a module, or what stands in one."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        with contextlib.suppress(ImportError):  # a function may have the name of the module that it stands in
            return functools.reduce(getattr, words[count:], importlib.import_module(".".join(words[:count])))
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("name", sorted(NAMED | REACHED))
def test_a_private_name_is_there(name):
    if name in ON_GPUS and torch.version.cuda is None:
        pytest.skip("this torch has no CUDA")
    assert resolve(name) is not None


def private(name: str) -> bool:
    words = name.split(".")
    hidden = any(word.startswith("_") and not word.startswith("__") for word in words)
    return words[0] in LIBRARIES and (hidden or name.startswith(INNER))


def dotted(node: ast.AST) -> str | None:
    """a.b.c as a text."""
    if isinstance(node, ast.Name):
        return node.id
    held = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{held}.{node.attr}" if held is not None and isinstance(node, ast.Attribute) else None


def names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            yield name


def test_every_private_name_that_we_use_stands_here():
    found = {name for path in PACKAGE.rglob("*.py") for name in names_in(path) if private(name)}
    assert found == NAMED
