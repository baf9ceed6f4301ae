"""This rank's `rank<N>.jsonl`, in the schema of launcher/measure/records.py."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from typing import Any

PACKAGES = (
    *("torch", "transformers", "accelerate", "trl", "peft", "deepspeed", "lightning"),
    *("bitsandbytes", "flash-attn", "torchtitan", "litgpt", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
)


class RankFile:
    """Appends records, each line written at once, so that a killed process loses none.

    A rank of several takes the place of a process without ranks, which has perhaps started it: that
    one's records go on in `parent.jsonl`.

    Raises:
        FileExistsError: another process has that rank's file.
    """

    def __init__(self, folder: str, rank: int, world_size: int = 1) -> None:
        self.rank = rank
        self._path = os.path.join(folder, f"rank{rank}.jsonl")
        self._started_unix_s = time.time()
        if world_size > 1 and _world_size(self._path) == 1:
            os.replace(self._path, os.path.join(folder, "parent.jsonl"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file = os.open(self._path, flags, 0o644)
        if rank == 0:
            _write_environment(folder)

    def add(self, kind: str, **fields: Any) -> None:
        """Append one record; NaN and infinity become null."""
        values = {"kind": kind, **{name: _finite(value) for name, value in fields.items()}}
        os.write(self._file, (json.dumps(values) + "\n").encode())

    def is_of_rank(self) -> bool:
        """Return False once a rank of several has taken the place of this process."""
        return os.path.samestat(os.fstat(self._file), os.stat(self._path))

    def close(self) -> None:
        """Close the file; nothing may be added afterwards."""
        os.close(self._file)

    def begin(self, *, folder: str, world_size: int, **described: Any) -> None:
        """Write the record that describes the run, perhaps again; fields that cannot be observed
        are null."""
        unknown = ("matmul_parameters", "flops_per_token", "accumulation", "global_batch", "steps")
        self.add(
            "run",
            schema_version=1,
            run=os.path.basename(folder),
            rank=self.rank,
            world_size=world_size,
            hostname=platform.node(),
            **described,
            **dict.fromkeys(unknown),
            started_unix_s=self._started_unix_s,
        )

    def event(self, name: str, step: int | None = None, **detail: Any) -> None:
        """Append an event."""
        more = {} if step is None else {"step": step}
        self.add("event", name=name, **more, unix_s=time.time(), detail=detail)


def is_distributed() -> bool:
    """Return True in a process that has joined a group."""
    found: Any = sys.modules.get("torch.distributed")
    return found is not None and found.is_available() and bool(found.is_initialized())


def rank_of_process() -> tuple[int, int]:
    """Return (rank, world size) of this process, 0 of 1 where there is no group."""
    if is_distributed():
        distributed: Any = sys.modules["torch.distributed"]
        return distributed.get_rank(), distributed.get_world_size()
    for rank, world in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def _world_size(path: str) -> int | None:
    """Return of how many ranks a file's process was one; None where there is no such file."""
    try:
        with open(path, encoding="utf-8") as lines:
            return int(json.loads(next(lines))["world_size"])
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_environment(folder: str) -> None:
    torch: Any = sys.modules["torch"]
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    content = {
        "command": sys.argv,
        "hostname": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
    }
    part = os.path.join(folder, f".environment-{os.getpid()}")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
    os.replace(part, os.path.join(folder, "environment.json"))
