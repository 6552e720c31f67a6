"""The example scripts, run on the interpreter at small shapes: each agrees with its own plain PyTorch."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = ["mha", "gqa", "sigmoidattn", "reluattn", "retention", "sparseattn", "blocksparseattn", "alibi", "t5_bias",
           "document", "sink"]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_as_near_to_float64_as_eager_pytorch(name, capsys):
    errors = importlib.import_module(name).main(["--device", "cpu"])
    assert {"o", "dq", "dk", "dv"} <= errors.keys()
    for which, (ours, eager) in errors.items():
        assert 0 < ours <= 1.1 * eager, (which, ours, eager)
    assert f"fp16, {'full' if name == 't5_bias' else 'causal'}, on cpu" in capsys.readouterr().out


def test_show_prints_the_program_and_the_kernel(capsys):
    importlib.import_module("mha").main(["--device", "cpu", "--length", "17", "--show"])
    out = capsys.readouterr().out
    assert "weight = exp2" in out and "T.prim_func" in out


@pytest.mark.slow  # models of its family stand in tests/integrations
def test_the_encoder_gives_the_same_embeddings_through_the_kernels(capsys):
    minilm = importlib.import_module("minilm")
    assert len(minilm.SENTENCES) == 20
    difference, _ = minilm.main(["--device", "cpu"])
    assert difference <= 1e-4
    (engine,) = minilm.ENGINES  # one served every layer
    assert engine.custom_io.specs["padding"].axes == ("batch", "seq_len_kv") and engine.backend == "interpret"


def test_a_gpt_learns_alike_with_pytorchs_attention_and_is_saved_and_loaded(tmp_path, capsys):
    train_gpt = importlib.import_module("train_gpt")
    ours, theirs = (
        train_gpt.main(["--device", "cpu", "--steps", "10", "--attention", name, "--save", str(tmp_path / name)])
        for name in ("softmax", "sdpa")
    )
    assert ours == pytest.approx(theirs, abs=1e-3) and ours[-1] < ours[0] - 1
    (again,) = train_gpt.main(["--device", "cpu", "--steps", "1", "--load", str(tmp_path / "sdpa")])
    assert again < ours[0] - 1
    said = capsys.readouterr().out
    assert "step 10: loss" in said and "tokens a second" in said and "ms a step" in said and "Attention " in said


@pytest.mark.parametrize("name", ["fading", pytest.param("sigmoid", marks=pytest.mark.slow)])
def test_a_gpt_learns_with_an_attention_of_ones_own(name, capsys):
    train_gpt = importlib.import_module("train_gpt")
    losses = train_gpt.main(["--device", "cpu", "--steps", "6", "--attention", name])
    assert losses[-1] < losses[0] - 1


def test_a_gpt_learns_with_blocks_that_it_chooses(capsys):
    block_topk = importlib.import_module("block_topk")
    losses = block_topk.main(["--device", "cpu", "--steps", "6", "--kept", "16"])
    chosen, whole = losses["chosen blocks"], losses["all blocks"]
    assert chosen == pytest.approx(whole, abs=1e-4) and whole[-1] < whole[0] - 1  # 16 of 16: the same attention
    assert "loss of the last ten steps: chosen blocks" in capsys.readouterr().out


def test_served_requests_get_the_tokens_that_transformers_generate_gives(capsys):
    pytest.importorskip("transformers")
    generate = importlib.import_module("generate")
    said, gaps, requests, pages = generate.main(["--device", "cpu", "--requests", "7", "--slots", "3", "--most", "12"])
    assert said["eager"] == said["sdpa"] == said["this script"] and set(gaps.values()) == {0}
    assert [len(tokens) for tokens in said["eager"]] == [r.wanted for r in requests]
    assert len({len(r.prompt) for r in requests}) > 3 and max(len(r.prompt) for r in requests) > pages.page
    assert sorted(pages.free) == list(range(1, len(pages.free) + 1)) and not pages.table.any()  # all were taken back
    assert "3 at once" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_on_a_gpu(name, capsys):
    for which, (ours, eager) in importlib.import_module(name).main(["--length", "2048"]).items():
        assert 0 < ours <= 1.1 * eager, (which, ours, eager)
    assert "TFLOP/s" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_encoder_in_fp16_on_a_gpu():
    _, cosine = importlib.import_module("minilm").main([])
    assert cosine >= 0.9999


@pytest.mark.gpu
def test_served_tokens_are_as_near_to_the_best_as_those_of_transformers_on_a_gpu():
    pytest.importorskip("transformers")
    generate = importlib.import_module("generate")
    _, gaps, _, _ = generate.main(["--requests", "12", "--slots", "8", "--longest", "500", "--most", "40"])
    assert gaps["this script"] <= 2 * max(gaps["eager"], gaps["sdpa"])


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[1].glob("attn_script/[!_]*.py")), ids=lambda p: p.name)
def test_script_is_short(path):
    assert len(path.read_text().splitlines()) < 80


LINEAR_SCRIPTS = ["retention_linear", "simple_gla", "gla", "mamba2", "mamba2_ngroup1"]


@pytest.mark.parametrize("name", LINEAR_SCRIPTS)
def test_linear_script_is_as_near_to_float64_as_eager_pytorch(name, capsys):
    errors = importlib.import_module(name).main(["--device", "cpu"])
    assert len(errors) >= 5 and {"o", "dq", "dk", "dv"} <= errors.keys()
    for which, (ours, eager) in errors.items():
        assert 0 < ours <= 1.1 * eager, (which, ours, eager)
    assert ("1 of k" if name == "mamba2_ngroup1" else "4 of k") in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", LINEAR_SCRIPTS)
def test_linear_script_runs_on_a_gpu(name, capsys):
    for which, (ours, eager) in importlib.import_module(name).main([]).items():
        assert 0 < ours <= 1.1 * eager, (which, ours, eager)
    assert "ours: forward" in capsys.readouterr().out
