"""What a kernel needs of its headers."""

import re
import subprocess

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, arch, meta_tensor
from attention_engine.codegen import compile as codegen_compile
from attention_engine.codegen.compile import find_nvcc, load_tilelang
from attention_engine.codegen.patches import headers, patched
from attention_engine.codegen.patches.declarations import cut
from attention_engine.codegen.patches.headers import Headers, words_of
from attention_engine.library import causal, scale

needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
TEXT = """
# 1 "a.h" 1
typedef unsigned int uint32_t;
typedef void (*callback)(int);
#pragma GCC diagnostic push
namespace tl {
inline namespace v1 {
enum class Kind { first, second };
template <int N, bool = (N >= 2)> struct Box;
template <int N> struct Box<N, true> : Base { int held[N]; void member() { if (N) { held[0] = 1; } } };
}
#pragma nv_exec_check_disable
template <class T, class = enable_if_t<(sizeof(T) > 2)>>
__attribute__((device)) inline T twice(T x, int n = count(3)) { return x + x; }
Box<1>::Box(int n) : held{n}, other(2) { held[0] = n; }
template <class T> concept Small = requires(T t) { { t.size() } -> same_as<int>; };
template <class T> requires Small<T> struct Needs { };
template <class T> inline constexpr T half_v = static_cast<T>(0.5);
constexpr int table[] = {1, 2};
Box<1>& Box<1>::operator=(const Box<1>& other) { return *this; }
bool operator==(const Point& a, const Point& b) { return true; }
using number = decltype(twice(1));
using namespace v1;
}
extern "C" {
int plain(int);
}
"""


def names():
    return [d.names for d in cut(TEXT)]


def test_headers_are_cut_into_declarations():
    assert names() == [
        ("uint32_t",), ("callback",), ("Kind", "first", "second"), ("Box",), ("Box",), ("twice",), ("Box",), ("Small",),
        ("Needs",), ("half_v",), ("table",), ("Box",), ("operator",), ("number",), (), ("plain",),
    ]  # fmt: skip


def test_declarations_know_their_namespaces_and_keep_their_text():
    found = {d.names[0]: d for d in cut(TEXT) if d.names}
    assert found["Kind"].around == ("namespace tl", "inline namespace v1") and found["Kind"].path == ("tl",)
    assert found["plain"].around == ('extern "C"',) and found["plain"].path == ()
    assert found["twice"].text.strip().startswith("#pragma nv_exec_check_disable")  # is the next declaration's
    assert not any("# 1" in d.text or "diagnostic" in d.text for d in found.values())  # nobody's


def kept(text, kernel, macros=None):
    return Headers(list(cut(text)), macros or {}).of(kernel)


def test_a_kernel_gets_what_it_names_and_what_that_names():
    text = "namespace tl { int inner(int); int outer(int x) { return inner(x); } int other(int); }"
    assert re.findall(r"int (\w+)\(", kept(text, "tl::outer(1);")) == ["inner", "outer"]
    assert kept(text, "x.outer(1); y->inner(2);") == ""  # members


def test_overloads_and_specializations_go_together():
    text = "namespace tl { struct A; int f(int); int f(A); template <class T> struct B; template <> struct B<int> {}; }"
    assert kept(text, "tl::f(1)").count("int f(") == 2
    assert kept(text, "tl::B<int> b;").count("struct B") == 2


def test_what_is_for_types_that_are_not_there_is_left_out():
    text = "namespace std { class string {}; template <class T> struct hash; template <> struct hash<string> {}; "
    text += "int swap(int&, int&); int swap(string&, string&); bool operator==(string, string); }"
    assert re.findall(r"swap\((\w+)", kept(text, "std::swap(a, b)")) == ["int"]
    assert "hash<string>" not in kept(text, "std::hash<int> h;")
    everything = kept(text, "std::string s; std::swap(s, s); std::hash<std::string> h;")
    assert "hash<string>" in everything and "operator==" in everything and everything.count("swap") == 2


def test_names_of_other_namespaces_are_not_reached():
    text = "namespace std { int move(int); } namespace cute { int move(int); int take(int x) { return move(x); } }"
    assert "std" not in kept(text, "cute::take(1)")
    assert "std" in kept(text + "int all(int x) { return std::move(x); }", "all(1)")


def test_macros_come_with_what_they_say():
    macros = {"ONE": "#define ONE two(INNER)", "INNER": "#define INNER 3", "OTHER": "#define OTHER 4"}
    found = kept("int two(int);", "x = ONE;", macros)
    assert "int two(int);" in found and "#define ONE" in found and "#define INNER" in found and "OTHER" not in found


def test_what_runs_on_the_host_alone_is_not_there():
    text = '# 1 "/usr/include/c++/13/ostream" 1\nnamespace std { int print(int); }\n'
    text += '# 1 "/usr/include/c++/13/cstdint" 1\nnamespace std { int wide(int); }\n# 1 "/cute/layout.hpp" 1\n'
    text += "struct Point {}; void operator<<(std::ostream& out, Point p); Point operator+(Point a, Point b);"
    found = kept(text, "std::print(1); std::wide(1); Point p; using std::ostream;")
    assert "wide" in found and "print" not in found and "operator+" in found and "operator<<" not in found


