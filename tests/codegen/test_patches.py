"""Changes to TileLang act on our kernels alone, and each is needed: TileLang without it still does what it mends."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

tilelang = pytest.importorskip("tilelang")

import tilelang.language as T  # noqa: E402
import tvm_ffi  # noqa: E402
from tilelang import tvm  # noqa: E402
from tilelang.ir import get_stmt_span  # noqa: E402
from tilelang.language.eager import builder, utils  # noqa: E402
from tvm import ir, tirx  # noqa: E402

from attention_engine import AttentionEngine, arch, library, meta_tensor  # noqa: E402
from attention_engine.codegen import patches  # noqa: E402
from attention_engine.codegen.compile import compile_kernel, lower_kernel  # noqa: E402
from attention_engine.codegen.patches import (  # noqa: E402
    PATCHES,
    carried,
    choices,
    descriptors,
    ended_reads,
    idle,
    later,
    layouts,
    masked,
    matrices,
    patched,
    printed,
    proofs,
    quiet,
    shared_names,
    swizzled,
)
from attention_engine.codegen.patches.scope import Patch, Scope, inside, replace  # noqa: E402
from attention_engine.compiler import Kernel  # noqa: E402
from tests.codegen import flash  # noqa: E402
from tests.codegen.at_pass import at_pass, seconds  # noqa: E402
from tests.codegen.runs import passes_of, placed_by_hand  # noqa: E402
from tests.codegen.test_compile import causal_sum  # noqa: E402
from tests.codegen.test_extremes import loses_a_minus  # noqa: E402
from tests.codegen.test_host_code import needs_compilers, watched  # noqa: E402

RULES = (carried, choices, descriptors, ended_reads, matrices, swizzled)
ROOT = Path(__file__).resolve().parent.parent.parent


def by_tilelang(kernel, capability):
    """The CUDA text that TileLang makes of a kernel by itself."""
    target = tvm.target.Target({"kind": "cuda", "arch": capability})
    with target:
        return tilelang.lower(kernel, target=target).kernel_source


@functools.cache
def theirs():
    return by_tilelang(flash.largest_scores(), "sm_90a")


@functools.cache
def ours():
    return lower_kernel(flash.largest_scores(), arch.H100()).cuda


# ---- who finds TileLang changed

SNAPSHOT = """
import json, sys
import tilelang, tvm_ffi
from tilelang import tvm
from attention_engine import AttentionEngine, arch, meta_tensor, settings
from attention_engine.codegen.compile import lower_kernel
from attention_engine.library import OnlineSoftmax, causal
from tests.codegen import flash

def is_theirs(module):
    return module.split(".")[0] in ("tilelang", "tvm", "tvm_ffi")

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if is_theirs(name):
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and is_theirs(value.__module__):
                    found.update({(name, key, inner): held for inner, held in list(vars(value).items())})
    return found

def their_text():
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    with target:
        return tilelang.lower(flash.largest_scores(), target=target).kernel_source

H100 = arch.H100()
metas = (meta_tensor(1, 2, 256, 64, dtype="float16"),) * 3
their_text()  # what TileLang makes of itself when it is first used stands by now
texts, before = [their_text()], attributes()
functions = sorted(tvm_ffi.registry.list_global_func_names())
engine = AttentionEngine(metas, None, None, causal, OnlineSoftmax(), device=H100)
for name in ("preprocess", "postprocess"):
    kernel = engine._all_kernels(H100)[name]
    lower_kernel(kernel.prim_func, H100, pass_configs=kernel.configs)
