"""Pictures of benchmark results, from files alone: bars for one length, curves over lengths, on light and dark pages.

python -m benchmarks.plot benchmarks/results/h100.csv --to /tmp/pictures     the pictures of these results
python -m benchmarks.plot --docs                                             those of the documents, docs/speed/*.svg
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import history

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs" / "speed"
DIRECTIONS = ("forward", "backward")
PEERS = {
    "attention_engine": "AttentionEngine", "deterministic": "AttentionEngine, deterministic",
    "cudnn": "cuDNN, through PyTorch's SDPA", "flash_attention_2": "FlashAttention-2, through PyTorch's SDPA",
    "flash_attention_4": "FlashAttention-4", "flex_attention": "FlexAttention",
    "torch_compile": "torch.compile of the formula", "mamba-ssm": "mamba-ssm", "fla": "flash-linear-attention",
    "flash_attention_3": "FlashAttention-3", "flashinfer": "FlashInfer", "read": "a plain read of the cache",
    "flex_flash": "FlexAttention's FLASH", "cudnn_frontend": "cuDNN's frontend",
}  # fmt: skip
PROGRAMS = {
    "softmax": "softmax", "softcap": "softcap", "alibi": "ALiBi", "sigmoid": "sigmoid", "relu": "ReLU",
    "retention": "retention",
}  # fmt: skip
MASKS = {
    "full": "", "causal": ", causal", "window": ", causal window of 1024", "documents": ", six causal documents"
}  # fmt: skip
LINEAR = {
    "mamba2": "Mamba-2, batch 8, length 2048", "mamba2_8k": "Mamba-2, batch 8, length 8192",
    "mamba2_b1": "Mamba-2, batch 1, length 2048", "retention": "retention, batch 8, length 4096",
    "retention_b1": "retention, batch 1, length 2048",
}  # fmt: skip
DECODING = {
    "softmax page 64": "attention_engine", "FlashAttention-3 page 64": "flash_attention_3",
    "FlashInfer decode page 64": "flashinfer", "read": "read",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """The colors of a picture on a page of that kind."""

    ink: str
    faint: str
    page: str
    peers: dict[str, str] = field(hash=False)


LOOKS = {
    "light": Look("#1f2933", "#d5dbe1", "white", {
        "attention_engine": "#0b6e4f", "deterministic": "#7fb069", "cudnn": "#8d99a6", "flash_attention_2": "#b8c1ca",
        "flash_attention_4": "#35588c", "flex_attention": "#c1666b", "torch_compile": "#dba617",
        "mamba-ssm": "#8d99a6", "fla": "#35588c",
        "flash_attention_3": "#35588c", "flashinfer": "#c1666b", "read": "#b8c1ca",
        "flex_flash": "#35588c", "cudnn_frontend": "#8d99a6",
    }),
    "dark": Look("#dfe5ea", "#47515c", "#1e2129", {
        "attention_engine": "#35c48d", "deterministic": "#a5d490", "cudnn": "#8d99a6", "flash_attention_2": "#667079",
        "flash_attention_4": "#6f9bdc", "flex_attention": "#e0878c", "torch_compile": "#e9c46a",
        "mamba-ssm": "#8d99a6", "fla": "#6f9bdc",
        "flash_attention_3": "#6f9bdc", "flashinfer": "#e0878c", "read": "#667079",
        "flex_flash": "#6f9bdc", "cudnn_frontend": "#8d99a6",
    }),
}  # fmt: skip


@dataclass(frozen=True)
class Results:
    """What was measured, and where: rows of a CSV file, with the environment that stands beside it."""

    rows: list[dict[str, str]]
    where: dict[str, str]


def read(paths: Sequence[Path]) -> Results:
    """The rows that were measured; files of one picture come from one kind of machine and one set of versions."""
    rows: list[dict[str, str]] = []
    where: dict[str, str] = {}
    for path in paths:
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row.get("status", "ok") == "ok"]
        beside = path.with_suffix(".json")
        found = json.loads(beside.read_text())["environment"] if beside.exists() else {}
        unlike = {name for name in ("device", "torch") if where and found.get(name) != where.get(name)}
        if unlike:
            raise ValueError(f"{path.name} was measured with another {' and '.join(sorted(unlike))}: no one picture")
        where = where or {name: str(value) for name, value in found.items()}
    return Results(rows, where)


def split(case: str) -> tuple[str, int]:
    """A case without its length, and its length."""
    family, _, length = case.rpartition(".")
    return family, int(length)


def words(family: str) -> str:
    """A case's maths in a user's words: mha-128.softmax.window is "softmax, causal window of 1024"."""
    _, program, mask = family.split(".")
    return PROGRAMS.get(program, program) + MASKS.get(mask, f", {mask}")


def shape_words(shape: str) -> str:
    """A shape in a user's words."""
    from attention_engine.tuner.cases import SHAPES

    given = SHAPES.get(shape)
    if given is None:
        return shape
    heads = f"{given.heads} heads" if given.heads == given.kv_heads else f"{given.heads}/{given.kv_heads} heads"
    dims = f"{given.dim}" if given.dim == given.dim_v else f"{given.dim}/{given.dim_v}"
    return f"batch {given.batch}, {heads}, head dim {dims}"


