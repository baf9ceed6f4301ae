"""A sweep as a job array, a task for each cell, and a job that reports when all have ended."""

import shutil

from launcher.compare.sweep.folder import SweepFolder
from launcher.compare.sweep.grid_source import flags_of
from launcher.compare.sweep.sweep_cli import prepare, tasks
from launcher.config.arguments import parse_run_config
from launcher.measure.records import Sweep
from launcher.tools.submit.job import Job, NotQueued, fill, sbatch
from launcher.util.errors import UserError


def submit_sweep(job: Job, *, dry_run: bool) -> None:
    """Write the sweep's folder and put both jobs into the queue, or print their scripts.

    Raises:
        UserError: what no cell could run with, or sbatch refuses.
    """
    folder, sweep = _check(job)
    out = folder.path
    # A folder's % is not one of sbatch's own.
    logs = str(out / "logs").replace("%", "%%")
    array = fill(
        "sweep.sbatch",
        [
            f"--output={job.output or f'{logs}/slurm-%A_%a.out'}",
            *job.options(),
            f"--array={tasks(sweep)}",
        ],
        ["--out", str(out)],
    )

    def report(array_id: str) -> str:
        after = (f"--dependency=afterany:{array_id}", f"--output={logs}/slurm-%j-report.out")
        return fill("report.sbatch", [*job.more, *after], [str(out), "--out", str(out / "report")])

    if dry_run:
        print(array, end="")
        print(report("ARRAY"), end="")
        return
    folder.create()
    folder.write(sweep)
    try:
        array_id = sbatch(array)
    except (UserError, NotQueued):
        shutil.rmtree(out)  # just made, and nothing has run
        raise
    try:
        report_id = sbatch(report(array_id))
    except UserError as error:
        raise UserError(
            f"array {array_id} is in the queue, its report is not ({error}): when all is done, "
            f"run python -m launcher report {out}"
        ) from None
    print(
        f"array {array_id} submitted: cells {tasks(sweep)} of {len(sweep.cells)}, in {out}; "
        f"job {report_id} will write {out / 'report' / 'report.html'}"
    )


def _check(job: Job) -> tuple[SweepFolder, Sweep]:
    """Refuse now what every cell would refuse after hours in the queue.

    Raises:
        UserError: a grid that is none, cells none of which can run, folders that are taken.
    """
    if job.nodes > 1:
        raise UserError(
            f"--nodes {job.nodes}: each cell of a sweep runs on one node; leave out --nodes"
        )
    for token in job.arguments:
        name = token.partition("=")[0]
        if name in ("--nproc", "--cell", "--prepare"):
            raise UserError(
                f"{name} cannot come after --: "
                "--gpus-per-node or --ranks-per-node says how many processes each cell has"
            )
    folder, sweep = prepare([f"--nproc={job.ranks_per_node}", *job.arguments])
    for row in sweep.cells:
        if not row.done:
            job.check_device(parse_run_config(flags_of(row.flags)).loop.device)
    if job.output is not None:
        job.check_output()
    return folder, sweep
