"""Read a program's command: its interpreter, and the ranks that it starts per node."""

import os
import re
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from launcher.util.errors import UserError

_RANKS = (
    *("--nproc", "--nproc-per-node", "--nproc_per_node"),  # torchrun
    *("--num_processes", "--num-processes"),  # accelerate launch
    *("--num_gpus", "--num-gpus"),  # deepspeed
)
_CONFIGS = ("--config_file", "--config-file")  # accelerate launch
_LAUNCHERS = ("torch.distributed.", "accelerate", "deepspeed")  # modules


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
    command = _of_launcher(command)
    if (value := _value(command, _RANKS)) is not None:
        # torchrun also takes auto, gpu and cpu
        return int(value) if value.isdecimal() else None
    if (slots := _value(command, ("--include",))) is not None:
        # deepspeed's localhost:0,2 needs a node of three
        numbers = map(int, re.findall(r"\d+", slots.partition(":")[2]))
        return max(numbers, default=-1) + 1 or None
    if (file := _value(command, _CONFIGS)) is not None:
        return _ranks_of_config(Path(file))
    if {Path(command[0]).name, *command} & {"accelerate", "accelerate.commands.launch", "trl"}:
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = os.environ.get("HF_HOME", f"{cache}/huggingface")
        return _ranks_of_config(Path(home, "accelerate", "default_config.yaml").expanduser())
    return None


def _of_launcher(command: Sequence[str]) -> Sequence[str]:
    """Return the words before the program: those behind it are its own."""
    for number, (word, following) in enumerate(pairwise([*command, ""])):
        if word.endswith(".py") or (word == "-m" and not following.startswith(_LAUNCHERS)):
            return command[:number]
    return command


def _value(command: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return what follows the first of these flags."""
    for number, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name in flags:
            return value if equals else "".join(command[number + 1 : number + 2])
    return None


def _ranks_of_config(path: Path) -> int | None:
    """Return the processes per machine that a config of `accelerate launch` asks for."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None  # accelerate will say what is wrong with it
    if not isinstance(content, dict):
        return None
    processes, machines = content.get("num_processes"), content.get("num_machines", 1)
    known = isinstance(processes, int) and isinstance(machines, int) and machines > 0
    return processes // machines if known and processes >= machines else None
