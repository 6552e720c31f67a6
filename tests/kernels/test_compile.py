"""Kernels of softmax, compiled without a GPU: the instructions of each architecture, no spills, memory that fits."""

import functools
import re
from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.compiler import Kernels
from attention_engine.frontend.meta import hints_of
from attention_engine.library import OnlineSoftmax, causal, document, padding, relative_bias, scale
from attention_engine.plan.forms import HopperKeys, Tile

pytest.importorskip("tilelang")
from attention_engine.codegen import compile as codegen_compile
from attention_engine.tuner.cases import find
from attention_engine.tuner.defaults import default_tiles
from tests.kernels.together import assert_fits, compile_together

HALF, BRAIN = torch.float16, torch.bfloat16
PLAIN = {"persistent": False, "queries_ahead": False, "lazy_rescale": False}
PERSISTENT, BOTH = {"persistent": True}, {"persistent": True, "lazy_rescale": True}
# Kernels by name: which, its dtype, its head dims, what differs from the default tile of the forward pass, its heads of
# queries and keys.
HOPPER = {
    "forward": ("forward", HALF, 64, 64, PLAIN),
    "persistent_forward": ("forward", HALF, 64, 64, BOTH),
    "queries": ("queries", HALF, 32, 64),
    "preprocess": ("preprocess", HALF, 64),
    "postprocess": ("postprocess", HALF, 64),
    "wide_forward": ("forward", BRAIN, 128, 128, PLAIN),
    "deep_persistent_forward": ("forward", BRAIN, 192, 128, PERSISTENT),
    "uneven_persistent_forward": ("forward", HALF, 128, 256),
    "ahead_forward": ("forward", BRAIN, 128, 128, {"persistent": True, "queries_ahead": True}),
    "widest_persistent_forward": ("forward", BRAIN, 256),
    "wide_backward": ("backward", HALF, 128),
    "deep_backward": ("backward", BRAIN, 192, 128),
    "ungrouped_deep_backward": ("backward", HALF, 192, 128, None, (2, 2)),
    "widest_backward": ("backward", BRAIN, 256),
}
# The same of benchmark cases, gradients of q, k and v alone: maths that leaves the larger tile its registers.
ROOMY = {
    "sloped_backward": ("backward", "mha-128.alibi.causal.2048"),
    "narrow_sloped_forward": ("forward", "mha-64.alibi.full.2048"),
    "narrow_sloped_backward": ("backward", "mha-64.alibi.full.2048"),
    "signed_backward": ("backward", "mha-128.relu.full.2048"),
    "sloped_forward": ("forward", "mha-128.alibi.full.2048"),
    "narrow_causal_sloped_forward": ("forward", "mha-64.alibi.causal.2048"),
    "sigmoid_forward": ("forward", "mha-128.sigmoid.full.2048"),
    "capped_forward": ("forward", "mha-128.softcap.full.2048"),
    "brief_forward": ("forward", "vit.softmax.full.1024"),
    "woven_forward": ("forward", "mha-64.softmax.full.8192"),
    "grouped_ordered_backward": ("backward", "llama-8b.softmax.full.4096", True),
    "ordered_backward": ("backward", "mha-128.softmax.full.4096", True),
    "causal_ordered_backward": ("backward", "mha-128.softmax.causal.4096", True),
}
IN_MEMORY = ("deep_backward", "ungrouped_deep_backward", "widest_backward")


def by_nvcc(test):
    """A test that compiles kernels, which takes minutes."""
    return pytest.mark.slow(pytest.mark.skipif(codegen_compile.find_nvcc() is None, reason="needs nvcc")(test))


def lower(gpu, kernel, dtype, dim, dim_v=None, forms=None, heads=(4, 2)):
    dims = (dim, dim, dim_v or dim)
    metas = [meta_tensor(1, h, 256, d, dtype=dtype) for h, d in zip((*heads, heads[1]), dims, strict=True)]
    over_queries = kernel == "queries"
    engine = AttentionEngine(
        metas, None, scale(dim**-0.5), causal, OnlineSoftmax(), device=gpu, deterministic=over_queries
    )
    source = engine._source_kernel(kernel, "cuda")
    if forms is not None:
        made = engine._kernels("cuda")
        tiles = replace(made.tiles, forward=made.tiles.forward.in_form(**forms))
        source = Kernels(made.maths, made.problem, tiles, gpu, False).forward
    return codegen_compile.lower_kernel(source.prim_func, gpu, pass_configs=source.configs)


