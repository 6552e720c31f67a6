"""What constructors take by name: one vocabulary in both engines, the seed's names, and names that are nobody's."""

import inspect

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, attention, errors, meta_tensor
from attention_engine.library import (
    and_masks,
    block_causal,
    block_diagonal,
    causal,
    dilated,
    relative_bias,
    scale,
)

METAS = (meta_tensor(None, 2, None, 16, dtype=torch.float32),) * 3
ENGINES = (AttentionEngine, LinearAttentionEngine)
IO = CustomIO({"gain": ("heads",)})
SHARED = ("qkv_meta", "custom_io", "layout", "device", "backend", "tune", "tune_file", "tune_bwd", "tune_file_bwd",
          "deterministic")  # fmt: skip


def said(kind, make):
    with pytest.raises(kind) as caught:
        make()
    assert type(caught.value) is kind
    return str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_both_engines_have_one_vocabulary(engine):
    assert set(SHARED) <= set(inspect.signature(engine).parameters)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_names_of_the_seed_mean_the_same(engine, tmp_path):
    file = str(tmp_path / "tiles.json")
    new = engine(METAS, custom_io=IO, tune_file=file)
    old = engine(METAS, custom_fwd_inputs=IO, tune_filename=file)
    assert new.custom_io is old.custom_io is IO
    assert new.tuning.files == old.tuning.files == (file, file)


def test_custom_inputs_stand_second_in_place():
    assert AttentionEngine(METAS, IO).custom_io is IO


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_of_its_own_for_the_backward_kernels(engine, tmp_path):
    files = (str(tmp_path / "forward.json"), str(tmp_path / "backward.json"))
    assert engine(METAS, tune_file=files[0], tune_file_bwd=files[1]).tuning.files == files


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("new", "old", "value"), [
    ("custom_io", "custom_fwd_inputs", IO), ("tune_file", "tune_filename", "tiles.json"),
])  # fmt: skip
def test_both_names_at_once_clash(engine, new, old, value):
    message = said(errors.OptionsClash, lambda: engine(METAS, **{new: value, old: value}))
    assert message == f"{new} and {old} are one option by two names. Give {new} alone."


@pytest.mark.parametrize(("engine", "name", "advice"), [
    (AttentionEngine, "scoremod", "Did you mean 'score_mod'?"),
    (AttentionEngine, "mask", "Did you mean 'mask_mod'?"),
    (LinearAttentionEngine, "qmod", "Did you mean 'q_mod', 'v_mod' or 'k_mod'?"),
    (LinearAttentionEngine, "zzz", "It takes qkv_meta, q_mod, k_mod, v_mod, decay_mod, custom_io, layout, device, "
     "backend, tune, tune_file, tune_bwd, tune_file_bwd, deterministic."),
    (AttentionEngine, "is_causal", "Write mask_mod=attention_engine.library.causal."),
    (AttentionEngine, "attn_mask", "A mask is a function of indices: mask_mod=..., or block_mask=... for blocks."),
    (AttentionEngine, "window_size", "Write mask_mod=attention_engine.library.sliding_window(left, right)."),
    (AttentionEngine, "cu_seqlens_q", "An engine's call takes it: AttentionEngine(...)(q, k, v, cu_seqlens_q=...)."),
    (LinearAttentionEngine, "is_causal", "A linear attention is causal by itself, and has no other mask."),
    (LinearAttentionEngine, "scale", "Write q_mod=lambda x, custom: x * dim**-0.5."),
    (LinearAttentionEngine, "score_mod",
     "A linear attention has no scores of pairs: q_mod, k_mod, v_mod and decay_mod change its tensors."),
])  # fmt: skip
def test_a_name_that_is_no_option_is_told_the_nearest(engine, name, advice):
    message = said(errors.UnknownArgument, lambda: engine(METAS, **{name: None}))
    assert message == f"{engine.__name__} has no argument {name!r}. {advice}"
    assert issubclass(errors.UnknownArgument, TypeError)


def test_the_constructor_keeps_its_signature():
    assert list(inspect.signature(AttentionEngine).parameters)[:6] == [
        "qkv_meta", "custom_io", "score_mod", "mask_mod", "online_func", "mask_value"]  # fmt: skip


def test_functions_in_the_place_of_custom_inputs_are_told_their_names():
    assert said(errors.UnknownOption, lambda: AttentionEngine(METAS, scale(0.25), causal)) == (
        "custom_io is scale(0.25), a function. Give functions by name: score_mod=..., mask_mod=..."
    )
    assert said(errors.UnknownOption, lambda: LinearAttentionEngine(METAS, custom_io=causal)) == (
        "custom_io is causal, a function. Give functions by name: q_mod=..., k_mod=..., v_mod=..., decay_mod=..."
    )


