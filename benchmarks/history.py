"""Ten figures, a line a version: history.csv, so that a loss is seen.

python -m benchmarks.run --case ... --out benchmarks/results/NAME --history     measures, and adds the version's line
python -m benchmarks.history benchmarks/results/NAME.json                       adds it from results that are there
python -m benchmarks.history                                                    each figure beside its best

A line is of one commit, one device and one dtype: results of the same three fill and replace what it has.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("history.csv")
LOSS = 0.97  # of the best: machines of one kind differ by as much
WHERE = ("date", "commit", "device", "dtype", "torch", "tilelang", "from")


@dataclass(frozen=True)
class Figure:
    """What is followed: TFLOP/s of a case (tuner/cases.py), in one direction, by one of our peers (peers.py)."""

    words: str
    case: str
    direction: str
    peer: str = "attention_engine"


FIGURES = {
    "full_forward": Figure("full, forward", "mha-128.softmax.full.8192", "forward"),
    "full_backward": Figure("full, backward", "mha-128.softmax.full.8192", "backward"),
    "causal_forward": Figure("causal, forward", "mha-128.softmax.causal.8192", "forward"),
    "causal_backward": Figure("causal, backward", "mha-128.softmax.causal.8192", "backward"),
    "narrow_forward": Figure("head dim 64, causal, forward", "mha-64.softmax.causal.8192", "forward"),
    "narrow_backward": Figure("head dim 64, causal, backward", "mha-64.softmax.causal.8192", "backward"),
    "short_backward": Figure("length 2048, causal, backward", "mha-128.softmax.causal.2048", "backward"),
    "window_backward": Figure("window of 1024, backward", "mha-128.softmax.window.8192", "backward"),
    "grouped_backward": Figure("32/8 heads, causal, backward", "llama-8b.softmax.causal.8192", "backward"),
    "deterministic_backward": Figure(
        "deterministic, causal, backward", "mha-128.softmax.causal.8192", "backward", "deterministic"
    ),
}


def read(path: Path = PATH) -> tuple[list[str], list[dict[str, str]]]:
    """The lines of the header that say where figures are from, and the versions, the oldest first."""
    lines = path.read_text().splitlines()
    said = [line for line in lines if line.startswith("#")]
    return said, list(csv.DictReader(line for line in lines if not line.startswith("#")))


def write(said: Sequence[str], versions: Sequence[Mapping[str, str]], path: Path = PATH) -> None:
    """The same, to the file."""
    with path.open("w", newline="") as file:
        file.writelines(f"{line}\n" for line in said)
        writer = csv.DictWriter(file, [*WHERE, *FIGURES], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(versions)


def found_in(rows: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, str]:
    """Those of the figures that were measured in a dtype."""
    measured = {
        (row["case"], row["direction"], row["peer"]): f"{float(row['tflops']):.1f}"
        for row in rows if row["status"] == "ok" and row["dtype"] == dtype
    }  # fmt: skip
    of = {name: measured.get((f.case, f.direction, f.peer)) for name, f in FIGURES.items()}
    return {name: value for name, value in of.items() if value is not None}


def add(where: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], source: str, path: Path = PATH) -> list[str]:
    """Adds a run's figures to the line of its commit, device and dtype; the dtypes of which it had some."""
    said, versions = read(path)
    added = []
    for dtype in sorted({row["dtype"] for row in rows}):
        figures = found_in(rows, dtype)
        if not figures:
            continue
        key = {"commit": str(where["commit"])[:9], "device": str(where["device"]), "dtype": dtype}
        line = next((v for v in versions if all(v[name] == value for name, value in key.items())), None)
        if line is None:
            versions_of = {package: str(where.get(package, "")) for package in ("torch", "tilelang")}
            line = {"date": str(where["date"]), **key, **versions_of, "from": source}
            versions.append(line)
        elif source not in line["from"].split("; "):
            line["from"] += f"; {source}"
        line.update(figures)
        added.append(dtype)
    write(said, versions, path)
    return added


def losses(versions: Sequence[Mapping[str, str]]) -> list[str]:
    """Each figure of each dtype: its last beside its best, and a word where that is a loss."""
    found = []
    for dtype in dict.fromkeys(version["dtype"] for version in versions):
        for name, figure in FIGURES.items():
            of = [(float(v[name]), v["commit"]) for v in versions if v["dtype"] == dtype and v[name]]
            if not of:
                continue
            (last, now), (best, then) = of[-1], max(of)
            word = "  LOSS" if last < LOSS * best else ""
            found.append(f"{dtype:9} {figure.words:33} {last:6.0f} ({now}) of {best:6.0f} ({then}){word}")
    return found


def draw(look: Any) -> Any:
    """Each figure over the versions, a line for each dtype."""
    from benchmarks import plot

    _, versions = read()
    commits = list(dict.fromkeys(version["commit"] for version in versions))
    figure, axes = plot.figure_of(look, 5, 2, 9, 11.5, sharex=True)
    colors = {"float16": look.peers["attention_engine"], "bfloat16": look.peers["flash_attention_4"]}
    handles = {}
    for axis, (name, of) in zip(axes.flat, FIGURES.items(), strict=True):
        for dtype, color in colors.items():
            chosen = [v for v in versions if v["dtype"] == dtype and v[name]]
            places = [commits.index(v["commit"]) for v in chosen]
            values = [float(v[name]) for v in chosen]
            (handles[dtype],) = axis.plot(places, values, marker="o", markersize=4, color=color)
        axis.set_title(f"{of.words}, TFLOP/s", loc="left")
        axis.set_xticks(range(len(commits)), [c[:7] for c in commits], rotation=90, fontsize=8)
        axis.set_xlim(-0.5, len(commits) - 0.5)
        every = [float(v[name]) for v in versions if v[name]]
        axis.set_ylim(0.7 * min(every), 1.05 * max(every))  # so that a loss of 3 % is seen
        axis.grid(color=look.faint, linewidth=0.6)
    devices = ", ".join(dict.fromkeys(v["device"] for v in versions))
    about = "head dim 128, length 8192, batch 2, 16 heads, unless said; runs differ by a few per cent"
    used = [f"PyTorch {v['torch'].partition('+')[0]}, TileLang {v['tilelang']}" for v in versions if v["tilelang"]]
    days = f"{'; '.join(dict.fromkeys(used))}; measured at commits of {versions[0]['date']} to {versions[-1]['date']}"
    plot.title(figure, "AttentionEngine, version by version", [f"{devices}; {about}", days], look)
    figure.legend(list(handles.values()), list(handles), frameon=False, ncols=2, loc="outside lower center", fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="JSON files of benchmarks.run")
    for path in parser.parse_args(argv).files:
        found = json.loads(path.read_text())
        add(found["environment"], found["rows"], path.name)
    print("\n".join(losses(read()[1])))


if __name__ == "__main__":
    main()