def versions(where: dict[str, str], peers: Sequence[str]) -> str:
    """Who was measured with which version, and when."""
    said = [f"PyTorch {where['torch'].partition('+')[0]}"] if "torch" in where else []
    if "cudnn" in peers and where.get("cudnn", "").isdigit():
        number = int(where["cudnn"])
        said.append(f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}")
    packages = {
        "flash-attn-4": ("FlashAttention-4", ("flash_attention_4", "flex_flash")),
        "nvidia-cudnn-frontend": ("cuDNN's frontend", ("cudnn_frontend",)), "triton": ("Triton", ("flex_attention",)),
        "tilelang": ("TileLang", ("attention_engine",)), "flash-linear-attention": ("flash-linear-attention", ("fla",)),
    }  # fmt: skip
    said += [f"{name} {where[p]}" for p, (name, of) in packages.items() if p in where and {*of} & {*peers}]
    return ", ".join(said + ([where["date"]] if "date" in where else []))


def figure_of(look: Look, rows: int, columns: int, width: float, height: float, **options: Any) -> Any:
    """A figure and its axes in a look."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "attention_engine", "text.color": look.ink, "axes.labelcolor": look.ink,
        "xtick.color": look.ink, "ytick.color": look.ink, "axes.edgecolor": look.faint, "figure.facecolor": look.page,
        "axes.facecolor": look.page, "savefig.facecolor": look.page, "font.size": 10, "axes.titlesize": 11,
        "font.family": "DejaVu Sans",
    })  # fmt: skip
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def title(figure: Any, first: str, lines: Sequence[str], look: Look) -> None:
    """The title in bold and what was measured below it, line by line."""
    figure.suptitle(first + "\n" * (len(lines) + 1), x=0.01, ha="left", fontsize=13, fontweight="bold")
    height = figure.get_size_inches()[1]
    for n, line in enumerate(lines):
        figure.text(0.01, 1 - (0.46 + 0.19 * n) / height, line, fontsize=9, color=look.ink, ha="left")


def legend(figure: Any, handles: dict[str, Any], columns: int = 3) -> None:
    """Whose bar is whose, below the picture."""
    figure.legend(
        list(handles.values()), [PEERS.get(p, p) for p in handles], frameon=False, ncols=min(columns, len(handles)),
        loc="outside lower center", fontsize=9,
    )  # fmt: skip


def draw_bars(axis: Any, groups: Sequence[str], values: dict[tuple[str, str], float], look: Look, form: str) -> dict:
    """Lying bars, a group for each line of text, the first at the top; who isn't there takes no room."""
    handles, place, ticks = {}, 0.0, []
    for group in groups:
        present = [peer for peer in look.peers if (group, peer) in values]
        ticks.append(place + (len(present) - 1) / 2)
        for peer in present:
            (bar,) = drawn = axis.barh(place, values[group, peer], 0.86, color=look.peers[peer])
            axis.bar_label(drawn, fmt=form, fontsize=8.5, padding=3, color=look.ink)
            handles[peer], place = bar, place + 1
        place += 0.7
    axis.set_yticks(ticks, groups)
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    return {peer: handles[peer] for peer in look.peers if peer in handles}


