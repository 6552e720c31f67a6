"""In which order a step of the backward pass over keys issues what it makes, and what comes to registers early."""

import pytest

from attention_engine import AttentionEngine, arch, library, meta_tensor

pytest.importorskip("tilelang")


def step_of(dim, **options):
    """The lines of a step, as the computing threads take it."""
    metas = [meta_tensor(1, 2, 256, dim, dtype="bfloat16") for _ in range(3)]
    engine = AttentionEngine(metas, device=arch.H100(), **options)
    lines = engine._source_kernel("backward", "cuda").prim_func.script().splitlines()
    added = next(n for n, line in enumerate(lines) if "atomic_add_elem_op" in line and "workspace" in line)
    return lines[max(n for n in range(added) if "for step in" in lines[n]) : added]


@pytest.mark.parametrize(("dim", "options", "early"), [
    (64, {}, True), (128, {}, True), (128, {"mask_mod": library.causal}, True), (96, {}, False),
    (128, {"score_mod": library.softcap(30.0)}, False),  # pairs keep their products
    (128, {"dropout_p": 0.1}, False),
], ids=["64", "128", "causal", "96", "softcap", "dropout"])  # fmt: skip
def test_dv_is_issued_before_threads_meet(dim, options, early):
    step = step_of(dim, **options)
    products = [n for n, line in enumerate(step) if "T.wgmma_gemm(" in line]
    meeting = next(n for n, line in enumerate(step) if "tvm_storage_sync" in line and "256" in line)
    assert len(products) == 5 and "dv_1[" in step[products[2]] and "dq[" in step[products[3]]
    assert (products[2] < meeting) == early and meeting < products[3]


@pytest.mark.parametrize(("dim", "held"), [(64, False), (128, True)])
def test_the_row_of_delta_comes_while_weights_are_made(dim, held):
    step = step_of(dim)
    rows = [n for n, line in enumerate(step) if "row1_held" in line and "T.copy" in line]
    waits = [n for n, line in enumerate(step) if "T.wait_wgmma(" in line]
    assert len(rows) == held and all(waits[0] < n < waits[1] for n in rows)


@pytest.mark.parametrize(("dim", "options", "early"), [
    (64, {}, False), (128, {}, True), (128, {"mask_mod": library.causal}, True), (96, {}, False),
    (128, {"mask_mod": library.sliding_window(100)}, False),  # two bounds: too few registers
], ids=["64", "128", "causal", "96", "window"])  # fmt: skip
def test_the_next_row_of_weights_comes_before_additions(dim, options, early):
    step = step_of(dim, **options)
    rows = [n for n, line in enumerate(step) if "row0_held" in line and "T.copy" in line]
    products = [n for n, line in enumerate(step) if "T.wgmma_gemm(" in line]
    waited = [n for n, line in enumerate(step) if "mbarrier_wait_parity(q_full" in line]
    assert len(products) == 5 and len(rows) == early and all(products[4] < n for n in rows)
    assert (products[0] < waited[0]) == early
