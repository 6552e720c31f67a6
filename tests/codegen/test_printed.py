"""Rules on the CUDA text: rows in several chains, warpgroups' numbers uniform; all else stays as it was."""

import random
import re

import pytest

from attention_engine.arch import H100
from attention_engine.codegen.compile import lower_kernel
from attention_engine.codegen.patches.choices import with_pairs_dropped, with_whole_products
from attention_engine.codegen.patches.descriptors import with_whole_descriptors
from attention_engine.codegen.patches.ended_reads import with_ended_reads
from attention_engine.codegen.patches.printed import (
    in_chains,
    with_held_barriers,
    with_held_threads,
    with_uniform_groups,
)
from attention_engine.plan.rules import ONE_CHAIN
from tests.codegen import flash

PRINTED = """\
  float most[2];
  int count[2];
      #pragma unroll
      for (int rv = 0; rv < 32; ++rv) {
        most[i_5] = max(most[i_5], scores[(rv & 15) * 4 + i_5]);
      }
"""
REWRITTEN = """\
  float most[2];
  int count[2];
      {
        float most_part[4];
        #pragma unroll
        for (int rv = 0; rv < 32; ++rv) {
          most_part[rv & 3] = rv == 0 ? max(most[i_5], scores[(rv & 15) * 4 + i_5]) : \
rv < 4 ? scores[(rv & 15) * 4 + i_5] : max(most_part[rv & 3], scores[(rv & 15) * 4 + i_5]);
        }
        most[i_5] = max(max(most_part[0], most_part[1]), max(most_part[2], most_part[3]));
      }
"""


def test_a_maximum_goes_in_four_chains():
    assert in_chains(PRINTED) == REWRITTEN


def test_a_maximum_of_nothing_is_not_compared():
    cleared = "      most[i_5] = -CUDART_INF_F;\n"
    found = in_chains(PRINTED.replace("      #pragma", f"{cleared}      #pragma"))
    assert cleared in found and "rv == 0 ? scores[(rv & 15) * 4 + i_5] : " in found
    other = in_chains(PRINTED.replace("      #pragma", f"{cleared.replace('i_5', 'i_6')}      #pragma"))
    assert "rv == 0 ? max(most[i_5], " in other


def test_a_sum_starts_from_what_there_is():
    found = in_chains(PRINTED.replace("max(most[i_5], ", "(most[i_5] + "))
    assert "rv == 0 ? most[i_5] + scores[(rv & 15) * 4 + i_5] : rv < 4 ? scores[" in found
    assert "most[i_5] = (most_part[0] + most_part[1]) + (most_part[2] + most_part[3]);" in found


def test_short_loops_and_integers_stay():
    short = PRINTED.replace("rv < 32", "rv < 8")
    assert in_chains(short) == short
    whole = PRINTED.replace("most[i_5]", "count[i_5]")
    assert in_chains(whole) == whole
    assert in_chains(PRINTED.replace("rv < 32", "rv < 30")).count("part") == 0


def test_totals_of_their_own_stay():
    """Each turn of the loop adds to another number: no reduction."""
    each = PRINTED.replace("most[i_5]", "most[rv]").replace("max(most[rv], ", "(most[rv] + ")
    assert in_chains(each) == each
    decayed = PRINTED.replace("max(most[i_5], scores", "(most[i_5] + most[i_5] * scores")
    assert in_chains(decayed) == decayed


def test_descriptors_are_added_to_as_one_number():
    """Of both operands, by instruction; the first one's own stays, and so does what is no operand of a product."""
    a, b = "((((warpgroup + 2) % 3) * 8192) + (ki_1 * 32)) >> 4", "(ki_1 * 32) >> 4"
    product = "tl::wgmma_ss<64, 128>(uint64_t(desc_a_1 + ({})), uint64_t(desc_b_1 + ({})), scores, 1);\n"
    kept = "  int other = int(desc_a_1 + ((i * 32) >> 4));\n  use(uint64_t(desc_b_1), 1);\n"
    found = with_whole_descriptors(kept + product.format(a, b))
    wanted = f"tl::wgmma_ss<64, 128>((uint64_t(desc_a_1) + uint64_t(({a}))), (uint64_t(desc_b_1) + uint64_t(({b}))), "
    assert found == f"{kept}{wanted}scores, 1);\n"


