"""The headers of a kernel, but for what it does not use: reading them is four fifths of the time that nvcc takes.

TileLang 0.1.15 has every kernel include CUTLASS, CuTe and the standard library: 200000 lines, of which it uses some
hundreds. Here they are preprocessed once for each GPU and nvcc, cut into declarations, and kept on disk. A kernel gets
those whose names it mentions, and whose names these mention, and so on. All that has one name goes together, so that
overloads are chosen as ever; but for those of types that are not there, and for products of tensor cores of other
shapes. A declaration that nobody names changes no code: the PTX is the same. Where nvcc refuses what is left, the
kernel is compiled with the headers whole.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import marshal
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from attention_engine import files, folders
from attention_engine.codegen.patches.declarations import WORD, Declaration, cut
from attention_engine.codegen.patches.scope import Patch, Undo, inside, replace

LOG = logging.getLogger("attention_engine")
TEMPLATES = "tl_templates/cuda/"
INCLUDED = (
    *(f"{TEMPLATES}{name}.h" for name in (
        "instruction/wgmma", "instruction/mma", "intrin", "math", "barrier", "copy_sm90", "copy", "atomic", "reduce",
        "scan", "ldsm", "threadblock_swizzle", "debug",
    )),
    "math_constants.h",
)  # fmt: skip
STANDARD = ("std", "__pstl", "__gnu_cxx")  # whose overloads are many, each for types of its own
ON_A_GPU = frozenset(
    """c++config.h cmath compare concepts cpp_type_traits.h cstddef cstdint cstdlib initializer_list limits math.h
    iterator_concepts.h move.h new std_abs.h stdlib.h stl_iterator_base_funcs.h stl_iterator_base_types.h stl_pair.h
    type_traits type_traits.h utility utility.h""".split()  # noqa: SIM905
)  # of the host's standard library, what kernels may need: strings, streams and clocks run on no GPU
FAST = "--use_fast_math"


@dataclass(frozen=True)
class Reading:
    """What headers are read for: the GPU, "sm_90a", approximate maths, and by which compilers from which folders."""

    target: str
    fast: bool
    nvcc: str
    host: str
    folders: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The name of what is kept of them."""
        makers = [Path(__file__), Path(__file__).with_name("declarations.py"), Path(self.nvcc), Path(self.host)]
        said = [f"{p}{p.stat().st_mtime_ns}{p.stat().st_size}" for p in makers]
        return hashlib.blake2b(repr((self, said)).encode(), digest_size=12).hexdigest()