def test_what_stands_before_the_headers_stays(monkeypatch):
    monkeypatch.setattr(headers, "headers_for", lambda reading: Headers(list(cut("int inner(int);")), {}))
    pytest.importorskip("tilelang")
    code = "#define OURS 1\nint ours() { return inner(1); }\n#if defined(_MSC_VER)\n#include <cuda.h>\n#endif\n"
    less = headers.lessened(code + "#include <math_constants.h>\nvoid f();\n", "sm_90a", True)
    assert less is not None and less.index("inner(int)") < less.index("int ours()") < less.index("void f();")
    assert "#define OURS" in less and "#include" not in less and "#if defined" not in less


def test_of_kernels_in_one_text_each_stays(monkeypatch):
    monkeypatch.setattr(headers, "headers_for", lambda reading: Headers(list(cut("int inner(int);")), {}))
    pytest.importorskip("tilelang")
    includes = "#if defined(_MSC_VER)\n#include <cuda.h>\n#endif\n#include <math_constants.h>\n#ifdef ENABLE_BF16\n"
    includes += "#include <tl_templates/cuda/cuda_bf16_fallbacks.cuh>\n#endif\n"
    names = ["first", "second", "third"]
    less = headers.lessened(
        "".join(f"{includes}\nint {name}() {{ return inner(1); }}\n" for name in names), "sm_90a", True
    )
    assert less is not None and [less.count(f"int {name}()") for name in names] == [1, 1, 1]
    assert less.count("int inner(int)") == 1 and "#include" not in less and "#endif" not in less


def test_words_of_members_name_nothing():
    assert words_of("a.b c->d { e } -> f; this->g()") == {"a", "c", "e", "f", "this"}


def test_a_kernel_with_another_header_is_left_alone():
    assert headers.lessened("#include <other.h>\nvoid f();", "sm_90a", True) is None


def lowered(device, name):
    pytest.importorskip("tilelang")
    engine = AttentionEngine([meta_tensor(1, 2, 128, 64, dtype=torch.float16)] * 3, CustomIO({}), scale(0.125), causal)
    kernel = engine._all_kernels(device)[name]
    return codegen_compile.lower_kernel(kernel.prim_func, device, pass_configs=kernel.configs)


def ptx(code, target, flags, folder):
    """A kernel's PTX, but for line numbers and what headers leave of themselves."""
    reading = headers.reading_for(target, headers.FAST in flags)
    (folder / "kernel.cu").write_text(code)
    command = [reading.nvcc, f"-ccbin={reading.host}", f"-arch={target}", "-std=c++20", "-O3", "-w", *flags, "--ptx"]
    command += [*(f"-I{place}" for place in reading.folders), "-o", str(folder / "kernel.ptx")]
    subprocess.run([*command, str(folder / "kernel.cu")], check=True)
    text = re.sub(
        r"^\.global \.align \d+ \.b8 \S*_INTERNAL_\S*;\n", "", (folder / "kernel.ptx").read_text(), flags=re.M
    )
    return re.sub(r"\n+", "\n", re.sub(r"^\s*//.*\n", "", text, flags=re.M))


@needs_nvcc
@pytest.mark.parametrize(
    ("device", "name"),
    [
        pytest.param(arch.H100(), "backward", marks=pytest.mark.slow),
        pytest.param(arch.H100(), "forward", marks=pytest.mark.slow),
        (arch.H100(), "preprocess"),
        pytest.param(arch.A100(), "forward", marks=pytest.mark.slow),
    ],
)
def test_the_machine_code_is_that_of_whole_headers(device, name, tmp_path):
    kernel = lowered(device, name)
    less = headers.lessened(kernel.cuda, device.target, headers.FAST in kernel.flags)
    assert less is not None and "#include" not in less and len(less) < 1_500_000
    whole = ptx(kernel.cuda, device.target, kernel.flags, tmp_path)
    with headers.without_runtime() as first:
        assert ptx(less, device.target, [first, *kernel.flags], tmp_path) == whole and "entry" in whole


def compiling(monkeypatch, refuses):
    """`compile_cuda` as patched, and the sources that nvcc is given."""
    load_tilelang()
    from tilelang.contrib import nvcc

    given = []

    def compile_cuda(code, *rest, **more):
        given.append(code)
        if refuses(code):
            raise RuntimeError("nvcc refused")
        return b"cubin"

    monkeypatch.setattr(nvcc, "compile_cuda", compile_cuda)
    monkeypatch.setattr(
        headers, "lessened", lambda code, target, fast, beside_runtime=False: "more" if beside_runtime else "less"
    )
    with patched():
        made = nvcc.compile_cuda("whole", "cubin", ["-arch=sm_80"], options=["-std=c++20"])
    return made, given


def test_where_nvcc_refuses_less_it_gets_all(monkeypatch):
    pytest.importorskip("tilelang")
    assert compiling(monkeypatch, lambda code: False) == (b"cubin", ["less"])
    assert compiling(monkeypatch, lambda code: code == "less") == (b"cubin", ["less", "more"])
    assert compiling(monkeypatch, lambda code: code != "whole") == (b"cubin", ["less", "more", "whole"])


def test_where_headers_cannot_be_read_kernels_have_them_whole(monkeypatch):
    pytest.importorskip("tilelang")
    load_tilelang()
    monkeypatch.setattr(headers, "_found", {})
    monkeypatch.setattr(headers, "_kept", lambda reading: (_ for _ in ()).throw(OSError("no room")))
    assert headers.lessened("#include <math_constants.h>\nvoid f();", "sm_90a", True) is None
