"""engine.check(): every output and gradient beside float64 and beside the same maths in the tensors' own dtype."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attention_engine.errors import BackwardNotDerived, NoMerge, NotInterpretable
from attention_engine.frontend.tracing import place_of
from attention_engine.ir.program import KV_IDX, Q_IDX, B, H
from attention_engine.passes.check_cuts import check_online, random_cuts
from attention_engine.passes.maths import analyse
from attention_engine.reference.dense import attend, attend_backward
from attention_engine.runtime.blocks import BlockList, GivenBlocks
from attention_engine.runtime.captured import tensors_now
from attention_engine.runtime.check_report import FAR, CheckReport, Formula, check_row, spell_tensors
from attention_engine.runtime.check_terms import errors_of_terms, make_zeros, program_with_zeros, summed
from attention_engine.runtime.doubts import doubts_of
from attention_engine.runtime.dropout import seed_tensor
from attention_engine.runtime.inputs import check_ranks
from attention_engine.runtime.program_kernels import allows_tf32
from attention_engine.runtime.small_call import cut_call, spell_run, to_run

if TYPE_CHECKING:
    from attention_engine.runtime.shown import Shown

RANDOM_CUTS = 50
LIMITS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 10.0}


@dataclass(frozen=True)
class _Call:
    """A call to check: copies of its tensors that ask for gradients, what arrives at its results, and its blocks."""

    engine: Shown
    leaves: Sequence[Tensor]  # q, k, v, custom inputs, captured tensors
    names: Sequence[str]  # of all but the first three
    blocks: GivenBlocks | None

    @property
    def floating(self) -> list[str]:
        """The names of the gradients, in order."""
        every = zip(["q", "k", "v", *self.names], self.leaves, strict=True)
        return [f"d{name}" for name, tensor in every if tensor.is_floating_point()]


def check_call(
    engine: Shown, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], blocks: GivenBlocks | None
) -> CheckReport:
    """The report on a call: of the engine as it is, or on a CPU with backend="auto" of its kernels on the interpreter.

    Raises NotOnline where random cuts of a row into tiles change the result.
    """
    check_ranks(engine.layout, q, k, v)
    runs, lacking = to_run(engine, q)
    blocks = blocks if blocks is not None else engine.block_mask
    if runs is engine:
        return compare(engine, q, k, v, custom, blocks, lacking=lacking)
    length = 1 if engine.layout == "bshd" else 2
    of_q, of_k = (["batch", None, None, None] for _ in range(2))
    of_q[length], of_k[length] = "seq_len", "seq_len_kv"
    given: dict[str, tuple[Tensor, Sequence[object]]] = {"q": (q, of_q), "k": (k, of_k), "v": (v, of_k)}
    given |= {s.name: (t, s.axes) for s, t in zip(engine.custom_io.in_order, custom, strict=True)}
    small, cut = cut_call(given)
    first, second, third, *rest = small.values()
    if blocks is not None:
        size = blocks.block_size if isinstance(blocks, BlockList) else engine.block_size
        rows, columns = (-(-t.shape[length] // n) for t, n in zip((first, second), size, strict=True))
        if isinstance(blocks, BlockList):
            blocks = blocks.cut(first.shape[0], rows, columns)
        else:
            blocks = blocks[: first.shape[0], :, :rows, :columns]
    try:
        return compare(runs, first, second, third, rest, blocks, cut=cut, doubted=(q, k, v, *custom))
    except NotInterpretable as refusal:
        return compare(engine, q, k, v, custom, blocks, lacking=str(refusal))


def compare(
    engine: Shown, q: Tensor, k: Tensor, v: Tensor, custom: Sequence[Tensor], blocks: GivenBlocks | None, *,
    lacking: str = "", cut: Sequence[str] = (), doubted: Sequence[Tensor] = (),
) -> CheckReport:  # fmt: skip
    """Runs the engine, the dense maths in float64, and the dense maths in the tensors' dtype, on the same gradients.

    lacking: why the kernels don't run. cut: what was cut off. doubted: the whole tensors, where these are cut.
    """
    cuts = tuple(random_cuts(random.Random(0), RANDOM_CUTS))
    check_online(engine._program, cuts, f"{place_of(engine.online_func.online_fwd)}: ")
    notes = [f"{RANDOM_CUTS} random cuts of a row into tiles give the same result", *_parts_that_do_not_join(engine)]
    held = tensors_now(engine._captured)
    names = [*engine.custom_io.specs, *(c.name for c in engine._captured)]
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in (q, k, v, *custom, *held)]
    call = _Call(engine, leaves, names, blocks)
    given, captured = leaves[3 : 3 + len(custom)], leaves[3 + len(custom) :]
    seed = seed_tensor(0, q.device) if engine._drops else None  # as _dense_program has it
    output, rows = engine._call(leaves[0], leaves[1], leaves[2], given, captured, blocks, True, {}, seed)
    drawn = torch.Generator(q.device).manual_seed(0)
    d_output = torch.randn(output.shape, generator=drawn, device=q.device).to(output.dtype)
    d_rows = _through_rows(engine, rows, drawn)
    exact = _dense(call, d_output, d_rows, torch.float64)
    with products_as_kernels(q):
        eager = _dense(call, d_output, d_rows, q.dtype)
        terms = _terms(call, d_output, d_rows, q.dtype)
    ours = [output, *rows.values()]
    try:
        ours += _gradients(output, leaves, d_output)
        for name, d_row in d_rows.items():
            ours += _gradients(rows[name], leaves, d_row)
    except BackwardNotDerived as refusal:
        exact, eager = exact[: len(ours)], eager[: len(ours)]
        notes.append(f"gradients are not there to check: {refusal}")
    results = ["o", *rows, *call.floating, *(f"{g} of {row}" for row in d_rows for g in call.floating)][: len(ours)]
    every = zip(results, ours, exact, eager, strict=True)
    seen = [(n, *three) for n, *three in every if " of " not in n or any(t.any() for t in three)]  # lse reads no v
    made = [check_row(name, a, b, c, terms.get(name, 0.0)) for name, a, b, c in seen]
    formulas = tuple(_formulas(call, d_output))
    notes += _doubts(engine, [*(doubted or (q, k, v, *custom)), *held], None if cut else blocks)
    backend = engine._backend_for(q.device)
    inputs = {n: t for n, t in zip(["q", "k", "v", *names], leaves, strict=True)}
    return CheckReport(
        tuple(made), LIMITS.get(q.dtype, 10.0), formulas, tuple(notes), backend,
        spell_run(backend, q.device, cut, lacking), spell_tensors(inputs),
    )  # fmt: skip


def _parts_that_do_not_join(engine: Shown) -> list[str]:
    """Why parts of a row have no merge, where they have none. The user's own `combine` is tried, too."""
    try:
        engine._merge_of(engine._program)
    except NoMerge as reason:
        wrong = "warning: " if engine.online_func.combine is not None else ""
        return [f"{wrong}parts of a row do not join: {reason}"]
    return []


