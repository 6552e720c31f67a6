"""The mistakes of a first hour: the first line that each meets says what, where and what to do; some are no mistakes.

The numbers are those under which they were collected, each made once in FlexAttention too. A mistake that is none here
computes what plain PyTorch does. Tracebacks show the user's frames and one of the package.

`python -m tests.test_mistakes` makes each again and prints its first line and its grade.
"""

from __future__ import annotations

import linecache
import traceback

import pytest

from attention_engine.errors import AttentionEngineError

START = """
import math
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex
from attention_engine import (
    AttentionEngine, CustomIO, LinearAttentionEngine, OnlineFunc, SymbolScalar, Var, create_mask, library,
    meta_tensor, where)
metas = (meta_tensor(2, 4, 8, 16, dtype=torch.float32),) * 3
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 8, 4, 16, generator=generator) for _ in range(3))
i, j = torch.arange(8)[:, None], torch.arange(8)

def plain(score=lambda s: s / 4, keep=torch.ones(8, 8).bool()):
    s = score(torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()))
    return torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(~keep, -math.inf).softmax(-1), v.double())

def same(o, expected):
    torch.testing.assert_close(o.double(), expected, rtol=1e-5, atol=1e-5)
"""
SIGNATURE = "def score_mod(score, custom, b, h, q_idx, kv_idx):\n    "
BIAS = SIGNATURE + 'return score + custom["bias"]\n'
BIAS += 'engine = AttentionEngine(metas, CustomIO({"bias": ("heads",)}), score_mod)\n'
SOFTMAX = """
class Softmax(OnlineFunc):
    def __init__(self):
        super().__init__({"m": SymbolScalar("m", Var("-inf")), "r": SymbolScalar("r", Var("0.0"))}, {})
    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        rescale = (m - m_new).exp()
        weights = (scores - m_new).exp()
        END
    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {}
AttentionEngine(metas, online_func=Softmax())
"""
BLOCKS = "blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, 2, 4, 8, 8, device='cpu', BLOCK_SIZE=8)\n"
BUILD = "AttentionEngine(metas, mask_mod=mask_mod)"
IN_PLACE, FIRST = "b, h, q_idx, kv_idx, custom", "custom, b, h, q_idx, kv_idx"
SEG = "def mask_mod(b, h, q_idx, kv_idx, custom):\n    return custom['seg'][b, q_idx] == custom['seg'][b, kv_idx]\n"


def score(body: str, plain: str = "") -> str:
    end = f"\nsame(AttentionEngine(metas, score_mod=score_mod)(q, k, v), plain({plain}))"
    return SIGNATURE + body + end


def mask(body: str) -> str:
    return f"def mask_mod(b, h, q_idx, kv_idx):\n    {body}\nAttentionEngine(metas, mask_mod=mask_mod)(q, k, v)"


def online(end: str) -> str:
    return SOFTMAX.replace("END", end).strip()


