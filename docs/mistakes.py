"""Classic mistakes: for each the class of its error, code that makes it, and the fix. Prints or writes docs/errors.md.

python docs/mistakes.py            every mistake with the message that a user meets
python docs/mistakes.py --write    docs/errors.md
"""

import argparse
import linecache
import textwrap
from dataclasses import dataclass
from pathlib import Path

from attention_engine import errors
from attention_engine.frontend.functions import Symbol

PAGE = Path(__file__).parent / "errors.md"
START = """
import math
import torch
from attention_engine import (
    AttentionEngine, CustomIO, OnlineFunc, SymbolScalar, Var, arch, library, meta_tensor, where)
qkv_meta = (meta_tensor(1, 2, 8, 16, dtype=torch.float32),) * 3
q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
"""
SOFTMAX = """
class Softmax(OnlineFunc):
    def __init__(self):
        super().__init__({{"m": SymbolScalar("m", Var("-inf")), "r": SymbolScalar("r", Var("0.0"))}}, {{}})

    @staticmethod
    def online_fwd(scores, online_rowscales, b, h, q_idx):
        m, r = online_rowscales["m"], online_rowscales["r"]
        m_new = m.max(scores.get_reduce("max"))
        rescale = (m - m_new).exp()
        weights = (scores - m_new).exp()
        {}

    @staticmethod
    def online_fwd_epilogue(o, online_rowscales, b, h, q_idx):
        return o / online_rowscales["r"], {{}}

engine = AttentionEngine(qkv_meta, online_func=Softmax())
"""
BUILD = "engine = AttentionEngine(qkv_meta, mask_mod=lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window)"
RIGHT_END = 'return weights, {"m": m_new, "r": r * rescale + weights.get_reduce("sum")}, rescale'


@dataclass(frozen=True)
class Mistake:
    """One mistake: what its code does wrong, and the same done right."""

    error: type[errors.AttentionEngineError]
    title: str
    wrong: str
    right: str


def score(wrong: str, right: str) -> tuple[str, str]:
    """A score_mod's two ways."""
    head = "def score_mod(score, custom, b, h, q_idx, kv_idx):\n    "
    tail = "\n\nengine = AttentionEngine(qkv_meta, score_mod=score_mod)"
    return head + wrong + tail, head + right + tail


def mask(wrong: str, right: str) -> tuple[str, str]:
    """A mask_mod's two ways."""
    head = "def mask_mod(b, h, q_idx, kv_idx):\n    "
    tail = "\n\nengine = AttentionEngine(qkv_meta, mask_mod=mask_mod)"
    return head + wrong + tail, head + right + tail


def softmax(wrong: str) -> tuple[str, str]:
    """Two ends of online_fwd."""
    return SOFTMAX.format(wrong).strip(), SOFTMAX.format(RIGHT_END).strip()


def option(wrong: str, right: str) -> tuple[str, str]:
    """Two ways to call the constructor."""
    return f"engine = AttentionEngine(qkv_meta, {wrong})", f"engine = AttentionEngine(qkv_meta, {right})"


def call(wrong: str, right: str) -> tuple[str, str]:
    """Two ways to call an engine."""
    head = "engine = AttentionEngine(qkv_meta)\n"
    return f"{head}engine({wrong})", f"{head}engine({right})"


def custom(wrong: str, right: str) -> tuple[str, str]:
    """Two ways to call an engine that reads slopes."""
    head = 'slopes = CustomIO({"slopes": ("heads",)})\n'
    head += "engine = AttentionEngine(qkv_meta, slopes, library.alibi(0.25))\n"
    return f"{head}engine({wrong})", f"{head}engine({right})"


