"""`shardscale submit`: check a training or a sweep, fill a batch script, and submit it."""

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.config.arguments import parse_run_config
from launcher.tools.submit.job import Job, NotQueued, fill, sbatch
from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.flags import MOST_RANKS, OptionParser, is_number, require_range
from launcher.util.startup import loading

OUTPUT = "slurm-%j.out"
# Set by the batch scripts, from the number of nodes and of ranks per node.
OF_THE_SCRIPT = ("--wrap", "--requeue", "--no-requeue", "--open-mode", "--signal")
DECIDED = (
    *("--ntasks", "--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-core"),
    *("--ntasks-per-socket", "--gpus", "--gpus-per-task", "--gpus-per-socket", "--gres"),
    *("--array", *OF_THE_SCRIPT),
)
DECIDED_LETTERS = "nGaNo"
# Own options: sbatch would accept abbreviations of them, and the later one would win.
OWN = ("--nodes", "--gpus-per-node", "--output")
# These override the options in the script.
DECIDING_VARIABLES = (
    *("SBATCH_ARRAY_INX", "SBATCH_GPUS", "SBATCH_GPUS_PER_NODE", "SBATCH_GPUS_PER_TASK"),
    *("SBATCH_GRES", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_SIGNAL"),
)
LETTERS_WITHOUT_VALUE = "HIOQVWhksuv"  # sbatch reads -Hn4 as -H -n 4


@refusing
def main(argv: Sequence[str]) -> int:
    """Submit a training or a sweep, or print its scripts; 0 on success, 2 when refused."""
    options, job = _parse(argv)
    try:
        if options.sweep:
            from launcher.tools.submit.sweep import submit_sweep  # imports for a second

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
        "folder that all nodes share. Options that are neither below nor after -- go to sbatch: "
        "--partition, --time, --account, --job-name, --mem, ...",
    )
    add = parser.add_argument
    add(
        "--sweep",
        action="store_true",
        help="submit a sweep; its flags follow --: --grid, --out, ...",
    )
    add("-N", "--nodes", type=int, default=1, help="nodes (default: 1)")
    add(
        "--gpus-per-node",
        default="1",
        metavar="[TYPE:]N",
        help="GPUs per node, one rank each: 4, a100:4 (default: 1); 0: CPU",
    )
    add("--ranks-per-node", type=int, help="ranks per node with --gpus-per-node 0 (default: 1)")
    add(
        *("-o", "--output"),
        help=f"log file (default: {OUTPUT}; for a sweep, in its folder)".replace("%", "%%"),
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
    gpu_type, gpus_per_node = _gpus(options.gpus_per_node)
    require_range("--ranks-per-node", options.ranks_per_node, 1, MOST_RANKS)
    if gpus_per_node and options.ranks_per_node:
        raise UserError(
            f"--ranks-per-node {options.ranks_per_node} is for jobs without GPUs: "
            f"--gpus-per-node {options.gpus_per_node} gives a rank to each GPU"
        )
    for token in more:
        _check(token)
    for name in DECIDING_VARIABLES:
        if name in os.environ:
            raise UserError(
                f"the environment variable {name}={os.environ[name]!r} would override the batch "
                "script: unset it"
            )
    return options, Job(
        nodes=options.nodes,
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        ranks_per_node=gpus_per_node or options.ranks_per_node or 1,
        output=options.output,
        more=tuple(more),
        arguments=tuple(tokens[end + 1 :]),
    )


def _gpus(text: str) -> tuple[str | None, int]:
    """Read `4` or `a100:4` as type and number of GPUs.

    Raises:
        UserError: neither.
    """
    kind, colon, number = text.rpartition(":")
    if not is_number(number, int) or (colon and not re.fullmatch(r"[\w.-]+", kind)):
        raise UserError(
            f"--gpus-per-node {text} must be a number of GPUs, or a type and a number: 4, a100:4"
        )
    require_range("--gpus-per-node", int(number), 0, MOST_RANKS)
    return kind or None, int(number)


def _check(token: str) -> None:
    """Refuse an option of sbatch that the batch script sets (raises UserError).

    sbatch accepts unique abbreviations of long options, such as `--arr` for `--array`.
    """
    name = token.partition("=")[0]
    short = name.startswith("-") and not name.startswith("--")
    letter = name[1:].lstrip(LETTERS_WITHOUT_VALUE)[:1] if short else ""
    if name in DECIDED or (letter and letter in DECIDED_LETTERS):
        fix = "give --nodes, --gpus-per-node ([TYPE:]N, as a100:4) or --ranks-per-node"
        if name == "--array" or letter == "a":
            fix = "give --sweep, whose cells are the tasks of an array"
        elif name in OF_THE_SCRIPT:
            fix = "leave it out"
        raise UserError(f"{token} is set by the batch script: {fix}")
    meant = [option for option in (*DECIDED, *OWN) if option.startswith(name)]
    if name.startswith("--") and meant:
        raise UserError(
            f"{token} abbreviates {meant[0]}, which the batch script sets: write the option in full"
        )


def submit_training(job: Job, *, dry_run: bool) -> None:
    """Submit a training, or print its script.

    Raises:
        UserError: it cannot run, or sbatch refuses it.
    """
    run_folder = _check_training(job)
    output = job.output or OUTPUT
    script = fill(
        "single_gpu.sbatch" if job.world_size == 1 else "train.sbatch",
        [f"--output={output}", *job.options()],
        # that of a --config gives way to the script's default unless it is typed, too
        [*job.arguments, *([] if run_folder is None else ["--out", str(run_folder)])],
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
    """Refuse now what the job would refuse after hours in the queue; returns a named run folder.

    Raises:
        UserError: invalid flags for that many ranks, missing data, or unwritable folders.
    """
    with loading():
        from launcher.config.resolve import check_run_folder, resolve
        from launcher.data.sources import find_source
        from launcher.run.prepare import (
            check_init_from,
            check_weights_source,
            saved_by,
            with_recipe,
        )
        from launcher.run.resume import find_resume

    config = parse_run_config(job.arguments, world_size=job.world_size)
    named = config.loop.out
    config = config.replace(out=named or Path("runs/slurm-JOB"))  # the batch scripts' default
    job.check_device(config.loop.device)
    device_type = "cuda" if job.gpus_per_node else "cpu"
    resume = find_resume(config.loop, {})
    saved = saved_by(resume.source)
    check_weights_source(config, saved)
    config, _ = with_recipe(config, saved)
    resolved = resolve(
        config,
        world_size=job.world_size,
        device_type=device_type,
        compiled_before=saved.get("config", {}).get("compile"),
    )
    if resume.source is None:
        check_init_from(resolved)
    find_source(config.data)
    assert config.loop.out is not None
    if not resume.reopens:
        check_run_folder(config.loop.out)
    job.check_output()
    return named