class Headers:
    """The declarations of the headers, and the macros."""

    def __init__(self, given: Sequence[Declaration], macros: dict[str, str], of_runtime: int = 0) -> None:
        declarations = [d for d in given if runs_on_a_gpu(d)]
        self.of_runtime = len(
            [d for d in given[:of_runtime] if runs_on_a_gpu(d)]
        )  # the first so many are cuda_runtime.h's
        self.declarations, self.macros = declarations, macros
        self.paths = [d.path for d in declarations]
        self.spaces = {name for path in self.paths for name in path}
        self.by_name: dict[str, list[int]] = defaultdict(list)
        for number, declaration in enumerate(declarations):
            for name in declaration.names:
                self.by_name[name].append(number)
        self.classes = {name for d in declarations if d.kind == "class" for name in d.names}
        self.needs = [frozenset(d.needs) & self.classes for d in declarations]
        self.words = functools.cache(lambda number: words_of(self.declarations[number].text))
        self.opened: dict[tuple[str, ...], set[str]] = defaultdict(set)  # by `using namespace`
        for path, declaration in zip(self.paths, declarations, strict=True):
            if not declaration.names and declaration.text.lstrip().startswith("using"):
                self.opened[path] |= set(WORD.findall(declaration.text)) & self.spaces

    @functools.cached_property
    def beside_runtime(self) -> Headers:
        """The rest, for nvcc with its own cuda_runtime.h."""
        return Headers(self.declarations[self.of_runtime :], self.macros)

    def of(self, kernel: str) -> str:
        """The headers that a kernel needs."""
        macros = self._macros(words_of(kernel))
        words = words_of(kernel).union(*(words_of(self.macros[name]) for name in macros))
        kept = self._reached(words, Products(kernel))
        defined = [f"#ifndef {name}\n{self.macros[name]}\n#endif\n" for name in sorted(macros)]
        return self._told(kept) + "".join(defined)

    def _macros(self, words: Iterable[str]) -> set[str]:
        found: set[str] = set()
        left = [w for w in words if w in self.macros]
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += [w for w in words_of(self.macros[name]) if w in self.macros]
        return found

    def _reached(self, words: set[str], products: Products) -> set[int]:
        """The numbers of the declarations that these words lead to."""
        kept: set[int] = set()
        have: set[str] = set()
        waiting: set[int] = set(self.by_name["operator"])  # for the types that they take
        front: list[tuple[set[str], tuple[str, ...]]] = [(words, ())]
        while front:
            words, path = front.pop()
            seen = {"<anonymous>", *path} | (words & self.spaces)
            seen = seen.union(*(self.opened[path[:n]] for n in range(len(path) + 1)))
            for number in {n for word in words if word != "operator" for n in self.by_name.get(word, ())} - kept:
                declaration = self.declarations[number]
                if not seen.issuperset(self.paths[number]) or not products.have(declaration):
                    continue
                if self._waits(number):
                    waiting.add(number)
                else:
                    kept.add(number)
                    have.update(declaration.names)
                    front.append((self.words(number), self.paths[number]))
            if not front:
                ready = {n for n in waiting if self.needs[n] <= have and (self.needs[n] or not self._is_operator(n))}
                for number in ready:
                    have.update(self.declarations[number].names)
                    front.append((self.words(number), self.paths[number]))
                waiting -= ready
                kept |= ready
        return kept

    def _is_operator(self, number: int) -> bool:
        return "operator" in self.declarations[number].names

    def _waits(self, number: int) -> bool:
        """Is it for certain types alone: a specialization, or a function of the standard library?"""
        if not self.needs[number]:
            return False
        return self.declarations[number].kind != "call" or self.paths[number][:1] in {(name,) for name in STANDARD}

    def _told(self, kept: set[int]) -> str:
        """These declarations in their order, in their namespaces."""
        there = {name for number in kept for name in self.paths[number]}
        lines: list[str] = []
        around: tuple[str, ...] = ()
        for number, declaration in enumerate(self.declarations):
            used = declaration.text.replace("using namespace", "")
            if number not in kept and (declaration.names or not there.issuperset(WORD.findall(used))):
                continue
            same = 0
            while same < min(len(around), len(declaration.around)) and around[same] == declaration.around[same]:
                same += 1
            lines += ["}"] * (len(around) - same) + [f"{opened} {{" for opened in declaration.around[same:]]
            around = declaration.around
            lines.append(declaration.text)
        return "\n".join([*lines, *["}"] * len(around), ""])


def runs_on_a_gpu(declaration: Declaration) -> bool:
    """May a kernel need it? Not what is of the host's standard library, nor what writes to its streams."""
    if _OF_THE_HOST.search(declaration.file) is not None:
        return declaration.file.rsplit("/", 1)[-1] in ON_A_GPU
    return "operator" not in declaration.names or not _STREAMS & set(declaration.needs)


_OF_THE_HOST = re.compile(r"/c\+\+/v?\d")  # libstdc++ and libc++
_STREAMS = {"ostream", "istream", "basic_ostream", "basic_istream"}


class Products:
    """The products of tensor cores that a kernel asks for: of other shapes there are two thousand."""

    def __init__(self, kernel: str) -> None:
        self.asked, brief = set(_PRODUCT.findall(kernel)), _BRIEF
        self.known = all({a, b, c} <= brief.keys() for a, b, c, _, _ in self.asked)
        self.shapes = tuple(f"MMA_{m}x{n}x" for _, _, _, m, n in self.asked)
        self.types = tuple(brief[c] + brief[a] + brief[b] for a, b, c, _, _ in self.asked) if self.known else ()

    def have(self, declaration: Declaration) -> bool:
        """May the kernel come to this declaration?"""
        name = declaration.names[0] if declaration.names else ""
        if not self.known:
            return True
        if name.startswith("MMA_64x"):
            return name.startswith(self.shapes) and any(types in name for types in self.types)
        if name in ("WgmmaSSImpl", "WgmmaRSImpl"):
            head = re.sub(r"\s+", " ", declaration.text.split("{", 1)[0])
            return "DataType::k" not in head or any(
                f"k{a}, DataType::k{b}, DataType::k{c}, {m}, {n}," in head for a, b, c, m, n in self.asked
            )
        return True


