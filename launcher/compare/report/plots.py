"""The page's charts as PNG files for papers, by matplotlib (an optional extra)."""

import importlib.util
from pathlib import Path
from typing import Any

from launcher.compare.report.analysis import MEMORY_KINDS
from launcher.compare.report.build import Report
from launcher.errors import UserError
from launcher.extras import how_to_install
from launcher.sizes import GIB

WIDTH_INCHES = 6.5  # a page's text width
DPI = 200
# The page's colours: cool for what stays between steps, warm for what a step needs on top.
LEDGER_COLOURS = {
    "params": "#1d4f8c",
    "master": "#6a4c93",
    "grads": "#5b94d0",
    "optimizer": "#2c8f86",
    "buffers": "#9cc9c3",
    "activations": "#dc8a3c",
    "temporary": "#f0c987",
    "allocator slack": "#d3d5d1",
    "context": "#9aa0a4",
    "unexplained": "#b0407d",
}
PHASE_COLOURS = {
    "data": "#9cc9c3",
    "forward": "#5b94d0",
    "backward": "#1d4f8c",
    "step": "#dc8a3c",
    "other": "#d3d5d1",
}


def require_matplotlib() -> None:
    """Refuse before anything is read.

    Raises:
        UserError: there is no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--png needs matplotlib: {how_to_install('plots')}")


def write_plots(report: Report, out: Path) -> list[str]:
    """Write the plots that the runs have figures for; returns the names of the files."""
    from matplotlib.figure import Figure

    names = []
    for name, draw in {
        "throughput_memory.png": _throughput_memory,
        "ledger.png": _ledger,
        "step_time.png": _step_time,
        "loss.png": _loss,
    }.items():
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        axes = figure.add_subplot()
        if draw(report, figure, axes):
            axes.spines[["top", "right"]].set_visible(False)
            figure.savefig(out / name, dpi=DPI)
            names.append(name)
    return names


def _plain(name: str) -> str:
    """A name that matplotlib neither sets as mathematics nor leaves out of a legend."""
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _throughput_memory(report: Report, figure: Any, axes: Any) -> bool:
    rows = [r for r in report.data["runs"] if r["state"] == "completed" and r["tokens_per_s"]]
    kind = max(MEMORY_KINDS, key=lambda k: sum(r[k] is not None for r in rows))
    rows = [row for row in rows if row[kind] is not None]
    for row in rows:
        point = (row[kind] / GIB, row["tokens_per_s"])
        on_front = kind in row["pareto"]
        axes.plot(*point, "o", color="C0", markerfacecolor="C0" if on_front else "white")
        axes.annotate(
            _plain(row["run"]), point, xytext=(5, 4), textcoords="offset points", fontsize=7
        )
    for setting in report.groups:
        front = sorted(
            (row[kind] / GIB, row["tokens_per_s"])
            for row in rows
            if kind in row["pareto"] and row["setting"] == setting
        )
        if front:
            axes.step(*zip(*front, strict=True), "--", color="0.6", where="post", zorder=0)
    axes.set_xlabel(f"{MEMORY_KINDS[kind]}, highest rank (GiB)")
    axes.set_ylabel("tokens/s, all ranks")
    return bool(rows)


def _ledger(report: Report, figure: Any, axes: Any) -> bool:
    bars = [
        (f"{row['run']}, rank {entry['rank']} ({entry['moment']})", entry["lines"])
        for row in report.data["runs"]
        for entry in row["ledgers"]
        if entry["place"] == "device" and entry["moment"] != "predicted"
    ]
    parts = {
        name: [lines.get(f"{name.replace(' ', '_')}_bytes", 0) / GIB for _, lines in bars]
        for name in LEDGER_COLOURS
    }
    axes.set_xlabel("GiB")
    return _stacked(figure, axes, [label for label, _ in bars], parts, LEDGER_COLOURS)


def _step_time(report: Report, figure: Any, axes: Any) -> bool:
    rows = [row for row in report.data["runs"] if row["phases_s"]]
    parts = {name: [row["phases_s"][name] for row in rows] for name in PHASE_COLOURS}
    axes.set_xlabel("seconds per step")
    return _stacked(figure, axes, [row["run"] for row in rows], parts, PHASE_COLOURS)


def _stacked(
    figure: Any,
    axes: Any,
    labels: list[str],
    parts: dict[str, list[float]],
    colours: dict[str, str],
) -> bool:
    starts = [0.0] * len(labels)
    places = range(len(labels))
    for name, sizes in parts.items():
        if any(sizes):
            axes.barh(places, sizes, left=starts, label=name, color=colours[name], height=0.7)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_yticks(places, list(map(_plain, labels)), fontsize=7)
    axes.invert_yaxis()
    figure.set_figheight(1.4 + 0.22 * len(labels))
    if labels:
        figure.legend(loc="outside upper center", ncols=5, fontsize=7, frameon=False)
    return bool(labels)


def _loss(report: Report, figure: Any, axes: Any) -> bool:
    runs = [run for run in report.runs if run.steps is not None]
    for run in runs:
        assert run.steps is not None
        axes.plot(run.steps.step, run.steps.loss, label=_plain(run.name), linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    if runs:
        axes.legend(fontsize=6, frameon=False, ncols=2)
    return bool(runs)