MISTAKES = {
    "1": (
     score("if h == 0: score = 0\n    return score"),
     "BranchOnSymbol: mine.py:2: Python asked for the truth of a symbolic value, h == 0. Write "
     "where(condition, a, b), and & | ~ between conditions."),
    "2": (
     "AttentionEngine(metas)(*(t.transpose(1, 2) for t in (q, k, v)))",
     "WrongHeads: q has 8 heads of dim 16, and the engine was built for 4 of 16. Heads and length look "
     'swapped: in the tensors (layout="bhsd"?), or in meta_tensor(batch, heads, length, dim).'),
    "3": (
     BIAS + "engine(q, k, v)",
     "CustomInputMissing: custom input 'bias' is missing. Declared: 'bias'; give them after q, k, v, or "
     "by name."),
    "4": (
     BIAS + "engine(q, k, v, torch.ones(5))",
     "WrongCustomShape: custom input 'bias' has shape (5,). Its axes ('heads',) ask for (4,): give that "
     "shape."),
    "5": (
     BIAS.replace('custom["bias"]', 'custom["biass"]'),
     "UnknownCustomInput: mine.py:2: no custom input is called 'biass'. Did you mean 'bias'? Declared: "
     "'bias'."),
    "7": (
     mask("return where(q_idx >= kv_idx, 0.0, -math.inf)"),
     "MaskIsNoCondition: mine.py:1: mask_mod returned the number where(kv_idx <= q_idx, 0, -inf). Return "
     "a condition, True where the pair is kept: q_idx >= kv_idx."),
    "8": (
     score("score * 2"),
     "WrongResult: mine.py:1: score_mod returned NoneType as the score. Return a symbolic value, or a "
     "number (is a `return` missing?)."),
    "8b": (
     mask("q_idx >= kv_idx"),
     "MaskIsNoCondition: mine.py:1: mask_mod returned NoneType. Return a condition, True where the pair "
     "is kept: q_idx >= kv_idx (is a `return` missing?)."),
    "6b": (
     score("return torch.special.i0(score)"),
     "UnsupportedOperation: mine.py:2: torch.i0 has no meaning in a mod. A mod sees one pair at a time, as "
     "numbers without dimensions. Write it in functions that a mod knows: the page below lists them."),
    "9": (
     "def score_mod(score, b, h, q_idx, kv_idx):\n    return score\nAttentionEngine(metas, score_mod=score_mod)",
     "WrongArity: mine.py:1: score_mod takes 5 arguments, as FlexAttention's does. Put custom second: "
     "(score, custom, b, h, q_idx, kv_idx)."),
    "10": (
     SEG.replace(IN_PLACE, FIRST) + BUILD,
     "WrongArity: mine.py:1: mask_mod takes custom as its argument 1. It is called with (b, h, q_idx, "
     "kv_idx, custom): make it argument 5."),
    "10b": (
     SEG.replace(IN_PLACE, FIRST).replace("custom", "c") + BUILD,
     "UnsupportedOperation: mine.py:2: ['seg'] has no meaning on a symbolic value, b. It is one number; "
     "the argument custom is another: score_mod(score, custom, ...), mask_mod(b, h, q_idx, kv_idx, "
     "custom)."),
    "11": (
     "AttentionEngine(metas)(q.half(), k, v)",
     "DtypesDiffer: q is torch.float16 and k is torch.float32. Give one dtype: k.to(q.dtype)."),
    "12": (
     "AttentionEngine(metas, backend='tilelang')(q, k, v)",
     'NoDevice: backend="tilelang" needs CUDA tensors, and these are on \'cpu\'. On a CPU use "reference" '
     'or "interpret".'),
    "13": (
     "AttentionEngine(metas)(q[..., :8], k[..., :8], v)",
     "WrongHeads: q has 4 heads of dim 8, and the engine was built for 4 of 16. Give dim 16, or build "
     "another."),
    "14": (
     "AttentionEngine(metas)(q, k[:, :, :3], v[:, :, :3])",
     "WrongHeads: k has 3 heads of dim 16, and the engine was built for 4 of 16. Give 4, or build "
     "another. Key heads of 4 query heads can be 1, 2, 4."),
    "15": (
     "bias = [1.0, 2.0, 3.0, 4.0]\n" + score("return score + bias[h]"),
     "SymbolAsIndex: mine.py:3: `bias[h]` is read at a symbolic index, h. Only tensors can be: make bias one, "
     "torch.tensor(bias), outside of the mod."),
    "15c": (
     "bias = np.ones(4)\n" + score("return score + bias[h]"),
     "SymbolAsIndex: mine.py:3: `bias[h]` is read at a symbolic index, h. Only tensors can be: make bias one, "
     "torch.tensor(bias), outside of the mod."),
    "15d": (
     "bias = {0: 1.0, 1: 2.0}\n" + score("return score + bias[h]"),
     "SymbolAsIndex: mine.py:3: `bias[h]` looks up a symbolic value, h, in a dict or a set, and it has no "
     "number yet. Compare it, h == 0, or read a tensor at it, tensor[h]."),
    "15e": (
     "bias = torch.ones(4, 8)\n" + score("return score + bias[h, :kv_idx].sum()"),
     "WrongIndex: mine.py:3: a slice of a tensor starts or ends at a symbolic value. A pair reads one entry: "
     "bias[q_idx, kv_idx]."),
    "15f": (
     "bias = torch.ones(8)\n" + score("return score + bias[:kv_idx].sum()"),
     "WrongIndex: mine.py:3: a slice of a tensor starts or ends at a symbolic value. A pair reads one entry: "
     "bias[kv_idx]."),
    "15g": (
     "bias = torch.nn.Embedding(8, 4)\n" + score("return score + bias(q_idx)[h]"),
     "UnsupportedOperation: mine.py:3: torch.embedding has no meaning in a mod. Read the table at an index: "
     "embedding.weight[q_idx, h]."),
    "16": (
     "AttentionEngine(metas, online_func=library.OnlineSoftmax)",
     "UnknownOption: online_func is <class 'attention_engine.library.OnlineSoftmax'>. Give an instance of "
     "OnlineFunc (is it missing brackets: OnlineSoftmax()?)."),
    "17": (
     online('return weights, {"m": m_new, "r": r * rescale + weights.get_reduce("sum")}'),
     "WrongResult: mine.py:4: Softmax.online_fwd returned a tuple of 2. Return (weights, new_rowscales, "
     "rescale)."),
    "18": (
     online('return weights, {"m": m_new}, rescale'),
     "MissingState: mine.py:4: Softmax.online_fwd gives no row state 'r'. Return each: 'm', 'r'."),
    "17b": (
     "class Mine(OnlineFunc):\n    @staticmethod\n    def online_forward(scores, rows, b, h, q_idx):\n        return 1",
     "UnknownArgument: Mine has a method 'online_forward', which nobody calls. Name it 'online_fwd'."),
    "18b": (
     online('return weights, {"m": m_new, "r": r * rescale + online_rowscales.r}, rescale'),
     "UnknownState: mine.py:10: row states are read by name in brackets: ['r']."),
    "18c": (
     online('return weights * custom, {"m": m_new, "r": r}, rescale').replace("h, q_idx):", "h, q_idx, custom):", 1),
     "TensorInMod: mine.py:10: a CustomInputs can't be mixed with symbolic values. It is all custom inputs: read one, "
     "custom['name']."),
    "41c": (
     score("return score - score.max(-1)"),
     "UnsupportedOperation: mine.py:2: max(-1) reduces a dim in torch, and a mod has none. For the max over a row, "
     "scores.get_reduce('max'), in online_fwd; for the max of two, a.max(-1.0)."),
    "41b": (
     score("return score - torch.max(score, dim=-1)"),
     "UnsupportedOperation: mine.py:2: max with dim= has no meaning in a mod. A mod sees one pair at a time, as "
     "numbers without dimensions. Sums over a row are scores.get_reduce('sum'), in online_fwd."),
    "19": (
     online('return weights, {"m": m_new, "r": r * rescale + weights.get_reduce("sum")}, 1.0'),
     "NotOnline: mine.py:4: Softmax.online_fwd: the output depends on how a row is cut into tiles. Is a "
     "rescale forgotten?"),
    "20": (
     score("return math.exp(score)"),
     "UnsupportedOperation: mine.py:2: a symbolic value, qk, has no number yet. In place of math.exp "
     "write torch.exp, or x.exp()."),
    "22": (
     BLOCKS + "AttentionEngine(metas)(q, k, v, block_mask=blocks)",
     "WrongBlockMask: block_mask is BlockMask. A call takes a tensor of blocks or a BlockList; give other "
     "masks, FlexAttention's too, where functions are given: mask_mod=..."),
    "23": (
     "AttentionEngine((meta_tensor(2, 8, 4, 16, dtype=torch.float32),) * 3)(q, k, v)",
     "WrongHeads: q has 4 heads of dim 16, and the engine was built for 8 of 16. Heads and length look "
     'swapped: in the tensors (layout="bhsd"?), or in meta_tensor(batch, heads, length, dim).'),
    "24": (
     BIAS.replace('custom["bias"]', 'custom["bias"][b, h]'),
     "WrongIndex: mine.py:2: custom input 'bias' has 1 dimension ('heads',), and is read with 2 indices. "
     "Give one index for each dimension."),
    "24b": (
     "bias = torch.randn(4)\n" + score("return score + bias[b, h]"),
     "WrongIndex: mine.py:3: captured tensor 'bias' has 1 dimension (4,), and is read with 2 indices. "
     "Give one index for each dimension."),
    "25": (
     BIAS.replace('custom["bias"]', 'custom["bias"][q_idx / 2]'),
     "BadCustomInput: mine.py:2: custom input 'bias' is read at float(q_idx) / 2, which is a float. Write "
     "// instead of /, or x.to(int)."),
    "25b": (
     "bias = torch.randn(4)\n" + score("return score + bias[q_idx / 2]"),
     "BadCustomInput: mine.py:3: captured tensor 'bias' is read at float(q_idx) / 2, which is a float. "
     "Write // instead of /, or x.to(int)."),
    "26b": (
     "AttentionEngine(metas, score_mod=0.25)",
     "NotAFunction: a float was given where a function of (score, custom, b, h, q_idx, kv_idx) belongs. The engine's "
     "scale= multiplies scores by a number."),
    "26c": (
     "AttentionEngine(metas, mask_mod='causal')",
     "NotAFunction: a str was given where a function of (b, h, q_idx, kv_idx) belongs. Give the function itself: "
     "attention_engine.library has many, or write a lambda."),
    "12b": (
     "AttentionEngine(metas).resources()",
     "NoDevice: there is no GPU to compile for. Say which: AttentionEngine(..., "
     "device=attention_engine.arch.H100())."),
    "12c": (
     "AttentionEngine().source()",
     "SizesUnknown: heads, dims and dtype are those of the first call, and there was none. Call the engine once, "
     "or give metas: AttentionEngine((meta_tensor(batch, heads, length, dim),) * 3, ...)."),
    "26": (
     "AttentionEngine(metas, scoremod=library.scale(2.0))",
     "UnknownArgument: AttentionEngine has no argument 'scoremod'. Did you mean 'score_mod'?"),
    "27": (
     score("return score * score.item()"),
     "UnsupportedOperation: mine.py:2: symbolic values have no `item`. A symbol stands for a value of "
     "every pair: it has no number yet. Compute with the symbol itself."),
    "28": (
     "AttentionEngine(metas)(q, k)",
     "TypeError: AttentionEngine.forward() missing 1 required positional argument: 'v'"),
    "30": (
     score("return score + sum(1 for n in range(q_idx))"),
     "SymbolAsIndex: mine.py:2: a symbolic value, q_idx, can't count: it has no number yet. Compare with "
     "it instead."),
    "31": (
     BIAS + "engine(q, k, v, biass=torch.ones(4))",
     "CustomInputMissing: 'biass' is no argument of a call and no custom input. Did you mean 'bias'? "
     "Declared custom inputs: 'bias'."),
    "33": (
     "LinearAttentionEngine(metas)(q, k, v, torch.zeros(2, 4, 8))",
     "WrongShape: decay has shape (2, 4, 8). With these q, k and v it must be (2, 8, 4)."),
    "34": (
     "CustomIO({'bias': ('head',)})",
     "UnknownAxis: mine.py:1: custom input 'bias': 'head' is no axis. Did you mean 'heads'?"),
    "36": (
     "AttentionEngine(metas, layout='bhds')",
     'UnknownOption: layout is \'bhds\'. Did you mean \'bshd\' or \'bhsd\'? Choose "bshd" (batch, length, '
     'heads, dim) or "bhsd" (batch, heads, length, dim).'),
    "37": (
     "AttentionEngine(metas, backend='triton')",
     "UnknownOption: backend is 'triton'. Choose 'auto', 'tilelang', 'tl', 'reference', 'interpret'."),
    "38": (
     mask("return q_idx >= kv_idx and q_idx - kv_idx < 4"),
     "BranchOnSymbol: mine.py:2: Python asked for the truth of a symbolic value, kv_idx <= q_idx. Write "
     "where(condition, a, b), and & | ~ between conditions."),
    "39": (
     "AttentionEngine(metas)(q, k, v, is_causal=True)",
     "CustomInputMissing: 'is_causal' is no argument of a call and no custom input. Say it when the "
     "engine is built: mask_mod=library.causal."),
    "39b": (
     "AttentionEngine(metas)(q, k, v, attn_mask=torch.ones(8, 8).bool())",
     "CustomInputMissing: 'attn_mask' is no argument of a call and no custom input. A mask belongs to the "
     "engine: mask_mod=library.causal, or a function (b, h, q_idx, kv_idx) that reads yours."),
    "39c": (
     "AttentionEngine(metas)(q, k, v, dropout_p=0.1)",
     "CustomInputMissing: 'dropout_p' is no argument of a call and no custom input. Say it when the engine "
     "is built: dropout_p=..."),
    "39d": (
     "AttentionEngine(metas)(q, k, v, scale=0.5)",
     "CustomInputMissing: 'scale' is no argument of a call and no custom input. Say it when the engine is "
     "built: scale=..."),
    "39e": (
     "AttentionEngine(metas)(q, k, v, enable_gqa=True)",
     "CustomInputMissing: 'enable_gqa' is no argument of a call and no custom input. Leave it out: query "
     "heads share key heads wherever there are more of them."),
    "39f": (
     "AttentionEngine(metas)(q, k, v, None, 0.0, True)",
     "CustomInputMissing: 3 arguments follow q, k and v, and the declared custom inputs are: none. Masks "
     "and scales are the engine's: AttentionEngine(mask_mod=..., scale=...)."),
    "38b": (
     score("return score if h in {0, 1} else 2 * score"),
     "SymbolAsIndex: mine.py:2: `h in {0, 1}` looks up a symbolic value, h, in a dict or a set, and it has no "
     "number yet. Compare it, h == 0, or read a tensor at it, tensor[h]."),
    "40": (
     "AttentionEngine(metas, mask_mod=library.sliding_window)",
     "FactoryNotCalled: sliding_window makes a function of (b, h, q_idx, kv_idx). Call it: "
     "sliding_window(left, right)."),
    "40b": (
     "AttentionEngine(metas, mask_mod=library.sliding_window(-1))",
     "UnknownOption: a window of -1 and 0 keys: give 0 or more. For no limit (-1 elsewhere): causal, or no mask."),
    "40c": (
     "AttentionEngine(metas, score_mod=library.softcap(0.0))",
     "UnknownOption: a cap of 0: give one above 0, or scale(factor) for none."),
    "26d": (
     "AttentionEngine(metas, mask_mod=[library.causal, library.sliding_window(4)])",
     "NotAFunction: a list was given where a function of (b, h, q_idx, kv_idx) belongs. Join masks by "
     "library.and_masks(...) or or_masks(...)."),
    "31b": (
     "AttentionEngine(metas).show_mask(16, 16)",
     "UnknownArgument: sizes are given by name: show_mask(Sq=64, Skv=64). What comes first is custom inputs."),
    "28b": (
     "AttentionEngine(metas).cost()",
     "TypeError: AttentionEngine.cost() missing 3 required positional arguments: 'q', 'k', and 'v'"),
    "41": (
     score("return score - score.get_reduce('max')"),
     "MisplacedReduction: mine.py:2: get_reduce in a score_mod. A row is reduced in online_fwd alone: "
     "reduce there."),
    "46": (
     SEG + "create_mask(mask_mod, 2, 4, 8, 8)",
     "UnknownCustomInput: mine.py:2: no custom input is called 'seg'. Declared: none. Declare it, "
     "CustomIO({'seg': axes}), or give create_mask and show_mask seg=tensor."),
    "46c": (
     SEG + "create_mask(mask_mod, 2, 4, 8, 8, CustomIO({'seg': ('batch', 'seq_len')}))",
     "UnknownOption: device is CustomIO({'seg': ('batch', 'seq_len')}). Give a device, or None. Custom inputs are "
     "given as tensors, by name: name=..."),
    "48": (
     "AttentionEngine(metas, library.scale(0.25), library.causal)",
     "UnknownOption: custom_io is scale(0.25), a function. Give functions by name: score_mod=..., "
     "mask_mod=..."),
    "48b": (
     "AttentionEngine(q, k, v)",
     "BadMeta: qkv_meta is a tensor of shape (2, 8, 4, 16) and torch.float32. Tensors are given with the "
     "call: AttentionEngine(...)(q, k, v)."),
}  # fmt: skip
NONE = {
    "6": score("return F.softplus(score)", "F.softplus"),
    "15b": "bias = torch.randn(4)\n"
     + score("return score + bias[h]", "lambda s: s + bias[:, None, None].double()"),
    "21": score("return np.tanh(score)", "torch.tanh"),
    "21b": score("return np.where(q_idx >= kv_idx, np.clip(score, -1, 1), -math.inf)",
                 "lambda s: s.clamp(-1, 1), i >= j"),
    "22b": BLOCKS + "same(AttentionEngine(metas, block_mask=blocks)(q, k, v), plain(keep=i >= j))",
    "22c": BLOCKS + "same(AttentionEngine(metas, mask_mod=blocks)(q, k, v), plain(keep=i >= j))",
    "29": score("return score + torch.zeros_like(score)", "lambda s: s"),
    "35": score("return score.masked_fill(q_idx < kv_idx, -math.inf)", "lambda s: s, i >= j"),
    "42": "same(AttentionEngine(metas, mask_mod=library.causal)(q, k, v), plain(keep=i >= j))",
    "43": "same(AttentionEngine(metas)(q, k, v), plain())",
    "46b": SEG + "seg = i.T // 3 + i[:2]\n"
     "assert torch.equal(create_mask(mask_mod, 2, 4, 8, 8, seg=seg)[:, 0], seg[..., None] == seg[:, None])",
    "47": "LinearAttentionEngine(metas, custom_fwd_inputs=CustomIO({'a': ('heads',)}), tune_filename='x.json')",
}  # fmt: skip


