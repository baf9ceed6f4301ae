"""The planner's peaks beside those of torch's real CUDA caching allocator, on a GPU that computes
nothing: real allocator, no kernels run.

    python bench/allocator.py [--only TEXT...] [--edge 200]
        [--keep] [--output bench/results]

Runs on a Python with torch's CUDA build and the null GPU of launcher/tools/rehearse. Each
configuration is built and trained for three steps, in a process of its own, as the only rank of a
real process group or as rank 0 of one that is pretended. Besides, `--edge` small configurations
each have a limit within a tenth of what the planner says they need: not one of those that it says
fit may run out of memory. Writes allocator.json and allocator.md.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from allocator_cases import cases, edge_cases
from runs import ROOT, environment, table

from launcher.forecast.fit import Verdict
from launcher.measure.hardware import gpu_named
from launcher.tools.rehearse import null_gpu

Row = dict[str, Any]
PROCESSES = 2
WRITE_EVERY = 10
MEASURES = ("allocated", "reserved")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these")
    parser.add_argument(
        "--keep", action="store_true", help="keep what the output has, and run what it lacks"
    )
    parser.add_argument("--edge", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.output / "allocator.json"
    rows: list[Row] = []
    edge = [case.name for case in edge_cases(options.edge, seed=0)]
    if options.keep and path.exists():
        still = {*(case.name for case in cases()), *edge}
        found = json.loads(path.read_text())["rows"]
        rows = [row for row in found if "error" not in row and row["name"] in still]
    names = [case.name for case in cases() if any(text in case.name for text in options.only)]
    known = {row["name"] for row in rows}
    wanted = [name for name in (*names, *edge) if name not in known]
    random.Random(0).shuffle(wanted)  # so that what there is so far is of all kinds
    with tempfile.TemporaryDirectory() as folder:
        environ = null_gpu_environment(Path(folder))
        for row in followed(wanted, Path(folder), environ):
            rows.append(row)
            if len(rows) % WRITE_EVERY == 0:
                write_results(rows, path)
    summary = write_results(rows, path)
    print(json.dumps(summary, indent=1))
    sys.exit(1 if summary["failed"] or summary["edge"]["fits_but_ran_out"] else 0)


def write_results(rows: list[Row], path: Path) -> dict[str, Any]:
    """JSON and a Markdown table; returns what they have come to."""
    rows = sorted(rows, key=lambda row: (row["name"].startswith("edge-"), row["world_size"]))
    apart = [row for row in rows if not row["name"].startswith("edge-")]
    summary = summarize(apart)
    summary["edge"] = summarize_edge([row for row in rows if row["name"].startswith("edge-")])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(summary, apart), encoding="utf-8")
    return summary


def null_gpu_environment(folder: Path) -> dict[str, str]:
    """The environment of an H200 that computes nothing."""
    variables = environment()
    return {
        **variables,
        **null_gpu.environment(sys.executable, [gpu_named("h200")], inherited=variables),
        "SHARDSCALE_NULL_GPU_CHECKS": "true",  # ours ask whether a step is finite
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def followed(names: Sequence[str], folder: Path, environ: dict[str, str]) -> Iterator[Row]:
    """All rows as they come, with a line each."""
    worker = [sys.executable, str(Path(__file__).with_name("allocator_rank.py"))]
    files = [folder / f"{number}.jsonl" for number in range(PROCESSES)]
    running = []
    for number, file in enumerate(files):
        file.touch()
        with (folder / f"{number}.log").open("wb") as log:
            command = [*worker, str(file), *names[number::PROCESSES]]
            running.append(subprocess.Popen(command, cwd=ROOT, env=environ, stderr=log))
    started_s, seen, done = time.monotonic(), [0] * PROCESSES, 0
    while True:
        ended = all(process.poll() is not None for process in running)
        for number, file in enumerate(files):
            lines = file.read_text(encoding="utf-8").splitlines()
            for line in lines[seen[number] :]:
                done += 1
                row = json.loads(line)
                spent_s = time.monotonic() - started_s
                print(f"[{done}/{len(names)}, {spent_s:.0f} s] {said(row)}", flush=True)
                yield row
            seen[number] = len(lines)
        if ended:
            break
        time.sleep(0.5)
    if done < len(names):
        lost = "".join((folder / f"{n}.log").read_text()[-4000:] for n in range(PROCESSES))
        sys.exit(f"{len(names) - done} cases have no result\n{lost}")


def said(row: Row) -> str:
    """One line."""
    if "error" in row:
        return f"{row['name']}: failed: {row['error'].strip().splitlines()[-1]}"
    if row["ran_out"]:
        return f"{row['name']}: out of memory, and the plan says it {row['verdict']}"
    return f"{row['name']}: " + ", ".join(f"{m} {error(row, m):+.2%}" for m in MEASURES)


def error(row: Row, measure: str) -> float:
    """Predicted over measured, less 1."""
    measured: int = row[f"measured_{measure}_bytes"]
    return float(row[f"predicted_{measure}_bytes"] / measured - 1)


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Return how far off the planner is over what ran, and whether a limit was foreseen."""
    ran = [row for row in rows if "error" not in row and not row["ran_out"]]
    ran_out = [row for row in rows if row.get("ran_out")]
    summary: dict[str, Any] = {
        "note": "real allocator, no kernels run",
        "torch": rows[0].get("torch") if rows else None,
        "configurations": len(ran),
        "failed": [row["name"] for row in rows if "error" in row],
        "ran_out": len(ran_out),
        "fits_but_ran_out": [row["name"] for row in ran_out if row["verdict"] == "fits"],
    }
    for measure in MEASURES:
        off = sorted(abs(error(row, measure)) for row in ran) or [0.0]
        summary[measure] = {
            "median_error": statistics.median(off),
            "p95_error": off[min(len(off) - 1, int(0.95 * len(off)))],
            "worst_error": off[-1],
        }
    return summary