NUMBERS = {
    "a step of 0": (lambda: AttentionEngine(mask_mod=dilated(0)), "a step of 0: give 1 or more."),
    "blocks of 0": (lambda: AttentionEngine(mask_mod=block_diagonal(0)), "a block of 0: give 1 or more."),
    "blocks below 0": (lambda: AttentionEngine(mask_mod=block_causal(-2)), "a block of -2: give 1 or more."),
    "no masks": (and_masks, "no masks to join: give one or more."),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_mask_of_the_library_says_which_number_it_takes(name):
    make, message = NUMBERS[name]
    assert said(errors.UnknownOption, make) == message


def test_a_relative_table_of_another_length_is_refused():
    """Entries past its end would read 0, and a longer one would have another middle."""
    for length in (5, 11):
        message = said(errors.BadCustomInput, lambda length=length: AttentionEngine(
            custom_io=CustomIO({"t": ("heads", length)}), score_mod=relative_bias("t", 4)))  # fmt: skip
        assert message.endswith(
            f"custom input 't' is declared with {length} entries in its last dimension, and 9 are read: 't': (..., 9)."
        )
    AttentionEngine(custom_io=CustomIO({"t": ("heads", 9)}), score_mod=relative_bias("t", 4))


def test_a_dict_in_the_place_of_custom_inputs_is_told_the_class():
    q = torch.zeros(1, 4, 2, 16)
    message = said(errors.UnknownOption, lambda: attention(q, q, q, custom_io={"x": (1,)}))
    assert message == "custom_io is {'x': (1,)}. Write CustomIO({'x': (1,)})."
    for engine in ENGINES:
        message = said(errors.UnknownOption, lambda engine=engine: engine(METAS, custom_io={"x": (1,)}))
        assert message == "custom_io is {'x': (1,)}. Write CustomIO({'x': (1,)})."


@pytest.mark.parametrize(("name", "value", "advice"), [
    ("mask", None, "Did you mean 'mask_mod'?"),
    ("is_causal", True, "Write mask_mod=attention_engine.library.causal."),
    ("attn_mask", torch.ones(4, 4), "A mask is a function of indices: mask_mod=..., or block_mask=... for blocks."),
    ("cu_seqlens_q", torch.tensor([0, 4]), "An engine's call takes it: AttentionEngine(...)(q, k, v, "
     "cu_seqlens_q=...)."),
    ("softcap", 30.0, "Write score_mod=attention_engine.library.softcap(cap, factor)."),
    ("return_lse", True, "A call returns rows with return_rowscales=True: o, {'lse': ...}."),
    ("slopes", torch.ones(2), "Write custom={'slopes': ...} for a custom input."),
])  # fmt: skip
def test_an_attention_in_one_call_tells_the_nearest_name(name, value, advice):
    q = torch.zeros(1, 4, 2, 16)
    message = said(errors.UnknownArgument, lambda: attention(q, q, q, **{name: value}))
    assert message == f"attention has no argument {name!r}. {advice}"


@pytest.mark.parametrize(("engine", "name", "advice"), [
    (AttentionEngine, "cu_seqlens", "AttentionEngine calls it cu_seqlens_q, and cu_seqlens_k where keys have other "
     "lengths."),
    (LinearAttentionEngine, "cu_seqlens_q", "LinearAttentionEngine calls it cu_seqlens."),
])  # fmt: skip
def test_a_call_tells_what_the_other_engine_calls_otherwise(engine, name, advice):
    q = torch.zeros(4, 2, 16)
    message = said(errors.CustomInputMissing, lambda: engine()(q, q, q, **{name: torch.tensor([0, 4])}))
    assert message == f"{name!r} is no argument of a call and no custom input. {advice}"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_true_or_false_is_nothing_else(engine):
    q, option = torch.zeros(1, 4, 2, 16), {AttentionEngine: "return_rowscales"}.get(engine, "output_final_state")
    assert said(errors.UnknownOption, lambda: engine(deterministic="yes")) == (
        "deterministic is 'yes'. Give True or False."
    )
    for _ in range(2):  # also where the call was seen
        assert said(errors.UnknownOption, lambda: engine()(q, q, q, **{option: "lse"})) == (
            f"{option} is 'lse'. Give True or False."
        )