def both_ways(
    rows: Sequence[dict[str, str]], label: Callable[[dict[str, str]], str], look: Look, groups: Sequence[str] = (),
    column: str = "tflops", unit: str = "TFLOP/s", form: str = "%.0f", peer: str = "peer",
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """A figure of a group of bars for each label, forward beside backward; whose bar is whose."""
    groups = groups or list(dict.fromkeys(map(label, rows)))
    count = len({(label(row), row[peer]) for row in rows})
    figure, axes = figure_of(look, 1, 2, 9, 1.75 + 0.21 * len(groups) + 0.235 * count, sharey=True)
    handles: dict[str, Any] = {}
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        of = [row for row in rows if row["direction"] == direction]
        handles |= draw_bars(axis, groups, {(label(r), r[peer]): float(r[column]) for r in of}, look, form)
        axis.set_title(f"{direction}, {unit}", loc="left")
        axis.xaxis.set_visible(False)
        axis.spines["bottom"].set_visible(False)
    if not axes[0].yaxis_inverted():  # the axes share their places: inverted twice is not inverted
        axes[0].invert_yaxis()
    return figure, handles


def bars(results: Results, length: int, look: Look, shape: str | None = None, what: str = "") -> Any:
    """One group of bars for each attention of that length and shape, forward beside backward."""
    chosen = [row for row in results.rows if split(row["case"])[1] == length]
    shape = shape or chosen[0]["case"].split(".")[0]
    of_shape = Results([row for row in chosen if row["case"].startswith(f"{shape}.")], results.where)
    said = f"{shape_words(shape)}, length {length}"
    return every(of_shape, look, what or f"Speed at length {length}", said, lambda family, _: words(family))


def every(results: Results, look: Look, what: str, said: str, label: Callable[[str, int], str]) -> Any:
    """One group of bars for each case. what: the title's first words. said: what all cases share. label: of a case
    without its length, and of its length."""
    figure, handles = both_ways(results.rows, lambda row: label(*split(row["case"])), look)
    about = f"{results.where.get('device', '')}, {results.rows[0]['dtype']}, {said}".strip(", ")
    title(figure, f"{what}: longer bars are faster", [about, versions(results.where, list(handles))], look)
    legend(figure, handles)
    return figure


def curves(results: Results, family: str, look: Look) -> Any:
    """TFLOP/s over lengths, forward beside backward, a line for each peer."""
    rows = [row for row in results.rows if split(row["case"])[0] == family]
    figure, axes = figure_of(look, 1, 2, 9, 4.2, sharey=True)
    handles: dict[str, Any] = {}
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for peer, color in look.peers.items():
            chosen = [r for r in rows if (r["peer"], r["direction"]) == (peer, direction)]
            points = sorted((split(r["case"])[1], float(r["tflops"])) for r in chosen)
            if points:
                (handles[peer],) = axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color)
        axis.set_xscale("log", base=2)
        lengths = sorted({split(r["case"])[1] for r in rows})
        axis.set_xticks(lengths, [str(n) for n in lengths], fontsize=9)
        axis.set_title(f"{direction}, TFLOP/s", loc="left")
        axis.set_xlabel("length")
        axis.grid(color=look.faint, linewidth=0.6)
    axes[0].set_ylim(bottom=0)
    shape = family.split(".")[0]
    about = f"{results.where.get('device', '')}, {rows[0]['dtype']}, {shape_words(shape)}"
    title(figure, f"{words(family).capitalize()}: speed over the length",
          [about.strip(", "), versions(results.where, list(handles))], look)  # fmt: skip
    legend(figure, handles)
    return figure


def linear(results: Results, look: Look) -> Any:
    """Milliseconds of linear attentions, forward beside backward."""
    rows = [row for row in results.rows if row["case"] in LINEAR and row["ms"] != "nan"]
    figure, handles = both_ways(
        rows, lambda row: LINEAR[row["case"]], look, list(LINEAR.values()), "ms", "milliseconds", "%.2f", "name"
    )
    where = {"device": rows[0]["device"], "torch": rows[0]["torch"], "tilelang": rows[0]["tilelang"]}
    where["flash-linear-attention"] = rows[0]["flash-linear-attention"]
    title(figure, "Linear attention: shorter bars are faster",
          [f"{where['device']}, bf16; Mamba-2: 80 heads, dims 128/64; retention: 32 heads, dims 256/512",
           versions(where, list(handles))], look)  # fmt: skip
    legend(figure, handles)
    return figure


def decoding(results: Results, look: Look) -> Any:
    """TB/s of one query a request over caches in pages of 64, after a call that left other data in the L2 cache."""
    rows = [row for row in results.rows if row["call"] in DECODING and row["cache_held"] == "written"]
    shapes = [row["shape"] for row in rows if row["call"] == "softmax page 64" and "queries" not in row["shape"]]
    figure, axis = figure_of(look, 1, 1, 9, 1.75 + 0.21 * len(shapes) + 0.235 * len(DECODING) * len(shapes))
    values = {(row["shape"], DECODING[row["call"]]): float(row["tb_s"]) for row in rows if row["shape"] in shapes}
    handles = draw_bars(axis, shapes, values, look, "%.2f")
    axis.set_title("keys and values read, TB/s", loc="left")
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)
    about = f"{results.where.get('device', '')}, bf16, head dim 128, pages of 64; batch, heads of q/k and v, keys"
    said = [versions(results.where, list(handles)), f"FlashInfer {results.where.get('flashinfer', '')}"]
    title(figure, "Decoding: longer bars are faster", [about, ", ".join(said)], look)
    legend(figure, handles, 4)
    return figure