texts.append(their_text())
after = attributes()
changed = [".".join(key) for key, value in before.items() if after.get(key) is not value]
print(json.dumps({
    "changed": changed, "same text": texts[0] == texts[1], "chains": "_part[" in texts[1],
    "functions": sorted(tvm_ffi.registry.list_global_func_names()) == functions,
    "reports": tilelang.env.is_print_on_compilation_enabled(),
}))
"""


@pytest.mark.slow  # its text alone is looked at below
def test_who_uses_tilelang_beside_us_finds_it_as_it_is():
    """Before and after our kernels are traced and lowered: its modules, classes and registry, and the text it makes."""
    done = subprocess.run([sys.executable, "-c", SNAPSHOT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "changed": [], "same text": True, "chains": False, "functions": True, "reports": True,
    }  # fmt: skip


def test_a_thread_that_compiles_none_of_ours_gets_tilelangs_own_text():
    """While another thread is inside, by patches that stand."""
    ready, done = threading.Event(), threading.Event()

    def stay():
        with patched():
            ready.set()
            done.wait()

    before, other = theirs(), threading.Thread(target=stay)
    other.start()
    try:
        ready.wait()
        assert len(patched._standing) == len(PATCHES) and not inside()
        assert by_tilelang(flash.largest_scores(), "sm_90a") == before != ours()
        assert tilelang.env.is_print_on_compilation_enabled()
        with patched():
            assert inside() and not tilelang.env.is_print_on_compilation_enabled()
        assert not inside() and len(patched._standing) == len(PATCHES)
    finally:
        done.set()
        other.join()
    assert not patched._standing


def test_what_another_user_does_to_the_text_stays_and_reaches_our_kernels_too():
    tilelang.engine.register_cuda_postproc(lambda code, target: f"// theirs\n{code}")
    registered = tvm_ffi.get_global_func(printed.CALLED_WITH_TEXT)
    try:
        text = lower_kernel(flash.largest_scores(), arch.H100()).cuda
        assert text.startswith("// theirs\n") and "_part[" in text
        assert tvm_ffi.get_global_func(printed.CALLED_WITH_TEXT) == registered
    finally:
        tvm_ffi.remove_global_func(printed.CALLED_WITH_TEXT)


class Theirs:
    """Stands for a class of TileLang."""

    @staticmethod
    def act():
        return "theirs"


def put(name="act"):
    own = vars(Theirs)[name]
    return replace((Theirs, name, staticmethod(lambda: "ours" if inside() else own())))


PATCH = Patch("it acts", "0", "none", put)


def test_a_patch_stands_while_anybody_is_inside():
    own, inside_of = vars(Theirs)["act"], Scope([PATCH])
    with inside_of(), inside_of():
        assert Theirs.act() == "ours"
    assert vars(Theirs)["act"] is own and not inside()
    with pytest.raises(KeyError), inside_of():
        raise KeyError
    assert vars(Theirs)["act"] is own and not inside()


def test_a_patch_that_cannot_be_put_takes_the_others_back():
    own, broken = vars(Theirs)["act"], Patch("it is gone", "0", "none", lambda: put("gone"))
    with pytest.raises(KeyError, match="gone"), Scope([PATCH, broken])():
        pass
    assert vars(Theirs)["act"] is own and not inside()


def test_what_another_puts_on_top_of_a_patch_stays(monkeypatch):
    """And finds the patch below it, which gives what stood there before; it is put once."""
    own, inside_of = vars(Theirs)["act"], Scope([PATCH])
    with monkeypatch.context() as restored:
        restored.setattr(Theirs, "act", own)
        for _ in range(2):
            with inside_of():
                below = Theirs.act
                Theirs.act = staticmethod(lambda below=below: f"on top of {below()}")
                assert Theirs.act().endswith("on top of ours")
            assert Theirs.act().endswith("on top of theirs") and len(inside_of._standing) == 1


def test_many_threads_enter_and_leave():
    own, inside_of, failed = vars(Theirs)["act"], Scope([PATCH]), []

    def work():
        for _ in range(200):
            with inside_of():
                if Theirs.act() != "ours":
                    failed.append("inside")
            if Theirs.act() != "theirs":
                failed.append("outside")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and vars(Theirs)["act"] is own and not inside_of._standing


# ---- what TileLang does without them: a test that fails here says that a patch may go


def test_every_change_of_ours_names_its_proof_here():
    folder = Path(patches.__file__).parent
    no_changes = {"__init__", "scope", "declarations", "kept_macros"}
    modules = {path.stem for path in folder.glob("*.py")} - no_changes
    of_patches = {patch.put.__module__.rsplit(".", 1)[1] for patch in PATCHES}
    rules = {rule.__name__.rsplit(".", 1)[1] for rule in RULES}
    assert modules == of_patches | {"proofs", "later"} | rules
    found = {patch.proof for patch in PATCHES} | {proofs.PROOF, later.PROOF, *(rule.PROOF for rule in RULES)}
    assert len(found) == len(modules) and found <= {name for name in globals() if name.startswith("test_tilelang_")}


def test_every_change_of_ours_was_looked_at_in_this_version_of_tilelang():
    installed = importlib.metadata.version("tilelang")
    versions = {patch.version for patch in PATCHES} | {proofs.VERSION, later.VERSION, *(rule.VERSION for rule in RULES)}
    assert versions == {installed}


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_cannot_print_waits_of_unknown_counts():
    with pytest.raises(TypeError, match=re.escape("Downcast from tirx.Sub to ir.IntImm failed.")):
        by_tilelang(causal_sum(), "sm_80")
    counts = re.findall(r"cp_async_wait<(\d+)>", lower_kernel(causal_sum(), arch.A100()).cuda)
    assert counts == ["3", "3", "3", "2", "1", "0"]  # the loop's two, then those of the drain


def registers_of_scores(text):
    """How many a thread has, and how many a fence names."""
    (declared,) = re.findall(r"float scores\[(\d+)\]", text)
    (fenced,) = set(re.findall(r"warpgroup_fence_operand\(reinterpret_cast<float\*>\(scores \+ 0\), (\d+)\)", text))
    return int(declared), int(fenced)


def test_tilelang_fences_registers_that_a_thread_does_not_have():
    assert registers_of_scores(theirs()) == (32, 64)
    assert registers_of_scores(ours()) == (32, 32)


@pytest.mark.parametrize("rule", [printed.in_chains, printed.with_uniform_groups, printed.with_held_threads,
                                  printed.with_held_barriers], ids=lambda rule: rule.__name__)  # fmt: skip
def test_tilelang_prints_what_our_rules_rewrite(rule):
    assert rule(theirs()) != theirs()


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_drops_weights_one_by_one(monkeypatch):
    """In a kernel whose pairs a group of its own chooses, at both places; and its products' words come one by one."""
    rules = choices.with_pairs_dropped, choices.with_whole_products
    for rule in rules:
        monkeypatch.setattr(printed, rule.__name__, lambda cuda: cuda)
    meta = meta_tensor(1, 2, 256, 64, dtype=torch.float16)
    kernel = AttentionEngine((meta,) * 3, dropout_p=0.1, device=arch.H100())._source_kernel("forward", "cuda")
    cuda = lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
    assert rules[0](cuda).count("first_bits_of_bytes<0xbbaa>(first)") == 2
    assert "__umulhi" in cuda and "__umulhi" not in rules[1](cuda)


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_adds_up_where_each_number_of_a_swizzled_tile_stands(monkeypatch):
    rule = swizzled.with_turned_bits
    monkeypatch.setattr(printed, rule.__name__, lambda cuda: cuda)
    meta = meta_tensor(1, 2, 256, 128, dtype=torch.float16)
    engine = AttentionEngine((meta,) * 3, mask_mod=lambda b, h, q, kv: q * kv % 3 > 0, device=arch.H100())
    kernel = engine._source_kernel("backward", "cuda")
    cuda = lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
    assert "gradients_out) + ((((" in cuda and rule(cuda).count(" ^ ((i_") == 1


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_works_out_where_sums_stand_at_each_addition(monkeypatch):
    rule = carried.with_carried_sums
    monkeypatch.setattr(printed, rule.__name__, lambda cuda: cuda)
    engine = AttentionEngine((meta_tensor(None, 2, None, 128, dtype=torch.float16),) * 3, mask_mod=library.causal)
    engine._note_call(((2, 128),) * 3, torch.float16)
    kernel = engine._all_kernels(arch.H100(), [], packed="alike")["backward"]
    cuda = lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
    assert cuda.count("AtomicAddx4((&(") == 1 and rule(cuda).count("add_four(place_") == 1


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_stores_a_stage_of_a_tile_by_four_bytes(monkeypatch):
    rule = matrices.with_stored_matrices
    monkeypatch.setattr(printed, rule.__name__, lambda cuda: cuda)
    meta = meta_tensor(1, 2, 256, 64, dtype=torch.float16)
    kernel = AttentionEngine((meta,) * 3, device=arch.H100())._source_kernel("backward", "cuda")
    cuda = lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
    assert cuda.count("*(uint1*)(((half_t*)gradients_out)") == 1
    assert rule(cuda).count("store_four_matrices(((half_t*)gradients_out)") == 1


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_adds_to_the_lower_half_of_a_descriptor(monkeypatch):
    rule = descriptors.with_whole_descriptors
    monkeypatch.setattr(printed, rule.__name__, lambda cuda: cuda)
    meta = meta_tensor(1, 2, None, 64, dtype=torch.float16)
    kernel = AttentionEngine((meta,) * 3, device=arch.H100())._source_kernel("forward", "cuda")
    cuda = lower_kernel(kernel.prim_func, arch.H100(), pass_configs=kernel.configs).cuda
    lower, whole = r"uint64_t\(desc_\w+ \+ \(", r"\(uint64_t\(desc_\w+\) \+ uint64_t\(\("
    assert len(re.findall(lower, cuda)) >= 6 and not re.search(whole, cuda)
    assert len(re.findall(whole, rule(cuda))) == len(re.findall(lower, cuda)) and not re.search(lower, rule(cuda))


