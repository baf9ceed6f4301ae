"""A Slurm job: its resources, its batch script, and its submission."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.util.errors import WHY, UserError, refused

SCRIPTS = Path(__file__).parent / "scripts"  # a link to slurm/, which the wheel carries as files


class NotQueued(Exception):
    """sbatch only tested a script (`--test-only`); carries sbatch's message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Resources to request, and the arguments of the program to run."""

    nodes: int
    gpus_per_node: int
    gpu_type: str | None
    ranks_per_node: int
    output: str | None
    more: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    def options(self) -> list[str]:
        """Options of sbatch; later ones override earlier ones."""
        typed = f"{self.gpu_type}:" if self.gpu_type else ""
        return [
            f"--nodes={self.nodes}",
            f"--gpus-per-node={typed}{self.gpus_per_node}",
            # train.sbatch starts a rank per GPU; without GPUs it reads the ranks from the tasks
            f"--ntasks-per-node={1 if self.gpus_per_node else self.ranks_per_node}",
            *self.more,
        ]

    def check_device(self, device: str) -> None:
        """Refuse a `--device` that contradicts the requested GPUs (raises UserError)."""
        if not self.gpus_per_node and device != "cpu":
            raise UserError("--gpus-per-node 0 trains on the CPU: add --device cpu after the --")
        if self.gpus_per_node and device == "cpu":
            raise UserError(
                f"--device cpu would leave the GPUs of --gpus-per-node {self.gpus_per_node} idle: "
                "give --gpus-per-node 0"
            )

    def check_output(self) -> None:
        """Refuse an unwritable log folder (raises UserError).

        Slurm creates no folders: the job would fail at once, without a log.
        """
        folder = Path(self.output or "").parent
        if "%" in str(folder):  # %u, for example, which only Slurm expands
            return
        said = f"--output {self.output}: {folder} cannot be written to ({WHY})"
        with (
            refused(OSError, f"{said}; create the folder, or choose another one"),
            tempfile.TemporaryFile(dir=folder),
        ):
            pass


def fill(script: str, options: Sequence[str], arguments: Sequence[str]) -> str:
    """Fill a batch script of slurm/ with options, this interpreter and arguments.

    Raises:
        UserError: an option with line breaks, which would become lines of the script.
    """
    for option in options:
        if not option.isprintable():
            raise UserError(
                f"{option!r:.200} cannot be written into a batch script: leave out line breaks "
                "and other control characters"
            )
    lines = (SCRIPTS / script).read_text(encoding="utf-8").splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    python = lines.index("python=python\n")
    lines[python] = f"python={shlex.quote(sys.executable)}\nset -- {shlex.join(arguments)}\n"
    # Shell quoting, except that sbatch removes backslashes between single quotes too.
    quoted = shlex.join(option.replace("\\", "\\\\") for option in options)
    lines.insert(last + 1, f"# From shardscale submit:\n#SBATCH {quoted}\n")
    return "".join(lines)


def sbatch(script: str) -> str:
    """Submit the script; returns the job ID.

    Raises:
        UserError: no sbatch, or it refuses the job.
        NotQueued: sbatch only tested the script.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on PATH: submit from a login node of a Slurm cluster, "
            "or print the script with --dry-run"
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False
    )
    messages = [line.removeprefix("sbatch: ") for line in done.stderr.splitlines()]
    if done.returncode:
        raise UserError("sbatch refused the job: " + "; ".join(messages).replace("error: ", ""))
    job_id = done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER with several clusters
    if not job_id:
        raise NotQueued("; ".join(messages) or "sbatch returned no job ID")
    return job_id