def lower_sums_of_diagonals(kv_heads):
    metas = [meta_tensor(1, heads, 256, 128, dtype=HALF) for heads in (4, kv_heads, kv_heads)]
    custom = CustomIO({"table": ("heads", 65)})
    score = relative_bias("table", 32, 0.1)
    engine = AttentionEngine(metas, custom, score, causal, OnlineSoftmax(), device=arch.H100())
    kernels = engine._kernels("cuda")
    maths = kernels.maths.wanting(("table",))
    tile = Tile(64, 128, 256, 2, HopperKeys(skewed_sums=True))
    tiles = replace(kernels.tiles, backward=tile)
    source = Kernels(maths, kernels.problem, tiles, arch.H100(), deterministic=False).backward
    return codegen_compile.lower_kernel(source.prim_func, arch.H100(), pass_configs=source.configs)


def lower_default_sums_of_diagonals(kv_heads, dtype):
    """Of a full mask, whose default tile has room for more queries."""
    metas = [meta_tensor(1, heads, 256, 128, dtype=dtype) for heads in (4, kv_heads, kv_heads)]
    score = relative_bias("table", 128, 128**-0.5)
    engine = AttentionEngine(
        metas, CustomIO({"table": ("heads", 257)}), score, online_func=OnlineSoftmax(), device=arch.H100()
    )
    kernels = engine._kernels("cuda")
    assert kernels.tiles.backward == Tile(80, 128, 256, 2, HopperKeys(skewed_sums=True))
    return codegen_compile.lower_kernel(kernels.backward.prim_func, arch.H100(), pass_configs=kernels.backward.configs)


def lower_case(kernel, name, deterministic=False):
    (case,) = find(name)
    made = AttentionEngine(case.metas(), **case.options(), device=arch.H100())._kernels("cuda")
    maths = made.maths.wanting(())
    tiles = default_tiles(made.problem, maths, arch.H100(), hints_of(case.metas()))
    source = getattr(Kernels(maths, made.problem, tiles, arch.H100(), deterministic), kernel)
    return codegen_compile.lower_kernel(source.prim_func, arch.H100(), pass_configs=source.configs)


def lower_lists(dim, dtype, kv_heads):
    """The kernel over keys of a document mask, whose blocks are persistent."""
    metas = [meta_tensor(1, heads, 256, dim, dtype=dtype) for heads in (4, kv_heads, kv_heads)]
    axes = CustomIO({"documents": ("batch", "seq_len")})
    made = AttentionEngine(metas, axes, scale(0.1), document(), OnlineSoftmax(), device=arch.H100())._kernels("cuda")
    maths = made.maths.wanting(())
    tiles = default_tiles(made.problem, maths, arch.H100())
    assert tiles.backward.persistent
    source = Kernels(maths, made.problem, tiles, arch.H100(), deterministic=False).backward
    return codegen_compile.lower_kernel(source.prim_func, arch.H100(), pass_configs=source.configs)


@functools.cache
def lists_over_keys():
    """The text of the kernel with persistent blocks."""
    return lower_lists(128, HALF, 2).cuda


@functools.cache
def hopper():
    lowered = {name: lower(arch.H100(), *given) for name, given in HOPPER.items()}
    lowered.update({name: lower_case(*given) for name, given in ROOMY.items()})
    tables = {"table_backward": lower_sums_of_diagonals(2), "ungrouped_table_backward": lower_sums_of_diagonals(4)}
    for kv_heads, dtype in ((4, HALF), (4, torch.bfloat16), (2, HALF)):
        tables[f"table_{kv_heads}_{str(dtype)[6:]}_backward"] = lower_default_sums_of_diagonals(kv_heads, dtype)
    for name, given in {"wide": (128, HALF, 4), "grouped": (128, BRAIN, 2)}.items():
        lowered[f"{name}_lists_backward"] = lower_lists(*given)
    return compile_together({**lowered, **tables}, arch.H100())


@by_nvcc
def test_hopper_kernels_fit_and_use_its_instructions():
    for name, made in hopper().items():
        assert_fits(name, made, arch.H100())
        if not name.endswith("process"):
            assert "wgmma" in made.cuda and "tma_load" in made.cuda
        assert ("AtomicAddx4" in made.cuda) is name.endswith("backward")


@by_nvcc
def test_hand_placed_kernels_run_products_while_they_compute():
    for name in ("forward", "wide_forward", "wide_backward"):
        cuda = hopper()[name].cuda
        assert "warpgroup_reg_dealloc<24>" in cuda and "tl::wait_wgmma<1>()" in cuda
        assert "const int warpgroup = __shfl_sync" in cuda


