"""The kernels that calls of a LinearAttentionEngine launch, by name, with none launched: source() and compile_for()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attention_engine.arch import Arch
from attention_engine.compiler import Kernel, Target
from attention_engine.errors import UnknownOption
from attention_engine.ir.expr import Type
from attention_engine.ir.linear import LinearProblem, LinearTile
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.linear_channels import ChannelKernels, ChannelLauncher
from attention_engine.runtime.linear_launch import LinearLauncher
from attention_engine.runtime.linear_plan import LinearKernels

if TYPE_CHECKING:
    from attention_engine.runtime.linear import LinearAttentionEngine

USUAL = (1, 1024)  # batch and length of metas that don't say
RANKS = {None: 0, "token": 3, "channel": 4}  # of the decay tensor, by who has one


@dataclass(frozen=True)
class _Silent:
    """A kernel that is noted instead of launched."""

    kernel: Kernel

    def compiled(self, *arguments: object) -> None:
        """Does nothing."""


class _Noted(LinearKernels):
    """Kernels that launch nothing; all that were asked for are in `noted`, in order."""

    def _kernel(self, builder: str, *given: object, tile: LinearTile | None = None) -> Any:
        return _Silent(super()._kernel(builder, *given, tile=tile))

    @property
    def noted(self) -> list[Kernel]:
        """The kernels themselves."""
        return list(self._made.values())


class _NotedChannels(_Noted, ChannelKernels):
    """The same for a decay for each channel."""


class _Rehearsal(LinearLauncher):
    """A launcher that goes through all motions."""

    def kernels_of(self, problem: LinearProblem, target: Target) -> LinearKernels:
        real = super().kernels_of(problem, target)
        return _Noted(real.program, problem, real.tiles, target)


class _ChannelRehearsal(ChannelLauncher):
    """The same for a decay for each channel."""

    def kernels_of(self, problem: LinearProblem, target: Target) -> ChannelKernels:
        real = super().kernels_of(problem, target)
        return _NotedChannels(real.program, problem, real.tiles, target)


def rehearse(engine: LinearAttentionEngine, device: Arch | None, per: str | None, starts: bool) -> dict[str, Kernel]:
    """The kernels of forward, backward and step at the metas' lengths, by name, in the order of their launches.

    device: None for the interpreter. per: whose the decay is, "token", "channel", or None for no tensor. starts: with
    an initial state, the last one and its gradient. Custom inputs are taken as fp32 (or bool).
    """
    if per not in RANKS:
        raise UnknownOption(f"decay is {per!r}. Choose 'token', 'channel' or None.")
    types = engine._types
    program = engine._trace(types, per is not None)
    held = tensors_now(engine._captured)
    specs = engine._specs(torch.empty(1, 1, engine.qkv_meta[2].heads, 1, device="meta"), held)
    rehearsal = _ChannelRehearsal if per == "channel" else _Rehearsal
    launcher = rehearsal(program, specs, device is None, device)
    metas, place = engine.qkv_meta, torch.device("meta")
    hints = zip((metas[0].batch, metas[0].length), USUAL, strict=True)
    batch, length = (n if isinstance(n, int) else usual for n, usual in hints)
    dtype = getattr(torch, metas[0].dtype_name)
    q, k, v = (torch.empty(batch, length, m.heads, m.dim, dtype=dtype, device=place) for m in metas)
    rows = (*v.shape[:3], q.shape[3])[: RANKS[per]]
    decay = torch.empty(rows, device=place) if per else None
    sizes = {"batch": batch, "heads": v.shape[2], "seq_len": length, "seq_len_kv": length}
    custom = [
        torch.empty([sizes.get(a, a) for a in s.axes],
                    dtype=torch.bool if types.get(s.name) is Type.BOOL else torch.float32, device=place)
        for s in engine.custom_io.specs.values()
    ]  # fmt: skip
    custom += [torch.empty(t.shape, dtype=t.dtype, device=place) for t in held]
    state = torch.empty(batch, v.shape[2], q.shape[3], v.shape[3], device=place) if starts else None
    wanted = frozenset(["decay", *(s.name for s in specs)] if per else [s.name for s in specs])
    launcher.forward(q, k, v, decay, state, custom, starts)
    launcher.backward(q, k, v, decay, state, custom, v, state, wanted)
    one = [None if t is None else t[:, :1] for t in (q, k, v, decay)]
    launcher.step(*one, state, custom)  # type: ignore[arg-type]
    (kernels,) = launcher._kernels.values()
    assert isinstance(kernels, _Noted)
    return {str(kernel.prim_func.attrs["global_symbol"]): kernel for kernel in kernels.noted}