E = errors
MISTAKES = [
    Mistake(E.BranchOnSymbol, "`if` on a symbolic value", *score(
        "if q_idx > kv_idx + 4:\n        return score - 1\n    return score",
        "return where(q_idx > kv_idx + 4, score - 1, score)")),
    Mistake(E.BranchOnSymbol, "`and`, `or`, `not` between conditions", *mask(
        "return q_idx >= kv_idx and q_idx - kv_idx < 4", "return (q_idx >= kv_idx) & (q_idx - kv_idx < 4)")),
    Mistake(E.BranchOnSymbol, "Python's `max` and `min`", *score("return max(score, 0)", "return score.max(0)")),
    Mistake(E.BranchOnSymbol, "a chained comparison", *mask(
        "return 0 <= q_idx - kv_idx < 4", "return (0 <= q_idx - kv_idx) & (q_idx - kv_idx < 4)")),
    Mistake(E.BranchOnSymbol, "`&` without brackets", *mask(
        "return q_idx >= kv_idx & kv_idx > 2", "return (q_idx >= kv_idx) & (kv_idx > 2)")),
    Mistake(E.UnsupportedOperation, "a function of the math module", *score(
        "return math.tanh(score)", "return score.tanh()")),
    Mistake(E.UnsupportedOperation, "a function that has no meaning for one pair", *score(
        "return torch.cumsum(score, -1)", "return torch.tanh(score)")),
    Mistake(E.MisplacedReduction, "a reduction of the row outside online_fwd", *(
        score("return score - score.get_reduce('max')", "")[0],
        "engine = AttentionEngine(qkv_meta, online_func=library.OnlineSoftmax())")),
    Mistake(E.NumberTooLarge, "an integer of more than 64 bits", *mask(
        "return q_idx < 2**70", "return q_idx < 2**62")),
    Mistake(E.UnsupportedOperation, "the softmax inside the score", *(
        score("return torch.softmax(score, -1)", "")[0],
        "engine = AttentionEngine(qkv_meta, online_func=library.OnlineSoftmax())")),
    Mistake(E.SymbolAsIndex, "a list read at a symbolic index", *(
        score("return score * [0.5, 0.25][h]", "")[0],
        "slopes = torch.tensor([0.5, 0.25])\n\n" + score("", "return score * slopes[h]")[1])),
    Mistake(E.SymbolAsIndex, "a loop to a symbolic index", *mask(
        "return sum(kv_idx == n for n in range(q_idx)) > 0", "return kv_idx < q_idx")),
    Mistake(E.TensorInMod, "a tensor of many numbers beside a score", *score(
        "return score + torch.ones(8)", "return score + torch.ones(8)[kv_idx]")),
    Mistake(E.WrongArity, "custom inputs in another place", *(
        "def mask_mod(custom, b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n\n"
        "engine = AttentionEngine(qkv_meta, mask_mod=mask_mod)", mask("", "return q_idx >= kv_idx")[1])),
    Mistake(E.WrongArity, "FlexAttention's score_mod", *(
        "def score_mod(score, b, h, q_idx, kv_idx):\n    return score\n\n"
        "engine = AttentionEngine(qkv_meta, score_mod=score_mod)", score("", "return score")[1])),
    Mistake(E.WrongResult, "a mod that returns nothing", *score("score * 0.125", "return score * 0.125")),
    Mistake(E.WrongResult, "a mod that returns a tensor", *score("return torch.ones(8)", "return 1.0")),
    Mistake(E.MaskIsNoCondition, "a mask that returns a number", *mask(
        "return where(q_idx >= kv_idx, 0.0, -1e9)", "return q_idx >= kv_idx")),
    Mistake(E.NotAFunction, "a tensor as mask_mod", *(
        "keep = torch.ones(8, 8).tril().bool()\nengine = AttentionEngine(qkv_meta, mask_mod=keep)",
        "keep = torch.ones(8, 8).tril().bool()\n\n" + mask("", "return keep[q_idx, kv_idx]")[1])),
    Mistake(E.FactoryNotCalled, "a factory in place of the mod that it makes", *option(
        "mask_mod=library.sliding_window", "mask_mod=library.sliding_window(4)")),
    Mistake(E.UnknownState, "a row state that isn't declared", *softmax(
        'return weights, {"m": m_new, "r": online_rowscales["sum"] + 1}, rescale')),
    Mistake(E.MissingState, "a row state that isn't returned", *softmax('return weights, {"m": m_new}, rescale')),
    Mistake(E.WrongResult, "a forgotten rescale in the result", *softmax(
        'return weights, {"m": m_new, "r": r * rescale + weights.get_reduce("sum")}')),
    Mistake(E.NotReduced, "a row state that differs from key to key", *softmax(
        'return weights, {"m": m_new, "r": r * rescale + weights}, rescale')),
    Mistake(E.UnknownReduction, "a reduction that isn't there", *softmax(
        'return weights, {"m": m_new, "r": r + weights.get_reduce("mean")}, rescale')),
    Mistake(E.NotOnline, "a result that depends on how the row is cut", *softmax(
        'return weights, {"m": m_new, "r": r + weights.get_reduce("sum")}, rescale')),
    Mistake(E.StatesNotDeclared, "an OnlineFunc that doesn't call its base class", *(
        "class Mine(OnlineFunc):\n    def __init__(self):\n        self.power = 2\n\n"
        "engine = AttentionEngine(qkv_meta, online_func=Mine())",
        "class Mine(OnlineFunc):\n    def __init__(self):\n        super().__init__()\n        self.power = 2\n\n"
        "engine = AttentionEngine(qkv_meta, online_func=Mine())")),
    Mistake(E.BadInitialValue, "a first value that is no number", 'm = SymbolScalar("m", Var("minus infinity"))',
            'm = SymbolScalar("m", Var("-inf"))'),
    Mistake(E.UnknownOption, "a class in place of an instance", *option(
        "online_func=library.OnlineSoftmax", "online_func=library.OnlineSoftmax()")),
    Mistake(E.UnknownOption, "an option's value that means nothing", *option('backend="triton"', 'backend="tilelang"')),
    Mistake(E.UnknownArgument, "an option that is spelled another way", *option(
        "maskmod=library.causal", "mask_mod=library.causal")),
    Mistake(E.OptionsClash, "two options that say the same", *option(
        "mask_mod=library.causal, block_mask=library.sliding_window(4)",
        "mask_mod=library.and_masks(library.causal, library.sliding_window(4))")),
    Mistake(E.HeadsDoNotGroup, "query heads that can't share the key heads", *(
        f"engine = AttentionEngine((meta_tensor(1, 24, 8, 16),) + (meta_tensor(1, {n}, 8, 16),) * 2)"
        for n in (5, 6))),
    Mistake(E.HeadDimsDiffer, "q and k of different head dims", *(
        f"engine = AttentionEngine((meta_tensor(1, 2, 8, 16), meta_tensor(1, 2, 8, {n}), meta_tensor(1, 2, 8, 32)))"
        for n in (32, 16))),
    Mistake(E.BadMeta, "tensors in place of their description", "engine = AttentionEngine((q, k, v))",
            "engine = AttentionEngine((meta_tensor(1, 2, 8, 16, dtype=torch.float32),) * 3)"),
    Mistake(E.SizesUnknown, "a kernel asked for before any call or meta says heads and dims", *(
        f"engine = AttentionEngine(mask_mod=library.causal)\n{way}engine.explain()"
        for way in ("", "engine(q, k, v)\n"))),
    Mistake(E.WrongHeads, "the other layout", *(
        call("*(t.transpose(1, 2) for t in (q, k, v))", "")[0],
        'engine = AttentionEngine(qkv_meta, layout="bhsd")\nengine(*(t.transpose(1, 2) for t in (q, k, v)))')),
    Mistake(E.WrongRank, "a missing dimension", *call("q[0], k[0], v[0]", "q[:1], k[:1], v[:1]")),
    Mistake(E.WrongShape, "decays of another shape", *(
        "from attention_engine import LinearAttentionEngine\n\nengine = LinearAttentionEngine(qkv_meta)\n"
        f"engine(q, k, v, -torch.rand({shape}))" for shape in ("1, 2, 8", "1, 8, 2"))),
    Mistake(E.DtypesDiffer, "two dtypes in one call", *call("q, k.half(), v", "q, k, v")),
    Mistake(E.NotFloating, "integer tensors", *call("q.int(), k.int(), v.int()", "q, k, v")),
    Mistake(E.LengthsDiffer, "keys and values of different lengths", *call("q, k, v[:, :7]", "q, k[:, :7], v[:, :7]")),
    Mistake(E.WrongSequences, "lengths of packed sequences in place of where they begin", *(
        "engine = AttentionEngine(qkv_meta, mask_mod=library.causal)\nrows = torch.randn(8, 2, 16)\n"
        f"engine(rows, rows, rows, cu_seqlens_q=torch.tensor([{numbers}], dtype=torch.int32))"
        for numbers in ("5, 3", "0, 5, 8"))),
    Mistake(E.DevicesDiffer, "tensors on two devices", *call('q, k.to("meta"), v', "q, k, v")),
    Mistake(E.WrongDtype, "another dtype than the kernels were built for", *(
        'engine = AttentionEngine(qkv_meta, backend="interpret")\nengine(q.half(), k.half(), v.half())',
        'engine = AttentionEngine(qkv_meta, backend="interpret")\nengine(q, k, v)')),
    Mistake(E.UnknownAxis, "an axis that doesn't exist", 'slopes = CustomIO({"slopes": ("head",)})',
            'slopes = CustomIO({"slopes": ("heads",)})'),
    Mistake(E.UnknownCustomInput, "a custom input that isn't declared", *(
        score('return score * custom["slopes"]', "")[0],
        'def score_mod(score, custom, b, h, q_idx, kv_idx):\n    return score * custom["slopes"]\n\n'
        'engine = AttentionEngine(qkv_meta, CustomIO({"slopes": ("heads",)}), score_mod)')),
    Mistake(E.WrongIndex, "the wrong number of indices", *(
        'def score_mod(score, custom, b, h, q_idx, kv_idx):\n'
        f'    return score * custom["slopes"]{indices}\n\n'
        'engine = AttentionEngine(qkv_meta, CustomIO({"slopes": ("heads",)}), score_mod)'
        for indices in ("[b, h]", "[h]"))),
    Mistake(E.CustomInputMissing, "a custom input that the call doesn't bring", *custom(
        "q, k, v", "q, k, v, slopes=torch.ones(2)")),
    Mistake(E.CustomInputMissing, "what other libraries take with each call", *(
        call("q, k, v, is_causal=True", "")[0],
        "engine = AttentionEngine(qkv_meta, mask_mod=library.causal)\nengine(q, k, v)")),
    Mistake(E.WrongCustomShape, "a custom input of the wrong shape", *custom(
        "q, k, v, torch.ones(3)", "q, k, v, torch.ones(2)")),
    Mistake(E.NotATensor, "a number in place of a tensor", *custom("q, k, v, 0.5", "q, k, v, torch.full((2,), 0.5)")),
    Mistake(E.WrongBlockMask, "a mask over pairs in place of one over blocks", *option(
        "block_mask=torch.ones(8, 8, dtype=torch.bool))(q, k, v",
        "block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))(q, k, v")),
    Mistake(E.WrongBlockMask, "FlexAttention's BlockMask with a call", *(
        "from torch.nn.attention.flex_attention import create_block_mask\n\n"
        'blocks = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 8, 8, device="cpu", BLOCK_SIZE=8)\n' + way
        for way in ("engine = AttentionEngine(qkv_meta)\nengine(q, k, v, block_mask=blocks)",
                    "engine = AttentionEngine(qkv_meta, block_mask=blocks)\nengine(q, k, v)"))),
    Mistake(E.WrongCache, "pages of a number of keys that no tile can have", *(
        f"engine = AttentionEngine(qkv_meta)\npages = torch.zeros(4, {keys}, 2, 16)\n"
        "table, lengths = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)\n"
        "with torch.no_grad():\n"
        "    engine.with_cache(q[:, :1], pages, pages, kv_lengths=lengths, page_table=table)"
        for keys in (12, 16))),
    Mistake(E.CacheNotDifferentiable, "a gradient through attention to a cache", *(
        "engine = AttentionEngine(qkv_meta)\nq.requires_grad_()\nlengths = torch.tensor([8], dtype=torch.int32)\n"
        f"{way}engine.with_cache(q, k, v, kv_lengths=lengths)" for way in ("", "with torch.no_grad():\n    "))),
    Mistake(E.FunctionsChanged, "a number that a mask reads, changed after the engine was built", *(
        f"window = 3\n{BUILD}\nwindow = 5\n{way}engine(q, k, v)" for way in ("", BUILD + "\n"))),
    Mistake(E.NoDevice, "kernels asked for on a CPU", *(
        f'engine = AttentionEngine(qkv_meta, backend="{name}")\nengine(q, k, v)'
        for name in ("tilelang", "interpret"))),
    Mistake(E.NoDevice, "CUDA source where there is no GPU to compile for", *(
        'engine = AttentionEngine(qkv_meta)\nengine.source("forward", form="cuda")',
        'engine = AttentionEngine(qkv_meta, device=arch.H100())\nengine.source("forward")')),
    Mistake(E.AttentionOutOfReach, "engines in a Hugging Face model that computes its attention in code of its own", *(
        "from transformers import BloomConfig, BloomForCausalLM\n"
        "from attention_engine.integrations.transformers import register\n"
        'register("attention_engine")\n'
        "config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)\n"
        f'model = BloomForCausalLM._from_config(config, attn_implementation="{name}")\n'
        "model(torch.ones(1, 4, dtype=torch.long))" for name in ("attention_engine", "eager"))),
    Mistake(E.RowNotDifferentiable, "a loss through a row whose gradient isn't derived", *(
        "class Softmax(library.OnlineSoftmax):\n"
        "    @staticmethod\n"
        "    def forward(scores, final_rowscales, b, h, q_idx, kv_idx):\n"
        '        return (scores - final_rowscales["lse"]).exp()\n\n'
        "    @staticmethod\n"
        "    def backward(dp, scores, final_rowscales, doosum_rowscales, b, h, q_idx, kv_idx):\n"
        "        return (dp - doosum_rowscales) * scores\n\n"
        'engine = AttentionEngine(qkv_meta, online_func=Softmax(), backend="interpret")\n'
        "o, rows = engine(q.requires_grad_(), k, v, return_rowscales=True)\n"
        f'(o.sum() + rows["lse"]{way}.sum()).backward()' for way in ("", ".detach()"))),
    Mistake(E.NoMerge, "a combine that forgets the sum over parts", *(
        "class Softmax(library.OnlineSoftmax):\n"
        "    @staticmethod\n"
        "    def combine(final_rowscales):\n"
        '        lse = final_rowscales["lse"]\n'
        '        weights = (lse - lse.get_reduce("max")).exp()\n'
        f"        return weights{way}\n\n"
        "AttentionEngine(qkv_meta, online_func=Softmax()).partial(q, k, v)"
        for way in ("", ' / weights.get_reduce("sum")'))),
]  # fmt: skip


