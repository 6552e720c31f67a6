"""A plan is data: its launches read what was written, allocate what kernels declare, and are those of a call."""

from dataclasses import replace

import pytest
import torch

from attention_engine import AttentionEngine, CustomIO, OnlineFunc, arch, meta_tensor
from attention_engine.compiler import Kernels
from attention_engine.ir.problem import Problem, padded
from attention_engine.ir.verify import InvalidIR
from attention_engine.library import OnlineRelu, OnlineSoftmax, causal, scale, sliding_window
from attention_engine.plan.attention_buffers import custom_inputs
from attention_engine.plan.buffers import (
    BATCH,
    QUERIES,
    Buffer,
    Role,
    buffers_of,
    ceil_div,
    length,
    own_length,
    value_of,
)
from attention_engine.plan.forms import padded_rows
from attention_engine.plan.launches import Launch, Trim, launches
from attention_engine.plan.verify import verify_steps
from attention_engine.runtime.run import Kept, Ready
from tests import cases, programs
from tests.sweep import Job


def plan(name="case: softmax", mask="causal", dim=64, dtype="fp16", device=None, wanted=True, **options):
    device = device or arch.H100()
    engine = Job(name, mask, dim, dtype).engine(device)
    asked = engine._asked(device, False)
    made = asked.trained.kernels_as_known(engine.tuning)
    maths = made.maths if wanted else made.maths.wanting(())
    return Kernels(maths, made.problem, made.tiles, device, options.get("deterministic", False)).plan


NAMES = [f"case: {name}" for name in cases.CASES] + [f"example: {name}" for name in programs.EXAMPLES]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_launch_reads_what_an_earlier_one_wrote(name, deterministic):
    made = plan(name, deterministic=deterministic)
    verify_steps(made.forward_steps)
    finals = tuple(n for n, _ in made.maths.program.finals)
    for arriving in () if made.refused else ((), finals):
        verify_steps(made.backward_steps(arriving))


def test_what_is_no_plan_is_refused():
    made = plan("case: softmax")
    preprocess, over_keys, postprocess = made.backward_steps()
    with pytest.raises(InvalidIR, match=r"the launch 'backward': 'row0' is read before it is filled"):
        verify_steps((over_keys, postprocess))
    with pytest.raises(InvalidIR, match="the step Trim: 'delta' is read before it is filled"):
        verify_steps((Trim("delta", preprocess.arguments[0]),))
    with pytest.raises(InvalidIR, match=r"it writes what it isn't given: .*elsewhere"):
        verify_steps((replace(preprocess, writes=frozenset(["elsewhere"])),))
    with pytest.raises(InvalidIR, match="two arguments have one name"):
        verify_steps((replace(preprocess, arguments=(*preprocess.arguments, preprocess.arguments[0])),))
    wider = [replace(a, shape=(*a.shape, 2)) if a.name == "row0" else a for a in over_keys.arguments]
    with pytest.raises(InvalidIR, match=r"'row0' is .* here, and was .* before"):
        verify_steps((preprocess, replace(over_keys, arguments=tuple(wider))))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", ["case: softmax", "case: relu2_row_sum", "example: tempered", "example: pair bias"])
def test_kernels_declare_what_is_allocated(name, mask):
    """Each parameter of a kernel's TileLang has the rank and the dtype of the plan's buffer, in its order."""
    pytest.importorskip("tilelang")
    engine = Job(name, mask, 64, "fp16").engine(arch.H100())
    made = engine._asked(arch.H100(), False).trained.kernels_as_known(engine.tuning)
    for launch in launches((*made.plan.forward_steps, *made.plan.backward_steps(), *made.plan.pair_launches)):
        function = made.kernel(launch).prim_func
        expected = []
        for argument in launch.arguments:
            expected += ["number"] * len(getattr(argument, "strides", ()))
            expected.append((len(argument.shape), argument.dtype) if isinstance(argument, Buffer) else "number")
        buffers = [function.buffer_map.get(p) for p in function.params]
        assert ["number" if b is None else (len(b.shape), str(b.dtype)) for b in buffers] == expected


