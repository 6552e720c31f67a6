"""What docs/limits.md says of kernels on each GPU is what docs/levels.csv holds, and a sample of that is made again."""

import itertools
import random

import pytest

from attention_engine import arch
from tests import levels, levels_rows, levels_table

pytest.importorskip("tilelang")
from attention_engine.codegen.cache import sources_digest
from attention_engine.codegen.compile import find_nvcc
from attention_engine.codegen.dialects import find_hipcc, lower_as
from attention_engine.compiler import Kernel

ROWS = levels.read()
GPUS = list(dict.fromkeys(row.gpu for row in ROWS))


def test_the_page_has_the_table_that_the_rows_make():
    assert levels.page(ROWS) == levels_table.PAGE.read_text(), "python -m tests.levels --write"


def test_no_kernel_is_counted_twice_and_each_has_its_job():
    assert len({(r.gpu, r.family, r.dim, r.program, r.kernel) for r in ROWS}) == len(ROWS)
    assert {(r.family, r.dim, r.program) for r in ROWS} <= {(j.family, j.dim, j.program) for j in levels.jobs()}


def test_no_kernel_spills():
    assert not [row for row in ROWS if row.spilled]


@pytest.mark.parametrize("gpu", GPUS)
def test_what_compiles_fits(gpu):
    made = levels._gpu(gpu)
    for row in (r for r in ROWS if r.gpu == gpu and r.level in ("compiles", "lowers")):
        assert not row.why, row
        assert row.registers <= made.max_registers_per_thread and row.shared <= made.shared_memory_per_block, row


def test_a_cousin_has_the_same_kernels():
    """So that rows of one stand for both. H20's persistent kernels hold its number of SMs, and are else H100's."""
    job = levels.Job("forward", 128, "softmax")
    for gpu, cousin, same in (
        (arch.RTX4090, arch.L40S, True),
        (arch.H100, arch.H200, True),
        (arch.H100, arch.H20, False),
    ):
        (one,), (other,) = (job.kernels(each()).values() for each in (gpu, cousin))
        assert (one._key.digest == other._key.digest) is same
        assert one.builder == other.builder and one.configs == other.configs
        assert one.source("tilelang").replace("132", "78") == other.source("tilelang").replace("132", "78")


def assert_marked(place):
    gpu, *job = place
    kept = [row for row in ROWS if row.place == place]
    assert levels.looked_at(gpu, levels.Job(*job), kept) == kept, "python -m tests.levels --mark"


@pytest.mark.parametrize("family", levels_table.FAMILIES)
def test_a_sample_has_the_text_that_kernels_have(family):
    """Or is marked. Other rows for each change of what makes kernels."""
    folders = ("straight", "cached", "linear")
    drawn = random.Random("".join(map(sources_digest, folders)))
    for place in drawn.sample(sorted({row.place for row in ROWS if row.family == family}), 6):
        assert_marked(place)


@pytest.mark.slow  # ten seconds a GPU
@pytest.mark.parametrize("gpu", GPUS)
def test_each_row_has_the_text_that_its_kernel_has(gpu):
    """Or is marked."""
    for job in levels.jobs():
        assert_marked((gpu, job.family, job.dim, job.program))


def test_rows_of_other_texts_are_told():
    job = levels.Job("linear", 64, "no_decay")
    unseen = levels.looked_at("A100", job)
    assert {row.level for row in unseen} == {"unmade"} and not any(row.current for row in unseen)
    texts = {name: levels.digest(kernel) for name, kernel in job.kernels(arch.A100()).items()}
    first, second, *_ = (levels_rows.replace(row, level="compiles", digest=texts[row.kernel]) for row in unseen)
    second, gone = levels_rows.replace(second, digest="0"), levels_rows.replace(first, kernel="no more")
    changed = levels_rows.replace(second, changed="changed")
    assert levels.looked_at("A100", job, [gone, second, first]) == [first, changed, *unseen[2:]]
    assert first.current and not changed.current
    assert changed.beside(changed.digest) == second and second.current


def test_kernels_are_made_a_few_at_a_time():
    common = "A100", "linear", 64, "plain", "float16"
    stale = [levels.Row(*common, kernel, "unmade") for kernel in "abc"]
    job = levels.Job("linear", 64, "plain")
    assert levels.tasks(stale) == [("A100", job, ("a", "b")), ("A100", job, ("c",))]


def test_a_digest_is_of_all_that_makes_a_text():
    (kernel,) = levels.Job("forward", 64, "softmax").kernels(arch.A100()).values()
    other = Kernel(kernel.builder, kernel.given, arch.RTX4090(), kernel.problem, kernel.configs)
    told = Kernel(kernel.builder, kernel.given, kernel.target, kernel.problem, kernel.configs | {"tl.any": True})
    (wider,) = levels.Job("forward", 128, "softmax").kernels(arch.A100()).values()
    again = Kernel(kernel.builder, kernel.given, kernel.target, kernel.problem, kernel.configs)
    assert len({levels.digest(each) for each in (kernel, other, told, wider)}) == 4
    assert levels.digest(again) == levels.digest(kernel)


