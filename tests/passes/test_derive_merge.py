"""How the parts of a row join: derived for every right program, proved by numbers, refused for wrong ones."""

import dataclasses
import time

import pytest

from attention_engine import library
from attention_engine.errors import NoMerge
from attention_engine.frontend.custom_io import CustomIO
from attention_engine.frontend.tracing import trace
from attention_engine.ir.expr import Op, const, make, substitute, topological
from attention_engine.ir.merge import part_variable, whole_variable
from attention_engine.ir.program import OUTPUT
from attention_engine.ir.verify import verify_merge, verify_program
from attention_engine.passes.check_cuts import check_online
from attention_engine.passes.check_merge import find_difference
from attention_engine.passes.derive_merge import _of_row_function, derive_merge
from tests.merges import RIGHT, UNWRITTEN, WRONG
from tests.programs import EXAMPLES

SHIPPED = {
    "identity": library.OnlineIdentity(), "softmax": library.OnlineSoftmax(), "softmax one": library.OnlineSoftmaxOne(),
    "sink": library.OnlineSoftmaxSink(), "sigmoid": library.OnlineSigmoid(), "relu": library.OnlineRelu(),
    "retention": library.OnlineRetention(),
}  # fmt: skip


def traced(func, **custom):
    return trace(None, None, func, CustomIO(custom))


def shipped(name):
    return traced(SHIPPED[name], **({"sinks": ("heads",)} if name == "sink" else {}))


def part(name):
    return part_variable(name)


def whole(name):
    return whole_variable(name)


def test_softmax_joins_by_its_maximum():
    merge = derive_merge(shipped("softmax"))
    back = make(Op.EXP, part("m") - whole("m"))
    assert dict(merge.states) == {
        "m": make(Op.REDUCE, part("m"), arg="max"), "r": make(Op.REDUCE, part("r") * back, arg="sum"),
    }  # fmt: skip
    assert [name for name, _ in merge.states] == ["m", "r"] and merge.factor is back and merge.read == ("m", "r")
    assert [name for name, _ in merge.finals] == ["lse"]


@pytest.mark.parametrize("name", ["identity", "sigmoid", "relu"])
def test_parts_without_states_are_added(name):
    merge = derive_merge(shipped(name))
    assert merge.states == () and merge.read == () and merge.factor is const(1.0) and merge.output is OUTPUT


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_row_function_has_one(name):
    verify_merge(derive_merge(shipped(name)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_program_of_the_tests_has_one(name):
    merge = derive_merge(EXAMPLES[name].trace())
    verify_merge(merge)
    verify_program(merge.part_program)


@pytest.mark.parametrize("name", RIGHT)
def test_row_functions_that_nobody_wrote_a_merge_for(name):
    program = RIGHT[name].trace()
    check_online(program)
    verify_merge(derive_merge(program))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_function_has_none(name):
    with pytest.raises(NoMerge, match=r"keys is .* of parts of .* it is") as error:
        derive_merge(traced(WRONG[name]))
    assert "each row in one part" in str(error.value)


def test_a_formula_that_is_not_found_says_what_stood_in_the_way():
    with pytest.raises(NoMerge) as error:
        derive_merge(traced(UNWRITTEN))
    assert str(error.value) == (
        "sigmoid(score - whole.m) is no sum of factors of the row's values times factors of the key.\n"
        "  Decoding then walks each row in one part."
    )


@pytest.mark.parametrize("name", ["softmax", "sink", "retention"])
def test_a_merge_takes_a_second_at_most(name):
    _of_row_function.cache_clear()
    start = time.perf_counter()
    derive_merge(shipped(name))
    assert time.perf_counter() - start < 3  # 0.3 s where nothing else runs


def test_programs_that_differ_in_score_and_mask_share_one():
    _of_row_function.cache_clear()
    for name in ("softmax", "alibi", "pair bias"):
        merge = derive_merge(EXAMPLES[name].trace())
        assert merge.program.score is EXAMPLES[name].trace().score
    assert _of_row_function.cache_info().misses <= 3
    assert derive_merge(EXAMPLES["softmax"].trace()) == derive_merge(EXAMPLES["softmax"].trace())


def spoiled(expr):
    """The expression with one of its nodes replaced by another, in every way."""
    for node in topological(expr):
        match node.op:
            case Op.MUL | Op.ADD | Op.MAXIMUM:
                others = list(node.args)
            case Op.EXP | Op.RECIP | Op.SQRT | Op.RSQRT | Op.LOG:
                others = [const(1.0)]
            case Op.REDUCE:
                others = [make(Op.REDUCE, *node.args, arg=kind) for kind in ("sum", "max", "min") if kind != node.arg]
            case _:
                continue
        yield from (substitute(expr, {node: other}) for other in others)


def spoils(merge):
    for expr in spoiled(merge.factor):
        yield dataclasses.replace(merge, factor=expr)
    yield dataclasses.replace(merge, factor=merge.factor * 1.000001)
    for n, (name, state) in enumerate(merge.states):
        for expr in spoiled(state):
            yield dataclasses.replace(merge, states=(*merge.states[:n], (name, expr), *merge.states[n + 1 :]))


# Spoiled merges that are right, too, by hand. moments: the sum over parts of n (mean - whole mean) is 0, so that what
# is multiplied with it may go, and an empty part's maximum(n, 1) is multiplied with a mean of 0. The other two: every
# part begins at the number that its maximum is bounded by.
EQUAL = {"moments": 4, "one at the start": 1, "over the largest": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHIPPED, *RIGHT])
def test_the_proof_sees_a_spoiled_merge(name):
    merge = derive_merge(shipped(name) if name in SHIPPED else RIGHT[name].trace())
    unseen = [wrong for wrong in spoils(merge) if find_difference(wrong) is None]
    assert len(unseen) == EQUAL.get(name, 0), "\n\n".join(map(str, unseen))