_PRODUCT = re.compile(r"wgmma_(?:ss|rs)<tl::DataType::k(\w+), tl::DataType::k(\w+), tl::DataType::k(\w+), (\d+), (\d+)")
_BRIEF = {"Float16": "F16", "BFloat16": "BF16", "Float32": "F32", "TensorFloat32": "TF32"}  # as CuTe has them
_MEMBER = re.compile(r"(?:\.\s*|(?<=[\w)\]])->)(?:template\s+)?[A-Za-z_]\w*")


def words_of(text: str) -> set[str]:
    """The words of C++ text that may name a declaration: not those of members."""
    return set(WORD.findall(_MEMBER.sub(" ", text)))


def read(reading: Reading) -> Headers:
    """The headers, preprocessed by the host's compiler as nvcc tells it to, and cut."""
    with tempfile.TemporaryDirectory() as folder:
        source, told = Path(folder) / "headers.cu", Path(folder) / "headers.ii"
        source.write_text("".join(f"#include <{name}>\n" for name in INCLUDED))
        command = [reading.nvcc, f"-ccbin={reading.host}", f"-arch={reading.target}", "-std=c++20"]
        command += [*(f"-I{place}" for place in reading.folders), *([FAST] if reading.fast else []), "--cubin"]
        plan = subprocess.run(
            [*command, "--dryrun", "-o", str(told), str(source)], capture_output=True, text=True, check=True
        )
        steps = [line.removeprefix("#$ ") for line in plan.stderr.splitlines() if line.startswith("#$ ")]
        script = [line for line in steps if re.match(r"\w+=", line)]
        (preprocess,) = [line for line in steps if " -E " in line]
        script = [f"export {name}='{value.strip()}'" for name, value in (line.split("=", 1) for line in script)]
        script.append(re.sub(r'-o "[^"]*"', f'-dD -o "{told}"', preprocess))
        subprocess.run(["bash", "-c", "\n".join(script)], check=True, capture_output=True)
        text = told.read_text(errors="replace")
    macros: dict[str, str] = {}
    for line in re.findall(r"^#(?:define|undef) .*$", text, re.MULTILINE):
        name = WORD.search(line, line.index(" "))
        if name is not None:
            macros.pop(name[0], None)
            if line.startswith("#define"):
                macros[name[0]] = line
    start = text.index(f'# 1 "{source}"', text.index("cuda_runtime.h"))  # behind what nvcc includes of itself
    own = list(cut(text[:start]))
    return Headers([*own, *cut(text[start:])], macros, len(own))


def keep(reading: Sequence[Any], place: str) -> None:
    """Reads the headers for the values of a `Reading`, and writes what is to be known of them."""
    headers = read(Reading(*reading))
    told = [d.kept for d in headers.declarations], headers.macros, headers.of_runtime
    files.write_whole(Path(place), base64.b64encode(marshal.dumps(told)).decode())


def _kept(reading: Reading) -> Headers | None:
    """The headers, read once among all processes; None where that can't be."""
    place = folders.kernel_folders().writable
    if place is None:
        return None
    kept = place / f".headers-{reading.digest}.{sys.implementation.cache_tag}"
    with folders.locked(kept.stem):
        if not kept.exists():
            code = "import ast, sys; from attention_engine.codegen.patches.headers import keep; "
            code += "keep(ast.literal_eval(sys.argv[1]), sys.argv[2])"
            command = [sys.executable, "-c", code, repr(astuple(reading)), str(kept)]
            package = str(Path(__file__).parents[3])  # in a process of its own: Python's lock stays with lowering
            subprocess.run(command, check=True, capture_output=True, cwd=package)
    if folders.distrust(kept) is not None:
        return None
    declarations, macros, of_runtime = marshal.loads(base64.b64decode(kept.read_bytes()))  # JSON takes three times that
    return Headers([Declaration(*fields) for fields in declarations], macros, of_runtime)


