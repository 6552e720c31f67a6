"""Lanes of the spare warps of the backward pass over keys: late ones find what they should, by meetings alone."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tilelang.language as T
import torch
from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform

from attention_engine import AttentionEngine, CustomIO, document_ids
from attention_engine.codegen.interpreter import Interpreter
from attention_engine.errors import HazardInKernel
from attention_engine.kernels.hopper.keys.spare_warps import walk_share
from attention_engine.kernels.items import HeadTile
from attention_engine.kernels.warps import WARP
from attention_engine.library import OnlineSoftmax, and_masks, causal, document, scale
from attention_engine.plan import units
from attention_engine.runtime import op, program_kernels
from tests import plain
from tests.cases import Shape
from tests.kernels.test_hopper_interpret import kernels, key_tile
from tests.kernels.test_key_items import walks

__all__ = ["kernels"]  # a fixture


def is_meeting(statement):
    return isinstance(statement, tirx.Evaluate) and "sync_warp" in str(statement)


def without_meetings(prim_func, before):
    """A kernel without the sync_warps that stand right before such a statement, and how many those were."""
    left_out = []

    def leave_out(sequence):
        kept, parts = [], list(sequence.seq)
        for part, after in zip(parts, [*parts[1:], None], strict=True):
            if is_meeting(part) and after is not None and before(after):
                left_out.append(part)
            else:
                kept.append(part)
        return tirx.SeqStmt(kept) if len(kept) > 1 else kept[0]

    body = ir_transform(prim_func.body, None, leave_out, ["tirx.SeqStmt"])
    return prim_func.with_body(body), len(left_out)


def starts_with(pattern):
    """Does a statement's text, without what it declares, start so?"""

    def found(statement):
        lines = [line.strip() for line in str(statement).splitlines()]
        kept = [line for line in lines if not re.match(r"\w+ = T\.(Buffer|handle|u?int\d+)\(", line)]
        return re.match(pattern, " ".join(kept)) is not None

    return found


def documents(kernels, shape, lengths, persistent=True):
    """The output of packed causal documents, what it is made of, the gradient that arrives, and their ids."""
    kernels.update(backward=key_tile(64, persistent=persistent))
    mask, tokens = and_masks(causal, document("ids")), shape.q_len
    engine = AttentionEngine(
        shape.meta(torch.float16), CustomIO({"ids": ("batch", "seq_len")}), scale(0.1), mask, OnlineSoftmax(),
        backend="interpret",
    )  # fmt: skip
    tensors = shape.tensors(torch.float16, "cpu", 0)
    ids = document_ids(lengths, tokens).expand(shape.batch, -1).contiguous()
    leaves = [tensors[n].requires_grad_() for n in "qkv"]
    return engine(*leaves, ids), leaves, tensors["do"], ids


