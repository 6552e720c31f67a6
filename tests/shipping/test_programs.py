"""The table of attentions that ship: its names, and that calls as users write them want the very kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, arch, errors, meta_tensor
from attention_engine.cli.main import main
from attention_engine.library import OnlineSoftmax, alibi, scale
from attention_engine.shipping import build
from attention_engine.shipping.programs import ATTENTIONS, LINEAR, cases, kernels_of

H100 = arch.H100()


def digests(engine, *given):
    """Of an engine's kernels."""
    keys = [
        build.cache.KernelKey(k.builder, k.given, H100, tuple(k.configs.items()))
        for k in engine._all_kernels(H100, given).values()
    ]
    return {key.digest for key in keys}


def test_names_are_chosen_by_any_part():
    every = cases()
    assert len({case.name for case in every}) == len(every)
    assert {case.attention for case in every} == {*ATTENTIONS, LINEAR}
    (one,) = cases("softmax.causal.128.bfloat16.heads-32-8")
    assert (one.dim, one.dtype, one.heads) == (128, "bfloat16", (32, 8))
    assert cases("alibi", "sigmoid") == [case for case in every if case.attention.split(".")[0] in ("alibi", "sigmoid")]
    assert {case.attention for case in cases("softmax.*.64.float16.heads-8-8")} >= {"softmax.full", "softmax.documents"}
    with pytest.raises(errors.UnknownOption, match=r"called 'sofmax.causal'. Did you mean 'softmax.causal'"):
        cases("sofmax.causal")


@pytest.mark.parametrize("attention", [*ATTENTIONS, LINEAR])
def test_each_has_kernels_of_both_directions(attention):
    made = kernels_of(cases(f"{attention}.128.bfloat16.heads-8-8")[0], H100)
    names = {kernel.builder for kernel in made.values()}
    if attention == LINEAR:
        assert {"linear.token.walk.walk", "linear.token.states.states", "linear.step.step"} <= names
    else:
        assert {"hopper.forward.forward", "rows.preprocess", "hopper.backward.backward"} <= names
        assert ("tile_map.tile_map" in names) == ("documents" in attention)


@pytest.mark.parametrize("dtype", [torch.float16, "bfloat16"])
@pytest.mark.parametrize("length", [None, 1024, 8192])
def test_softmax_as_users_write_it_is_what_ships(dtype, length):
    kind = str(dtype).removeprefix("torch.")
    shipped = {n for case in cases(f"softmax.causal.128.{kind}.heads-32-8") for n in kernels_of(case, H100)}
    heads = (32, 8, 8)
    metas = [meta_tensor(1, n, length, 128, dtype=dtype) for n in heads]

    def mine(b, h, q, k):
        return k <= q

    assert digests(AttentionEngine(metas, mask_mod=mine)) <= shipped
    assert digests(AttentionEngine(metas, None, scale(128**-0.5), mine, OnlineSoftmax())) <= shipped
    assert not digests(AttentionEngine(metas, mask_mod=mine, scale=0.1)) <= shipped


def test_alibi_as_users_write_it_is_what_ships():
    shipped = {n for case in cases("alibi.causal.64.float16.heads-16-16") for n in kernels_of(case, H100)}
    metas = (meta_tensor(None, 16, None, 64),) * 3
    io, slopes = CustomIO({"slopes": ("heads",)}), torch.ones(16)

    def mine(score, custom, b, h, q, k):
        return 0.125 * score - (q - k) * custom["slopes"][h]

    for score in (alibi(0.125), mine):
        assert digests(AttentionEngine(metas, io, score, lambda b, h, q, k: q >= k), slopes) <= shipped


@pytest.mark.parametrize("wanted", [frozenset(), frozenset({"decay"})], ids=["fixed", "learned"])
def test_linear_attention_as_users_call_it_is_what_ships(wanted):
    shipped = {n for case in cases(f"{LINEAR}.128.bfloat16.heads-16-16") for n in kernels_of(case, H100)}
    engine = LinearAttentionEngine(
        (meta_tensor(2, 16, 2048, 128, dtype="bfloat16"),) * 3, q_mod=lambda q, c: q * 128**-0.5
    )
    asked = replace(engine._asked_of(H100, "token"), wanted=tuple(wanted))
    kernels = asked.kernels_as_known(engine.tuning, "backward")
    steps = kernels.plan.backward_steps(2, 2048, wanted, False, False)
    keys = {
        build.cache.KernelKey(k.builder, k.given, H100, tuple(k.configs.items())) for k in kernels.named(steps).values()
    }
    assert {key.digest for key in keys} <= shipped


def test_the_command_lists_and_says_what_it_wants(capsys, tmp_path, monkeypatch):
    assert main(["kernels", "build", "--list", "--only", "sigmoid.full.64.float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sigmoid.full.64.float16.heads-8-8" and lines[-1] == "5 attentions"
    assert main(["kernels", "build"]) == 1
    assert "--out DIR" in capsys.readouterr().err
    assert main(["kernels", "build", "--arch", "H300", "--out", str(tmp_path)]) == 1
    assert "no GPU is called 'H300' here" in capsys.readouterr().err
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert main(["kernels", "build", "--out", str(tmp_path)]) == 1
    assert "No CUDA compiler" in capsys.readouterr().err


def test_what_is_not_compiled_is_named_and_no_wheel_made(tmp_path, monkeypatch, capsys):
    (case,) = cases("softmax.full.64.float16.heads-8-8")
    monkeypatch.setattr(build, "find_nvcc", lambda: tmp_path)
    monkeypatch.setattr(build, "call_all", lambda *_: iter([(0, RuntimeError("nvcc failed"))]))
    assert main(["kernels", "build", "--out", str(tmp_path), "--only", case.name]) == 1
    assert f"1 of 1 attentions were not compiled:\n  {case.name}: RuntimeError: nvcc failed" in capsys.readouterr().err
    monkeypatch.setattr(build, "call_all", lambda *_: iter([(0, ["0" * 32])]))
    assert main(["kernels", "build", "--out", str(tmp_path), "--only", case.name]) == 1
    assert "1 kernels were compiled and not kept" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.whl"))