def _doubts(engine: Shown, tensors: Sequence[Tensor], blocks: GivenBlocks | None) -> list[str]:
    """Warnings of what the call reads, whole."""
    tensors = [t.detach() for t in tensors]
    program, inputs, extra = engine._dense_program(tensors, blocks)
    first, second = (t if engine.layout == "bhsd" else t.transpose(1, 2) for t in tensors[:2])
    with torch.no_grad():
        return list(doubts_of(program, first, second, dict(zip(inputs, [*tensors[3:], *extra], strict=True))))


def _terms(
    call: _Call, d_output: Tensor, d_rows: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:  # fmt: skip
    """What eager's errors of terms come to, by the names of gradients that sum many of them into few numbers."""
    engine, leaves = call.engine, call.leaves
    few = summed(dict(zip(call.names, leaves[3:], strict=True)))
    if not few:
        return {}
    program, names, extra = engine._dense_program(leaves, call.blocks)
    program, zeros = program_with_zeros(program, few)
    q, k, v = (t.detach() if engine.layout == "bhsd" else t.detach().transpose(1, 2) for t in leaves[:3])
    sizes = dict(zip((B, H, Q_IDX, KV_IDX), (*q.shape[:3], k.shape[2]), strict=True))

    def run(dtype: torch.dtype) -> dict[str, Sequence[Tensor | None]]:
        rest = [t.detach().to(dtype) if t.is_floating_point() else t for t in leaves[3:]]
        made = make_zeros(zeros, sizes, dtype, q.device)
        custom = dict(zip(names, [*rest, *extra], strict=True)) | made
        output, rows = attend(program, q.to(dtype), k.to(dtype), v.to(dtype), custom, dtype=dtype)
        turned = d_output if engine.layout == "bhsd" else d_output.transpose(1, 2)
        sent = {"": (output, turned)} | {
            f" of {n}": (row, d_rows[n]) for (n, _), row in zip(program.finals, rows, strict=True) if n in d_rows
        }
        return {result: _each(value, list(made.values()), d) for result, (value, d) in sent.items()}

    numbers = {n: t.numel() for n, t in zip(call.names, leaves[3:], strict=True)}
    found = errors_of_terms(numbers, zeros, run, dtype)
    return {f"d{name}{result}": error for (name, result), error in found.items()}


def _each(value: Tensor, zeros: Sequence[Tensor], arriving: Tensor) -> Sequence[Tensor | None]:
    if not value.requires_grad or not zeros:
        return [None] * len(zeros)
    return torch.autograd.grad(value, zeros, arriving.to(value.dtype), allow_unused=True, retain_graph=True)


def _through_rows(engine: Shown, rows: Mapping[str, Tensor], drawn: torch.Generator) -> dict[str, Tensor]:
    """What is sent back through each returned row that has a gradient; nothing through rows that keep no pair."""
    backward = engine._maths().trained.backward
    lacking = dict(backward.undifferentiated) if backward is not None else {}
    randoms = {n: torch.randn(row.shape, generator=drawn, device=row.device).to(row.dtype) for n, row in rows.items()}
    sent = {n: torch.where(row.detach().abs() < FAR, randoms[n], 0.0) for n, row in rows.items()}
    return {n: d for n, d in sent.items() if n not in lacking}


def _gradients(output: Tensor, leaves: Sequence[Tensor], d_output: Tensor) -> list[Tensor]:
    wanted = [t for t in leaves if t.requires_grad]
    if not output.requires_grad:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad(output, wanted, d_output, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def _dense(call: _Call, d_output: Tensor, d_rows: Mapping[str, Tensor], dtype: torch.dtype) -> list[Tensor]:
    engine, tensors, blocks = call.engine, call.leaves, call.blocks
    leaves = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]
    program, names, extra = engine._dense_program(tensors, blocks)
    q, k, v = (t if engine.layout == "bhsd" else t.transpose(1, 2) for t in leaves[:3])
    output, rows = attend(program, q, k, v, dict(zip(names, [*leaves[3:], *extra], strict=True)), dtype=dtype)
    output = output if engine.layout == "bhsd" else output.transpose(1, 2)
    named = dict(zip((n for n, _ in program.finals), rows, strict=True))
    through = [g for n, d in d_rows.items() for g in _gradients(named[n], leaves, d.to(named[n].dtype))]
    return [output, *rows, *_gradients(output, leaves, d_output.to(dtype)), *through]


def _formulas(call: _Call, d_output: Tensor) -> Iterator[Formula]:
    """Gradients by the user's `forward` and `backward`, beside autograd's through the row as `online_fwd` makes it."""
    engine, tensors, blocks = call.engine, call.leaves, call.blocks
    program, names, extra = engine._dense_program(tensors, blocks)
    written = [name for name in ("forward", "backward") if getattr(program, name) is not None]
    if not written:
        return
    leaves = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in tensors]
    custom = dict(zip(names, [*leaves[3:], *extra], strict=True))
    q, k, v = (t if engine.layout == "bhsd" else t.transpose(1, 2) for t in leaves[:3])
    d_output = (d_output if engine.layout == "bhsd" else d_output.transpose(1, 2)).double()
    output, _ = attend(program, q, k, v, custom)
    derived = torch.autograd.grad(output, (q, k, v), d_output, allow_unused=True)
    maths = analyse(program)
    if maths.backward is None:
        return
    with torch.no_grad():
        output, saved = attend(program.returning(maths.backward.saved), q, k, v, custom)
        delta = (output * d_output).sum(-1)
        found = attend_backward(program, maths.backward, q, k, v, custom, saved, delta, d_output, {})
    for name, ours, want in zip(("dq", "dk", "dv"), (found.q, found.k, found.v), derived, strict=True):
        want = torch.zeros_like(ours) if want is None else want
        # dV is made of the weights alone, which `forward` says where it is written
        method = written[0] if name == "dv" else written[-1]
        if name != "dv" or "forward" in written:
            yield Formula(method, name, float((ours - want).norm() / want.norm().clamp_min(1e-300)))