_lock = threading.Lock()
_found: dict[Reading, Headers | None] = {}


def headers_for(reading: Reading) -> Headers | None:
    """The headers, read once a process."""
    with _lock:
        if reading not in _found:
            _found[reading] = None
            with contextlib.suppress(OSError, ValueError, TypeError, EOFError, subprocess.SubprocessError):
                _found[reading] = _kept(reading)
        return _found[reading]


def reading_for(target: str, fast: bool) -> Reading:
    """What TileLang reads the headers for; it is imported by then."""
    from tilelang.contrib.cc import get_cplus_compiler
    from tilelang.contrib.nvcc import get_nvcc_compiler
    from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

    places = (str(TILELANG_TEMPLATE_PATH), str(CUTLASS_INCLUDE_DIR))
    return Reading(target, fast, str(get_nvcc_compiler()), str(get_cplus_compiler()), places)


def begin(target: str, fast: bool) -> None:
    """Starts reading the headers, while the first kernel is lowered."""
    threading.Thread(target=headers_for, args=(reading_for(target, fast),), daemon=True).start()


_INCLUDE = re.compile(r"^#include <([^>]+)>\n", re.MULTILINE)
_INCLUDES = re.compile(r"^#if defined\(_MSC_VER\).*\n(?:#.*\n|\n)*#include <[^>]+>\n(?:#endif\n)?", re.MULTILINE)


def lessened(code: str, target: str, fast: bool, beside_runtime: bool = False) -> str | None:
    """The source of a kernel, or of several, with what it needs of the headers in their place; None where that isn't
    known. beside_runtime: for nvcc with its own cuda_runtime.h."""
    asked = set(_INCLUDE.findall(code)) - {"cuda.h", f"{TEMPLATES}cuda_bf16_fallbacks.cuh"}  # under conditions
    kernel = _INCLUDES.sub("", code)
    if not asked or not asked <= set(INCLUDED) or _INCLUDE.search(kernel) is not None:
        return None
    headers = headers_for(reading_for(target, fast))
    if headers is None:
        return None
    return (headers.beside_runtime if beside_runtime else headers).of(kernel) + kernel


@contextlib.contextmanager
def without_runtime() -> Iterator[str]:
    """An option for nvcc: the header that it includes before all others, cuda_runtime.h, is empty. What a kernel needs
    of it is cut like the rest."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cuda_runtime.h").touch()
        yield f"-I{folder}"


def put() -> Undo:
    """nvcc compiles our kernels with what they need of their headers; with all where it can't."""
    from tilelang.contrib import nvcc

    whole = nvcc.compile_cuda

    def compile_cuda(code: str, target_format: str = "ptx", arch: Any = None, options: Any = None, **more: Any) -> Any:
        if inside() and isinstance(arch, list) and len(arch) == 1 and isinstance(options, list):
            wanted = code, arch[0].removeprefix("-arch="), FAST in options
            less = lessened(*wanted)
            if less is not None:
                with contextlib.suppress(RuntimeError), without_runtime() as first:
                    return whole(less, target_format, arch, [first, *options], **more)
                LOG.info(
                    "a kernel is compiled with nvcc's cuda_runtime.h whole: nvcc refused what it seems to need of it"
                )
                with contextlib.suppress(RuntimeError):
                    return whole(lessened(*wanted, beside_runtime=True), target_format, arch, options, **more)
                LOG.info("a kernel is compiled with its headers whole: nvcc refused what it seems to need of them")
        return whole(code, target_format, arch, options, **more)

    return replace((nvcc, "compile_cuda", compile_cuda))


PATCH = Patch(
    defect="every kernel includes 200000 lines of headers",
    version="0.1.15",
    proof="test_tilelang_includes_more_than_a_kernel_needs",
    put=put,
)