def summarize_edge(rows: list[Row]) -> dict[str, Any]:
    """Return how often each verdict was right."""
    good = [row for row in rows if "error" not in row]
    said = {word: [r for r in good if r["verdict"] == word] for word in get_args(Verdict)}
    return {
        "runs": len(good),
        "failed": [row["name"] for row in rows if "error" in row],
        "ran_out_of": {
            word: [sum(row["ran_out"] for row in found), len(found)] for word, found in said.items()
        },
        "fits_but_ran_out": [row["name"] for row in said["fits"] if row["ran_out"]],
    }


def markdown(summary: dict[str, Any], rows: list[Row]) -> str:
    """The tables for people."""
    errors = [
        [m, *(f"{summary[m][f'{which}_error']:.3%}" for which in ("median", "p95", "worst"))]
        for m in MEASURES
    ]
    edge = summary["edge"]
    ran = [r for r in rows if "error" not in r and not r["ran_out"]]
    lines = [
        "# Predicted and real allocations (real allocator, no kernels run)",
        "",
        f"{summary['configurations']} configurations on a GPU that computes nothing, torch "
        f"{summary['torch']}: what the planner predicts beside the peaks of torch's own CUDA "
        "caching allocator in three steps.",
        "",
        table(("error of", "median", "95th percentile", "worst"), errors),
        "",
        f"Near the edge: {edge['runs']} runs under a limit within a tenth of what the planner says "
        "they need. Ran out of memory: "
        + "; ".join(
            f"{out} of {count} that it called {word!r}"
            for word, (out, count) in edge["ran_out_of"].items()
        )
        + ".",
        "",
        table(
            ("configuration", "ranks", "allocated MiB", "error", "reserved MiB", "error"),
            [
                [
                    row["name"],
                    str(row["world_size"]),
                    *(
                        cell
                        for m in MEASURES
                        for cell in (
                            f"{row[f'measured_{m}_bytes'] / 2**20:,.1f}",
                            f"{error(row, m):+.2%}",
                        )
                    ),
                ]
                for row in ran
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    # Nothing of CUDA is imported here: the null GPU is preloaded for the workers only.
    os.environ.pop("LD_PRELOAD", None)
    main()
