"""GPUs as data: what a kernel may use on each, and the compiler's name for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from attention_engine.errors import UnknownArch, UnknownOption, as_given

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Arch:
    """One GPU. Memory in bytes.

    NVIDIA's limits are those of the CUDA Programming Guide, table "Compute Capabilities"; SMs, peaks and bandwidths are
    those of the data sheet or the architecture's white paper. AMD's are those of ROCm's page "GPU hardware
    specifications" and of the data sheets of MI250 and MI300X: of one device as ROCm counts them.
    """

    name: str
    target: str  # as nvcc's -arch, the suffix a unlocks wgmma, setmaxnreg and tcgen05; as hipcc's --offload-arch
    capability: tuple[int, int]  # NVIDIA's; AMD has none
    sm_count: int
    shared_memory_per_block: int  # the most one block may opt in to
    shared_memory_per_sm: int
    max_threads_per_sm: int
    has_wgmma: bool = False
    has_tma: bool = False
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    peak_tflops: float | None = None  # dense, 16-bit operands, fp32 sums; None where nobody has looked it up
    bandwidth_tb_s: float | None = None
    language: Literal["cuda", "hip"] = "cuda"  # of the text that its compiler takes
    warp: int = 32  # threads that run as one; TileLang gives each warp whole rows of a product, 16 at least
    shared_memory_kept: int = 1024  # of each block, by the system

    def shared_memory_for(self, blocks_per_sm: int) -> int:
        """How much each block may use where several share an SM; of NVIDIA's the system keeps 1 KB of each."""
        share = self.shared_memory_per_sm // blocks_per_sm - self.shared_memory_kept
        return min(share // 128 * 128, self.shared_memory_per_block)

    def in_straight_lines(self) -> Arch:
        """The same without the instructions that only kernels placed by hand know how to use."""
        return replace(self, has_wgmma=False, has_tma=False)


def A100() -> Arch:  # noqa: N802 - the GPU's own name, as for those below
    """Ampere, 40 or 80 GB, SXM."""
    return Arch("A100", "sm_80", (8, 0), 108, 166912, 167936, 2048, peak_tflops=312, bandwidth_tb_s=2.0)


def RTX3090() -> Arch:  # noqa: N802
    """Ampere, GA102."""
    return Arch("RTX 3090", "sm_86", (8, 6), 82, 101376, 102400, 1536, peak_tflops=71, bandwidth_tb_s=0.94)


def RTX4090() -> Arch:  # noqa: N802
    """Ada, AD102."""
    return Arch("RTX 4090", "sm_89", (8, 9), 128, 101376, 102400, 1536, peak_tflops=165, bandwidth_tb_s=1.0)


def L40() -> Arch:  # noqa: N802
    """Ada, AD102, for servers."""
    return Arch("L40", "sm_89", (8, 9), 142, 101376, 102400, 1536, peak_tflops=181, bandwidth_tb_s=0.86)


def L40S() -> Arch:  # noqa: N802
    """Ada, AD102, for servers, with more power."""
    return replace(L40(), name="L40S", peak_tflops=362)


def H100() -> Arch:  # noqa: N802
    """Hopper, 80 GB, SXM."""
    return Arch("H100", "sm_90a", (9, 0), 132, 232448, 233472, 2048, True, True, peak_tflops=989, bandwidth_tb_s=3.35)


def H200() -> Arch:  # noqa: N802
    """Hopper, 141 GB, SXM."""
    return replace(H100(), name="H200", bandwidth_tb_s=4.8)


def H20() -> Arch:  # noqa: N802
    """Hopper, 96 GB: fewer SMs."""
    return replace(H100(), name="H20", sm_count=78, peak_tflops=148, bandwidth_tb_s=4.0)


def B200() -> Arch:  # noqa: N802
    """Blackwell, 180 GB, SXM. Its matrix instructions are tcgen05, not wgmma."""
    return Arch(
        "B200", "sm_100a", (10, 0), 148, 232448, 233472, 2048, has_tma=True, peak_tflops=2250, bandwidth_tb_s=8.0
    )


def RTX5090() -> Arch:  # noqa: N802
    """Blackwell, GB202."""
    return Arch("RTX 5090", "sm_120a", (12, 0), 170, 101376, 102400, 1536, has_tma=True, bandwidth_tb_s=1.79)


def MI250() -> Arch:  # noqa: N802
    """CDNA 2, one of the two dies of a card: ROCm shows each as a device. Half of a thread's registers are for sums of
    matrix products (MFMA) alone."""
    return Arch(
        "MI250", "gfx90a", (0, 0), 104, 65536, 65536, 2048, registers_per_sm=131072, max_registers_per_thread=512,
        peak_tflops=181, bandwidth_tb_s=1.6, language="hip", warp=64, shared_memory_kept=0,
    )  # fmt: skip


def MI300X() -> Arch:  # noqa: N802
    """CDNA 3."""
    return replace(
        MI250(), name="MI300X", target="gfx942", sm_count=304, peak_tflops=1307, bandwidth_tb_s=5.3
    )  # fmt: skip


KNOWN_GPUS = (A100, RTX3090, RTX4090, L40, L40S, H100, H200, H20, B200, RTX5090)
AMD_GPUS = (MI250, MI300X)


def check_gpu(device: object) -> None:
    """UnknownOption for what is given as a GPU and is none, such as its name."""
    if device is None or isinstance(device, Arch):
        return
    said = str(getattr(device, "__name__", device)).upper().replace(" ", "").replace("-", "")
    named = [gpu.__name__ for gpu in (*KNOWN_GPUS, *AMD_GPUS) if gpu.__name__ == said] or ["H100"]
    raise UnknownOption(
        f"device is {as_given(device)}. "
        f"Give an architecture, attention_engine.arch.{named[0]}(), or None for the tensors' own."
    )


def describe(name: str, capability: tuple[int, int], sm_count: int) -> Arch:
    """The description of a GPU that names itself so; raises UnknownArch for a capability without kernels here."""
    relatives = [arch for gpu in KNOWN_GPUS if (arch := gpu()).capability == capability]
    if not relatives:
        known = ", ".join(sorted({"{}.{}".format(*gpu().capability) for gpu in KNOWN_GPUS}, key=float))
        raise UnknownArch(
            f"{name} has compute capability {capability[0]}.{capability[1]}; there are kernels for {known}. "
            "Use backend='reference' on this GPU."
        )
    return _named(relatives, name, sm_count)


def describe_amd(name: str, target: str, sm_count: int) -> Arch:
    """The same of an AMD GPU, by the name that ROCm gives its instructions ("gfx942:sramecc+:xnack-")."""
    target = target.split(":")[0]
    relatives = [arch for gpu in AMD_GPUS if (arch := gpu()).target == target]
    if not relatives:
        known = ", ".join(gpu().target for gpu in AMD_GPUS)
        raise UnknownArch(f"{name} is {target}; there are kernels for {known}. Use backend='reference' on this GPU.")
    return _named(relatives, name, sm_count)


def _named(relatives: list[Arch], name: str, sm_count: int) -> Arch:
    """The one whose name is the longest part of this one ("H20" is a part of "H200"); else one of theirs with it."""
    named = [arch for arch in relatives if arch.name in name]
    if named:
        return replace(max(named, key=lambda arch: len(arch.name)), sm_count=sm_count)
    return replace(relatives[0], name=name, sm_count=sm_count, peak_tflops=None, bandwidth_tb_s=None)


def detect(device: torch.device | str | int | None = None) -> Arch:
    """The description of a device that torch calls CUDA's, AMD's too; by default the current one."""
    import torch

    properties = torch.cuda.get_device_properties(torch.device("cuda") if device is None else torch.device(device))
    if torch.version.hip is not None:
        return describe_amd(properties.name, properties.gcnArchName, properties.multi_processor_count)
    capability = (properties.major, properties.minor)
    return describe(properties.name, capability, properties.multi_processor_count)
