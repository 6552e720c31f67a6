"""What engine.check() warns of: reads outside of custom inputs, and log decays above 0."""

import pytest
import torch

from attention_engine import CustomIO, LinearAttentionEngine, meta_tensor
from tests.runtime.engines import BACKENDS, HEADS, build, qkv

both = pytest.mark.parametrize("backend", BACKENDS)


def warnings_of(report):
    assert report.ok, report
    return [n for n in report.notes if n.startswith("warning:")]


def by_distance(score, custom, b, h, q_idx, kv_idx):
    return score * 0.25 + custom["table"][h, q_idx - kv_idx]


@both
@pytest.mark.parametrize("captured", [False, True])
def test_a_table_that_is_too_short_for_kept_pairs(backend, captured):
    table = torch.randn(HEADS, 8)

    def of_a_capture(score, custom, b, h, q_idx, kv_idx):
        return score * 0.25 + table[h, q_idx - kv_idx]

    if captured:
        engine, custom = build(score_mod=of_a_capture, backend=backend), ()
    else:
        engine, custom = build({"table": (HEADS, 8)}, score_mod=by_distance, backend=backend), (table,)
    (found,) = warnings_of(engine.check(*qkv(11), *custom))
    assert "is read outside its shape (4, 8), first at b 0, h 0, q_idx 8, kv_idx 0: there it is 0" in found
    assert warnings_of(engine.check(*qkv(8), *custom)) == []  # pairs that the mask leaves out may


@both
def test_a_mask_that_reads_outside(backend):
    def mask(b, h, q_idx, kv_idx, custom):
        return custom["ids"][b, kv_idx + 1] == 0

    ids = torch.zeros(2, 11, dtype=torch.int32)
    (found,) = warnings_of(build({"ids": ("batch", 11)}, mask_mod=mask, backend=backend).check(*qkv(11), ids))
    assert "outside its shape (2, 11)" in found and "kv_idx 10" in found


@both
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_decay_that_grows(backend, layout):
    engine = LinearAttentionEngine(
        [meta_tensor(2, 4, 9, 16, dtype=torch.float32)] * 3, decay_mod=lambda a, c: a * c["sign"],
        custom_io=CustomIO({"sign": (1,)}), backend=backend, layout=layout,
    )  # fmt: skip
    q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
    decay = -torch.rand(2, 9, 4)
    decay[1, 3, 2] = -1.5
    given = [q, k, v, decay] if layout == "bshd" else [t.transpose(1, 2) for t in (q, k, v, decay)]
    assert warnings_of(engine.check(*given, torch.ones(1))) == []
    (found,) = warnings_of(engine.check(*given, -torch.ones(1)))
    assert f"warning: {decay.numel()} decays are above 0, up to 1.5 at batch 1, head 2, token 3" in found


@both
def test_a_call_warns_once_of_decays_that_are_no_logs(backend):
    metas = [meta_tensor(2, 4, 9, 16, dtype=torch.float32)] * 3
    q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
    factors = torch.full((2, 9, 4), 0.9)
    engine = LinearAttentionEngine(metas, backend=backend)
    with pytest.warns(UserWarning, match="72 decays are above 0, up to 0.9 at batch 0, head 0, token 0") as caught:
        engine(q, k, v, factors)
    assert [w.filename for w in caught] == [__file__]  # the user's line
    engine(q, k, v, factors)  # warnings are errors here
    LinearAttentionEngine(metas, backend=backend)(q, k, v, factors.log())
    LinearAttentionEngine(metas, decay_mod=lambda a, custom: a.log(), backend=backend)(q, k, v, factors)


def test_a_read_outside_in_a_linear_mod():
    engine = LinearAttentionEngine(
        [meta_tensor(2, 4, 9, 16, dtype=torch.float32)] * 3, v_mod=lambda x, c: x * c["gain"][4],
        custom_io=CustomIO({"gain": (4,)}), backend="reference",
    )  # fmt: skip
    (found,) = warnings_of(engine.check(*(torch.randn(2, 9, 4, 16) for _ in range(3)), None, torch.ones(4)))
    assert "outside its shape (4,)" in found