def test_a_warpgroups_number_is_one_lanes():
    head = 'extern "C" __global__ void __launch_bounds__(384, 1) made(float* x) {\n'
    found = with_uniform_groups(f"{head}  tl::wgmma_ss(x + (((int)threadIdx.x) >> 7));\n}}\n")
    declared = "  const int warpgroup = __shfl_sync(0xffffffffu, (((int)threadIdx.x) >> 7), 0);\n"
    assert found == f"{head}{declared}  tl::wgmma_ss(x + warpgroup);\n}}\n"
    plain = f"{head}  x[((int)threadIdx.x) >> 7] = 0;\n}}\n"
    assert with_uniform_groups(plain) == plain


def test_a_threads_index_is_read_once_but_by_the_threads_that_copy():
    head = 'extern "C" __global__ void k(float* x) {\n'
    before = "  if (((int)threadIdx.x) < 128) {\n"
    copying = "    tl::warpgroup_reg_dealloc<24>();\n    x[((int)threadIdx.x)] = 0;\n"
    computing = "  } else {\n    tl::warpgroup_reg_alloc<240>();\n    x[((int)threadIdx.x) >> 5] = 0;\n  }\n}\n"
    found = with_held_threads(head + before + copying + computing)
    declared, body = found.split(head)
    assert 'asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));' in declared
    assert body == (
        "  const int thread = thread_again();\n"
        "  if (thread < 128) {\n"
        "    tl::warpgroup_reg_dealloc<24>();\n    x[thread_again()] = 0;\n"
        "  } else {\n    tl::warpgroup_reg_alloc<240>();\n    x[thread >> 5] = 0;\n  }\n}\n"
    )


def test_the_threads_that_compute_hold_their_barriers():
    declared = "".join(
        f"  __shared__ __align__(16) uint64_t {n}_mem[2];\n  auto {n} = reinterpret_cast<Barrier*>({n}_mem);\n"
        for n in ("full", "empty", "other")
    )
    copying = "  if (x) {\n    empty[0].wait(1);\n    other[0].wait(1);\n  } else {\n"
    computing = "    tl::warpgroup_reg_alloc<240>();\n    full[0].wait(0);\n    empty[0].arrive();\n  }\n}\n"
    head = 'extern "C" __global__ void made();\nextern "C" __global__ void made() {\n'
    found = with_held_barriers(head + declared + copying + computing)
    alloc, *body = computing.splitlines(keepends=True)
    held = "".join(f"    Barrier* const {n} = held({n}_mem);\n" for n in ("full", "empty"))
    assert found.startswith(head + declared + copying + alloc + "    const auto held = [](uint64_t* barriers) {\n")
    assert found.endswith("    };\n" + held + "".join(body))
    assert with_held_barriers(head + declared + "}\n") == head + declared + "}\n"


READS = """\
      tl::tma_load(k_desc, mbarrier[0], (&(((half_t*)k_tile)[0])), 0, 0);
      tl::tma_load((&(((float*)weights)[0])), (&(w[0])), mbarrier[1], 256);
      tl::initialize_wgmma_descriptor<1, 1, 64>(desc_b, (&(((half_t*)k_tile)[0])));
      mbarrier[2].arrive();
      sums[0] = sums[0] * ((float*)weights)[thread] * ((float*)other)[thread];
      sums[1] = sums[0];
      mbarrier[3].arrive();
      mbarrier[4].arrive();
      k_empty[0].arrive();
"""


def test_a_thread_fences_what_it_read_of_a_copied_tile_before_it_gives_it_back():
    """At barriers of TileLang's; at ours, whose place a kernel chose, it says itself what it needs."""
    arrival = "      mbarrier[3].arrive();\n"
    fenced = READS.replace(arrival, f"      tl::fence_proxy_async();\n{arrival}")
    assert with_ended_reads(READS) == fenced
    assert with_ended_reads(fenced) == fenced
    read = "      sums[0] = sums[0] * ((float*)weights)[thread] * ((float*)other)[thread];\n"
    assert with_ended_reads(READS.replace(read, "")) == READS.replace(read, "")
    assert with_ended_reads(READS.replace("weights)[0]", "weights_of(0)")).count("fence_proxy_async") == 3


HEAD = 'extern "C" __global__ void made(float* x) {\n'
DROPPED = """\
    #pragma unroll
    for (int i = 0; i < 32; ++i) {
      uint condval;
      if ((i < 16)) {
        condval = v_1;
      } else {
        condval = v_2;
      }
      float condval_1;
      if (((uint)0 < (condval & ((uint)1 << ((uint)(((((((i & 15) >> 3) * 16) + ((i & 1) * 8)) + (((i & 3) >> 1) * 2)) + ((i & 7) >> 2)) + 4)))))) {
        condval_1 = scores[i];
      } else {
        condval_1 = 0x0p+0f/*0.000000e+00*/;
      }
      scores[i] = condval_1;
    }
"""  # noqa: E501
CASTS = """\
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      uint2 __1;
      float4 v__1 = *(float4*)(scores + (n * 4));
      ((half2*)(&__1))[0] = __float22half2_rn(((float2*)(&v__1))[0]);
      ((half2*)(&__1))[1] = __float22half2_rn(((float2*)(&v__1))[1]);
"""
STORED = "      *(uint2*)(weights + (n * 4)) = __1;\n"


