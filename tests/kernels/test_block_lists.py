"""Kernels that walk over the blocks that a call lists: lists of tiles beside those that look at pairs, and kernels for
Hopper in the warp simulator, with lists of unequal lengths."""

import pytest
import torch

from attention_engine import AttentionEngine, BlockList, arch, create_mask, meta_tensor
from attention_engine.compiler import Kernel, pass_configs
from attention_engine.ir.block_lists import ListedBlocks
from attention_engine.ir.expr import Type
from attention_engine.library import causal
from attention_engine.passes.tile_plan import plan_tiles
from attention_engine.plan.forms import HopperForward, HopperKeys, Tile
from attention_engine.runtime import op
from attention_engine.runtime.block_rows import _looking, kernel_for
from attention_engine.runtime.blocks import ANY
from tests import plain
from tests.runtime.test_block_list import dense, draw

DIM = 128
FORWARD = Tile(128, 64, 256, 3, HopperForward(persistent=True, queries_ahead=True))
ONE_GROUP = Tile(64, 64, 128, 3, HopperForward())
SHARED = Tile(64, 64, 256, 3, HopperKeys(shared_weights=True))
PERSISTENT = Tile(64, 128, 256, 2, HopperKeys(persistent=True))


def inputs(q_len, kv_len, heads, key_heads, dim=DIM):
    generator = torch.Generator().manual_seed(q_len)
    return [torch.randn(1, n, h, dim, generator=generator).to(torch.bfloat16).requires_grad_()
            for n, h in ((q_len, heads), (kv_len, key_heads), (kv_len, key_heads))]  # fmt: skip


def errors(engine, leaves, lists, keep, is_causal=False):
    """The summed errors of o, dq, dk and dv over those of eager."""
    mask = lambda b, h, i, j: keep  # noqa: E731
    exact = [t.detach().double().requires_grad_() for t in leaves]
    outputs = [
        (engine(*leaves, block_mask=lists), leaves),
        (plain.attention(*exact, "softmax", causal=is_causal, mask=mask), exact),
        (plain.eager(*leaves, "softmax", causal=is_causal, mask=mask), leaves),
    ]
    found = []
    for o, of in outputs:
        do = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape).to(o)
        found.append([t.double() for t in (o.detach(), *torch.autograd.grad(o, of, do))])
    return [float((a - b).abs().sum() / (c - b).abs().sum()) for a, b, c in zip(*found)]