def test_sizes_are_those_of_the_padded_rows():
    made = plan("case: softmax", dim=96)
    buffers = {b.name: b for b in buffers_of(made.preprocess(()).arguments)}
    for queries in (1, 63, 128, 129, 1000):
        lengths = {"batch": 3, "q_length": queries, "kv_length": 7}
        rows = padded_rows(queries, made.row_pad)
        assert buffers["delta"].shape_of(lengths) == (3, programs.HEADS, rows)
        assert buffers["workspace"].shape_of(lengths) == (3 * programs.HEADS, rows * padded(96))


def test_a_size_is_a_number_once_lengths_are_known():
    size = ceil_div(length("n") + 128, 100) * 100
    assert [value_of(size, {"n": n}) for n in (1, 72, 73, 172)] == [200, 200, 300, 300]
    assert value_of(5, {}) == 5


class Largest(OnlineFunc):
    """Scores over the largest of their row."""

    def __init__(self):
        super().__init__({"r": 0.0}, {})

    @staticmethod
    def online_fwd(scores, rows, b, h, q_idx):
        return scores, {"r": rows["r"].max(scores.get_reduce("absmax"))}, 1

    @staticmethod
    def online_fwd_epilogue(o, rows, b, h, q_idx):
        return o / (rows["r"] + 1.0), {}


def names(engine):
    made = engine._asked(arch.H100(), False).trained.kernels_as_known(engine.tuning)
    return [step.name if isinstance(step, Launch) else "trim" for step in made.plan.backward_steps()]


def build(online=None, **options):
    metas = (meta_tensor(1, 2, 64, 64, dtype=torch.float16),) * 3
    given = {"score_mod": scale(0.125), "mask_mod": causal, "online_func": online or OnlineSoftmax()} | options
    return AttentionEngine(metas, device=arch.H100(), **given)


def test_the_order_of_launches_is_told():
    assert names(build()) == ["preprocess", "backward", "postprocess"]
    assert names(build(deterministic=True)) == ["preprocess", "backward", "postprocess"]  # which adds in order
    window = build(deterministic=True, mask_mod=sliding_window(16))
    assert names(window) == ["preprocess", "backward", "queries"]
    exact = ["extremes", "preprocess", "exact_delta", "preprocess_again", "backward"]
    assert names(build(Largest())) == [*exact, "postprocess"]
    twice = ["extremes of queries", "trim", "preprocess_again", "queries"]
    assert names(build(Largest(), deterministic=True)) == [*exact, *twice]
    assert names(build(OnlineRelu(), mask_mod=lambda b, h, i, j: (i + j) % 3 > 0)) == [
        "preprocess", "tile map of backward", "backward", "postprocess",
    ]  # fmt: skip


def test_a_map_serves_every_kernel_that_asks_for_it():
    made = names(build(Largest(), deterministic=True, mask_mod=lambda b, h, i, j: (i + j) % 3 > 0))
    assert made.count("tile map of queries") == 1 and made.index("tile map of queries") < made.index("queries")


def test_names_stand_for_one_kernel_each():
    """compile_for, source, explain and the tuner ask by these names."""
    axes = CustomIO({"table": ("heads", 129)})
    engine = build(None, custom_io=axes, score_mod=lambda s, c, b, h, i, j: s + c["table"][h, i - j + 64])
    made = engine._asked(arch.H100(), False).trained.kernels_as_known(engine.tuning)
    steps = [s for s in (*made.plan.forward_steps, *made.plan.backward_steps()) if isinstance(s, Launch)]
    assert len({s.name for s in steps}) == len({(s.builder, s.given) for s in steps}) == len(steps)


