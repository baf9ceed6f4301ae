"""Published and predicted figures side by side, and what the comparison says."""

import csv
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from published_pairs import ordered, pairs_of
from published_plan import Planned
from published_rows import FOLDER, Row, not_usable

Results = Sequence[tuple[Row, Planned]]
GIB = 2**30
EXPLAINED_FROM = 0.10
SECONDS_WITHIN, MOST_OPTIMISTIC = 1.25, 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One published number and the planner's."""

    row: Row
    kind: str
    """`allocated`, `reserved` or `seconds`."""
    published: float
    planned: float
    unlike: str
    """Why it is another program's; empty where it is not."""

    @property
    def ratio(self) -> float:
        """Planned over published."""
        return self.planned / self.published


def figures(results: Results) -> Iterator[Figure]:
    """All numbers that have both."""
    for row, plan in results:
        for kind, published, planned, unlike in (
            ("allocated", row.allocated_bytes, plan.planned_allocated_bytes, row.unlike_bytes),
            ("reserved", row.reserved_bytes, plan.planned_reserved_bytes, row.unlike_bytes),
            ("seconds", row.step_s, plan.planned_step_s, row.unlike_seconds),
        ):
            if published is not None and planned is not None:
                yield Figure(
                    row=row, kind=kind, published=published, planned=planned, unlike=unlike
                )


