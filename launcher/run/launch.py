"""Which launch has begun a run. A restart, by torchrun or by Slurm, continues only what its own
launch began: another run may have taken the folder first.

A launch is known by its agents, which outlive the ranks that they restart, and by its job in
Slurm, which outlives both.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from launcher.parallel.world import number_of
from launcher.util.processes import BY_ANY_TORCHRUN

KEY = "launch"
"""In `environment.json`."""


def restarts(environment: Mapping[str, str]) -> int:
    """How often torchrun has restarted these ranks."""
    return number_of(environment, "TORCHELASTIC_RESTART_COUNT", default=0)


def agent() -> str:
    """The process that starts this one's ranks: a torchrun, or this process itself."""
    process = psutil.Process()
    with contextlib.suppress(psutil.Error):  # the parent is another user's
        while BY_ANY_TORCHRUN in process.environ() and (parent := process.parent()) is not None:
            process = parent
    return f"{socket.gethostname()} {process.pid} {_started(process)}"


def job(environment: Mapping[str, str]) -> str | None:
    """The job in Slurm that this process belongs to."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID")
    cluster, number = (environment.get(name) for name in names)
    return None if number is None else f"{cluster or 'slurm'} {number}"


def record(agents: list[str]) -> dict[str, Any]:
    """What a run folder keeps of the launch that has it."""
    return {"agents": sorted(set(agents)), "job": job(os.environ)}


def is_restarted(environment: Mapping[str, str]) -> bool:
    """Whether this process is started again, by torchrun or by Slurm."""
    return restarts(environment) > 0 or _requeues(environment) > 0


def continues(out: Path, agents: list[str], environment: Mapping[str, str]) -> bool:
    """Whether a restart of the launch with these agents may go on in the folder: its own launch has
    begun the run there, or nobody has.

    Args:
        agents: of all ranks.
    """
    if not (out / "config.yaml").exists():
        return True
    launch = read(out)
    known = launch.get("agents")
    of_agent = isinstance(known, list) and not set(agents).isdisjoint(map(str, known))
    of_job = job(environment) is not None and launch.get("job") == job(environment)
    return (restarts(environment) > 0 and of_agent) or (_requeues(environment) > 0 and of_job)


def read(out: Path) -> dict[str, Any]:
    """The record of the launch that has the folder; nothing where there is none."""
    try:
        environment = json.loads((out / "environment.json").read_text(encoding="utf-8"))
        launch = environment[KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return launch if isinstance(launch, dict) else {}


def _requeues(environment: Mapping[str, str]) -> int:
    return number_of(environment, "SLURM_RESTART_COUNT", default=0)


def _started(process: psutil.Process) -> str:
    """When, in ticks since the machine's start: its clock may be set meanwhile."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return str(process.create_time())
    return stat.rpartition(")")[2].split()[19]
