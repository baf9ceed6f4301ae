"""The command line of `shardscale submit`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import check_run_folder, resolve
from launcher.data import sources
from launcher.run.base import check_beginning
from launcher.run.origin import find_origin
from launcher.run.provenance import with_recipe
from launcher.tools.submit.job import Job, NotQueued, fill, sbatch
from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.flags import MOST_RANKS, OptionParser, require_range

OUTPUT = "slurm-%j.out"
# What the scripts themselves decide from the number of nodes and of ranks on each.
DECIDED = (
    *("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-core"),
    *("--ntasks-per-socket", "--gpus", "--gpus-per-task", "--gpus-per-socket", "--gres"),
    *("--array", "--wrap", "--requeue", "--no-requeue", "--open-mode", "--signal"),
)
DECIDED_LETTERS = "nGaNo"
# Ours: sbatch would take them again, shortened, and the later one wins.
OWN = ("--nodes", "--gpus-per-node", "--output")
# sbatch takes these before the lines of the script.
DECIDING_VARIABLES = (
    *("SBATCH_ARRAY_INX", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"),
    *("SBATCH_GRES", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_SIGNAL"),
)
LETTERS_WITHOUT_VALUE = "HIOQVWhksuv"  # of sbatch, which takes -Hn4 for -H -n 4


@refusing
def main(argv: Sequence[str]) -> int:
    """Submit a training or a sweep, or print its scripts; 0 when that is done, 2 when refused."""
    options, job = _parse(argv)
    try:
        if options.sweep:
            from launcher.tools.submit.sweep import submit_sweep  # takes a second

            submit_sweep(job, dry_run=options.dry_run)
        else:
            submit_training(job, dry_run=options.dry_run)
    except NotQueued as only_tested:
        print(f"not submitted, only tested: {only_tested}")
    return ExitCode.DONE


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="shardscale submit",
        usage="shardscale submit [--sweep] [options] [sbatch options] -- [flags of what to run]",
        description="Submit a training to Slurm, or with --sweep a sweep and its report, from a "
        "folder that all nodes share. What is neither below nor after -- is an option of sbatch: "
        "--partition, --time, --account, --job-name, --mem, ...",
    )
    add = parser.add_argument
    add("--sweep", action="store_true", help="after -- come flags of sweep: --grid, --out, ...")
    add("-N", "--nodes", type=int, default=1, help="machines (default: 1)")
    add("--gpus-per-node", type=int, default=1, help="a rank each (default: 1); 0: on the CPU")
    add("--ranks-per-node", type=int, help="only with --gpus-per-node 0 (default then: 1)")
    add(
        *("-o", "--output"),
        help=f"log file (default: {OUTPUT}, of a sweep in its folder)".replace("%", "%%"),
    )
    add("--dry-run", action="store_true", help="print the batch script instead of submitting it")
    return parser


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Job]:
    tokens = list(argv)
    end = tokens.index("--") if "--" in tokens else len(tokens)
    options, more = _parser().parse_known_args(tokens[:end])
    if end == len(tokens):
        raise UserError("write -- before the flags of launcher.train: submit --nodes 2 -- --zero 3")
    require_range("--nodes", options.nodes, 1, MOST_RANKS)
    require_range("--gpus-per-node", options.gpus_per_node, 0, MOST_RANKS)
    require_range("--ranks-per-node", options.ranks_per_node, 1, MOST_RANKS)
    if options.gpus_per_node and options.ranks_per_node:
        raise UserError(
            f"--ranks-per-node {options.ranks_per_node} is for jobs without GPUs: "
            f"--gpus-per-node {options.gpus_per_node} gives a rank to each GPU"
        )
    for token in more:
        _check(token)
    for name in DECIDING_VARIABLES:
        if name in os.environ:
            raise UserError(
                f"the environment has {name}={os.environ[name]!r}, which sbatch would take instead "
                "of what the batch script says: unset it"
            )
    return options, Job(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        ranks_per_node=options.gpus_per_node or options.ranks_per_node or 1,
        output=options.output,
        more=tuple(more),
        arguments=tuple(tokens[end + 1 :]),
    )


def _check(token: str) -> None:
    """Raises UserError where an option of sbatch is one that the batch script decides.

    sbatch takes any beginning of a long option that only one has, as `--arr` for `--array`.
    """
    name = token.partition("=")[0]
    short = name.startswith("-") and not name.startswith("--")
    letter = name[1:].lstrip(LETTERS_WITHOUT_VALUE)[:1] if short else ""
    if name in DECIDED or (letter and letter in DECIDED_LETTERS):
        raise UserError(
            f"{token} is decided by the batch script: "
            "give --nodes, --gpus-per-node or --ranks-per-node"
        )
    meant = [option for option in (*DECIDED, *OWN) if option.startswith(name)]
    if name.startswith("--") and meant:
        raise UserError(f"{token}: write the option in full, if {meant[0]} is not what it means")


def submit_training(job: Job, *, dry_run: bool) -> None:
    """Put the run into the queue, or print its script.

    Raises:
        UserError: it cannot run, or sbatch refuses.
    """
    run_folder = _check_training(job)
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
        f"and writes its run to {run_folder or f'runs/slurm-{job_id}'}"
    )


def _check_training(job: Job) -> Path | None:
    """Refuse now what the job would refuse after hours in the queue; the run folder, if named.

    Raises:
        UserError: flags that cannot run on that many ranks, missing data, folders that cannot be
            written to.
    """
    # Where the batch scripts put a run; as there, a typed --out comes later and wins.
    unnamed = Path("runs/slurm-JOB")
    config = parse_run_config(["--out", str(unnamed), *job.arguments], world_size=job.world_size)
    job.check_device(config.loop.device)
    device_type = "cuda" if job.gpus_per_node else "cpu"
    origin = find_origin(config.loop, {})
    config, _ = with_recipe(config, origin.source)
    resolved = resolve(config, world_size=job.world_size, device_type=device_type)
    if origin.source is None:
        check_beginning(resolved)
    sources.resolve(config.data.data, config.data.data_field, config.data.stream_bytes)
    assert config.loop.out is not None
    if not origin.reopens:
        check_run_folder(config.loop.out)
    job.check_output()
    return None if config.loop.out == unnamed else config.loop.out
