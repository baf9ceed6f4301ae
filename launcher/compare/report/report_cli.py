"""`shardscale report`: compare runs in a table, CSV, Markdown, JSON and one HTML page."""

import concurrent.futures
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from launcher.compare.inference import FOLDER, RESULT_FILE, for_page
from launcher.compare.report.baseline import (
    check_replaceable,
    read_baseline,
    worse_than,
    write_baseline,
)
from launcher.compare.report.comparison import Report
from launcher.compare.report.find import FoundRun, find_runs
from launcher.compare.report.output import (
    csv_text,
    markdown_text,
    print_report,
    print_table,
    report_page,
)
from launcher.compare.report.runs import Run, load_run, unreadable_run
from launcher.util.errors import (
    WHY,
    ExitCode,
    UserError,
    naming,
    one_line,
    refused,
    refusing,
    tell,
)
from launcher.util.files import check_writable, replace_text
from launcher.util.flags import options_of
from launcher.util.json_file import read_json
from launcher.util.processes import die_with, usable_cores
from launcher.util.sizes import parse_bytes
from launcher.util.startup import deaf_children

WORSE = 1
"""Exit code where something is worse than the baseline."""
FILES = ("report.json", "report.csv", "report.md", "report.html")
"""The first says that the others are a report's, too."""
MOST_REPORT_BYTES = 2**30
RUNS_PER_WORKER = 8  # reading fewer is faster than starting a process


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Compare runs."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS...")] = ()
    """Run folders, folders of run folders, or globs."""
    out: Path | None = None
    """Folder for report.html, .csv, .md and .json (default: the folder given, else ./report)."""
    reference: str | None = None
    """Run to compare losses with (default: the first single or ddp run)."""
    memory_budget: str = "24GiB"
    """Memory limit of the goal `fastest under`."""
    against: Path | None = None
    """Baseline to compare with; exit code 1 if memory grew by over 1%, or speed fell beyond its
    noise."""
    write_baseline: Path | None = None
    """Write bytes and speeds of the completed runs to this JSON file, for --against."""


@refusing
def main(argv: Sequence[str]) -> int:
    """Read the runs, write the files, print the table; 0 on success, 1 when worse than the
    baseline, 2 when refused."""
    options = options_of(ReportOptions, argv, "shardscale report")
    if not options.runs:
        raise UserError("report needs runs: give run folders, for example: report runs/*")
    budget_bytes = parse_bytes(options.memory_budget, "--memory-budget")
    alone = len(options.runs) == 1 and os.path.isdir(options.runs[0])
    out = options.out or Path(options.runs[0] if alone else "report")
    with naming("--out"):
        check_writable(out)
        _check_files(out)
    if options.write_baseline is not None:
        check_replaceable(options.write_baseline)
    before = None if options.against is None else read_baseline(options.against)
    runs = load_runs(find_runs(options.runs))
    report = Report(runs, reference=options.reference, memory_budget_bytes=budget_bytes)
    _write_files(report, out)
    print_report(report.data, str(out / "report.csv"))
    print(f"written to {out}: {', '.join(FILES)}")
    hosts = {run.name: run.record.get("hostname") for run in runs}
    if options.write_baseline is not None:
        write_baseline(options.write_baseline, report.data["runs"], hosts)
        print(f"baseline: {options.write_baseline}")
    if before is None:
        return ExitCode.DONE
    worse, notes = worse_than(before, report.data["runs"], hosts)
    for note in notes:
        print(note)
    for sentence in worse:
        tell(f"worse than {options.against}: {one_line(sentence)}")
    if not worse:
        print(f"no worse than {options.against}")
    return WORSE if worse else ExitCode.DONE


def report_sweep(sweep: Path) -> None:
    """Write the report of a sweep into its folder `report`, and print the table.

    Raises:
        UserError: no cell to report, or files that cannot be written.
    """
    report = Report(load_runs(find_runs([str(sweep)])))
    out = sweep / "report"
    _write_files(report, out)
    print_table(report.data, str(out / "report.csv"))
    print(f"report: {out / 'report.html'}", flush=True)


def _check_files(out: Path) -> None:
    """Refuse a folder whose files with the names of a report's are no report's."""
    theirs = [name for name in FILES if (out / name).exists()]
    try:
        ours = "report_version" in read_json(
            out / FILES[0], what="a report", most_bytes=MOST_REPORT_BYTES
        )
    except UserError:
        ours = False
    if theirs and not ours:
        raise UserError(f"{out}: has a {theirs[0]} that no report has written: choose another one")


def _write_files(report: Report, out: Path) -> None:
    with refused(OSError, f"--out {out}: the folder cannot be created ({WHY}); choose another one"):
        out.mkdir(parents=True, exist_ok=True)
    texts = (
        json.dumps(report.data, indent=1, allow_nan=False) + "\n",
        csv_text(report.data),
        markdown_text(report.data),
        report_page(report, _inference_beside(out)),
    )
    for name, text in zip(FILES, texts, strict=True):
        said = f"--out {out}: {name} cannot be written ({WHY}); choose another folder"
        with refused(OSError, said):
            replace_text(out / name, text)  # half a report.json would be taken for another's


def _inference_beside(out: Path) -> dict[str, Any] | None:
    """Return the table of `infer-bench` for the page; None where there is none, or a damaged one,
    which must not cost the report of the runs."""
    path = out / FOLDER / RESULT_FILE
    if not path.is_file():
        return None
    try:
        return for_page(read_json(path, what="the result of infer-bench"))
    except Exception as error:  # a file can hold anything
        reason = error if isinstance(error, UserError) else f"{path}: no result of infer-bench"
        tell(f"left out of the page: {reason}")
        return None


def load_runs(found: dict[str, FoundRun]) -> list[Run]:
    """Read all runs, in parallel if there are many."""
    workers = min(usable_cores(), len(found) // RUNS_PER_WORKER)
    if workers < 2:
        return [_load(name, run) for name, run in found.items()]
    # spawn: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=die_with, initargs=(os.getpid(),)
    ) as pool:
        with deaf_children():  # the pool starts its processes at the first task
            runs = pool.map(_load, found, found.values(), chunksize=4)
        return list(runs)


def _load(name: str, found: FoundRun) -> Run:
    try:
        run = load_run(name, found)
        # compared alone, so that content that breaks the comparison costs this run only
        Report([run])
    except Exception as error:  # files can hold anything, and one run must not fail the others
        return unreadable_run(name, found, error)
    return run