def message_of(mistake: Mistake) -> str:
    """What the user meets: the last lines of the traceback, but for the one that names the section of the page."""
    error = raised(mistake.wrong)
    if error is None:
        raise AssertionError(f"{mistake.title}: nothing is wrong with\n{mistake.wrong}")
    return f"{type(error).__name__}: {error}"


def raised(code: str) -> errors.AttentionEngineError | None:
    """The error that this code ends in."""
    names: dict[str, object] = {}
    exec(START, names)
    linecache.cache["my_attention.py"] = (len(code), None, code.splitlines(True), "my_attention.py")
    try:
        exec(compile(code, "my_attention.py", "exec"), names)
    except errors.AttentionEngineError as error:
        return error
    return None


def classes() -> dict[str, type[errors.AttentionEngineError]]:
    """All classes of errors by name, in the order in which they are written."""
    return {n: c for n, c in vars(errors).items() if isinstance(c, type) and c.__module__ == errors.__name__}


def page() -> str:
    """docs/errors.md: a section for each class of errors, at which the last line of its messages points."""
    head = """\
        # Errors

        Every mistake has a class in `attention_engine.errors`, derived from `AttentionEngineError` and from Python's
        own class where there is one (`TypeError`, `ValueError`, ...). A message says where, what was found, and what to
        do. Its last line, which is left out below, names a section of this page. Tracebacks show your own frames and
        one of the package; with `ATTENTION_ENGINE_ALL_FRAMES=1` in the environment they show all.

        This page is written by `python docs/mistakes.py --write`, which makes each mistake; a test makes it again.

        All examples begin with
        """
    parts = [textwrap.dedent(head), f"```python\n{START.strip()}\n```\n"]
    for name, kind in classes().items():
        parts.append(f"## {name}\n\n{' '.join((kind.__doc__ or '').split())}\n")
        parts += [example(mistake) for mistake in MISTAKES if mistake.error is kind]
        if kind is E.UnsupportedOperation:
            parts.append(f"### What a mod knows\n\n{known_functions()}\n")
    return "\n".join(parts)


def example(mistake: Mistake) -> str:
    """A mistake on the page."""
    return (
        f"### {mistake.title[0].upper()}{mistake.title[1:]}\n\n"
        f"```py\n{mistake.wrong}\n```\n\n```text\n{message_of(mistake)}\n```\n\n"
        f"The fix:\n\n```py\n{mistake.right}\n```\n"
    )


def known_functions() -> str:
    """The sentence that lists what symbols can do."""
    names = ", ".join(f"`{name}`" for name in sorted(Symbol.FUNCTIONS))
    text = f"`+ - * / ** // %`, comparisons, `& | ^ ~ << >>`, and by the names of torch or numpy, as functions of " \
        f"them or as methods: {names}. In `online_fwd` also `get_reduce`."  # fmt: skip
    return "\n".join(textwrap.wrap(text, 118))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/errors.md")
    if parser.parse_args().write:
        PAGE.write_text(page())
        return
    for number, mistake in enumerate(MISTAKES, 1):
        print(f"{number}. {mistake.title}\n{textwrap.indent(message_of(mistake), '   ')}\n")


if __name__ == "__main__":
    main()
