"""Rules on the CUDA text: rows in several chains, warpgroups' numbers uniform; all else stays as it was."""

from attention_engine.arch import H100
from attention_engine.target.compile import ONE_CHAIN, lower_kernel
from attention_engine.target.printed import in_chains, with_uniform_groups
from tests.target import flash

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
        float most_part[4] = {most[i_5], most[i_5], most[i_5], most[i_5]};
        #pragma unroll
        for (int rv = 0; rv < 32; ++rv) { most_part[rv & 3] = max(most_part[rv & 3], scores[(rv & 15) * 4 + i_5]); }
        most[i_5] = max(max(most_part[0], most_part[1]), max(most_part[2], most_part[3]));
      }
"""


def test_a_maximum_goes_in_four_chains():
    assert in_chains(PRINTED) == REWRITTEN


def test_a_sum_starts_from_what_there_is():
    found = in_chains(PRINTED.replace("max(most[i_5], ", "(most[i_5] + "))
    assert "float most_part[4] = {0.0f, 0.0f, 0.0f, 0.0f};" in found
    assert "most[i_5] = most[i_5] + ((most_part[0] + most_part[1]) + (most_part[2] + most_part[3]));" in found


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


def test_a_warpgroups_number_is_one_lanes():
    head = 'extern "C" __global__ void __launch_bounds__(384, 1) made(float* x) {\n'
    found = with_uniform_groups(f"{head}  tl::wgmma_ss(x + (((int)threadIdx.x) >> 7));\n}}\n")
    declared = "  const int warpgroup = __shfl_sync(0xffffffffu, (((int)threadIdx.x) >> 7), 0);\n"
    assert found == f"{head}{declared}  tl::wgmma_ss(x + warpgroup);\n}}\n"
    plain = f"{head}  x[((int)threadIdx.x) >> 7] = 0;\n}}\n"
    assert with_uniform_groups(plain) == plain


def test_kernels_are_printed_so():
    """In four chains, or in one where a kernel asks for it; a user's own TileLang kernels stay as they are."""
    import tilelang

    kernel = flash.forward(64, 64)
    ours = lower_kernel(kernel, H100()).cuda
    assert "_part[rv & 3] = max(" in ours
    one_chain = lower_kernel(kernel, H100(), pass_configs={ONE_CHAIN: True})
    assert "_part[" not in one_chain.cuda and one_chain.flags != lower_kernel(kernel, H100()).flags
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}):
        assert "_part[" not in tilelang.lower(kernel).kernel_source
