"""One reciprocal for two numbers of a thread: the rule on the text, and what it puts there, compiled for the CPU."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from attention_engine.codegen.patches.reciprocals import HELPER, with_shared_reciprocals

KERNEL = 'extern "C" __global__ void forward_kernel(float* x) {\n'
PRINTED = """\
      #pragma unroll
      for (int i_5 = 0; i_5 < 64; ++i_5) {
        scores[i_5] = tl::fast_rcp((exp2f((-0x1p-3f/*-1.25e-01*/ * scores[i_5])) + 0x1p+0f/*1.000000e+00*/));
      }
"""
REWRITTEN = """\
      #pragma unroll
      for (int i_5 = 0; i_5 < 64; ++i_5) {
        scores[i_5] = exp2f((-0x1p-3f/*-1.25e-01*/ * scores[i_5])) + 0x1p+0f/*1.000000e+00*/;
      }
      #pragma unroll
      for (int i_5 = 0; i_5 < 64; i_5 += 2) {
        invert_two(scores[i_5], scores[i_5 + 1]);
      }
"""
ON_CPU = """\
#define __device__
#define __forceinline__ inline
namespace tl { static float fast_rcp(float x) { return 1.0f / x; } }
"""


def test_neighbours_share_a_reciprocal():
    assert with_shared_reciprocals(KERNEL + PRINTED) == HELPER + KERNEL + REWRITTEN


@pytest.mark.parametrize(
    ("printed", "other"),
    [("< 64", "< 63"), ("scores[i_5] =", "weights[i_5] ="), ("+ 0x1p+0f", "- 0x1p+0f"), ("exp2f", "tanhf"),
     ("      }\n", "        x[i_5] = scores[i_5];\n      }\n")],
)  # fmt: skip
def test_all_else_stays(printed, other):
    """An odd number; a tile whose neighbours may be of two rows; what may be less than 1; and loops that do more."""
    changed = KERNEL + PRINTED.replace(printed, other)
    assert with_shared_reciprocals(changed) == changed


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_two_reciprocals_are_those_of_each(tmp_path):
    (tmp_path / "two.cc").write_text(f'{ON_CPU}{HELPER}extern "C" void two(float* x) {{ invert_two(x[0], x[1]); }}\n')
    library = tmp_path / "two.so"
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "two.cc")], check=True)
    two = ctypes.CDLL(str(library)).two
    numbers = [1.0, 1.5, 3.0, 1e4, 2.0**40, 2.0**62, 2.0**63]
    for a in [*numbers, 2.0**64, 3e38, torch.inf]:
        for b in [*numbers, torch.inf]:
            found = (ctypes.c_float * 2)(a, b)
            two(found)
            exact = torch.tensor([1 / x if x <= 2.0**63 else 0.0 for x in (a, b)])
            torch.testing.assert_close(torch.tensor([*found]), exact, rtol=4e-7, atol=0)
    found = (ctypes.c_float * 2)(torch.nan, 2.0)
    two(found)
    assert torch.tensor([*found]).isnan().all()