@by_nvcc
def test_backward_where_no_register_is_left_adds_to_dq_without_a_guard():
    """One that TileLang sets where it can't prove a bound spills 692 bytes."""
    for name in ("deep_backward", "ungrouped_deep_backward"):
        cuda = hopper()[name].cuda
        assert cuda[: cuda.index("AtomicAddx4")].splitlines()[-4].strip() == "}", name


@by_nvcc
def test_no_step_of_sums_of_diagonals_waits_for_the_additions_of_the_last():
    """As a fence before its first products would."""
    for name in ("table_backward", "ungrouped_table_backward"):
        _, computing = hopper()[name].cuda.split("tl::warpgroup_reg_alloc<")
        lines = computing.splitlines()
        begin = next(n for n, line in enumerate(lines) if "for (int step" in line)
        products = [n for n, line in enumerate(lines) if n > begin and "tl::wgmma_" in line]
        assert len(products) == 5, name
        assert not any("fence_proxy_async" in line for line in lines[begin : products[1]]), name


@by_nvcc
def test_backward_of_wide_heads_hands_pairs_over_in_shared_memory():
    for name in IN_MEMORY:
        cuda = hopper()[name].cuda
        assert "warpgroup_reg_dealloc<24>" in cuda and cuda.count("tl::wgmma_ss<") == 5 and "wgmma_rs" not in cuda
        assert "const int warpgroup = __shfl_sync" in cuda


@by_nvcc
def test_backward_blocks_of_causal_masks_have_numbers_of_their_own():
    cuda = hopper()["wide_backward"].cuda
    assert "blockIdx.x" in cuda and "blockIdx.y" not in cuda
    assert "cudaGridDependencySynchronize();" in cuda
    assert "blockIdx.y" in hopper()["deep_backward"].cuda  # no register for numbers of its own


@pytest.mark.slow  # test_lanes.py simulates it
def test_a_lane_writes_an_items_numbers_when_its_warp_has_read_those_before():
    """In the text too, whose meetings compilers might move: the simulator sees the tile program alone."""
    lines = [line.strip() for line in lists_over_keys().splitlines()]
    writes = [n for n, line in enumerate(lines) if line.startswith("((int*)record)[")]
    branches = [n for n, line in enumerate(lines) if line == "if ((thread_again() % 32) == 0) {"]
    of_writes = {max(branch for branch in branches if branch < n) for n in writes}
    assert len(of_writes) == 7 and all(lines[n - 1] == "__syncwarp();" for n in of_writes)


@pytest.mark.slow
def test_a_lane_speaks_for_a_spare_warp_when_all_of_its_lanes_have_read():
    """Lanes that parted at a wait need not be together again: those left behind would read the item after the next, or
    walk on by the numbers of another walk, and wait for ever for lanes that went on. See test_lanes.py."""
    lines = [line.strip() for line in lists_over_keys().splitlines()]
    gives_back = [n for n, line in enumerate(lines) if line.startswith("read[") and line.endswith(".arrive();")]
    assert len(gives_back) == 4, "the copying warp, the spare ones, computing ones at their first item and at others"
    for n in gives_back:
        assert lines[n - 1].startswith("if (") and lines[n - 2] == "__syncwarp();"
    walks = [n for n, line in enumerate(lines) if re.match(r"\(\(int\*\)\w*_\d+\)\[0\] = \(\(int\*\)record\)", line)]
    assert len(walks) == 6, "three warps prepare, and store"
    for n in walks:
        assert "__syncwarp();" in lines[n - 4 : n], "all have left the walk before"


@by_nvcc
def test_warpgroups_take_turns_at_each_step_or_start_apart():
    for name, groups, turns in (("forward", 3, True), ("wide_forward", 2, True), ("capped_forward", 2, False)):
        cuda = hopper()[name].cuda
        assert f"__launch_bounds__({128 * (groups + 1)}" in cuda
        before, of_steps = cuda.split("for (int after", 1)
        assert "__named_barrier_arrive" in before and ("__named_barrier_arrive" in of_steps) is turns


@by_nvcc
def test_persistent_forward_kernels_copy_ahead_of_the_next_item():
    for name in ("persistent_forward", "deep_persistent_forward"):
        cuda = hopper()[name].cuda
        assert "blockIdx.x" in cuda and "blockIdx.y" not in cuda
        copying = cuda[cuda.index("warpgroup_reg_dealloc") : cuda.index("warpgroup_reg_alloc")]
        assert copying.index("for (int turn") < copying.index("q_empty[0].wait") < copying.index("q_full[0].arrive")
        own_tile = "tma_store(o_desc, (&(((half_t*)o_tile)" in cuda
        assert own_tile is not name.startswith("deep")  # which has no room for a tile of o