def test_tilelang_includes_more_than_a_kernel_needs():
    assert "#include <tl_templates/cuda/scan.h>" in theirs() and "cumsum" not in theirs().lower()


@needs_compilers
@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_compiles_host_code_last(monkeypatch, tmp_path):
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    started, target = watched(monkeypatch), {"kind": "cuda", "arch": "sm_90a"}
    tilelang.compile(flash.largest_scores(keys=80), target=target, execution_backend="tvm_ffi")
    assert ["--cubin" in words for words in started] == [True, False]
    assert {"lib0.c", "devc.c"} <= set(started[-1])


def test_tilelang_rewrites_a_macro_each_time_that_it_is_defined(monkeypatch):
    compiled, own = [], utils.get_compiled_object
    monkeypatch.setattr(utils, "get_compiled_object", lambda *args: compiled.append(args[1]) or own(*args))

    def define(value):
        def macro(x):
            return x + value

        return builder.mutate(macro)

    assert [define(value).gen.__closure__[0].cell_contents for value in (1, 2)] == [1, 2]
    assert len(compiled) == 2


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_runs_passes_that_change_nothing(monkeypatch):
    """In the text of kernels placed by hand: ours leaves them out. Some change what a later one would have."""
    kernel = placed_by_hand()
    found, text = passes_of(monkeypatch, kernel)
    monkeypatch.setattr(idle, "NO_STORAGE_SYNC", "tl.no_such_rule")
    every, theirs = passes_of(monkeypatch, kernel)
    runs = {name: [n for n, run in enumerate(every) if run[0] == name] for name, _ in every}
    left_out = {*runs["LegalizeNegativeIndex"], *runs["HoistIfThenElse"]}
    assert len(left_out) == 2 and not any(every[n][1] for n in left_out)
    left_out |= {runs["Simplify"][n - 1] for n in idle.IDLE} | {runs["TVM's Simplify"][n - 1] for n in idle.IDLE_OF_TVM}
    assert len(left_out) == 7 and not any(every[runs["Simplify"][n - 1]][1] for n in (3, 5))
    assert [name for name, _ in found] == [name for n, (name, _) in enumerate(every) if n not in left_out]
    assert text == theirs


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_tries_masks_as_vectors(monkeypatch):
    """Loops of a forward kernel with a window take it twice as long as without the conditions, and more."""

    with_hidden = masked.with_hidden

    def look(module, whole):
        whole(module)  # the first asks TileLang for what it remembers
        return seconds(lambda given: with_hidden(given, whole), module), seconds(whole, module)

    ours, theirs = at_pass(
        monkeypatch, (masked, "with_hidden"), "forward", look, mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv < 100)
    )
    assert theirs > 1.5 * ours, f"{theirs:.2f} s and {ours:.2f} s"


