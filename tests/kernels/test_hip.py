"""What is read of AMD's compiler, by a compiler of three lines; and, where that is here, what it says of a kernel."""

import pytest

pytest.importorskip("tilelang")
from attention_engine import arch
from attention_engine.codegen.dialects import find_hipcc
from attention_engine.errors import NoHipCompiler
from tests import levels
from tests.kernels import hip

ASSEMBLY = """\
	scratch_store_dword off, v1, s32
amdhsa.kernels:
  - .agpr_count:     36
    .private_segment_fixed_size: 16
    .vgpr_count:     196
    .vgpr_spill_count: 4
  - .agpr_count:     0
    .private_segment_fixed_size: 0
    .vgpr_count:     200
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """hipcc is these lines of a shell."""

    def says(lines):
        script = tmp_path / "hipcc"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(hip, "find_hipcc", lambda: str(script))

    return says


def test_the_most_that_a_kernel_of_the_text_takes(compiler, tmp_path):
    (tmp_path / "made.s").write_text(ASSEMBLY)
    compiler(f'echo "$@" > {tmp_path}/asked; while [ "$1" != -o ]; do shift; done; cp {tmp_path}/made.s "$2"')
    assert hip.compile_hip_text("text", arch.MI250()) == hip.Used(registers=200, scratch_bytes=16)
    asked = (tmp_path / "asked").read_text().split()
    assert {"--offload-arch=gfx90a", "-O3", "-S"} <= set(asked) and asked[-1].endswith(".hip")


@pytest.mark.parametrize(
    ("instruction", "scratch"),
    [
        ("scratch_load_dwordx2 v[0:1], off, s33", 16),
        ("buffer_load_dword v1, off, s[0:3], 0 offset:4", 16),
        ("v_writelane_b32 v255, s30, 2", 0),
        ("buffer_load_dword v1, off, s[8:11], 0", 0),
    ],
)
def test_memory_counts_where_it_is_read_or_written(instruction, scratch):
    text = ASSEMBLY.replace("scratch_store_dword off, v1, s32", instruction)
    assert hip.parse_assembly(text).scratch_bytes == scratch


def test_a_text_that_does_not_compile_is_refused_in_the_compilers_words(compiler):
    compiler("echo 'kernel.hip:3:1: error: unknown type name' >&2; echo '1 error generated' >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"^kernel.hip:3:1: error: unknown type name$"):
        hip.compile_hip_text("text", arch.MI300X())


def test_without_the_compiler(monkeypatch):
    monkeypatch.setattr(hip, "find_hipcc", lambda: None)
    with pytest.raises(NoHipCompiler):
        hip.compile_hip_text("text", arch.MI300X())


@pytest.mark.slow  # TileLang and the compiler take ten seconds
@pytest.mark.skipif(find_hipcc() is None, reason="needs hipcc")
@pytest.mark.parametrize("gpu", arch.AMD_GPUS)
def test_a_forward_kernel_fits_amds_gpus(gpu):
    (row,) = levels.made(gpu.__name__, levels.Job("forward", 64, "softmax"))
    assert row.level == "compiles" and row.spilled == 0 and 0 < row.registers <= gpu().max_registers_per_thread
