"""One training run as a job."""

from pathlib import Path

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import check_run_folder, resolve
from launcher.data import sources
from launcher.submit.job import Job, fill, sbatch

OUTPUT = "slurm-%j.out"


def submit_training(job: Job, *, dry_run: bool) -> None:
    """Put the run into the queue, or print its script.

    Raises:
        UserError: it cannot run, or sbatch refuses.
    """
    run_folder = _check(job)
    output = job.output or OUTPUT
    script = fill(
        "single_gpu.sbatch" if job.world_size == 1 else "train.sbatch",
        [f"--output={output}", *job.options()],
        job.arguments,
    )
    if dry_run:
        print(script, end="")
        return
    job_id = sbatch(script)
    print(
        f"job {job_id} submitted: it logs to {output.replace('%j', job_id)} "
        f"and writes its run to {run_folder or _unnamed(job_id)}"
    )


def _unnamed(job_id: str) -> Path:
    """Where the batch scripts put a run whose flags name no --out."""
    return Path("runs") / f"slurm-{job_id}"


def _check(job: Job) -> Path | None:
    """Refuse now what the job would refuse after hours in the queue; the run folder, if named.

    Raises:
        UserError: flags that cannot run on so many ranks, missing data, folders that cannot be
            written to.
    """
    unnamed = _unnamed("JOB")
    # As in the batch scripts: a typed --out comes later and wins.
    config = parse_run_config(["--out", str(unnamed), *job.arguments], world_size=job.world_size)
    job.check_device(config.loop.device)
    resolve(
        config,
        world_size=job.world_size,
        device_type="cuda" if job.gpus_per_node else "cpu",
    )
    sources.resolve(config.data.data, config.data.data_field, config.data.stream_bytes)
    assert config.loop.out is not None
    check_run_folder(config.loop.out)
    job.check_output()
    return None if config.loop.out == unnamed else config.loop.out