def test_zeroed_buffers_come_as_zeros_and_others_as_they_are():
    axes = CustomIO({"bias": ("batch", "seq_len_kv")})
    engine = build(None, custom_io=axes, score_mod=lambda s, c, b, h, i, j: s + c["bias"])
    made = engine._asked(arch.H100(), False).trained.kernels_as_known(engine.tuning).plan
    over_keys = buffers_of(made.over_keys.arguments)
    assert {b.name for b in over_keys if b.role is Role.ZEROED} == {"key_sum0"}
    seen = {}

    class Silent:
        def run(self, *given):
            seen[self.name] = given

        def __init__(self, launch):
            self.name = launch.name

        def begin(self):
            pass

    lengths = {"batch": 2, "q_length": 5, "kv_length": 9}
    memory = {b.place: torch.full((1,), 7.0) for b in over_keys if b.role is Role.GIVEN}
    rows = {b.place: torch.full((1,), 7.0) for b in buffers_of(made.preprocess(()).arguments)}
    numbers = made.numbers(*lengths.values())
    ready = Ready([made.over_keys], Silent, lengths, numbers, torch.device("cpu"), Kept())
    memory = rows | memory
    ready(memory)
    assert memory["key_sum0"].shape == (2, 2, 9) and not memory["key_sum0"].any()
    assert memory["dk"].shape == (2, 9, 2, 64) and len(seen["backward"]) == len(made.over_keys.arguments)


@pytest.mark.parametrize("name", ["table", "state.m", "a.b_c"])
def test_axes_have_lengths_whatever_their_input_is_called(name):
    problem = Problem(2, 2, 64, 64, "float16", custom=((name, "float32", ("heads", "seq_len", "q_blocks")),))
    own = own_length(name, "q_blocks")
    assert value_of(own, {own.name: 7}) == 7
    (buffer,) = buffers_of(custom_inputs(problem))
    assert buffer.shape_of({"batch": 1, "q_length": 5, "kv_length": 6, own.name: 7}) == (2, 5, 7)


class Writes:
    """A kernel that fills what its launch writes with the number of the call."""

    calls = 0

    def __init__(self, launch):
        self.launch = launch

    def begin(self):
        pass

    def run(self, *given):
        Writes.calls += 1
        for argument, value in zip(self.launch.arguments, given, strict=True):
            if argument.place in self.launch.writes:
                value.fill_(Writes.calls)


def ready(*steps, kept, **lengths):
    return Ready(steps, Writes, lengths, {}, torch.device("cpu"), kept)


def test_what_a_trim_left_is_what_the_next_launch_reads():
    source, target = Buffer("a", (BATCH, QUERIES + 3)), Buffer("b", (BATCH, QUERIES))
    first = Launch("first", "x.x", (), (source,), frozenset(["a"]))
    second = Launch("second", "x.x", (), (target,), frozenset())
    memory = {}
    ready(first, Trim("a", target), second, kept=Kept(), batch=2, q_length=5)(memory)
    assert memory["b"].shape == (2, 5) and torch.equal(memory["b"], memory["a"][:, :5])


def test_what_lasts_is_made_again_for_other_shapes_places_and_lengths_alone():
    def lasting(name, heads):
        lists = Buffer("lists", (heads, QUERIES), key=name)
        return Launch(name, "x.x", ("mask",), (lists,), frozenset([name]), lasting=True)

    kept, shapes = Kept(), []
    for name, heads, queries in [("a", 2, 5), ("a", 6, 5), ("b", 2, 5), ("a", 2, 7), ("a", 2, 5)]:
        before, memory = Writes.calls, {}
        ready(lasting(name, heads), kept=kept, batch=1, q_length=queries)(memory)
        shapes.append((tuple(memory[name].shape), Writes.calls - before))
    assert shapes == [((2, 5), 1), ((6, 5), 1), ((2, 5), 1), ((2, 7), 1), ((2, 5), 0)]