def explanations() -> dict[str, str]:
    """Return the explanations of rows whose bytes are more than 10% off, by key."""
    with (FOLDER / "explained.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: row["reason"] for row in csv.DictReader(file)}


def summary(results: Results) -> list[str]:
    """Return what holds, and what does not: a line for each question."""
    every = list(figures(results))
    lines = []
    for to_fit, rows in ((False, "rows that check"), (True, "rows that constants were fitted to")):
        some = [f for f in every if f.row.fits_constants == to_fit]
        like = [f for f in some if not f.unlike]
        lines += [f"**{rows}**", ""]
        lines += [_bytes_line("bytes", like), _bytes_line("bytes, other programs too", some)]
        lines += [_seconds_line("seconds", like), _seconds_line("seconds, others too", some), ""]
    ran = [(row, plan) for row, plan in results if row.runs is not None and plan.verdict]
    right = sum((plan.verdict != "does not fit") == row.runs for row, plan in ran)
    lines += ["**all rows**", ""]
    lines.append(f"- whether it runs at all: {right} of {len(ran)} said right")
    for kind in ("bytes", "seconds"):
        found = pairs_of(results, kind)
        share = sum(ordered(pair) for pair in found)
        lines.append(
            f"- pairs that differ in one choice, by {kind}: {share} of {len(found)} in the "
            f"published order ({share / len(found):.0%})"
        )
    return lines


def _bytes_line(name: str, some: Sequence[Figure]) -> str:
    off = [abs(f.ratio - 1) for f in some if f.kind != "seconds"]
    over = sum(each > EXPLAINED_FROM for each in off)
    return (
        f"- {name}: {len(off)} figures, median error {statistics.median(off):.1%}, 95th percentile "
        f"{statistics.quantiles(off, n=20)[-1]:.1%}, worst {max(off):.1%}, {over} over 10%"
    )


def _seconds_line(name: str, some: Sequence[Figure]) -> str:
    ratios = [f.ratio for f in some if f.kind == "seconds"]
    within = sum(1 / SECONDS_WITHIN <= ratio <= SECONDS_WITHIN for ratio in ratios)
    optimistic = sum(ratio < 1 / MOST_OPTIMISTIC for ratio in ratios)
    return (
        f"- {name}: {len(ratios)} figures, {within / len(ratios):.0%} within 1.25x, predicted over "
        f"published {min(ratios):.2f} to {max(ratios):.2f}, {optimistic} optimistic by more than "
        f"{MOST_OPTIMISTIC}x"
    )


def markdown(results: Results) -> str:
    """All rows."""
    lines = ["# Published and predicted", "", *summary(results), ""]
    lines += [
        "| row | to | GPUs | kind | published | predicted | ratio |",
        "|---|---|---|---|" + "---:|" * 3,
    ]
    lines += [_line(figure) for figure in figures(results)]
    refused = [(row, plan) for row, plan in results if plan.refused]
    lines += ["", *(f"- {row.key}: {plan.refused}" for row, plan in refused)]
    return "\n".join(lines) + "\n"


def _line(f: Figure) -> str:
    scale, unit = (1, "s") if f.kind == "seconds" else (GIB, "GiB")
    to = ("fit" if f.row.fits_constants else "check") + (", another program" if f.unlike else "")
    return (
        f"| {f.row.key} | {to} | {f.row.gpus} x {f.row.gpu} | {f.kind} | "
        f"{f.published / scale:.4g} {unit} | {f.planned / scale:.4g} {unit} | {f.ratio:.2f} |"
    )


def accuracy_page(results: Results) -> str:
    """docs/accuracy.md."""
    reasons = explanations()
    text = (FOLDER / "accuracy.md").read_text(encoding="utf-8")
    others = [(row, plan) for row, plan in results if not row.key.startswith("mpt-")]
    table = [
        "| row | to | GPUs | kind | published | predicted | ratio |",
        "|---|---|---|---|" + "---:|" * 3,
    ]
    table += [_line(figure) for figure in figures(others)]
    off: dict[str, list[str]] = {}
    for f in figures(results):
        if f.kind != "seconds" and abs(f.ratio - 1) > EXPLAINED_FROM:
            off.setdefault(f.row.key, []).append(f"{f.kind} {f.ratio:.2f}")
    unlike = {row.key: row.unlike_bytes for row, _ in results if row.unlike_bytes}
    explained = [
        f"- `{key}` ({', '.join(ratios)}): {unlike.get(key) or reasons[key]}"
        for key, ratios in off.items()
    ]
    differs: dict[str, list[str]] = {}
    for row, _ in results:
        mpt = row.key.startswith("mpt-")
        names = differs.setdefault(row.differs, [])
        names += [] if mpt and names else ["all of llm-foundry" if mpt else f"`{row.key}`"]
    missed = [
        f"- `{f.row.key}` ({'fit' if f.row.fits_constants else 'check'}): {f.ratio:.2f}"
        for f in sorted(figures(results), key=lambda f: f.ratio)
        if f.kind == "seconds"
        and not f.unlike
        and not 1 / MOST_OPTIMISTIC <= f.ratio <= SECONDS_WITHIN
    ]
    seconds = sorted({row.unlike_seconds for row, _ in results if row.unlike_seconds})
    parts = {
        "summary": summary(results),
        "table": table,
        "explained": explained,
        "missed": missed,
        "unlike": [f"- {reason}" for reason in seconds],
        "differs": [f"- {text}: {', '.join(names)}" for text, names in differs.items()],
        "sources": [f"- {source}" for source in sorted({row.source for row, _ in results})],
        "not usable": [f"- {rows}: {reason}" for rows, reason in not_usable()],
    }
    for name, lines in parts.items():
        text = text.replace(f"<!-- {name} -->", "\n".join(lines))
    return text


def plot(results: Results, path: Path) -> None:
    """Predicted over published, of bytes and of seconds."""
    try:
        import matplotlib
    except ImportError:
        return print("no plot: pip install matplotlib")  # figures are worth more
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(1, 2, figsize=(11, 5))
    every = list(figures(results))
    for axis, seconds in zip(axes, (False, True), strict=True):
        some = [f for f in every if (f.kind == "seconds") == seconds]
        scale = 1 if seconds else GIB
        for name, color, chosen in (
            ("to fit", "0.6", [f for f in some if f.row.fits_constants and not f.unlike]),
            ("to check", "C0", [f for f in some if not f.row.fits_constants and not f.unlike]),
            ("another program", "C1", [f for f in some if f.unlike]),
        ):
            published = [f.published / scale for f in chosen]
            axis.scatter(published, [f.ratio for f in chosen], s=12, color=color, label=name)
        axis.axhline(1, color="0.4", linewidth=1)
        axis.set_xscale("log")
        axis.set_xlabel("published, s per step" if seconds else "published, GiB")
        axis.set_ylabel("predicted / published")
        axis.legend(fontsize=8)
    drawing.tight_layout()
    drawing.savefig(path, dpi=130)
