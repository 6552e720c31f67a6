"""Every mistake in building or calling an engine has its class and says, whole, what to do."""

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, LinearAttentionEngine, arch, meta_tensor
from attention_engine.errors import (
    AttentionEngineError,
    BadCustomInput,
    BadMeta,
    DevicesDiffer,
    DtypesDiffer,
    HeadDimsDiffer,
    HeadsDoNotGroup,
    LengthsDiffer,
    NoDevice,
    NotATensor,
    NotFloating,
    TooLong,
    UnknownCustomInput,
    UnknownOption,
    WrongCustomDtype,
    WrongDtype,
    WrongHeads,
    WrongRank,
)
from attention_engine.library import OnlineSoftmax
from tests.runtime.engines import BACKENDS, build, qkv


def said(kind: type[AttentionEngineError], function, *given, **named) -> str:
    with pytest.raises(kind) as caught:
        function(*given, **named)
    assert type(caught.value) is kind
    return str(caught.value)


# ---- metas


def metas(q=(2, 4, 8, 16), k=(2, 2, 8, 16), v=(2, 2, 8, 24), dtypes=("float16",) * 3):
    return tuple(meta_tensor(*sizes, dtype=dtype) for sizes, dtype in zip((q, k, v), dtypes))


@pytest.mark.parametrize(("given", "message"), [
    ({"k": (2, 2, 8, 32), "kind": HeadDimsDiffer},
     "q has head dim 16 and k has 32. They must be equal: the score is q . k."),
    ({"v": (2, 4, 8, 24)}, "k has 2 heads and v has 4. They must be equal."),
    ({"v": (2, 2, 9, 24)}, "k has length 8 and v has 9. They must be equal."),
    ({"dtypes": ("float16", "float16", "bfloat16")}, "q, k and v are float16, float16 and bfloat16. Give one dtype."),
])  # fmt: skip
def test_metas_that_do_not_fit_are_refused(given, message):
    kind = given.get("kind", BadMeta)
    assert said(kind, AttentionEngine, metas(**{n: g for n, g in given.items() if n != "kind"})) == message


@pytest.mark.parametrize(("given", "message"), [
    ((1, 0, 8, 16), "meta_tensor: heads is 0. Give a positive int: meta_tensor(batch, heads, length, dim)."),
    ((1, 2, 8, 16.0), "meta_tensor: dim is 16.0. Give a positive int: meta_tensor(batch, heads, length, dim)."),
    ((1, True, 8, 16), "meta_tensor: heads is True. Give a positive int: meta_tensor(batch, heads, length, dim)."),
    ((-1, 2, 8, 16), "meta_tensor: batch is -1. Give an int of at least 0, a name or None."),
    ((1, 2, -8, 16), "meta_tensor: length is -8. Give an int of at least 0, a name or None."),
    ((1, 2, 8, 16, "float64"),
     "meta_tensor: dtype is float64. Choose torch.float16, torch.bfloat16 or torch.float32."),
])  # fmt: skip
def test_a_meta_that_describes_nothing_is_refused(given, message):
    assert said(BadMeta, meta_tensor, *given) == message


def test_anything_but_three_metas_is_refused():
    one = meta_tensor("B", 2, None, 16)
    shown = "meta_tensor('B', 2, None, 16, dtype='float16')"
    way_out = "Give three descriptions: (meta_tensor(...),) * 3."
    assert said(BadMeta, AttentionEngine, one) == f"qkv_meta is {shown}. {way_out}"
    assert said(BadMeta, AttentionEngine, (one, one)) == f"qkv_meta is ({shown}, {shown}). {way_out}"
    assert said(BadMeta, AttentionEngine, (1, 2, 3)) == f"qkv_meta is (1, 2, 3). {way_out}"


def test_heads_that_do_not_group_are_refused():
    given = metas((1, 24, 8, 16), (1, 5, 8, 16), (1, 5, 8, 16))
    assert said(HeadsDoNotGroup, AttentionEngine, given) == (
        "24 query heads cannot share 5 key heads evenly. Choose key heads that divide 24: 1, 2, 3, 4, 6, 8, 12, 24."
    )
    assert isinstance(HeadsDoNotGroup(), ValueError)


# ---- options