def rounds_products(q: Tensor) -> bool:
    """Must eager PyTorch be told to take tf32 products where kernels do? On a CPU it doesn't heed the switch."""
    return q.dtype is torch.float32 and q.device.type == "cpu" and allows_tf32()


def products_as_kernels(q: Tensor) -> AbstractContextManager[object]:
    """Within, eager PyTorch's matrix products are made as kernels make them for tensors like q."""
    return _Tf32() if rounds_products(q) else nullcontext()


def product_as_kernels(q: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Matrix products of eager PyTorch for tensors like q."""
    return _Tf32Product.apply if rounds_products(q) else torch.matmul


class _Tf32(TorchFunctionMode):
    """Products of fp32 tensors as tensor cores make them where torch allows tf32, for tensors on a CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            return _Tf32Product.apply(*args)  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _Tf32Product(torch.autograd.Function):
    """a @ b of operands rounded to tf32, and so its gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _tf32(a) @ _tf32(b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return (
            (_tf32(gradient) @ _tf32(b).transpose(-1, -2)).sum_to_size(a.shape),
            (_tf32(a).transpose(-1, -2) @ _tf32(gradient)).sum_to_size(b.shape),
        )


def _tf32(tensor: Tensor) -> Tensor:
    """fp32 numbers rounded to the 10 bits after the point that tf32 keeps."""
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