@by_nvcc
def test_a_warp_of_its_own_brings_queries_that_come_ahead():
    cuda = hopper()["ahead_forward"].cuda
    copying = cuda[cuda.index("warpgroup_reg_dealloc") : cuda.index("warpgroup_reg_alloc")]
    keys, queries = copying.split("for (int turn", 1)
    assert "noted[" in keys and "tma_load(k_desc" in keys and "q_desc" not in keys
    assert "tma_load(q_desc" in queries and "k_desc" not in queries


@by_nvcc
def test_tiles_start_with_what_places_add_before_groups_wait_for_their_turns():
    """So that a turn issues products at once."""
    for name in ("sloped_forward", "narrow_sloped_forward", "narrow_causal_sloped_forward"):
        before, of_steps = hopper()[name].cuda.split("for (int after", 1)
        assert "scores[" in before and "scores[" not in of_steps[: of_steps.index("tl::wgmma_ss<")], name


@by_nvcc
def test_the_output_is_rescaled_where_a_row_of_the_warp_has_a_new_maximum():
    for name, lazy in (("forward", False), ("wide_forward", False), ("persistent_forward", True)):
        assert (hopper()[name].cuda.count("if (__any_sync(") == 1) is lazy


@by_nvcc
def test_weights_are_made_before_the_wait_for_their_gradients():
    """What keeps compilers from moving that wait up: a fence on the weights, and a wait that is over."""
    cuda = hopper()["wide_backward"].cuda
    loop = cuda[cuda.index("tl::wait_wgmma<1>()") :]
    between = loop[loop.index("exp2f") : loop.index("tl::wait_wgmma<0>()")]
    assert "warpgroup_fence_operand(reinterpret_cast<float*>(weights + 0), 40)" in between and ".wait(" in between


@by_nvcc
def test_fences_name_the_registers_that_a_thread_has():
    for name in ("forward", "wide_backward"):
        cuda = hopper()[name].cuda
        held = {name: int(count) for name, count in re.findall(r"\bfloat (\w+)\[(\d+)\];", cuda)}
        fenced = re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\((\w+) \+ 0\), (\d+)\)", cuda)
        assert len(fenced) > 4 and all(int(count) == held[name] for name, count in fenced)


@by_nvcc
def test_an_older_gpu_copies_by_cp_async():
    """In memory that all of them have."""
    made = compile_together({"forward": lower(arch.A100(), "forward", HALF, 64)}, arch.A100())["forward"]
    assert_fits("forward", made, arch.A100())
    assert "cp_async" in made.cuda and "mma_sync" in made.cuda
    assert "wgmma" not in made.cuda and "tma_load" not in made.cuda
    assert made.used.shared_bytes <= arch.RTX4090().shared_memory_per_block


@pytest.mark.parametrize(("kernel", "dtype", "dim", "bulk"), [
    pytest.param("forward", HALF, 20, False, marks=pytest.mark.slow),
    pytest.param("backward", HALF, 20, False, marks=pytest.mark.slow),
    pytest.param("forward", torch.float32, 20, False, marks=pytest.mark.slow),
    pytest.param("backward", torch.float32, 20, False, marks=pytest.mark.slow),
    ("forward", HALF, 24, True),  # the others take TileLang ten seconds each
])  # fmt: skip
def test_rows_that_are_no_whole_16_bytes_are_not_copied_in_bulk(kernel, dtype, dim, bulk):
    """A GPU refuses the descriptor of such a copy when the kernel is launched."""
    assert ("CUtensorMap" in lower(arch.H100(), kernel, dtype, dim).cuda) == bulk


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_tiles_that_come_by_registers_are_loaded_and_stored_by_the_same_threads(dtype):
    """TileLang's warp specialization would let one warp load them and store another's registers, which nobody wrote."""
    metas = [meta_tensor(1, 2, 256, dim, dtype=dtype) for dim in (96, 96, 64)]
    engine = AttentionEngine(
        metas, CustomIO({"lengths": ("batch",)}), scale(0.1), padding(), OnlineSoftmax(), device=arch.H100()
    )
    forward = engine._kernels("cuda").forward
    assert forward.builder == "straight.forward.forward"
    cuda = codegen_compile.lower_kernel(forward.prim_func, arch.H100(), pass_configs=forward.configs).cuda
    assert "wgmma" in cuda and "_producer_ws" not in cuda
