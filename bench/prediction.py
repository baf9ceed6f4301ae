"""Predicted against measured peaks, in real runs of a few steps each.

    python bench/prediction.py [--ranks 1 2 4] [--only TEXT...] [--keep] [--output bench/results]
    python bench/prediction.py --device cuda [--fake-ranks 1 4 8 64] [--output bench/results]

On a CPU the peak is the highest of all live tensors (`--memory-trace`), on every rank of a real
process group per size. On a GPU it is what the caching allocator saw, allocated and reserved, on
rank 0 of a process group that is pretended (1 is a real, single process). Writes prediction.json,
prediction.md and prediction.png.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prediction_cases import Case, cases_for
from runs import environment

from launcher.util.processes import for_children

TORCHRUN = (sys.executable, "-m", "launcher.torchrun")
ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--fake-ranks", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run the cases whose name contains one of these"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the other cases that the output already has"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    sizes = options.ranks if options.device == "cpu" else options.fake_ranks
    work = [
        (n, [c for c in cases_for(n, options.device) if any(t in c.name for t in options.only)])
        for n in sizes
    ]
    total = sum(len(cases) for _, cases in work)
    rows: list[dict[str, Any]] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for ranks, cases in work:
            if cases:
                results = Path(folder) / f"{ranks}.jsonl"
                rows += run_size(ranks, cases, options.device, results, started, len(rows), total)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = "prediction" if options.device == "cpu" else "prediction_cuda"
    path = options.output / stem
    write_results(together(rows, path) if options.keep else rows, path, options.device)


def run_size(
    ranks: int,
    cases: list[Case],
    device: str,
    results: Path,
    started: float,
    done: int,
    total: int,
) -> list[dict[str, Any]]:
    """All cases of one size, in one process group."""
    results.touch()
    worker = [str(Path(__file__).with_name("prediction_rank.py")), str(results), device]
    real = ranks if device == "cpu" else 1
    command = [*TORCHRUN, "--nproc", str(real), *worker, str(ranks), *(c.name for c in cases)]
    single_threaded = {**environment(), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=single_threaded | for_children(), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = 0
    while process.poll() is None:
        time.sleep(1.0)
        lines = results.read_text(encoding="utf-8").splitlines()
        for line in lines[seen:]:
            row = json.loads(line)
            spent = time.monotonic() - started
            left = spent / (done + seen + 1) * (total - done - seen - 1)
            error = "failed" if "error" in row else f"{worst_error(row):+.2%}"
            print(
                f"[{done + seen + 1}/{total}] {row['name']} x{ranks}: {error}  "
                f"({spent:.0f} s, about {left:.0f} s to go)",
                flush=True,
            )
            seen += 1
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    if len(rows) < len(cases):
        print(process.stderr.read()[-4000:], file=sys.stderr)
    return rows


def together(rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The new rows in the place of older ones of the same case, by number of ranks."""
    found = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    by_case = {(row["world_size"], row["name"]): row for row in (*found, *rows)}
    return sorted(by_case.values(), key=lambda row: int(row["world_size"]))


def errors(row: dict[str, Any]) -> list[float]:
    """Relative error of each rank's predicted peak."""
    return [rank["predicted_bytes"] / rank["measured_bytes"] - 1 for rank in row["ranks"]]


def worst_error(row: dict[str, Any]) -> float:
    """The rank that is furthest off, with its sign."""
    return max(errors(row), key=abs)


def write_results(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    """JSON, a Markdown table and a plot."""
    good = [row for row in rows if "error" not in row]
    for row in rows:
        if "error" in row:
            print(f"{row['name']} x{row['world_size']}:\n{row['error']}", file=sys.stderr)
    if not good:
        sys.exit("no case ran to its end: nothing is written")
    off = sorted(abs(error) for row in good for error in errors(row))
    summary = {
        "device": device,
        "configurations": len(good),
        "failed": [row["name"] for row in rows if "error" in row],
        "rank_peaks": len(off),
        "median_error": statistics.median(off),
        "p95_error": off[min(len(off) - 1, int(0.95 * len(off)))],
        "worst_error": off[-1],
    }
    path.with_suffix(".json").write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(summary, good))
    plot(good, path.with_suffix(".png"))
    print(json.dumps(summary, indent=1))


def markdown(summary: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    lines = [
        "# Predicted and measured peaks",
        "",
        f"{summary['configurations']} configurations on {summary['device']}, "
        f"{summary['rank_peaks']} rank peaks: median error {summary['median_error']:.4%}, "
        f"95th percentile {summary['p95_error']:.4%}, worst {summary['worst_error']:.2%}. "
        "The rank that is furthest off stands for each configuration.",
        "",
        "| ranks | configuration | predicted MiB | measured MiB | error |",
        "|---:|---|---:|---:|---:|",
    ]
    for row in rows:
        worst = max(row["ranks"], key=lambda r: abs(r["predicted_bytes"] / r["measured_bytes"] - 1))
        predicted, measured = worst["predicted_bytes"], worst["measured_bytes"]
        lines.append(
            f"| {row['world_size']} | {row['name']} | {predicted / 2**20:.2f} | "
            f"{measured / 2**20:.2f} | {predicted / measured - 1:+.2%} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Predicted over measured, one dot per rank and configuration."""
    try:
        import matplotlib
    except ImportError:
        return print("no plot: pip install matplotlib")  # figures are worth more
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 6))
    families = sorted({row["family"] for row in rows})
    for number, family in enumerate(families):
        ranks = [rank for row in rows if row["family"] == family for rank in row["ranks"]]
        measured = [rank["measured_bytes"] / 2**20 for rank in ranks]
        predicted = [rank["predicted_bytes"] / 2**20 for rank in ranks]
        axes.scatter(measured, predicted, s=14, label=family, color=f"C{number}", zorder=3)
    top = max(r["measured_bytes"] / 2**20 for row in rows for r in row["ranks"]) * 1.05
    axes.plot([0, top], [0, top], color="0.6", linewidth=1)
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color="0.9", label="within 10%")
    axes.set_xlabel("measured peak, MiB")
    axes.set_ylabel("predicted peak, MiB")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
