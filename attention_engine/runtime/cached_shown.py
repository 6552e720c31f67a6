"""The kernels of calls with a cache, for who looks at them or compiles them ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_engine.arch import Arch
from attention_engine.compiler import Kernel
from attention_engine.runtime.arguments import as_parameter
from attention_engine.runtime.cached import CachedAttention
from attention_engine.runtime.cached_inputs import CachedCall
from attention_engine.runtime.captured import axes_now, specs_of, tensors_now
from attention_engine.runtime.inputs import stand_ins, type_of

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

NAMES = ("decode", "decode parts", "combine")


def cached_kernels(
    engine: Shown, device: Arch | None, page: int = 0, custom: Sequence[Tensor] = (), starts: bool = False
) -> dict[str, Kernel]:
    """What calls with a cache launch, by name, for the heads, dims and dtype that the engine knows.

    device: None, the interpreter. page: keys of a page; 0: a request's keys lie one after the other. custom: as a call
    brings them; without any they are fp32. starts: is it given where queries start?
    """
    metas = engine._metas()
    dtype = getattr(torch, metas[0].dtype_name)
    q, k, v = (torch.empty(1, page or 1, m.heads, m.dim, dtype=dtype) for m in metas)
    one = torch.ones(1, dtype=torch.int32)
    declared = list(engine.custom_io.specs.values())
    held = tensors_now(engine._captured)
    given = [*(custom or stand_ins(declared, engine._types, torch.device("cpu"))), *held]
    sizes = {"batch": None, "heads": q.shape[2], "seq_len": None, "seq_len_kv": None}
    specs = [*declared, *specs_of(engine._captured, axes_now(engine._captured, held, sizes))]
    types = {s.name: type_of(t) for s, t in zip(specs, given, strict=True)}
    program = engine._trace(types, engine._variant(None, q.shape[3], drops=""))
    attention = CachedAttention(program, specs, True, device is None, device, engine._combine_of(program))
    table = one[None] if page else None
    call = CachedCall(q[:, :1], k, v, v.shape[3], one, table, one if starts else None, None, given)
    return attention.kernels(call, [as_parameter(t) for t in given]).every
