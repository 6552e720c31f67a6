"""Other libraries' causal attention over sequences that GPUs share, for benchmarks/distributed.py.

Each peer takes the mesh and the whole q, k, v and dO, (batch, length, heads, dim), and gives: a call of this rank's
tokens, the leaves that its gradients are asked for, this rank's dO, and a context in which it must run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Made: TypeAlias = tuple[Callable[[], Tensor], list[Tensor], Tensor, AbstractContextManager[Any]]


def heads_first(whole: Sequence[Tensor], repeats: bool) -> list[Tensor]:
    """(batch, heads, length, dim). repeats: as many key heads as query heads."""
    found = [t.detach().transpose(1, 2).contiguous() for t in whole]
    if repeats:
        times = found[0].shape[1] // found[1].shape[1]
        found[1:3] = [t.repeat_interleave(times, 1) for t in found[1:3]]
    return found


def of_torch(rotate: str, mesh: DeviceMesh, whole: Sequence[Tensor]) -> Made:
    """torch's context_parallel around SDPA with cuDNN. It takes no grouped heads: key heads are repeated before."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate)
    buffers = heads_first(whole, repeats=True)
    stack = ExitStack()
    stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers={*buffers}))
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    *leaves, d_o = buffers
    for leaf in leaves:
        leaf.requires_grad_()
    return lambda: functional.scaled_dot_product_attention(*leaves, is_causal=True), leaves, d_o, stack


def of_flex(mesh: DeviceMesh, whole: Sequence[Tensor]) -> Made:
    """FlexAttention with torch's plan for shared sequences: keys are gathered, queries dealt from head and tail."""
    from torch.distributed.tensor.experimental import _attention as cp
    from torch.distributed.tensor.experimental._context_parallel import _attention as plans
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    plans._compiled_create_block_mask = create_block_mask  # to compile it takes 70 s
    attend = torch.compile(flex_attention, dynamic=False)

    class Attend(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Any:
            return attend(query, key, value, block_mask=block_mask, enable_gqa=True)

    buffers, length = heads_first(whole, repeats=False), whole[0].shape[1]
    dealt = cp._HeadTailLoadBalancer(length, mesh.size(), torch.device("cuda"))
    mask = plans._create_cp_block_mask(lambda b, h, q, k: q >= k, 1, 1, length, length, mesh, dealt)
    *mine, d_o = cp._context_parallel_shard(mesh, buffers, [2] * 4, dealt)
    leaves = [t.detach().clone().requires_grad_() for t in mine]
    plan = cp._ContextParallel(2, cp._ContextParallel.AttentionType.FLEX)
    module = parallelize_module(Attend(), mesh, plan)
    return lambda: module(*leaves, mask), leaves, d_o, nullcontext()


def of_ring_flash(mesh: DeviceMesh, whole: Sequence[Tensor]) -> Made:
    """ring-flash-attn, zigzag; it needs flash-attn 2."""
    from ring_flash_attn import zigzag_ring_flash_attn_func

    rank, size = mesh.get_local_rank(), mesh.size()
    mine = []
    for tensor in whole:
        pieces = tensor.chunk(2 * size, 1)
        mine.append(torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], 1).detach().clone())
    *leaves, d_o = mine
    for leaf in leaves:
        leaf.requires_grad_()
    group = mesh.get_group()
    return lambda: zigzag_ring_flash_attn_func(*leaves, causal=True, group=group), leaves, d_o, nullcontext()


PEERS: dict[str, Callable[[DeviceMesh, Sequence[Tensor]], Made]] = {
    "torch cuDNN, allgather": lambda mesh, whole: of_torch("allgather", mesh, whole),
    "torch cuDNN, alltoall": lambda mesh, whole: of_torch("alltoall", mesh, whole),
    "torch FlexAttention": of_flex,
    "ring-flash-attn": of_ring_flash,
}