def over_dims(results: Results, look: Look) -> Any:
    """One group of bars for each head dim and mask, forward beside backward."""

    def label(family: str, length: int) -> str:
        return f"{shape_words(family.split('.')[0]).rpartition(', ')[2]}{MASKS[family.split('.')[2]]}"

    lengths = ", ".join(sorted({row["case"].rpartition(".")[2] for row in results.rows}))
    return every(results, look, "Head dims", f"softmax, 16 heads, length {lengths}", label)


def of_heads(family: str, length: int) -> str:
    """A case by its batch, its heads, its mask and its length."""
    shape, _, mask = family.split(".")
    return f"{shape_words(shape).rpartition(', ')[0]}{MASKS[mask]}, length {length}"


def of_mask(family: str, length: int) -> str:
    """A case by its maths, and by its heads where they share keys."""
    shape = shape_words(family.split(".")[0])
    return words(family) + (f", {shape.split(', ')[1]}" if "/" in shape else "")


def of_files(*names: str) -> Results:
    return read([RESULTS / f"{name}.csv" for name in names])


def first_screen(look: Look) -> Any:
    """The README's picture: one shape, each attention beside who else runs it."""
    found = of_files("h100_softmax_peers_fp16", "h100_flex", "h100_torch_compile")
    order = ("softmax.full", "softmax.causal", "alibi.full", "softcap.full", "softmax.window", "sigmoid.full")
    kept = [f"mha-128.{name}.8192" for name in (*order, "relu.full")]
    rows = sorted((row for row in found.rows if row["case"] in kept), key=lambda row: kept.index(row["case"]))
    return bars(Results(rows, found.where), 8192, look, what="Attention on one H100")


PICTURES: dict[str, Callable[[Look], Any]] = {
    "h100": first_screen,
    "history": history.draw,
    "h100_dims": lambda look: over_dims(of_files("h100_dims_bf16"), look),
    "h100_grouped": lambda look: every(
        of_files("h100_grouped_bf16"), look, "Grouped heads", "head dim 128, softmax", of_heads
    ),
    "h100_masks": lambda look: every(
        of_files("h100_flex_backends"), look, "Masks and scores", "head dim 128, length 8192", of_mask
    ),
    "h100_linear": lambda look: linear(of_files("h100_linear"), look),
    "h100_decoding": lambda look: decoding(of_files("h100_decoding"), look),
    **{
        f"h100_{shape}_{mask}": lambda look, family=f"mha-{shape}.softmax.{mask}": curves(
            of_files("h100_softmax_peers_fp16"), family, look
        )
        for shape in (128, 64)
        for mask in ("full", "causal")
    },
}


def save(name: str, draw: Callable[[Look], Any], folder: Path) -> None:
    """NAME.svg for light pages, NAME_dark.svg for dark ones; the same bytes each time."""
    import matplotlib.pyplot as plt

    for kind, look in LOOKS.items():
        figure = draw(look)
        path = folder / f"{name}{'_dark' * (kind == 'dark')}.svg"
        figure.savefig(path, metadata={"Date": None})
        text = path.read_text().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # of the same widths
        path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
        plt.close(figure)
        print(path)


def pictures_of(paths: Sequence[Path]) -> dict[str, Callable[[Look], Any]]:
    """Bars for each shape and length of these results, curves for what was measured at several lengths; of results in
    milliseconds, those of linear attention, one picture, and one of decoding."""
    results, name = read(paths), paths[0].stem
    if all("cache_held" in row for row in results.rows):
        return {name: lambda look: decoding(results, look)}
    in_time = ["ms" in row for row in results.rows]
    if any(in_time):
        if not all(in_time):
            raise ValueError("some of these results are TFLOP/s, and some milliseconds: no one picture")
        return {name: lambda look: linear(results, look)}
    cases = [split(row["case"]) for row in results.rows]
    found: dict[str, Callable[[Look], Any]] = {}
    for shape, length in sorted({(family.split(".")[0], length) for family, length in cases}):
        found[f"{name}_{shape}_{length}"] = lambda look, s=shape, n=length: bars(results, n, look, s)
    for family in dict.fromkeys(f for f, _ in cases):
        if len({n for f, n in cases if f == family}) > 1:
            found[f"{name}_{family}"] = lambda look, f=family: curves(results, f, look)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    import matplotlib as mpl

    mpl.use("Agg")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="CSV files of benchmarks.run")
    parser.add_argument("--to", type=Path, help="the folder of the pictures")
    parser.add_argument("--docs", action="store_true", help="draw the documents' pictures")
    args = parser.parse_args(argv)
    if args.docs == bool(args.files) or (args.to is None) != args.docs:
        parser.error("give FILES and --to FOLDER, or --docs")
    folder = DOCS if args.docs else args.to
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (PICTURES if args.docs else pictures_of(args.files)).items():
        save(name, draw, folder)


if __name__ == "__main__":
    main()