def mask_of(word, selector):
    """What the permutation leaves: each byte of the result is the first bit of one of the word's."""
    nibbles = [(selector >> 4 * n) & 0xF for n in range(4)]
    assert all(n & 8 for n in nibbles)
    return sum((0xFF if word >> (8 * (n & 3) + 7) & 1 else 0) << (8 * at) for at, n in enumerate(nibbles))


@pytest.mark.parametrize("pointer", ["((half2*)(", "(reinterpret_cast<__nv_bfloat162*>("])
def test_weights_are_dropped_in_pairs(pointer):
    """A mask keeps what the loop kept, for each of a thread's numbers."""
    casts = CASTS.replace("((half2*)(", pointer)
    found = with_pairs_dropped(HEAD + DROPPED + casts + STORED + "    }\n  }\n")
    lines = [line.strip() for line in found.split(HEAD)[1].splitlines()]
    assert lines[0] == "const uint32_t words[2] = {v_1, v_2};" and "scores[i]" not in found
    shift, first, at_x, at_y = (line.replace("const uint32_t ", "").rstrip(";") for line in lines[7:11])
    choice = re.compile(
        r"__1\.[xy] &= n & 2 \? first_bits_of_bytes<(\w+)>\((\w+)\) : first_bits_of_bytes<(\w+)>\((\w+)\)"
    )
    draw = random.Random(0)
    for _ in range(20):
        words = [draw.getrandbits(32) for _ in range(2)]
        for n in range(8):
            names = {"words": words, "n": n}
            for line in (shift, first):
                name, value = line.split(" = ")
                names[name] = eval(value, {}, names) & 0xFFFF_FFFF
            for at, line in ((0, at_x), (2, at_y)):
                upper, word, lower, other = choice.fullmatch(line).groups()
                mask = mask_of(names[word], int(upper, 16)) if n & 2 else mask_of(names[other], int(lower, 16))
                for column in (0, 1):
                    i = 4 * n + at + column
                    place = ((i & 15) >> 3) * 16 + (i & 1) * 8 + ((i & 3) >> 1) * 2 + ((i & 7) >> 2) + 4
                    kept = words[i // 16] >> place & 1
                    assert mask >> 16 * column & 0xFFFF == 0xFFFF * kept


def test_other_choices_stay():
    for text in (
        DROPPED.replace("* 16)", "* 8)") + CASTS + STORED,
        DROPPED + CASTS.replace("scores", "others") + STORED,
    ):
        assert with_pairs_dropped(HEAD + text) == HEAD + text


def test_both_words_of_a_product_come_of_one_instruction():
    text = HEAD + "  v_1 = (v_0 * (uint)77);\n  v_2 = (__umulhi(v_0, (uint)77) ^ v_1);\n  v_3 = (v_0 * (uint)78);\n}\n"
    found = with_whole_products(text)
    assert found.startswith("#ifndef WORDS_OF_PRODUCT") and found.count("mul.wide.u32") == 1
    assert found.split(HEAD)[1] == (
        "  v_1 = ((uint)words_of_product(v_0, (uint)77));\n"
        "  v_2 = (((uint)(words_of_product(v_0, (uint)77) >> 32)) ^ v_1);\n  v_3 = (v_0 * (uint)78);\n}\n"
    )
    assert with_whole_products(HEAD + "  v_1 = (v_0 * (uint)77);\n}\n") == HEAD + "  v_1 = (v_0 * (uint)77);\n}\n"


def test_kernels_are_printed_so():
    assert "max(largest_clear_part[rv & 3], " in lower_kernel(flash.forward(64, 64), H100()).cuda


@pytest.mark.slow  # of a user's own kernels test_patches.py says the same
def test_a_kernel_may_ask_for_one_chain_and_a_users_own_kernels_have_it():
    import tilelang

    kernel = flash.forward(64, 64)
    ours = lower_kernel(kernel, H100())
    one_chain = lower_kernel(kernel, H100(), pass_configs={ONE_CHAIN: True})
    assert "_part[" not in one_chain.cuda and one_chain.flags != ours.flags
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
        assert "_part[" not in tilelang.lower(kernel).kernel_source