IMPORTED = "print(sum(name.startswith(later.LATER) for name in sys.modules))"
LATE = f"""
import sys
from attention_engine.codegen.compile import load_tilelang
from attention_engine.codegen.patches import later, remembered
load_tilelang()
from tilelang.language.eager import ast, builder
assert remembered._rewritten and builder.mutate is ast.mutate  # its own macros; then it is as it was
{IMPORTED}
from importlib.machinery import SourceFileLoader
run, ran = SourceFileLoader.exec_module, []
SourceFileLoader.exec_module = lambda loader, module: (ran.append(module.__name__), run(loader, module))[1]
import tvm.relax.op
from tvm import relax, topi
assert ran.count("tvm.relax.op") == 1 and relax.op.__spec__.origin.endswith("op/__init__.py"), ran
assert relax.TensorType.__module__.startswith("tvm.relax") and callable(topi.add) and callable(relax.op.add)
{IMPORTED}
"""


def printed_by(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100).stdout


def test_what_no_kernel_needs_is_imported_when_somebody_asks():
    before, after = map(int, printed_by(LATE).split())
    assert before <= len(later.LATER) + 1 and after > 200


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_imports_what_no_kernel_needs():
    code = f"import sys, tilelang; print(sum(name.startswith({later.LATER}) for name in sys.modules))"
    assert int(printed_by(code)) > 300


