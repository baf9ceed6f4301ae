"""What each memory technique saves, against arithmetic done by hand (techniques_cases.py).

    python bench/techniques.py [--only TEXT] [--output bench/results]

Every row is a pair of real runs of `launcher.train` on the CPU with `--memory-trace`, equal but for
the technique: the measured saving is the difference of their live peaks in the third step, on the
worst rank. (In the second, DDP holds its buckets twice while it puts them into their final order.)
The expected saving comes from the shape alone, from no run and no planner. Writes techniques.json
and techniques.md.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from runs import Run, refuse_existing, table, train, write_stdlib
from techniques_cases import TECHNIQUES, UNMEASURED, Shape, Technique

MIB = 2**20
STEPS = 3  # allocations repeat from here on
TEXT_BYTES = 60_000
WITHIN = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="techniques whose name contains this")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.output / "techniques.json"
    refuse_existing(path)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = write_stdlib(Path(folder) / "text.txt", TEXT_BYTES)
        bench = _Pairs(Path(folder), ["--tokenizer=byte", f"--data={text}", "--device=cpu"])
        for technique in TECHNIQUES:
            if options.only in technique.name:
                rows.append(bench.row(technique))
                print(json.dumps(rows[-1]), flush=True)
    for name, reason in UNMEASURED.items():
        rows.append({"technique": name, "state": "not measured", "reason": reason})
    options.output.mkdir(parents=True, exist_ok=True)
    result = {"torch": torch.__version__, "within": WITHIN, "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(rows))
    print(markdown(rows))


class _Pairs:
    """Runs with and without; what several techniques are held against runs once."""

    def __init__(self, folder: Path, common: list[str]) -> None:
        self._folder = folder
        self._common = common
        self._done: dict[tuple[str, ...], Run] = {}

    def row(self, technique: Technique) -> dict[str, Any]:
        shape = technique.shape
        expected = technique.saving(shape)
        formula = " ".join((technique.saving.__doc__ or "").split())
        found = {"technique": technique.name, "shape": shape.name, "formula": formula}
        runs = [
            self._run(shape, flags, technique.ranks)
            for flags in (technique.without, technique.flags)
        ]
        refused = next((run for run in runs if not run.completed), None)
        if refused is not None:
            return {**found, "state": refused.state, "reason": refused.reason}
        (record,) = runs[0].records("run")
        assert record["parameters"] == shape.parameters, "the arithmetic is of another model"
        without, using = (run.peak_of_step(STEPS) for run in runs)
        measured = without[1] - using[1]
        return {
            **found,
            "peak_phases": [without[0], using[0]],
            "peaks_bytes": [without[1], using[1]],
            "expected_bytes": round(expected),
            "measured_bytes": measured,
            "difference": measured / expected - 1,
        }

    def _run(self, shape: Shape, flags: tuple[str, ...], ranks: int) -> Run:
        rest = [*flags, "--memory-trace", f"--steps={STEPS}"]
        if not any(flag.startswith("--micro-batch") for flag in flags):
            rest.append(f"--micro-batch={shape.micro_batch}")
        key = (*shape.flags(), *rest, str(ranks))
        if key not in self._done:
            out = self._folder / str(len(self._done))
            command = [*shape.flags(), *rest, *self._common]
            self._done[key] = train(command, out=out, ranks=ranks)
        return self._done[key]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Expected and measured side by side, then the formulas."""
    measured = [row for row in rows if "difference" in row]
    worst = max(measured, key=lambda row: abs(row["difference"]))
    titles = ["technique", "shape", "peak without", "MiB", "peak with", "MiB"]
    titles += ["expected saving MiB", "measured MiB", "difference"]
    lines = []
    for row in measured:
        (before, after), (large, small) = row["peak_phases"], row["peaks_bytes"]
        sizes = [f"{row[f'{what}_bytes'] / MIB:.2f}" for what in ("expected", "measured")]
        peaks = [before, f"{large / MIB:.2f}", after, f"{small / MIB:.2f}"]
        lines.append([row["technique"], row["shape"], *peaks, *sizes, f"{row['difference']:+.2%}"])
    inside = sum(abs(row["difference"]) <= WITHIN for row in measured)
    parts = [
        "# What each technique saves",
        f"Live peak of the third step on CPUs, worst rank: {inside} of "
        f"{len(measured)} within {WITHIN:.0%}, worst {worst['difference']:+.2%} "
        f"({worst['technique']}).",
        table(titles, lines),
        "The arithmetic (M tokens of a micro-batch, d width, L layers, V vocabulary, T sequence "
        "length, H heads, P parameters, n elements of the largest parameter; bytes):",
        "\n".join(f"- {row['technique']}: {row['formula']}" for row in measured),
    ]
    missing = [f"- {r['technique']}: {r['state']}: {r['reason']}" for r in rows if "reason" in r]
    if missing:
        parts += ["What cannot be measured on a CPU:", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
