"""Read a program's command: its interpreter, and the ranks that it starts per node."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from launcher.util.errors import UserError

_RANKS = (
    *("--nproc", "--nproc-per-node", "--nproc_per_node"),  # torchrun
    *("--num_processes", "--num-processes"),  # accelerate launch
    *("--num_gpus", "--num-gpus"),  # deepspeed
)


def interpreter(command: Sequence[str]) -> str:
    """Return the Python that runs a command: itself, or the one that a script names in line 1.

    Raises:
        UserError: no such program, or one that is no script of Python.
    """
    if re.fullmatch(r"(.*/)?python[\d.]*", command[0]):
        return command[0]
    found = shutil.which(command[0])
    if found is None:
        raise UserError(f"{command[0]} cannot be started: check the command after --")
    with Path(found).open("rb") as file:
        first = file.readline(4096)
    match = re.match(rb"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(\S*python[\d.]*)", first)
    if match is None:
        raise UserError(f"{command[0]} is no program of Python: give python or torchrun after --")
    return match[1].decode()


def ranks_per_node(command: Sequence[str]) -> int | None:
    """Return the processes that the command's launcher starts; None where it does not say."""
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in _RANKS:
            value = value if equals else "".join(command[number + 1 : number + 2])
            return int(value) if value.isdecimal() else None
    return None
