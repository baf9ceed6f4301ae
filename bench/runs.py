"""Runs and sweeps of the launcher for other benches: start them, read what they wrote."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # a script of bench/ has only its own folder, where nothing is installed

from launcher.config.schema import DataChoice  # noqa: E402
from launcher.data.sources import find_source  # noqa: E402

PHASES = ("forward", "backward", "step")
WARMUP_STEPS = 2
# What costs time or memory and is not asked about here.
QUIET = ("--report-to=none", "--log-every=1000", "--save-every=0")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder, and why there is none where the launcher refused."""

    folder: Path
    state: str
    reason: str | None

    @property
    def completed(self) -> bool:
        return self.state == "completed"

    @property
    def summary(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return result

    def records(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        lines = (self.folder / f"rank{rank}.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def phase_peaks(self, period: str = "steady") -> dict[str, int]:
        """Phase -> highest bytes of the worst rank; empty where nobody measured."""
        ranks = range(len(list(self.folder.glob("rank*.jsonl"))))
        found: dict[str, int] = {}
        for record in (r for rank in ranks for r in self.records("phase", rank)):
            name, size = record["phase"], record.get("peak_bytes")
            if record["period"] == period and name in PHASES and size is not None:
                found[name] = max(size, found.get(name, 0))
        return found

    def peak_of_step(self, step: int) -> tuple[str, int]:
        """Phase and height of one step's live peak, on the worst rank (`--memory-trace`)."""
        ranks = range(len(list(self.folder.glob("rank*.jsonl"))))
        ledgers = [r for rank in ranks for r in self.records("ledger", rank)]
        peaks = [r for r in ledgers if r["moment"] == "peak" and r["step"] == step]
        worst = max(peaks, key=lambda ledger: ledger["device"]["used_bytes"])
        return worst["phase"], worst["device"]["used_bytes"]

    def step_time_s(self) -> float:
        """Median without the warm-up."""
        durations: list[float] = [step["duration_s"] for step in self.records("step")]
        return statistics.median(durations[WARMUP_STEPS:] or durations)

    def tokens_per_s(self) -> float:
        return float(self.records("step")[0]["tokens"] / self.step_time_s())


def train(flags: Sequence[str], *, out: Path, ranks: int = 1, timeout_s: float = 1800) -> Run:
    """One run of `launcher.train`, whatever becomes of it."""
    command = [sys.executable, "-m", "launcher.torchrun", "--nproc", str(ranks)]
    command += ["-m", "launcher.train", *QUIET, *flags, f"--out={out}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s
    )
    try:
        status = json.loads((out / "status.json").read_text())
    except FileNotFoundError:
        said = [line for line in done.stderr.splitlines() if line.startswith("shardscale: ")]
        reason = said[-1].removeprefix("shardscale: ") if said else done.stderr[-2000:]
        return Run(folder=out, state="refused" if said else "failed", reason=reason)
    return Run(folder=out, state=status["state"], reason=status.get("reason"))


def run_ranks(command: Sequence[str], *, ranks: int, more: Mapping[str, str] | None = None) -> None:
    """A script on so many processes, which must end well."""
    start = [sys.executable, "-m", "launcher.torchrun", "--nproc", str(ranks)]
    subprocess.run([*start, *command], cwd=ROOT, env={**environment(), **(more or {})}, check=True)


def sweep(
    base: Mapping[str, Any], cells: Sequence[Mapping[str, Any]], *, out: Path
) -> dict[str, Run]:
    """`shardscale sweep` over named cells, in one process each; its report is in out/report."""
    grid = out.with_suffix(".yaml")
    grid.write_text(yaml.safe_dump({"base": dict(base), "cells": [dict(cell) for cell in cells]}))
    command = [sys.executable, "-m", "launcher", "sweep", "--nproc", "1", "--report-to=none"]
    command += ["--grid-file", str(grid), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    found = json.loads((out / "sweep.json").read_text())["cells"]
    return {
        row["name"]: Run(folder=out / row["folder"], state=row["state"], reason=row["reason"])
        for row in found
    }


def write_stdlib(path: Path, size_bytes: int) -> Path:
    """The beginning of the default corpus, for runs that shall not read all of its test split."""
    texts, total = [], 0
    for text in find_source(DataChoice()).texts():
        texts.append(text)
        total += len(text)
        if total >= size_bytes:
            break
    path.write_text("\n".join(texts)[:size_bytes], encoding="utf-8")
    return path


def refuse_existing(path: Path) -> None:
    if path.exists():
        sys.exit(f"{path} exists: nothing is overwritten")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def environment() -> dict[str, str]:
    """For processes that import `launcher` from here, and what the caller's path adds."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # One thread per process, unless told otherwise: what is compared shall not share cores.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
