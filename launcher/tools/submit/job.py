"""A job of Slurm's: what it asks for, its batch script, and how it gets into the queue."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.util.errors import UserError

SCRIPTS = Path(__file__).parent / "scripts"  # a link to slurm/, which the wheel carries as files


class NotQueued(Exception):
    """sbatch has tested a script (`--test-only`) and queued nothing; the message is its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to ask Slurm for, and the arguments of what runs on it."""

    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    output: str | None
    more: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nodes * self.ranks_per_node

    def options(self) -> list[str]:
        """The options of sbatch; a later one beats an earlier one."""
        return [
            f"--nodes={self.nodes}",
            f"--gpus-per-node={self.gpus_per_node}",
            f"--ntasks-per-node={1 if self.gpus_per_node else self.ranks_per_node}",
            *self.more,
        ]

    def check_device(self, device: str) -> None:
        """Raises UserError where `--device` and the GPUs asked for do not go together."""
        if not self.gpus_per_node and device != "cpu":
            raise UserError("--gpus-per-node 0 trains on the CPU: add --device cpu after the --")
        if self.gpus_per_node and device == "cpu":
            raise UserError(
                f"--device cpu would leave the GPUs of --gpus-per-node {self.gpus_per_node} idle: "
                "give --gpus-per-node 0"
            )

    def check_output(self) -> None:
        """Raises UserError where no log could be written.

        Slurm makes no folders: the job would end at once, without a log that says why.
        """
        folder = Path(self.output or "").parent
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"--output {self.output}: {folder} cannot be written to ({error.strerror}); "
                "make the folder, or choose another one"
            ) from None


def fill(script: str, options: Sequence[str], arguments: Sequence[str]) -> str:
    """The batch script of that name with these options, this interpreter, and the arguments.

    Raises:
        UserError: an option that would be lines of the script.
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
    # As in a shell, but for a backslash, which sbatch takes away also between single quotes.
    asked = shlex.join(option.replace("\\", "\\\\") for option in options)
    lines.insert(last + 1, f"# From shardscale submit:\n#SBATCH {asked}\n")
    return "".join(lines)


def sbatch(script: str) -> str:
    """Give the script to sbatch; the job's number.

    Raises:
        UserError: there is no sbatch, or it refuses.
        NotQueued: it only tested the script.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on PATH: submit from a login node of a Slurm cluster, "
            "or see the script with --dry-run"
        )
    done = subprocess.run(
        ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False
    )
    said = [line.removeprefix("sbatch: ") for line in done.stderr.splitlines()]
    if done.returncode:
        raise UserError("sbatch refused the job: " + "; ".join(said).replace("error: ", ""))
    job_id = done.stdout.strip().partition(";")[0]  # NUMBER;CLUSTER where there are several
    if not job_id:
        raise NotQueued("; ".join(said) or "sbatch says nothing of a job")
    return job_id