# What a first line says: what, where and what to do (A), two of the three (B), one (C); D: it misleads; F: nothing is
# said, or the error is not ours. All are A but these.
GRADES = {
    "28": ("B", "what and where, as Python says it of any function"),
    "32": ("B", "a decay above 0 is no error: it is meant at times. check() warns of it, and says where"),
    "44": ("-", "as many heads as tokens, and the other layout: nobody can tell"),
    "45": ("C", "a call says nothing: a read outside is 0, as the documents say. check() warns of it, and says where"),
}


def run(code: str) -> None:
    names: dict[str, object] = {}
    exec(START, names)
    linecache.cache["mine.py"] = (len(code), None, code.splitlines(True), "mine.py")
    exec(compile(code, "mine.py", "exec"), names)


@pytest.mark.parametrize("number", MISTAKES)
def test_the_first_line_says_what_where_and_what_to_do(number):
    code, first = MISTAKES[number]
    with pytest.raises((AttentionEngineError, TypeError)) as caught:
        run(code)
    assert f"{type(caught.value).__name__}: {caught.value}".splitlines()[0] == first


@pytest.mark.parametrize("number", sorted(MISTAKES.keys() - {"28"}))
def test_a_traceback_holds_the_users_frames_and_one_of_ours(number, monkeypatch):
    monkeypatch.delenv("ATTENTION_ENGINE_ALL_FRAMES", raising=False)
    with pytest.raises((AttentionEngineError, TypeError)) as caught:
        run(MISTAKES[number][0])
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum("/attention_engine/" in file for file in files) == 1
    if first := MISTAKES[number][1].partition(": ")[2].partition(":")[0] == "mine.py":
        assert (first and files[-1] == "mine.py") or "/attention_engine/" in files[-1]


