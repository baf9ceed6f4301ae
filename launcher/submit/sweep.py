"""A sweep as a job array, a task for each cell, and a job that reports when all have ended."""

import shutil

from launcher.compare.sweep.array import Prepared, prepare
from launcher.compare.sweep.grid_source import flags_of
from launcher.config.arguments import parse_run_config
from launcher.errors import UserError
from launcher.submit.job import Job, fill, sbatch


def submit_sweep(job: Job, *, dry_run: bool) -> None:
    """Write the sweep's folder and put both jobs into the queue, or print their scripts.

    Raises:
        UserError: what no cell could run with, or sbatch refuses.
    """
    prepared = _check(job)
    out = prepared.folder.path
    # A folder's % is not one of sbatch's own.
    logs = str(out / "logs").replace("%", "%%")
    array = fill(
        "sweep.sbatch",
        [
            f"--output={job.output or f'{logs}/slurm-%A_%a.out'}",
            *job.options(),
            f"--array={prepared.tasks()}",
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
    prepared.write()
    try:
        array_id = sbatch(array)
    except UserError:
        shutil.rmtree(out)  # just made, and nothing has run
        raise
    try:
        report_id = sbatch(report(array_id))
    except UserError as error:
        raise UserError(
            f"array {array_id} is in the queue, its report is not ({error}): when all is done, "
            f"python -m launcher report {out}"
        ) from None
    print(
        f"array {array_id} submitted: cells {prepared.tasks()} of {len(prepared.rows)}, in {out}; "
        f"job {report_id} will write {out / 'report' / 'report.html'}"
    )


def _check(job: Job) -> Prepared:
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
    prepared = prepare([f"--nproc={job.ranks_per_node}", *job.arguments])
    for row in prepared.rows:
        if not row.done:
            job.check_device(parse_run_config(flags_of(row.cell.flags)).loop.device)
    if job.output is not None:
        job.check_output()
    return prepared
