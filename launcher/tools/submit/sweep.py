"""Submit a sweep as a job array with a task per cell, and a job that reports after all of them."""

import shutil

from launcher.compare.sweep.grid_source import flags_of
from launcher.compare.sweep.sweep import prepare, tasks
from launcher.compare.sweep.sweep_folder import SweepFolder
from launcher.config.arguments import parse_run_config
from launcher.measure.records import Sweep
from launcher.tools.submit.job import Job, NotQueued, fill, sbatch
from launcher.util.errors import UserError


def submit_sweep(job: Job, *, dry_run: bool) -> None:
    """Write the sweep's folder and submit both jobs, or print their scripts.

    Raises:
        UserError: no cell can run, or sbatch refuses a job.
    """
    folder, sweep = _check(job)
    out = folder.path
    # Escaped: sbatch expands %.
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
        shutil.rmtree(out)  # just created; nothing has run
        raise
    try:
        report_id = sbatch(report(array_id))
    except UserError as error:
        raise UserError(
            f"array {array_id} is submitted, its report is not ({error}): after all cells, run "
            f"python -m launcher report {out}"
        ) from None
    print(
        f"array {array_id} submitted: cells {tasks(sweep)} of {len(sweep.cells)}, in {out}; "
        f"job {report_id} will write {out / 'report' / 'report.html'}"
    )


def _check(job: Job) -> tuple[SweepFolder, Sweep]:
    """Refuse now what every cell would refuse after hours in the queue.

    Raises:
        UserError: an invalid grid, no cell that can run, or a folder that is taken.
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
                "--gpus-per-node or --ranks-per-node sets the processes per cell"
            )
    folder, sweep = prepare([f"--nproc={job.ranks_per_node}", *job.arguments])
    for row in sweep.cells:
        if not row.done:
            job.check_device(parse_run_config(flags_of(row.flags)).loop.device)
    if job.output is not None:
        job.check_output()
    return folder, sweep