@pytest.mark.parametrize("number", NONE)
def test_what_is_no_mistake_computes_what_torch_does(number):
    run(NONE[number])


def test_all_frames_are_shown_on_request(monkeypatch):
    def frames() -> int:
        with pytest.raises(AttentionEngineError) as caught:
            run(MISTAKES["1"][0])
        return len(traceback.extract_tb(caught.value.__traceback__))

    few = frames()
    monkeypatch.setenv("ATTENTION_ENGINE_ALL_FRAMES", "1")
    assert frames() > few + 5


def test_each_of_the_48_is_made_or_told_of():
    told = {int("".join(filter(str.isdigit, number))) for number in (*MISTAKES, *NONE, *GRADES)}
    assert told == set(range(1, 49))
    assert {grade for grade, _ in GRADES.values()} <= {"B", "C", "-"}


def grade(number: str) -> tuple[str, str]:
    """The grade of a mistake, made once more, and the first line that it met, or what is to be said of it."""
    if number in NONE:
        run(NONE[number])
        return "A", "no mistake: it computes what torch does"
    if number not in MISTAKES:
        return GRADES[number]
    try:
        run(MISTAKES[number][0])
    except (AttentionEngineError, TypeError) as error:
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return GRADES.get(number, ("A" if first == MISTAKES[number][1] else "changed", ""))[0], first
    return "F", "nothing was said"


def main() -> None:
    """Prints all of them."""
    grades: dict[str, int] = {}
    for number in sorted({*MISTAKES, *NONE, *GRADES}, key=lambda n: (int("".join(filter(str.isdigit, n))), n)):
        found, line = grade(number)
        grades[found] = grades.get(found, 0) + 1
        print(f"{number:>4} {found}  {line}")
    print(", ".join(f"{name}: {count}" for name, count in sorted(grades.items())))


if __name__ == "__main__":
    main()
