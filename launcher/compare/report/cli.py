"""`report`: what several runs say together, as a table, CSV, Markdown, JSON and one HTML page."""

import concurrent.futures
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from launcher.compare.report.build import Report
from launcher.compare.report.find import FoundRun, find_runs
from launcher.compare.report.page import report_page
from launcher.compare.report.runs import Run, load_run, unreadable_run
from launcher.compare.report.text import csv_text, markdown_text, print_report, print_table
from launcher.config.arguments import one_sentence
from launcher.errors import ExitCode, UserError
from launcher.orphans import die_with
from launcher.sizes import parse_bytes

DEFAULT_BUDGET_BYTES = 24 * 2**30
RUNS_PER_WORKER = 8  # fewer are read sooner than a process starts


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Compare runs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS...")] = ()
    """Run folders, folders of run folders, or globs."""
    out: Path | None = None
    """Folder for report.html, .csv, .md and .json (the one folder given, else ./report)."""
    png: bool = False
    """Also write the plots as PNG files, for papers."""
    reference: str | None = None
    """Name of the run that losses are held against (the first single or ddp run)."""
    memory_budget: str | None = None
    """Memory of the `fastest under` line (24GiB)."""


def main(argv: Sequence[str]) -> int:
    """Write and print the report; returns the exit code."""
    try:
        with one_sentence():
            options = tyro.cli(ReportOptions, args=list(argv), prog="shardscale report")
        write_report(options)
    except UserError as error:
        print(f"shardscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.DONE


def write_report(options: ReportOptions) -> None:
    """Read the runs, write the files, print the table.

    Raises:
        UserError: no runs, an unknown reference, a budget that is no size, a folder that cannot
            be written, or no matplotlib.
    """
    if not options.runs:
        raise UserError("report needs runs: give run folders, for example: report runs/*")
    budget_bytes = DEFAULT_BUDGET_BYTES
    if options.memory_budget is not None:
        budget_bytes = parse_bytes(options.memory_budget, "--memory-budget")
    if options.png:
        from launcher.compare.report import plots as report_plots

        report_plots.require_matplotlib()
    report = Report(
        load_runs(find_runs(options.runs)),
        reference=options.reference,
        memory_budget_bytes=budget_bytes,
    )
    out = _out_folder(options)
    names = _write_files(report, out)
    if options.png:
        names += report_plots.write_plots(report, out)
    print_report(report.data, str(out / "report.csv"))
    print(f"written to {out}: {', '.join(names)}")


def report_sweep(sweep: Path) -> None:
    """Write the report of a sweep into its `report` folder, print the table and where the page is.

    Raises:
        UserError: no cell to report, or files that cannot be written.
    """
    report = Report(
        load_runs(find_runs([str(sweep)])),
        reference=None,
        memory_budget_bytes=DEFAULT_BUDGET_BYTES,
    )
    out = _made(sweep / "report")
    _write_files(report, out)
    print_table(report.data, str(out / "report.csv"))
    print(f"report: {out / 'report.html'}", flush=True)


def _write_files(report: Report, out: Path) -> list[str]:
    files = {
        "report.csv": csv_text(report.data),
        "report.md": markdown_text(report.data),
        "report.json": json.dumps(report.data, indent=1, allow_nan=False) + "\n",
        "report.html": report_page(report),
    }
    for name, text in files.items():
        _write(out / name, text)
    return list(files)


def load_runs(found: dict[str, FoundRun]) -> list[Run]:
    """Read all runs, on every core where there are many."""
    workers = min(len(os.sched_getaffinity(0)), len(found) // RUNS_PER_WORKER)
    if workers < 2:
        return [_load(name, run) for name, run in found.items()]
    # Not fork: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=die_with, initargs=(os.getpid(),)
    ) as pool:
        return list(pool.map(_load, found, found.values(), chunksize=4))


def _load(name: str, found: FoundRun) -> Run:
    """One run; what cannot be shown alone must not keep the others from being shown."""
    try:
        run = load_run(name, found)
        Report([run], reference=None, memory_budget_bytes=DEFAULT_BUDGET_BYTES)
    except Exception as error:  # of any kind: the files can hold anything
        return unreadable_run(name, found, error)
    return run


def _out_folder(options: ReportOptions) -> Path:
    if options.out is not None:
        return _made(options.out)
    if len(options.runs) == 1 and os.path.isdir(options.runs[0]):
        return _made(Path(options.runs[0]))
    return _made(Path("report"))


def _made(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {out}: no folder can be made there ({error.strerror}); choose another place"
        ) from None
    return out


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out {path.parent}: {path.name} cannot be written ({error.strerror}); "
            "choose another place"
        ) from None
