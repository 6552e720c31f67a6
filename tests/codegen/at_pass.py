"""Looks at a small kernel where one of TileLang's passes is replaced."""

import time

import pytest
import torch

from attention_engine import AttentionEngine, arch, meta_tensor
from attention_engine.codegen.compile import lower_kernel


class Reached(Exception):
    """The kernel has come to the pass, and is not lowered further."""


def at_pass(monkeypatch, replaced, name, look, packed=None, **options):
    """Has `look` see a small kernel placed by hand when it comes to a pass, and TileLang's own; returns what it makes
    of them. replaced: the module and the name of what stands in the pass's place."""
    meta = meta_tensor(1, 1, 256, 64, dtype=torch.float16)
    kernel = AttentionEngine((meta,) * 3, device=arch.H100(), **options)._source_kernel(name, "cuda", packed)
    made = []

    def seen(module, whole):
        made.append(look(module, whole))
        raise Reached

    with monkeypatch.context() as patch, pytest.raises(Reached):
        patch.setattr(*replaced, seen)
        lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs)
    return made[0]


def seconds(run, module):
    """Of a core, that a pass takes."""
    started = time.thread_time()
    run(module)
    return time.thread_time() - started
