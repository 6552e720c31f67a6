"""Values wider than a kernel has room for run in parts: results, gradients, rows and costs are of the whole."""

import pytest
import torch

from attention_engine import AttentionEngine, arch, library, meta_tensor
from attention_engine.runtime import parts


def engine(dim_v, backend="interpret", dtype=torch.float32, **options):
    metas = tuple(meta_tensor(1, 2, 40, dim, dtype=dtype) for dim in (16, 16, dim_v))
    return AttentionEngine(metas, None, library.scale(0.25), library.causal, library.OnlineSoftmax(), backend=backend,
                           **options)  # fmt: skip


def results(attention, dim_v, layout="bshd"):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 40, 2, dim) for dim in (16, 16, dim_v, dim_v)]
    q, k, v, do = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    kind = torch.float64 if attention.backend == "reference" else torch.float32
    leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
    given = [x.transpose(1, 2) for x in leaves] if layout == "bhsd" else leaves
    o, rows = attention(*given, return_rowscales=True)
    o = o.transpose(1, 2) if layout == "bhsd" else o
    (lse,) = rows.values()
    return [o, lse, *torch.autograd.grad((o * do.to(kind)).sum() + lse.sum(), leaves)]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dim_v", [40, 64, 65])
def test_wide_values_are_right_in_every_result(dim_v, layout, monkeypatch):
    monkeypatch.setattr(parts, "WIDEST", 32)
    exact = results(engine(dim_v, "reference"), dim_v)
    found = results(engine(dim_v, layout=layout), dim_v, layout)
    for name, a, b in zip(("o", "lse", "dq", "dk", "dv"), found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_parts_are_as_few_and_as_equal_as_can_be():
    found = {dim: parts.width(dim) for dim in (64, 256, 257, 320, 512, 513, 1024)}
    assert found == {64: 64, 256: 256, 257: 129, 320: 160, 512: 256, 513: 171, 1024: 256}


def test_only_wide_values_run_in_parts(monkeypatch):
    monkeypatch.setattr(parts, "WIDEST", 32)
    widths = []
    run = parts.op.run

    def counted(key, form, given, *rest):
        widths.append(given[2].shape[3])
        return run(key, form, given, *rest)

    monkeypatch.setattr(parts.op, "run", counted)
    for dim_v in (32, 33):
        results(engine(dim_v), dim_v)
    assert widths == [32, 17, 16]


def test_retnets_heads_have_kernels():
    """Head dims 256 and 512 in 16 bits, of which no kernel of pairs fits Hopper whole."""
    metas = tuple(meta_tensor(1, 4, 2048, dim, dtype=torch.float16) for dim in (256, 256, 512))
    attention = AttentionEngine(metas, None, library.scale(0.0625), library.causal, library.OnlineSoftmax(),
                                device=arch.H100())  # fmt: skip
    kernels = attention._all_kernels(arch.H100())
    assert {kernel.problem.dim_v for kernel in kernels.values()} == {256}
    assert all(kernel.builder.startswith("hopper.") for kernel in (kernels["forward"], kernels["backward"]))