@pytest.mark.parametrize(("option", "message"), [
    ({"backend": "cuda"}, "backend is 'cuda'. Choose 'auto', 'tilelang', 'tl', 'reference', 'interpret'."),
    ({"layout": "bsd"},
     "layout is 'bsd'. Did you mean 'bshd' or 'bhsd'? "
     'Choose "bshd" (batch, length, heads, dim) or "bhsd" (batch, heads, length, dim).'),
    ({"mask_value": "1"}, 'mask_value is \'1\'. Choose "-inf" or "0"; both mean that a masked pair is left out.'),
    ({"device": "H100"},
     "device is 'H100'. Give an architecture, attention_engine.arch.H100(), or None for the tensors' own."),
    ({"block_size": 128}, "block_size is 128. Give (queries, keys) of a block: (128, 128)."),
    ({"block_size": (128, 0)}, "block_size is (128, 0). Give (queries, keys) of a block: (128, 128)."),
    ({"block_size": (128, 64, 2)}, "block_size is (128, 64, 2). Give (queries, keys) of a block: (128, 128)."),
    ({"online_func": OnlineSoftmax},
     f"online_func is {OnlineSoftmax!r}. Give an instance of OnlineFunc (is it missing brackets: OnlineSoftmax()?)."),
    ({"online_func": "softmax"}, "online_func is 'softmax'. Give an instance of OnlineFunc."),
    ({"block_mask": 5}, "block_mask is 5. Give an instance of Tensor."),
])  # fmt: skip
def test_an_option_that_means_nothing_is_refused(option, message):
    assert said(UnknownOption, build, **option) == message


def test_custom_inputs_are_declared_by_a_custom_io():
    message = said(UnknownOption, AttentionEngine, metas(), {"x": (1,)})
    assert message == "custom_io is {'x': (1,)}. Write CustomIO({'x': (1,)})."
    assert said(UnknownOption, AttentionEngine, metas(), CustomIO) == (
        f"custom_io is {CustomIO!r}. Give an instance of CustomIO (is it missing brackets: CustomIO()?)."
    )


@pytest.mark.parametrize("value", ["-inf", "0", None])
def test_both_mask_values_mean_the_same(value):
    inputs = qkv()
    assert torch.equal(build(mask_value=value)(*inputs), build()(*inputs))


# ---- devices


def test_tilelang_needs_cuda_tensors():
    for name in ("tilelang", "tl"):
        engine = build(backend=name)
        assert engine.backend == "tilelang"
        assert said(NoDevice, engine, *qkv()) == (
            'backend="tilelang" needs CUDA tensors, and these are on \'cpu\'. On a CPU use "reference" or "interpret".'
        )


def test_tensors_elsewhere_are_refused():
    there = torch.device("xpu")  # no such tensor can be made here
    assert said(NoDevice, build(backend="auto")._backend_for, there) == (
        "tensors are on 'xpu'. Kernels run on CUDA, the reference on the CPU."
    )
    assert said(NoDevice, build()._backend_for, there) == (
        "backend=\"interpret\" runs on CPU tensors, and these are on 'xpu'."
    )


def test_cuda_sources_need_an_architecture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert said(NoDevice, build().source, "forward", "cuda") == (
        "there is no GPU to compile for. Say which: AttentionEngine(..., device=attention_engine.arch.H100())."
    )


@pytest.mark.parametrize("ask", [
    lambda engine, gpu: engine.source("forward", device=gpu), lambda engine, gpu: engine.compile_for(gpu),
    lambda engine, gpu: engine.resources(gpu),
], ids=["source", "compile_for", "resources"])  # fmt: skip
@pytest.mark.parametrize(("device", "name"), [("RTX 4090", "RTX4090"), (arch.MI300X, "MI300X"), ("cuda", "H100")])
def test_a_gpu_is_more_than_its_name(ask, device, name):
    """Nothing may be compiled for another in its place."""
    linear = LinearAttentionEngine([meta_tensor(1, 2, 64, 64, dtype=torch.float16)] * 3)
    for engine in (build(), linear):
        assert said(UnknownOption, ask, engine, device).endswith(
            f"Give an architecture, attention_engine.arch.{name}(), or None for the tensors' own."
        )


def test_sources_have_names_and_forms():
    engine = build(device=arch.H100())
    assert said(UnknownOption, engine.source, "dq") == (
        "no kernel is called 'dq'. Choose 'forward', 'preprocess', 'backward', 'postprocess'."
    )
    assert (
        said(UnknownOption, engine.source, "forward", "ptx")
        == 'form is \'ptx\'. Choose "tilelang", "cuda", "hip" or "cutedsl".'
    )


# ---- tensors