@pytest.fixture(scope="module")
def of_documents():
    """The kernel over keys of grouped heads, whose one block has six items of three units, and what it was given."""
    found = []
    run = Interpreter.__call__

    def note(interpreter, *arguments):
        found.append((interpreter, [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]))
        run(interpreter, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        op.ATTENTIONS.clear()
        chosen, default = {}, program_kernels.default_tiles
        patch.setattr(program_kernels, "default_tiles", lambda *given: replace(default(*given), **chosen))
        patch.setattr(units, "units_ahead", lambda *_: 1)
        patch.setattr(units, "prepared_before", lambda *_: False)
        patch.setattr(units, "pairs_of_a_listed_unit", lambda *_: 1)
        patch.setattr(Interpreter, "__call__", note)
        o, leaves, do, _ = documents(chosen, Shape(1, 300, 300, 6, 3, 128, 128), [100, 40, 160])
        torch.autograd.grad(o, leaves, do)
        assert walks()
        (kernel,) = [k.backward for a in op.ATTENTIONS.values() for k in a.program_kernels._kernels.values()]
        op.ATTENTIONS.clear()
    (given,) = [arguments for interpreter, arguments in found if interpreter is kernel.compiled]
    return kernel.prim_func, given


LANE_0, OTHERS = "lane 0 of threads", "the other lanes of threads"
# What stands behind a meeting, how many there are of those, and the hazard without them.
NEEDED = {
    "a record is given back": (
        starts_with(r"if T.And\(thread % 32 == 0, T.bool\(True\)\): T.ptx_arrive_barrier\(read"), 4,
        rf"record\[\d, \d\] may be written by {LANE_0} 96 to 127 before it is read by {OTHERS} 32 to 63, or after",
    ),
    "a record's numbers are written": (
        starts_with(r"if thread % 32 == 0: (number\w*: T.int32 = .*)?record\["), 7,
        rf"record\[0, 1\] may be written by {LANE_0} 96 to 127 before it is read by {OTHERS} 96 to 127, or after",
    ),
    "rows are on their way": (
        starts_with(r"place\[3\] ="), 6,
        "(row|dq).* may be written by .* before it is read by .* of threads [0-9]+ to [0-9]+, or after",
    ),
    "a unit is prepared": (
        starts_with(r"if thread % 32 == 0: which\w*: T.int32 = counters"), 3,
        rf"{LANE_0} \d+ to \d+ counts what its warp has copied to memory before {OTHERS} .* no sync_warp orders them",
    ),
    "rows leave": (
        starts_with(r"T.tma_copy\(T.region\(row"), 3,
        "row.* may be read by .* before it is written by .* of threads [0-9]+ to [0-9]+, or after",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NEEDED)
def test_a_warp_that_does_not_meet_before_a_lane_goes_on_is_a_hazard(what, of_documents):
    before, count, message = NEEDED[what]
    kernel, left_out = without_meetings(of_documents[0], before)
    assert left_out == count
    with pytest.raises(HazardInKernel, match=message):
        Interpreter(kernel)(*(a.clone() if isinstance(a, torch.Tensor) else a for a in of_documents[1]))


@pytest.mark.parametrize("meets", [True, False])
def test_a_walk_begins_when_all_lanes_have_left_the_one_before(meets):
    """As the record that a lane gives back stands between them, the persistent kernel alone would not show it."""
    shares = SimpleNamespace(sharing=2, tiles=3)
    work = SimpleNamespace(first=lambda: HeadTile(0, 1), shares=shares)

    @T.macro
    def note(seen, head, tile):
        if T.get_thread_binding() % WARP == 0:
            seen[head, tile] = seen[head, tile] + 1

    @T.prim_func
    def walks_twice(seen: T.Tensor((2, 3), "int32")):
        with T.Kernel(1, threads=128):
            at = T.alloc_shared([2], "int32")
            if T.get_thread_binding() < WARP:
                for _turn in T.serial(2):
                    walk_share(work, at, 2, lambda head, tile: note(seen, head, tile))
            else:
                T.sync_warp()

    seen = torch.zeros(2, 3, dtype=torch.int32)
    if meets:
        Interpreter(walks_twice)(seen)
        assert seen.tolist() == [[0, 2, 0], [2, 0, 2]]
        return
    kernel, left_out = without_meetings(walks_twice, starts_with(r"at\[0\] = 0"))
    assert left_out == 1
    with pytest.raises(HazardInKernel, match=r"at\[0\] may be written by .* before it is read by .* or after"):
        Interpreter(kernel)(seen)


@pytest.mark.parametrize(("batch", "heads", "lengths", "persistent"), [
    (1, (4, 1), [100, 40, 160], True),
    *[pytest.param(batch, heads, lengths, persistent, marks=pytest.mark.slow)
      for batch, heads in ((2, (8, 2)), (3, (2, 1)), (2, (3, 3)))
      for lengths in ([300], [1, 129, 70, 100], [10] * 30) for persistent in (True, False)],
])  # fmt: skip
def test_packed_documents_with_grouped_heads_come_back_right(batch, heads, lengths, persistent, kernels, monkeypatch):
    monkeypatch.setattr(units, "units_ahead", lambda *_: 1)
    monkeypatch.setattr(units, "prepared_before", lambda *_: False)
    monkeypatch.setattr(units, "pairs_of_a_listed_unit", lambda *_: 1)
    shape = Shape(batch, 300, 300, *heads, 128, 128)
    o, leaves, do, ids = documents(kernels, shape, lengths, persistent)
    found = torch.autograd.grad(o, leaves, do)
    assert walks() is persistent
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true = plain.attention(
        *exact, "softmax", causal=True, score=plain.scaled(0.1), mask=lambda b, h, i, j: ids[b, i] == ids[b, j],
    )  # fmt: skip
    for mine, right in zip(found, torch.autograd.grad(true, exact, do.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-2, atol=1e-2)
