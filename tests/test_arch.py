"""GPUs are described as the CUDA Programming Guide has them."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from attention_engine import arch
from attention_engine.errors import UnknownArch


def test_two_blocks_share_an_h100_sm_with_113_kb_each() -> None:
    assert arch.H100().shared_memory_for(2) == 113 * 1024
    assert arch.H100().shared_memory_for(1) == arch.H100().shared_memory_per_block == 227 * 1024


def test_consumer_gpus_have_99_kb_a_block() -> None:
    for gpu in (arch.RTX3090(), arch.RTX4090(), arch.L40()):
        assert gpu.shared_memory_per_block == gpu.shared_memory_for(1) == 99 * 1024


def test_a_block_never_has_more_than_its_sm_without_the_kilobyte_of_the_system() -> None:
    for gpu in (gpu() for gpu in arch.KNOWN_GPUS):
        assert gpu.shared_memory_per_block == gpu.shared_memory_per_sm - 1024
        assert gpu.target.removeprefix("sm_").removesuffix("a") == "{}{}".format(*gpu.capability)


def test_a_device_is_described_by_its_name_and_capability() -> None:
    assert arch.describe("NVIDIA H200", (9, 0), 132) == arch.H200()
    assert arch.describe("NVIDIA H100 80GB HBM3", (9, 0), 114).sm_count == 114
    cousin = arch.describe("NVIDIA A10", (8, 6), 72)
    assert (cousin.name, cousin.target, cousin.sm_count, cousin.peak_tflops) == ("NVIDIA A10", "sm_86", 72, None)


def test_a_name_that_is_part_of_another_is_not_taken_for_it():
    assert arch.describe("NVIDIA L40S", (8, 9), 142) == arch.L40S()
    assert arch.describe("NVIDIA L40", (8, 9), 142) == arch.L40()
    assert arch.describe("NVIDIA H20", (9, 0), 78) == arch.H20()


def test_amd_gpus_have_wavefronts_of_64_and_64_kb_a_block():
    for gpu in (gpu() for gpu in arch.AMD_GPUS):
        assert (gpu.language, gpu.warp) == ("hip", 64)
        assert gpu.shared_memory_per_block == gpu.shared_memory_for(1) == 64 * 1024
        assert gpu.capability < (8, 0) and not gpu.has_wgmma and not gpu.has_tma  # torch says (9, 0) of a gfx90a


def test_amd_gpus_are_described_by_what_rocm_calls_their_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert arch.describe_amd("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304) == arch.MI300X()
    cousin = arch.describe_amd("AMD Instinct MI300A", "gfx942", 228)
    assert (cousin.name, cousin.target, cousin.sm_count, cousin.peak_tflops) == (
        "AMD Instinct MI300A", "gfx942", 228, None,
    )  # fmt: skip
    with pytest.raises(UnknownArch, match=r"gfx1100; there are kernels for gfx90a, gfx942\. Use backend='reference'"):
        arch.describe_amd("AMD Radeon RX 7900", "gfx1100", 96)
    properties = SimpleNamespace(name="AMD Instinct MI250X", gcnArchName="gfx90a", multi_processor_count=110)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (arch.detect().target, arch.detect().sm_count) == ("gfx90a", 110)


def test_an_unknown_capability_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnknownArch) as error:
        arch.describe("Tesla T4", (7, 5), 40)
    assert str(error.value) == (
        "Tesla T4 has compute capability 7.5; there are kernels for 8.0, 8.6, 8.9, 9.0, 10.0, 12.0. "
        "Use backend='reference' on this GPU."
    )


def test_detect_asks_torch_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA L40", major=8, minor=9, multi_processor_count=142)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert arch.detect("cuda:1") == arch.detect() == arch.L40()


def test_importing_arch_and_settings_imports_neither_torch_nor_tilelang() -> None:
    code = (
        "import sys, attention_engine.arch, attention_engine.settings; "
        "assert not {'torch', 'tilelang'} & set(sys.modules), sorted({'torch', 'tilelang'} & set(sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