Q, K, V = (t.detach() for t in qkv(11, 13))
ORDER = "(batch, length, heads, dim)"
WRONG = {
    "a list": (NotATensor, ([1], K, V), f"q is list. Give a tensor {ORDER}."),
    "nothing": (NotATensor, (Q, None, V), f"k is NoneType. Give a tensor {ORDER}."),
    "three dims": (WrongRank, (Q, K[0], V), f"k has 3 dimensions, (13, 2, 16). Give {ORDER}."),
    "other heads": (
        WrongHeads,
        (Q[:, :, :3], K, V),
        "q has 3 heads of dim 16, and the engine was built for 4 of 16. Give 4, or build another.\n"
        f'  Its shape must be {ORDER}, layout="bshd".',
    ),
    "the other layout": (
        WrongHeads,
        (Q, K, V.transpose(1, 2)),
        "v has 13 heads of dim 24, and the engine was built for 2 of 24. Heads and length look swapped: in the "
        'tensors (layout="bhsd"?), or in meta_tensor(batch, heads, length, dim).\n'
        f'  Its shape must be {ORDER}, layout="bshd".',
    ),
    "another dim": (
        WrongHeads,
        (Q, K[..., :8], V),
        "k has 2 heads of dim 8, and the engine was built for 2 of 16. Give dim 16, or build another.\n"
        f'  Its shape must be {ORDER}, layout="bshd".',
    ),
    "two devices": (
        DevicesDiffer,
        (Q, K, V.to("meta")),
        "q is on 'cpu' and v on 'meta'. Put them on one device: v.to(q.device).",
    ),
    "two dtypes": (
        DtypesDiffer,
        (Q, K.half(), V),
        "q is torch.float32 and k is torch.float16. Give one dtype: k.to(q.dtype).",
    ),
    "two batches": (
        LengthsDiffer,
        (Q[:1], K, V),
        "q, k, v have batches 1, 2, 2 and lengths 11, 13, 13. Give k and v one length, and all one batch (k and v "
        "may have a batch of 1).",
    ),
    "two lengths": (
        LengthsDiffer,
        (Q, K, V[:, :12]),
        "q, k, v have batches 2, 2, 2 and lengths 11, 13, 12. Give k and v one length, and all one batch (k and v "
        "may have a batch of 1).",
    ),
    "integers": (NotFloating, (Q.int(), K.int(), V.int()), "q, k and v are torch.int32. Give floating tensors."),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_do_not_fit_are_refused(backend, kind):
    mistake, given, message = WRONG[kind]
    assert said(mistake, build(backend=backend), *given) == message


def test_the_layout_is_named_in_its_order():
    engine = build(layout="bhsd")
    assert said(WrongHeads, engine, Q, K, V) == (
        "q has 11 heads of dim 16, and the engine was built for 4 of 16. Heads and length look swapped: in "
        'the tensors (layout="bshd"?), or in meta_tensor(batch, heads, length, dim).\n'
        '  Its shape must be (batch, heads, length, dim), layout="bhsd".'
    )
    assert said(WrongRank, engine, Q[0], K, V) == "q has 3 dimensions, (11, 4, 16). Give (batch, heads, length, dim)."


def test_what_was_found_is_shown_in_one_line():
    engine = build()
    assert said(UnknownOption, engine.explain, torch.zeros(2, 3)).startswith(
        "packed is a tensor of shape (2, 3) and torch.float32. Choose"
    )
    assert said(UnknownOption, build, backend="cuda" * 99).startswith(f"backend is 'cuda{'cuda' * 18}.... Choose")


def test_lengths_that_kernels_cannot_count_are_refused():
    q, k, v = (t[:1, :1].expand(1, 2**26 + 1, *t.shape[2:]) for t in (Q, K, V))
    message = "a length is 67108865, and kernels count to 67108864 (2^26).\n" \
        '  Cut the sequence into parts, or use backend="reference".'  # fmt: skip
    assert said(TooLong, build(), Q[:1], k, v) == said(TooLong, build(), q, K[:1], V[:1]) == message
    linear = LinearAttentionEngine((meta_tensor(1, 4, 8, 16, dtype=torch.float32),) * 3, backend="interpret")
    assert said(TooLong, linear, q, q, q) == message


def test_kernels_want_the_dtype_that_they_were_built_for():
    assert said(WrongDtype, build(), Q.half(), K.half(), V.half()) == (
        "q, k and v are torch.float16, and the engine was built for torch.float32. Convert them, or build another."
    )
    assert build(backend="reference")(Q.half(), K.half(), V.half()).dtype is torch.float16


# ---- custom inputs


def test_a_custom_input_must_be_of_a_dtype_that_kernels_read():
    engine = build({"x": ("heads",)}, score_mod=lambda s, custom, b, h, q_idx, kv_idx: s * custom["x"])
    assert said(WrongCustomDtype, engine, Q, K, V, torch.ones(4, dtype=torch.complex64)) == (
        "custom input 'x' is torch.complex64. Give a floating, integer or bool tensor."
    )


def test_custom_inputs_are_declared_by_a_dict_and_read_in_brackets():
    assert said(BadCustomInput, CustomIO, ["x"]).endswith(
        "CustomIO was given list. Give a dict of axes: CustomIO({'slopes': ('heads',)})."
    )
    assert said(UnknownCustomInput, build, {"x": (1,)}, score_mod=lambda s, c, b, h, q_idx, kv_idx: s * c.x).endswith(
        "custom inputs are read by name in brackets: custom['x']."
    )
