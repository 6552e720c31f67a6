"""What AMD's compiler makes of a kernel's HIP text, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from attention_engine.arch import Arch
from attention_engine.codegen.compile import load_tilelang
from attention_engine.codegen.dialects import find_hipcc
from attention_engine.errors import NoHipCompiler


@dataclass(frozen=True)
class Used:
    """What one thread of a kernel takes, as the compiler's assembly says."""

    registers: int  # vector registers, those of matrix products' sums among them
    scratch_bytes: int  # memory of its own that it reads or writes: what was spilled, arrays that no registers hold


def compile_hip_text(text: str, gpu: Arch) -> Used:
    """Compiles a text with TileLang's flags. Raises NoHipCompiler, or RuntimeError with the compiler's first error."""
    compiler = find_hipcc()
    if compiler is None:
        raise NoHipCompiler(gpu.name)
    with tempfile.TemporaryDirectory() as folder:
        source, assembly = Path(folder) / "kernel.hip", Path(folder) / "kernel.s"
        source.write_text(text)
        headers = Path(load_tilelang().__file__).parent / "src"
        wanted = [f"--offload-arch={gpu.target}", "--cuda-device-only", "-S", "-O3", "-std=c++17", f"-I{headers}"]
        asked = [compiler, *wanted, "-o", str(assembly), str(source)]
        result = subprocess.run(asked, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            errors = [line for line in result.stderr.splitlines() if "error:" in line]
            raise RuntimeError((errors or [f"{compiler} failed: {result.returncode}"])[0])
        return parse_assembly(assembly.read_text())


def parse_assembly(assembly: str) -> Used:
    """What the notes at the end of an assembly say; of several kernels, the most of each.

    They count memory for scalar registers too, which may then be kept in lanes of a vector register: memory counts
    where an instruction names it, or the descriptor that a kernel of MI250 gets for it.
    """

    def most(name: str) -> int:
        return max(int(number) for number in re.findall(rf"^\s+(?:- )?\.{name}:\s+(\d+)$", assembly, re.MULTILINE))

    named = re.search(r"\bscratch_(load|store)|\bbuffer_(load|store)_\w+ .*s\[0:3\]", assembly)
    return Used(most("vgpr_count"), most("private_segment_fixed_size") if named else 0)
