"""`memscale submit`: fill a batch script of slurm/, check what can be checked, give it to sbatch.

python -m launcher submit --nodes 2 --gpus-per-node 8 --partition a100 --time 8:00:00 -- --zero 3
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launcher.arguments import parse_run_config
from launcher.data import sources
from launcher.errors import ExitCode, UserError
from launcher.resolve import check_run_folder, resolve

SCRIPTS = Path(__file__).parents[1] / "slurm"
# What the scripts themselves decide from the number of nodes and of ranks on each.
DECIDED = ("--ntasks", "-n", "--ntasks-per-node", "--gpus", "-G", "--gres", "--array", "-a")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to ask Slurm for, and what to train on it."""

    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    output: str
    more: tuple[str, ...]
    training: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    def run_folder(self, job_id: str) -> Path:
        """Where the batch scripts put a run whose flags name no --out."""
        return Path("runs") / f"slurm-{job_id}"

    def directives(self) -> str:
        """The options of sbatch, as a line of the script; a later one beats an earlier one."""
        options = (
            f"--nodes={self.nodes}",
            f"--gpus-per-node={self.gpus_per_node}",
            f"--ntasks-per-node={1 if self.gpus_per_node else self.ranks_per_node}",
            f"--output={self.output}",
        )
        return f"#SBATCH {shlex.join([*options, *self.more])}\n"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message.removeprefix("argument "))


def main(argv: Sequence[str]) -> int:
    """Submit a training, or print its script; 0 when it is in the queue, 2 when refused."""
    try:
        options, job = _parse(argv)
        run_folder = _check(job)
        script = _script(job)
        if options.dry_run:
            print(script, end="")
            return ExitCode.DONE
        job_id = _sbatch(script)
    except UserError as error:
        print(f"memscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    print(
        f"job {job_id} submitted: it logs to {job.output.replace('%j', job_id)} "
        f"and writes its run to {run_folder or job.run_folder(job_id)}"
    )
    return ExitCode.DONE


def _parser() -> _Parser:
    parser = _Parser(
        prog="memscale submit",
        usage="memscale submit [options] [sbatch options] -- [flags of launcher.train]",
        description="Submit a training to Slurm from a folder that all nodes share. What is "
        "neither below nor behind -- is an option of sbatch: --partition, --time, --account, "
        "--job-name, --mem, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-N", "--nodes", type=int, default=1, help="machines (default: 1)")
    add("--gpus-per-node", type=int, default=1, help="a rank each (default: 1); 0: on the CPU")
    add("--ranks-per-node", type=int, help="only with --gpus-per-node 0 (default then: 1)")
    add("-o", "--output", default="slurm-%j.out", help="log file (default: slurm-%%j.out)")
    add("--dry-run", action="store_true", help="print the batch script instead of submitting it")
    return parser


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Job]:
    tokens = list(argv)
    end = tokens.index("--") if "--" in tokens else len(tokens)
    options, more = _parser().parse_known_args(tokens[:end])
    if end == len(tokens):
        raise UserError("write -- before the flags of launcher.train: submit --nodes 2 -- --zero 3")
    for name, least in (("nodes", 1), ("gpus_per_node", 0), ("ranks_per_node", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value} must be {least} or more")
    if options.gpus_per_node and options.ranks_per_node:
        raise UserError(
            f"--ranks-per-node {options.ranks_per_node} is for jobs without GPUs: "
            f"--gpus-per-node {options.gpus_per_node} gives a rank to each GPU"
        )
    for token in more:
        if token.partition("=")[0] in DECIDED:
            raise UserError(
                f"{token} is decided by the batch script: "
                "give --nodes, --gpus-per-node or --ranks-per-node"
            )
    return options, Job(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node,
        ranks_per_node=options.gpus_per_node or options.ranks_per_node or 1,
        output=options.output,
        more=tuple(more),
        training=tuple(tokens[end + 1 :]),
    )


def _check(job: Job) -> Path | None:
    """Refuse now what the job would refuse after hours in the queue; the run folder, if named.

    Raises:
        UserError: flags that cannot run on so many ranks, missing data, folders that cannot be
            written to.
    """
    unnamed = job.run_folder("JOB")
    # As in the batch scripts: a typed --out comes later and wins.
    config = parse_run_config(["--out", str(unnamed), *job.training], prog="launcher.train")
    if not job.gpus_per_node and config.loop.device != "cpu":
        raise UserError("--gpus-per-node 0 trains on the CPU: add --device cpu behind the --")
    if job.gpus_per_node and config.loop.device == "cpu":
        raise UserError(
            f"--device cpu would leave the GPUs of --gpus-per-node {job.gpus_per_node} idle: "
            "give --gpus-per-node 0"
        )
    resolve(
        config,
        world_size=job.world_size,
        device_type="cuda" if job.gpus_per_node else "cpu",
    )
    sources.resolve(config.data.data)
    assert config.loop.out is not None
    check_run_folder(config.loop.out)
    folder = Path(job.output).parent
    try:
        # Slurm makes no folders: the job would end at once, without a log that says why.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--output {job.output}: {folder} cannot be written to ({error.strerror}); "
            "make the folder, or choose another one"
        ) from None
    return None if config.loop.out == unnamed else config.loop.out


def _script(job: Job) -> str:
    """The batch script with the job's options, this interpreter, and the training's flags.

    Raises:
        UserError: the scripts are not there.
    """
    path = SCRIPTS / ("single_gpu.sbatch" if job.world_size == 1 else "train.sbatch")
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist: submit needs memscale's source folder (pip install -e .)"
        ) from None
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    python = lines.index("python=python\n")
    lines[python] = f"python={shlex.quote(sys.executable)}\nset -- {shlex.join(job.training)}\n"
    lines.insert(last + 1, f"# From memscale submit:\n{job.directives()}")
    return "".join(lines)


def _sbatch(script: str) -> str:
    """Give the script to sbatch; the job's number.

    Raises:
        UserError: there is no sbatch, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on PATH: submit from a login node of a Slurm cluster, "
            "or see the script with --dry-run"
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line.removeprefix("sbatch: ") for line in done.stderr.splitlines()]
        raise UserError("sbatch refused the job: " + "; ".join(said).replace("error: ", ""))
    return done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