@pytest.mark.slow  # of a TileLang that is pinned: what may go with the next
def test_tilelang_searches_layouts_from_each_operation(monkeypatch):
    """Of a forward kernel it takes several times as long for all at once as for one after the other."""

    one_by_one = layouts.one_by_one

    def look(module, whole):
        one_by_one(module, whole)  # the first asks TileLang for what it remembers
        return seconds(lambda given: one_by_one(given, whole), module), seconds(whole, module)

    ours, theirs = at_pass(monkeypatch, (layouts, "one_by_one"), "forward", look)
    assert theirs > 2 * ours, f"{theirs:.2f} s and {ours:.2f} s"


def test_tilelang_reports_what_it_compiles(monkeypatch):
    assert tilelang.env.is_print_on_compilation_enabled()
    with patched():
        assert not tilelang.env.is_print_on_compilation_enabled()
        monkeypatch.setenv("ATTENTION_ENGINE_VERBOSE", "1")
        assert tilelang.env.is_print_on_compilation_enabled()


def lines_of(kernel):
    """The places in Python that its statements know."""
    found = []
    tirx.stmt_functor.post_order_visit(
        kernel.body, lambda node: found.append(get_stmt_span(node)) if isinstance(node, tirx.Stmt) else None
    )
    return {str(span) for span in found if span is not None}


def test_tilelang_notes_the_line_of_each_statement(monkeypatch):
    """Ours are the same programs without."""
    meta = meta_tensor(1, 2, 64, 64, dtype="float16")
    kernel = AttentionEngine((meta,) * 3, device=arch.H100())._source_kernel("preprocess", "tilelang")
    assert not lines_of(kernel.prim_func)
    monkeypatch.setenv("ATTENTION_ENGINE_VERBOSE", "1")
    noted = vars(Kernel)["prim_func"].func(kernel)
    assert any("rows.py" in line for line in lines_of(noted))
    assert noted.script() == kernel.prim_func.script()


def test_what_tilelang_finds_in_our_kernels_no_user_hears(capfd, caplog, monkeypatch):
    """Its warnings are for who wrote the kernel; a power is the same call with and without."""
    x, exponent = tirx.Var("x", "float32"), tirx.FloatImm("float32", 3.5)
    loggers = [logging.getLogger(name) for name in quiet.LOGGERS]
    with caplog.at_level(logging.WARNING):
        for logger in loggers:
            monkeypatch.setattr(logger, "propagate", True)
            logger.addHandler(caplog.handler)
        try:
            theirs = T.pow(x, exponent)
            assert "Detected pow(x, y) where y >= 3" in capfd.readouterr().err
            with patched():
                tvm.ir.assert_structural_equal(T.pow(x, exponent), theirs, map_free_vars=True)
                for logger in loggers:
                    logger.warning("Return value `Ellipsis` is unused")
                assert capfd.readouterr().err == "" and caplog.records == []
                loggers[0].error("a defect")
            assert {record.message for record in caplog.records} == {"a defect"}
            loggers[0].warning("not ours")
            assert "not ours" in {record.message for record in caplog.records}
        finally:
            for logger in loggers:
                logger.removeHandler(caplog.handler)


def tiles_given_back_unfenced(text):
    """Tiles that the TMA unit fills and that threads touch with no fence before they next arrive at a barrier."""
    filled = set(re.findall(r"tma_load\(.*?\*\)(\w+)\)\[", text))
    found, touched = [], set()
    for line in text.splitlines():
        if "fence_proxy_async" in line:
            touched = set()
        elif re.search(r"\.arrive\(\)", line):
            found += sorted(touched)
            touched = set()
        elif "tma_load" not in line and "descriptor" not in line:
            touched |= filled & set(re.findall(r"\*\)(\w+)\)", line))
    return found


