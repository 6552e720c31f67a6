"""Pictures of benchmark results, from files alone: bars for one length, curves over lengths.

python -m benchmarks.plot benchmarks/results/h100.csv --to benchmarks/results
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLORS = {
    "attention_engine": "#0b6e4f", "deterministic": "#7fb069", "cudnn": "#6c757d", "flash_attention_2": "#adb5bd",
    "flash_attention_4": "#1d3557", "flex_attention": "#c1666b", "torch_compile": "#e9c46a",
}  # fmt: skip


def read(paths: Sequence[Path]) -> list[dict[str, str]]:
    """The rows that were measured."""
    rows = []
    for path in paths:
        with path.open(newline="") as file:
            rows += [row for row in csv.DictReader(file) if row["status"] == "ok"]
    return rows


def split(case: str) -> tuple[str, int]:
    """A case without its length, and its length."""
    family, _, length = case.rpartition(".")
    return family, int(length)


def bars(rows: list[dict[str, str]], length: int) -> Any:
    """One group of bars for each case of that length, forward above backward."""
    import matplotlib.pyplot as plt

    chosen = [row for row in rows if split(row["case"])[1] == length]
    families = list(dict.fromkeys(split(row["case"])[0] for row in chosen))
    peers = [peer for peer in COLORS if any(row["peer"] == peer for row in chosen)]
    figure, axes = plt.subplots(2, 1, figsize=(max(6, 1.5 * len(families) + 2), 7), sharex=True, layout="constrained")
    runs = {(r["direction"], split(r["case"])[0], r["peer"]): float(r["tflops"]) for r in chosen}
    width = 0.85 / max(len(peers), 1)
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        places: dict[str, list[float]] = {peer: [] for peer in peers}
        heights: dict[str, list[float]] = {peer: [] for peer in peers}
        for place, family in enumerate(families):
            present = [peer for peer in peers if (direction, family, peer) in runs]
            for n, peer in enumerate(present):
                places[peer].append(place + (n - (len(present) - 1) / 2) * width)
                heights[peer].append(runs[direction, family, peer])
        for peer in peers:
            drawn = axis.bar(places[peer], heights[peer], width, color=COLORS[peer], label=peer)
            axis.bar_label(drawn, fmt="%.0f", fontsize=7)
        axis.set_ylabel(f"{direction}, TFLOP/s")
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].set_xticks(range(len(families)), families, rotation=20, ha="right")
    axes[0].legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def curves(rows: list[dict[str, str]], family: str) -> Any:
    """TFLOP/s over lengths, forward beside backward, a line for each peer."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, direction in zip(axes, ("forward", "backward"), strict=True):
        for peer, color in COLORS.items():
            chosen = [r for r in rows if (r["peer"], r["direction"], split(r["case"])[0]) == (peer, direction, family)]
            points = sorted((split(r["case"])[1], float(r["tflops"])) for r in chosen)
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", color=color, label=peer)
        axis.set_xscale("log", base=2)
        lengths = sorted({split(r["case"])[1] for r in rows if split(r["case"])[0] == family})
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.set_title(f"{family}, {direction}")
        axis.set_xlabel("length")
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("TFLOP/s")
    axes[0].set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=6, loc="outside lower center")
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="the folder of the pictures")
    args = parser.parse_args(argv)
    rows = read(args.files)
    name, names = args.files[0].stem, [split(row["case"]) for row in rows]
    args.to.mkdir(parents=True, exist_ok=True)
    figures = {f"{name}_{length}": bars(rows, length) for length in sorted({n for _, n in names})}
    for family in dict.fromkeys(f for f, _ in names):
        if len({n for f, n in names if f == family}) > 1:
            figures[f"{name}_{family}"] = curves(rows, family)
    for title, figure in figures.items():
        for form in ("png", "svg"):
            figure.savefig(args.to / f"{title}.{form}", dpi=150)
        plt.close(figure)
        print(args.to / f"{title}.png")


if __name__ == "__main__":
    main()