def test_a_file_is_the_same_whoever_wrote_its_rows_when(tmp_path):
    rows = [row for row in ROWS if row.program == "retention"]
    shuffled = random.Random(0).sample(rows, len(rows))
    levels.write(shuffled, tmp_path / "rows.csv", levels.order)
    assert levels.read(tmp_path / "rows.csv") == rows


def draw(gpu):
    """A job of a GPU all of whose rows are current, another one as rows change."""
    found = {r.place[1:] for r in ROWS if r.gpu == gpu} - {r.place[1:] for r in ROWS if r.gpu == gpu and not r.current}
    return levels.Job(*random.Random(len(ROWS)).choice(sorted(found)))


@pytest.mark.slow  # TileLang and nvcc take a minute for each
@pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")
@pytest.mark.parametrize("gpu", GPUS)
def test_a_sample_is_made_again(gpu):
    """Registers are ptxas's, and change with its version."""
    job = draw(gpu)
    kept = [row for row in ROWS if row.place == (gpu, job.family, job.dim, job.program)]

    def known(rows):
        """Where no hipcc is at hand, a GPU of AMD's has its text alone."""
        compiled = levels._gpu(gpu).language != "hip" or find_hipcc() is not None
        of_machine_code = [(r.level, r.spilled) if compiled else () for r in rows]
        return sorted(
            (r.kernel, *machine, r.shared, bool(r.why), r.digest)
            for r, machine in zip(rows, of_machine_code, strict=True)
        )

    assert known(levels.made(gpu, job)) == known(kept)


def test_a_row_of_a_gpu_that_is_not_here_is_made_again():
    """The quickest: TileLang lowers it in two seconds."""
    row = next(r for r in ROWS if r.gpu == "MI300X" and r.kernel == "postprocess" and r.dim == 64 and r.current)
    kernel = levels.Job(row.family, row.dim, row.program).kernels(arch.MI300X())["postprocess"]
    made = levels.lower_as("hip", kernel.prim_func, arch.MI300X(), kernel.configs)
    assert made.shared_bytes == row.shared and "backward_postprocess_kernel" in made.text
    assert levels.digest(kernel) == row.digest, "TileLang gives some variables of what it lowers other names"


def test_the_table_counts_kernels_by_level():
    common = ("A100", "forward", 64, "softmax", "float16")
    rows = [
        levels.Row(*common, "forward", "compiles", 200, 0, 2048),
        levels.Row(*common, "tile map", "compiles", 10, 8, 0),
        levels.Row(*common, "other", "refused", why="no"),
        levels.Row(*common, "new", "unmade"),
        levels.Row(*common, "newer", "compiles", 20, 0, 64, changed="changed"),
    ]
    lines = levels_table.table(rows, dict.fromkeys(levels_table.FAMILIES, 46)).splitlines()
    assert lines[4:] == ["", "| refused | on | of | reason |", "| --- | --- | --- | --- |",
                         "| other | A100 | forward: softmax 64 | no |"]  # fmt: skip
    assert lines[2] == "| H100 | runs, measured | runs, measured | runs, measured | runs, measured |"
    assert lines[3] == (
        "| A100 | 1 of 46 problems; compiles: 3 of 5 kernels; refused: 1 of 5 kernels; "
        "not looked at: 1; as they were before a change: 1; spills: 1; at most 200 "
        "registers; at most 2.0 KB of shared memory | not looked at | not looked at | not looked at |"
    )


def test_jobs_are_found_by_their_names():
    assert [str(job) for job in levels.jobs("backward 64 softm")] == [
        f"backward 64 softmax{rest}" for rest in ("", ", full", " one", " with sinks")
    ]
    every = levels.jobs()
    assert len(set(every)) == len(every) > 100
    assert {j.family for j in every} == set(levels_table.FAMILIES)
    assert all(a != b for a, b in itertools.pairwise(every))


@pytest.mark.parametrize("dim", [64, 128])
def test_mods_that_bend_tensors_fit_the_least_shared_memory(dim):
    """Each tensor then stands there twice: with whole states a block of MI250 had 67328 bytes of 65536."""
    gpu, job = arch.MI250(), levels.Job("linear", dim, "shifted")
    kernel = job.kernels(gpu)["backward states"]
    assert 0 < lower_as("hip", kernel.prim_func, gpu, kernel.configs).shared_bytes <= gpu.shared_memory_per_block