def test_tilelang_gives_tiles_back_before_reads_have_ended():
    """The weights of a step; keys are read by products alone, which end before."""
    kernel = flash.weighted_sums()
    assert tiles_given_back_unfenced(by_tilelang(kernel, "sm_90a")) == ["weights"]
    assert tiles_given_back_unfenced(lower_kernel(kernel, arch.H100()).cuda) == []


def equal_tiles(among: int, alignment: int | None = None):
    """Eight tiles of one name and size, used by some threads; which of many variables they are, `among` chooses."""
    in_shared, x = ir.PointerType(ir.PrimType("float32"), "shared.dyn"), tirx.Var("threadIdx.x", "int32")
    variables = random.Random(among).sample([tirx.Var("tile", in_shared) for _ in range(200)], 8)
    tiles = [tirx.decl_buffer((8,), "float32", "tile", data=data, scope="shared.dyn") for data in variables]
    used = [tirx.BufferStore(tile, tirx.FloatImm("float32", float(n)), [x]) for n, tile in enumerate(tiles)]
    body = tirx.SeqStmt([*map(tirx.AllocBuffer, tiles), tirx.IfThenElse(x < 8, tirx.SeqStmt(used), None)])
    threads = tirx.AttrStmt(tirx.IterVar((0, 32), x, 1, "threadIdx.x"), "thread_extent", 32, body)
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})
    function = tirx.PrimFunc([], threads).with_attr("target", target)
    return function if alignment is None else function.with_attr(shared_names.ALIGNMENTS, {"tile": alignment})


def laid_out(function):
    with function.attrs["target"]:
        return tilelang.transform.MergeSharedMemoryAllocations()(tvm.IRModule({"main": function}))["main"]


def test_tilelang_lays_out_tiles_of_one_name_by_address():
    """By ours, by where the kernel declares them: each tile then follows the one before."""
    assert len({laid_out(equal_tiles(among)).script() for among in range(6)}) > 1
    with patched():
        (text,) = {laid_out(equal_tiles(among)).script() for among in range(6)}
    places = dict(re.findall(r"(\w+): T.handle.* = T.handle_add_byte_offset\(buf_dyn_shmem.data, (\d+)\)", text))
    data = dict(re.findall(r"(\w+) = T.Buffer\(.*data=(\w+),", text))
    written = [places[data[name]] for name in re.findall(r"(\w+)\[threadIdx_x\] = T.float32", text)]
    assert written == [str(32 * number) for number in range(8)]


def test_a_tile_with_a_name_of_its_own_keeps_its_alignment():
    with patched():
        text = laid_out(equal_tiles(0, 128)).script()
    assert re.findall(r"buf_dyn_shmem.data, (\d+)\)", text) == [str(128 * number) for number in range(8)]


@pytest.mark.slow
def test_tilelang_proves_slowly():
    """Seconds of a core to lower a kernel: by quick proofs two thirds or less."""
    kernel = flash.forward(64, 64)

    def seconds(lower):
        started = time.process_time()
        lower()
        return time.process_time() - started

    def lower():
        return by_tilelang(kernel, "sm_90a")

    lower()
    full = min(seconds(lower) for _ in range(2))
    quick = min(seconds(lambda: proofs.with_quick_proofs(lower)) for _ in range(2))
    assert quick < 0.8 * full, (quick, full)


@needs_compilers
def test_tilelang_leaves_to_ptxas_a_minus_that_it_loses(tmp_path):
    assert loses_a_minus(tmp_path)


@needs_compilers
def test_a_kernel_whose_extremes_ptxas_gets_wrong_is_compiled_anew(tmp_path, monkeypatch):
    """Three of a tile's numbers, one negated: as tile maps have them."""
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "theirs"))
    started = watched(monkeypatch)
    compiled = compile_kernel(largest_of_three(), arch.H100())
    assert sum("--cubin" in words for words in started) == 2 and callable(compiled.run)
    before = len(started)
    compile_kernel(flash.largest_scores(keys=32), arch.H100())
    assert sum("--cubin" in words for words in started[before:]) == 1


def largest_of_three():
    @T.prim_func
    def largest_of_three(a: T.Tensor((128, 3), "int32"), o: T.Tensor((128,), "int32")):
        with T.Kernel(1, threads=128):
            for i in T.Parallel(128):
                o[i] = T.max(T.max(a[i, 0], 0 - a[i, 1]), a[i, 2])

    return largest_of_three