CASES = {  # tiles, heads, key heads, lists of heads, size of a block, causal
    "narrow": (dict(forward=FORWARD, backward=SHARED), 2, 1, 1, (128, 64), False),
    "narrow, key heads": (dict(forward=FORWARD, backward=SHARED), 4, 2, 2, (128, 64), True),
    "each head": (dict(forward=FORWARD, backward=SHARED), 2, 1, 2, (64, 64), True),
    "head dim 64": (dict(forward=FORWARD.in_form(queries_ahead=False), backward=SHARED), 2, 1, 1, (64, 64), True),
    "one group": (dict(forward=ONE_GROUP, backward=SHARED), 2, 1, 2, (64, 64), True),
    "wide": (dict(backward=PERSISTENT), 2, 1, 1, (128, 128), False),
    "wide, own heads": (dict(backward=PERSISTENT), 2, 2, 2, (128, 128), False),
    "key heads": (dict(forward=FORWARD, backward=PERSISTENT), 4, 2, 2, (64, 128), True),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_for_hopper_walk_over_listed_blocks(name, chosen_tiles):
    tiles, heads, key_heads, lists, size, is_causal = CASES[name]
    chosen_tiles.update(tiles)
    q_len, kv_len = 330, 300
    rows, columns = -(-q_len // size[0]), -(-kv_len // size[1])
    indices, counts = draw(1, lists, rows, columns - 1, seed=len(name))  # no list holds the last block of keys
    counts[0, 0, 1] = 0  # nor the second row any
    keep = dense(indices, counts, size, q_len, kv_len, heads)
    engine = AttentionEngine(mask_mod=causal if is_causal else None, backend="interpret")
    leaves = inputs(q_len, kv_len, heads, key_heads, 64 if name == "head dim 64" else DIM)
    found = errors(engine, leaves, BlockList(indices, counts, size), keep, is_causal)
    assert max(found) <= 1.1
    scripts = [kernel.prim_func.script() for a in op.ATTENTIONS.values()
               for k in a.program_kernels._kernels.values()
               for kernel in (k.forward, k.backward) if "compiled" in vars(kernel)]  # fmt: skip
    assert sum(script.count("set_max_nreg") for script in scripts) == 2 * len(tiles)  # those for Hopper ran
    (plan,) = {k.plan for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()}
    assert plan.by_queries == (size[0] == 128 and "own" not in name)


@pytest.mark.parametrize("counted", [True, False])
def test_the_map_is_made_in_one_launch(counted):
    indices, counts = draw(2, 3, 5, 200, seed=3)
    indices[0, 0, 0, 0] = 900
    found = torch.full((2, 3, 5, 190), 7, dtype=torch.int8)
    kernel = Kernel("listed_blocks.listed_blocks", (ANY, counted), "interpret", ANY, pass_configs(ANY))
    kernel.run(*([indices, counts] if counted else [indices]), found)
    assert torch.equal(found, BlockList(indices, counts if counted else None, (64, 64)).to_map(190))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype", "gpu"), [
    ((128, 64), torch.bfloat16, arch.H100()), ((64, 128), torch.float32, arch.H100()),
    ((128, 64), torch.float16, arch.A100()),
], ids=str)  # fmt: skip
def test_rows_of_blocks_spill_nothing(size, dtype, gpu):
    looking = _looking(AttentionEngine(mask_mod=causal, device=gpu))
    q, k = (torch.empty(1, 256, heads, DIM, dtype=dtype) for heads in (4, 2))
    found = kernel_for(looking._kernels_of("tilelang", q, k, []), q, k, [], ListedBlocks(*size, False, 2)).resources
    assert (found.spill_stores, found.spill_loads, found.notes) == (0, 0, ())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dk_of_listed_blocks_is_on_its_way_while_the_next_step_begins(dtype):
    metas = [meta_tensor(1, heads, 256, DIM, dtype=dtype) for heads in (2, 2, 2)]
    engine = AttentionEngine(metas, device=arch.H100())
    lists = BlockList(torch.zeros(1, 2, 4, 2, dtype=torch.int32), None, (64, 64))
    made = engine._asked(arch.H100(), False, (), None, lists).kernels_as_known(engine.tuning).of_backward["backward"]
    found = made.resources
    assert (found.spill_stores, found.spill_loads, found.notes) == (0, 0, ())
    lines = made.prim_func.script().splitlines()
    added = next(n for n, line in enumerate(lines) if "atomic_add_elem_op" in line and "workspace" in line)
    wait = next(line for line in lines[added:] if "wait_wgmma" in line)
    step = [line for line in lines[:added] if line.lstrip().startswith("for step in")][-1]
    indent = [len(line) - len(line.lstrip()) for line in (wait, step)]
    assert "wait_wgmma(0)" in wait and indent[0] == indent[1], "it stands behind the loop"


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "dtype"), [(128, torch.bfloat16), (128, torch.float16), (64, torch.bfloat16)], ids=str)
def test_two_blocks_of_one_warpgroup_share_an_sm(dim, dtype):
    metas = [meta_tensor(1, heads, 256, dim, dtype=dtype) for heads in (4, 2, 2)]
    engine = AttentionEngine(metas, mask_mod=causal, device=arch.H100())
    asked = engine._asked(
        arch.H100(), False, (), None, BlockList(torch.zeros(1, 2, 4, 2, dtype=torch.int32), None, (64, 64))
    )
    found = asked.kernels_as_known(engine.tuning).of_forward["forward"].resources
    assert (found.spill_stores, found.spill_loads, found.notes) == (0, 0, ())
    per_sm = 228 * 1024, 65536
    assert 2 * (found.shared_bytes + 1024) <= per_sm[0] and 2 * 256 * found.registers <= per_sm[1]


def plan_of(lists, mask=None, heads=4, key_heads=2):
    """What a mask with such a call's blocks asks of loops."""
    engine = AttentionEngine(mask_mod=mask, backend="reference")
    q, k = torch.empty(1, 130, heads, DIM), torch.empty(1, 130, key_heads, DIM)
    blocks = engine._blocks(lists, q, k)
    return plan_tiles(engine._trace({blocks.name: Type.INT}, engine._variant(blocks, DIM)).mask)


def test_which_tiles_follow_listed_blocks():
    lists = [BlockList(*draw(1, heads, 2, 3, least=1), (128, 64)) for heads in (1, 2, 4)]
    for of, by_head, by_group in zip(lists, (False, False, True), (False, True, False)):
        plan = plan_of(of, causal)
        assert (plan.mapped, plan.by_head, plan.by_group) == (True, by_head, by_group)
        assert plan.follows_blocks(64, 64) and plan.follows_blocks(256, 128) and not plan.follows_blocks(96, 64)
    beside = plan_of(lists[1], lambda b, h, q_idx, kv_idx: kv_idx % (h + 2) == 0)
    assert not beside.follows_blocks(64, 64) and beside.by_head and not beside.by_group
    assert plan_tiles(None).blocks is None and not plan_tiles(None).follows_blocks(64, 64)


@pytest.mark.parametrize("lists", [1, 2, 4])
def test_a_mask_beside_lists_that_bounds_do_not_say(lists):
    """Then pairs are looked at; the results are the same."""

    def third(b, h, q_idx, kv_idx):
        return (kv_idx + h) % 3 != 0

    q_len, kv_len, size = 70, 90, (32, 16)
    indices, counts = draw(1, lists, 3, 6, seed=lists)
    keep = dense(indices, counts, size, q_len, kv_len) & create_mask(third, 1, 4, q_len, kv_len)
    engine = AttentionEngine(mask_mod=third, backend="interpret")
    leaves = inputs(q_len, kv_len, 4, 2)
    assert max(errors(engine, leaves, BlockList(indices, counts, size), keep)) <= 1.1
