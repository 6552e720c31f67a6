"""Packed sequences: values and gradients beside plain torch, sequence by sequence, and what a call may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

from attention_engine import AttentionEngine, CustomIO, library, meta_tensor
from attention_engine.compiler import Kernel, Kernels
from attention_engine.errors import (
    LengthsDiffer,
    NotATensor,
    OptionsClash,
    UnknownOption,
    WrongCustomShape,
    WrongIndex,
    WrongRank,
    WrongSequences,
)
from attention_engine.ir.packing import AHEAD, FIRST, FIRST_K, SEQUENCE_K, SEQUENCE_Q, Packing
from attention_engine.ir.problem import Problem
from attention_engine.ir.program import PLACES
from attention_engine.runtime import built, packed_call, packed_check
from attention_engine.runtime.attentions import ATTENTIONS
from attention_engine.runtime.packed import make_tables, pack
from attention_engine.runtime.program_kernels import ProgramKernels
from tests import plain
from tests.packed_cases import (
    CASES,
    DIM,
    DIM_V,
    HEADS,
    KV_HEADS,
    LENGTHS,
    UNLIKE,
    Case,
    io_of,
    sequence_by_sequence,
    starts,
    tensors,
    with_gradients,
)

BACKENDS = ("reference", "interpret")
by_name = {case.name: case for case in CASES}
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def build(case: Case, dtype: torch.dtype, **options):
    dims = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM_V))
    metas = [meta_tensor(None, heads, None, dim, dtype=dtype) for heads, dim in dims]
    return AttentionEngine(metas, io_of(case), **case.options, **options)


def run(engine, case: Case, qkv, custom, **more):
    cu = {"cu_seqlens_q": starts(case.lengths)}
    if case.key_lengths is not None:
        cu["cu_seqlens_k"] = starts(case.key_lengths)
    return engine(*qkv, **cu, **custom, **more)


def check(case: Case, dtype: torch.dtype, **options) -> None:
    qkv, custom = tensors(case, dtype)
    found = with_gradients(run(build(case, dtype, **options), case, qkv, custom), qkv, custom)
    exact, eager = (
        with_gradients(sequence_by_sequence(case, qkv, custom, of), qkv, custom) for of in (torch.float64, dtype)
    )
    plain.compare(found, exact, eager, dtype, floor=1e-8)


@cases
def test_packed_programs_on_the_reference(case):
    check(case, torch.float32, backend="reference")


@cases
def test_packed_programs_on_the_interpreter(case):
    check(case, torch.float32, backend="interpret")


@pytest.mark.parametrize("name", ["causal", "causal, unlike lengths", "softcap", "softmax one, blocks"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_programs_in_16_bits(name, dtype):
    check(by_name[name], dtype, backend="interpret")


@pytest.mark.parametrize("name", ["a table of places", "captured tables", "causal, unlike lengths"])
def test_deterministic_gradients_are_the_same_bits_in_each_run(name):
    case = by_name[name]
    check(case, torch.float32, backend="interpret", deterministic=True)
    engine = build(case, torch.float32, backend="interpret", deterministic=True)
    qkv, custom = tensors(case, torch.float32)
    first, again = (with_gradients(run(engine, case, qkv, custom), qkv, custom) for _ in range(2))
    assert all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_returned_by_head_and_packed_row(backend):
    case = by_name["causal, unlike lengths"]
    qkv, custom = tensors(case, torch.float32)
    _, rows = run(build(case, torch.float32, backend=backend), case, qkv, custom, return_rowscales=True)
    assert rows["lse"].shape == (HEADS, qkv[0].shape[0])
    wanted, at_k, at = torch.full((HEADS, qkv[0].shape[0]), -torch.inf, dtype=torch.float64), 0, 0
    for queries, keys in zip(case.lengths, case.key_lengths):
        q, k, v = (t[None, a : a + n].detach() for t, a, n in zip(qkv, (at, at_k, at_k), (queries, keys, keys)))
        if queries and keys:
            late = keys - queries
            _, lse = plain.attention(
                q, k, v, "softmax", mask=lambda b, h, i, j, late=late: i + late >= j, return_lse=True
            )
            wanted[:, at : at + queries] = lse[0]
        at, at_k = at + queries, at_k + keys
    seen = wanted.isfinite()
    assert (rows["lse"][~seen] < -1e29).all()
    assert torch.allclose(rows["lse"][seen].double(), wanted[seen], atol=2e-6)
    (through,) = torch.autograd.grad(rows["lse"][seen].sum(), qkv[0])
    assert through.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["causal", "causal, unlike lengths", "sigmoid in a window"])
def test_rows_behind_the_last_sequence_are_0_and_see_nothing(backend, name):
    case = by_name[name]
    qkv, custom = tensors(case, torch.float32, more=9)
    found = with_gradients(run(build(case, torch.float32, backend=backend), case, qkv, custom), qkv, custom)
    wanted = with_gradients(sequence_by_sequence(case, qkv, custom, torch.float64), qkv, custom)
    assert all(not found[n][-9:].any() for n in found)
    assert all((found[n] - wanted[n]).abs().max() < 1e-5 for n in found)


def test_other_lengths_and_counts_of_sequences_compile_no_kernel(monkeypatch):
    engine = build(by_name["causal"], torch.float32, backend="interpret")
    made = []
    monkeypatch.setattr(Kernels, "__init__", noting(Kernels.__init__, made))
    for lengths in ([70, 3], [1], [20, 0, 40, 9], [130]):
        case = replace(by_name["causal"], lengths=lengths)
        qkv, custom = tensors(case, torch.float32)
        with_gradients(run(engine, case, qkv, custom), qkv, custom)
    assert len(made) <= 2  # one of each direction


def noting(begin, made):
    def init(self, *args, **named):
        made.append(args)
        begin(self, *args, **named)

    return init


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["causal", "a number of each sequence", "causal, unlike lengths"])
def test_torch_compile_follows_a_packed_call_whole_and_once(backend, name):
    torch._dynamo.reset()
    case = by_name[name]
    engine, counter = build(case, torch.float32, backend=backend), CompileCounterWithBackend("aot_eager")

    def whole(q, k, v, cu, cu_k, custom):
        return engine(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu_k, **custom).cos()

    compiled = torch.compile(whole, backend=counter, fullgraph=True, dynamic=True)
    first = 0
    several = ((5, 3, 20, 7, 0), (7, 3, 31, 0, 3)), ((12, 5), (20, 9)), ((3, 8, 40, 6), (3, 8, 41, 7))
    for lengths, others in several:  # no count is one of heads or dims, which dynamo would take for the same number
        one = replace(case, lengths=lengths, key_lengths=others if case.key_lengths else None)
        qkv, custom = tensors(one, torch.float32)
        cu, cu_k = starts(lengths), starts(others) if one.key_lengths else None
        found, wanted = compiled(*qkv, cu, cu_k, custom), whole(*qkv, cu, cu_k, custom)
        assert torch.allclose(found, wanted, atol=1e-6)
        ours, theirs = (torch.autograd.grad(o.sum(), qkv) for o in (found, wanted))
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs))
        first = first or counter.frame_count  # dynamo may begin anew within a compilation
    assert counter.frame_count == first


def test_tables_are_made_without_a_look_at_the_lengths():
    with FakeTensorMode():
        q = torch.empty(30, HEADS, DIM)
        cu = torch.empty(5, dtype=torch.int32)
        rows = pack(q, q, q, cu, None)
        other = pack(q, q, q, cu, torch.empty(5, dtype=torch.int32))
    assert [t.shape for t in rows.tables] == [*[(30,)] * 3, (5, 5)] and len(other.tables) == 6


def test_tables_say_of_each_row_which_sequence_it_is_of_and_where_that_begins():
    q, k = torch.empty(7, HEADS, DIM), torch.empty(9, HEADS, DIM)
    rows = pack(q, k, k, starts([2, 0, 4]), starts([3, 1, 4]))
    found = dict(zip(rows.names, (t.tolist() for t in rows.tables)))
    assert found == {
        SEQUENCE_Q: [0, 0, 2, 2, 2, 2, -1], SEQUENCE_K: [0, 0, 0, 1, 2, 2, 2, 2, 3],
        FIRST: [0, 0, 4, 4, 4, 4, 8], FIRST_K: [0, 0, 0, 3, 4, 4, 4, 4, 8], AHEAD: [1, 1, 2, 2, 2, 2, 2],
        PLACES: [[1, 0, 3, 0, 2], [-1, -3, 4, 2, 2], [-2, -4, 8, 2, 6], [-7, -8, 8, 6, 7]],
    }  # fmt: skip


@pytest.mark.parametrize("lengths, others", [(LENGTHS, None), ((0, 300, 0), None), UNLIKE, ((3, 500), (700, 1))])
def test_the_kernel_of_tables_makes_what_torch_does(lengths, others):
    packing = Packing.ALIKE if others is None else Packing.UNLIKE
    any_problem = Problem(1, 1, 64, 64, "float16")
    kernel = Kernel("packed_tables.packed_tables", (any_problem, packing), "interpret", any_problem, {})
    begins = [starts(each) for each in (lengths, others) if each is not None]
    rows = [int(each[-1]) + 9 for each in begins]
    wanted = make_tables(packing, begins[0], begins[-1], rows[0], rows[-1])
    found = [torch.full_like(t, -7) for t in wanted]
    kernel.run(*begins, *found)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


def test_the_same_starts_given_twice_are_those_of_one_kind_of_row():
    q, cu = torch.empty(7, HEADS, DIM), starts([2, 5])
    assert pack(q, q, q, cu, cu).packing is Packing.ALIKE
    assert pack(q, q, q, cu, cu.clone()).packing is Packing.UNLIKE


def test_an_engine_without_metas_and_of_another_layout_takes_rows_as_they_are():
    case = by_name["causal"]
    qkv, custom = tensors(case, torch.float32)
    wanted = sequence_by_sequence(case, qkv, custom, torch.float64)
    engine = AttentionEngine(mask_mod=library.causal, layout="bhsd")
    found = engine(*qkv, cu_seqlens_q=starts(case.lengths).long(), max_seqlen_q=70, max_seqlen_k=70)
    assert (found - wanted).abs().max() < 1e-5


def test_a_call_of_one_sequence_is_the_plain_call():
    q, k, v = (torch.randn(1, 33, HEADS, DIM) for _ in range(3))
    engine = AttentionEngine(mask_mod=library.causal, backend="interpret")
    packed = engine(q[0], k[0], v[0], cu_seqlens_q=torch.tensor([0, 33]))
    assert torch.allclose(engine(q, k, v)[0], packed, atol=1e-6)


ROWS = torch.zeros(8, HEADS, DIM)
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
MISTAKES = {
    "dtype": (WrongSequences, "torch.float32 of shape", {"cu_seqlens_q": CU.float()}),
    "rank": (WrongSequences, r"of shape \(1, 3\)", {"cu_seqlens_q": CU[None]}),
    "not at 0": (WrongSequences, "begins with 1", {"cu_seqlens_q": CU + 1}),
    "back": (WrongSequences, "goes back from 5 to 3 at 2", {"cu_seqlens_q": torch.tensor([0, 5, 3])}),
    "too many": (WrongSequences, "ends at row 9, and there are 8 rows", {"cu_seqlens_q": torch.tensor([0, 9])}),
    "counts": (WrongSequences, "of 2 sequences and cu_seqlens_k of 1",
               {"cu_seqlens_q": CU, "cu_seqlens_k": torch.tensor([0, 8])}),
    "keys alone": (WrongSequences, "cu_seqlens_k was given without cu_seqlens_q", {"cu_seqlens_k": CU}),
    "most alone": (WrongSequences, "max_seqlen_q was given without cu_seqlens_q", {"max_seqlen_q": 5}),
    "a list": (NotATensor, "cu_seqlens_q is list", {"cu_seqlens_q": [0, 3, 8]}),
    "blocks": (OptionsClash, "packed sequences have no such blocks",
               {"cu_seqlens_q": CU, "block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_of_packed_calls_are_named(mistake):
    kind, says, given = mistake
    with pytest.raises(kind, match=says):
        AttentionEngine(mask_mod=library.causal)(ROWS, ROWS, ROWS, **given)


def test_packed_rows_have_three_dimensions_and_lengths_that_fit():
    engine = AttentionEngine(mask_mod=library.causal)
    with pytest.raises(WrongRank, match=r"q has 4 dimensions, \(1, 8, 4, 16\). With cu_seqlens_q give"):
        engine(ROWS[None], ROWS, ROWS, cu_seqlens_q=CU)
    with pytest.raises(LengthsDiffer, match="Say where the sequences of keys begin"):
        engine(ROWS, torch.cat([ROWS, ROWS]), torch.cat([ROWS, ROWS]), cu_seqlens_q=CU)
    with pytest.raises(LengthsDiffer, match="k has 8 rows and v has 16"):
        engine(ROWS, ROWS, torch.cat([ROWS, ROWS]), cu_seqlens_q=CU)


def test_packed_rows_are_read_at_their_own_row_alone():
    io = CustomIO({"documents": ("batch", "seq_len")})
    engine = AttentionEngine(custom_io=io, mask_mod=library.document())
    with pytest.raises(WrongIndex, match="counts packed rows, and an index is a place in a sequence"):
        engine(ROWS, ROWS, ROWS, torch.zeros(2, 8, dtype=torch.int32), cu_seqlens_q=CU)


def test_a_custom_input_of_each_sequence_has_as_many_numbers():
    case = by_name["a number of each sequence"]
    qkv, custom = tensors(case, torch.float32)
    with pytest.raises(WrongCustomShape, match=r"shape \(1,\). Its axes \('batch',\) ask for \(5,\)"):
        run(build(case, torch.float32), case, qkv, {"bias": custom["bias"][:1]})


@pytest.mark.parametrize("name", ["a number of each sequence", "causal, unlike lengths", "captured tables"])
def test_what_is_shown_and_compiled_ahead_is_what_a_packed_call_runs(name):
    case = by_name[name]
    qkv, custom = tensors(case, torch.float32)
    engine = build(case, torch.float32, backend="interpret")
    packed = "unlike" if case.key_lengths else "alike"
    asked = engine._asked(None, True, list(custom.values()), packed)
    before = set(ATTENTIONS)
    run(engine, case, qkv, custom)
    new = set(ATTENTIONS) - before
    assert len(new) <= 1
    for program_kernels in (ATTENTIONS[key].program_kernels for key in new):
        (kernels,) = program_kernels._kernels.values()
        assert kernels.problem == asked.problem and kernels.maths.program == asked.maths.program
    assert "_packed_sequence_q[q_idx] == _packed_sequence_k[kv_idx]" in engine.program(packed)
    assert "forward: " in engine.explain(packed)
    assert "_packed_sequence_q" in engine.source("tile map of forward", packed=packed)


def test_an_unknown_kind_of_packing_is_named():
    with pytest.raises(UnknownOption, match="packed is True"):
        build(by_name["causal"], torch.float32).program(packed=True)


@pytest.mark.parametrize("name", ["causal", "causal, unlike lengths", "a number of each sequence", "captured tables"])
def test_check_holds_a_packed_call_against_float64(name):
    case = by_name[name]
    qkv, custom = tensors(case, torch.float32)
    engine = build(case, torch.float32)
    cu_k = None if case.key_lengths is None else starts(case.key_lengths)
    report = engine.check(*qkv, **custom, cu_seqlens_q=starts(case.lengths), cu_seqlens_k=cu_k)
    assert report.ok and "interpret" in str(report), report
    assert {row.name for row in report.rows} >= {"o", "lse", "dq", "dk", "dv", *(f"d{n}" for n in custom)}


def test_check_sees_a_packed_kernel_that_is_wrong(monkeypatch):
    case = by_name["causal"]
    qkv, custom = tensors(case, torch.float32)

    def spoiled(*given, **named):
        o, rows = packed_call.call_packed(*given, **named)
        return o * 1.001, rows

    monkeypatch.setattr(packed_check, "call_packed", spoiled)
    assert not build(case, torch.float32).check(*qkv, **custom, cu_seqlens_q=starts(case.lengths)).ok


def test_calls_of_shapes_that_were_seen_look_at_their_own_lengths(monkeypatch):
    engine = build(by_name["causal"], torch.float32)
    checked = []
    monkeypatch.setattr(packed_call, "check_qkv", lambda *_, **__: checked.append(1))
    for lengths in ((5, 30, 8), (12, 0, 31), (43, 0, 0)):
        case = replace(by_name["causal"], lengths=lengths)
        qkv, custom = tensors(case, torch.float32)
        found = with_gradients(run(engine, case, qkv, custom), qkv, custom)
        exact = with_gradients(sequence_by_sequence(case, qkv, custom, torch.float64), qkv, custom)
        assert all((found[n] - exact[n]).abs().max() < 1e-5 for n in found)
    assert len(checked) == 1
    with pytest.raises(WrongSequences, match="ends at row 44"):
        engine(*qkv, cu_seqlens_q=torch.tensor([0, 5, 6, 44], dtype=torch.int32))
    dropping = AttentionEngine(mask_mod=library.causal, dropout_p=0.5)
    cu = starts((43,))
    dropped, whole = dropping(*qkv, cu_seqlens_q=cu), dropping.eval()(*qkv, cu_seqlens_q=cu)
    assert torch.allclose(whole, engine(*qkv, cu_seqlens_q=cu)) and not torch.allclose(dropped, whole, atol=0.1)


def test_packed_calls_run_default_tiles_and_measure_none(monkeypatch):
    monkeypatch.setattr(built, "choose", lambda *_: pytest.fail("a packed call asks for no trial"))
    engine = build(by_name["causal"], torch.float32, backend="interpret", tune=True)
    qkv, custom = tensors(by_name["causal"], torch.float32)
    with_gradients(run(engine, by_name["causal"], qkv, custom), qkv, custom)


def test_a_gradient_comes_to_the_kernels_as_it_arrived(monkeypatch):
    """Whole tensors are not copied on the way."""
    case, arrived = by_name["causal"], []
    backward = ProgramKernels.backward
    monkeypatch.setattr(ProgramKernels, "backward", lambda *given: arrived.append(given[7]) or backward(*given))
    qkv, custom = tensors(case, torch.float32)
    o = run(build(case, torch.float32, backend="interpret"), case, qkv, custom)
    d_o = torch.randn_like(o)
    torch.autograd.grad(o, qkv, d_o)
    assert arrived[0].data_ptr() == d_o.data_ptr()
