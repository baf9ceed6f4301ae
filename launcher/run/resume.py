"""Resume: the run that a start continues, and its folder.

A run continues in its own folder with `--resume auto`, and unasked when torchrun or Slurm restarts
it. A restart continues only a run that its own launch has begun: another run may have taken the
folder first. A launch is identified by its agents, which outlive the ranks that they restart, and
by its Slurm job, which outlives both.
"""

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from launcher.checkpoint.store import CheckpointFolder, candidates
from launcher.config.resolve import Resolved
from launcher.config.schema import LoopChoice
from launcher.data.files import HUB_PREFIX
from launcher.parallel.world import OWN_AGENT, World, number_of
from launcher.run.run_folder import LAUNCH, RunFolder, default_run_folder, in_use
from launcher.util.errors import ExitCode, UserError, naming
from launcher.util.files import FolderLock, nearest_existing, replace_text
from launcher.util.json_file import json_object
from launcher.util.processes import BY_ANY_TORCHRUN

AUTO = Path("auto")
SHARED_WITHIN_S = 15.0  # most seconds until a shared file system shows a new folder to all nodes
Announce = Callable[[RunFolder], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """The run and the state that a start continues."""

    source: Path | None
    """Checkpoint or run folder to load; None for fresh weights."""
    reopens: bool
    """The run folder exists, and this start continues in it."""
    completed: bool = False
    """An earlier start has reached the end of the run."""


def find_resume(loop: LoopChoice, environment: Mapping[str, str]) -> Resume:
    """Resolve `--resume` and `--out` against what is on disk.

    Raises:
        UserError: there is no checkpoint to continue from, or `--out` is no run's folder.
    """
    out, resume = loop.out, loop.resume
    if resume == AUTO and out is None:
        raise UserError("--resume auto continues in a run folder: name it with --out")
    if ":" in (nodes := environment.get(OWN_AGENT, "")) and resume != AUTO:
        raise UserError(  # torch does not count the restarts when a node joins or leaves
            f"--nnodes {nodes}: give --out and --resume auto, so that restarted ranks continue"
        )
    elsewhere = None if resume == AUTO else resume
    refused = out is not None and _was_refused(out)
    restarted = _restarts(environment) > 0 or _requeues(environment) > 0
    if out is None or not out.exists() or not (resume == AUTO or restarted or refused):
        if elsewhere is not None:
            with naming("--resume"):
                candidates(elsewhere)  # raises where there is none
        return Resume(source=elsewhere, reopens=False)
    _check_run(out)
    if restarted and resume != AUTO and _on_one_node(environment):
        check_launch(out, [agent_id()], environment)
    if refused:
        return Resume(source=elsewhere, reopens=True)
    try:
        saved = CheckpointFolder(out / "checkpoints").list()
    except OSError as error:
        what = f"its checkpoints cannot be read ({error.strerror})"
        raise UserError(f"--out {out}: {what}; repair the folder or choose another") from None
    source = out if saved else elsewhere or _first_source(out)
    completed = RunFolder(out).read_status().get("state") == "completed"
    return Resume(source=source, reopens=True, completed=completed)


def ended_out_of_memory(out: Path | None, environment: Mapping[str, str]) -> bool:
    """Return whether torchrun has restarted a run that would run out of memory again."""
    return (
        _restarts(environment) > 0
        and out is not None
        and RunFolder(out).read_status().get("exit_code") == ExitCode.OUT_OF_MEMORY
    )


def agent_id() -> str:
    """Identify the process that starts this one's ranks: a torchrun, or this process itself."""
    process = psutil.Process()
    with contextlib.suppress(psutil.Error):  # the parent is another user's
        while BY_ANY_TORCHRUN in process.environ() and (parent := process.parent()) is not None:
            process = parent
    return f"{socket.gethostname()} {process.pid} {_start_ticks(process)}"


def launch_record(agents: list[str]) -> dict[str, Any]:
    """Return what a run folder records of its launch."""
    return {"agents": sorted(set(agents)), "job": _job(os.environ)}


def is_of_another_launch(out: Path) -> bool:
    """Return whether an agent other than this process's has begun the run in a folder."""
    agents = _read_launch(out).get("agents")
    return isinstance(agents, list) and agent_id() not in agents


def check_launch(out: Path, agents: list[str], environment: Mapping[str, str]) -> None:
    """Refuse to restart a run that another launch has begun.

    Args:
        agents: of all ranks.

    Raises:
        UserError: neither these agents nor this job have begun the run in the folder.
    """
    if not (out / "config.yaml").exists():
        return
    launch = _read_launch(out)
    known = launch.get("agents")
    same_agent = isinstance(known, list) and not set(agents).isdisjoint(map(str, known))
    same_job = _job(environment) is not None and launch.get("job") == _job(environment)
    if _restarts(environment) > 0 and same_agent:
        return
    if _requeues(environment) > 0 and same_job:
        return
    raise UserError(
        f"--out {out}: another start took this folder first, and restarts continue only the run of "
        "their own launch: choose another one, or add --resume auto to continue that run"
    )


def open_folder(
    resolved: Resolved,
    tokenizer_file: Path | None,
    resume: Resume,
    world: World,
    announce: Announce = lambda folder: None,
) -> tuple[RunFolder, Resume]:
    """Make the run folder or continue in it, as the main rank sees it; all ranks call this.

    Other nodes may see a shared file system a little later, so the main rank decides. `announce`
    is called before anything is written.

    Raises:
        UserError: on all ranks; another run's folder, not writable, or not seen by every node.
    """
    out = resolved.config.loop.out or default_run_folder(resolved)
    path, resume = world.agreed((out, resume))
    folder = RunFolder(path)
    announce(folder)
    agents = world.gathered(agent_id())
    begun = _begin(folder, resume, resolved, tokenizer_file, agents) if world.is_main else None
    if (refusal := world.agreed(begun)) is not None:
        raise refusal
    if world.size > world.local_size:
        _check_shared(path, world)
    return folder, resume


def _check_shared(out: Path, world: World) -> None:
    """Reject a folder that another node does not see: its ranks could save nothing there."""
    until_s = time.monotonic() + SHARED_WITHIN_S
    while not (found := has_our_run(out)) and time.monotonic() < until_s:
        time.sleep(0.1)
        os.listdir(nearest_existing(out))  # NFS asks its server anew where a folder is opened
    for rank, node in enumerate(world.gathered(None if found else socket.gethostname())):
        if node is not None:
            raise UserError(
                f"--out {out}: rank {rank} ({node}) does not see this folder of rank 0: give a "
                "place on a file system that all nodes share"
            )


def has_our_run(out: Path) -> bool:
    """Return whether this launch has begun a run there; a node's own disk may hold an earlier."""
    return (out / "config.yaml").exists() and not is_of_another_launch(out)


def _begin(
    folder: RunFolder,
    resume: Resume,
    resolved: Resolved,
    tokenizer_file: Path | None,
    agents: list[str],
) -> UserError | None:
    config = resolved.config
    try:
        restarted = _restarts(os.environ) > 0 or _requeues(os.environ) > 0
        if resume.reopens and restarted and config.loop.resume != AUTO:
            check_launch(folder.path, agents, os.environ)
        folder.begin(config.flat(), reopens=resume.reopens, launch=launch_record(agents))
        _copy_inputs(folder.path, config.sharding.deepspeed, tokenizer_file, config.data.tokenizer)
    except FileExistsError:
        return UserError(
            f"--out {folder.path}: another run has just taken this folder: choose another one"
        )
    except UserError as error:
        return error
    except OSError as error:
        if not resume.reopens:
            shutil.rmtree(folder.path, ignore_errors=True)
        return UserError(
            f"--out {folder.path}: cannot be written to ({error.strerror}): choose another place"
        )
    return None


def _copy_inputs(
    run: Path, deepspeed: Path | None, tokenizer_file: Path | None, tokenizer: str
) -> None:
    if deepspeed is not None:
        # What config.yaml has no field for, such as bucket sizes, stands only there.
        kept = run / "deepspeed.json"
        if not kept.exists() or not deepspeed.samefile(kept):  # a resumed run may be given that
            shutil.copyfile(deepspeed, kept)
    if tokenizer_file is not None:
        # The text it was trained on may change; an export of the model needs this one.
        replace_text(run / "tokenizer.json", tokenizer_file.read_text(encoding="utf-8"))
    if Path(tokenizer).suffix or tokenizer.startswith(HUB_PREFIX):
        from launcher.checkpoint.pretrained.companions import carry_beside

        # What other programs have saved beside a file; the corpus has kept what came with a name.
        by_name = tokenizer.startswith(HUB_PREFIX) and tokenizer_file is not None
        carry_beside(str(tokenizer_file) if by_name else tokenizer, run)


def _was_refused(out: Path) -> bool:
    """Return whether a run there was refused before it saved anything, as weights with NaN are: the
    next start may reuse the folder."""
    if RunFolder(out).read_status().get("exit_code") != ExitCode.REFUSED:
        return False
    return not (out / "checkpoints").exists()


def _first_source(out: Path) -> Path | None:
    """Return what the run began with, by its latest start that did not continue; it saved none."""
    for path in RunFolder(out).configs():
        try:
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (ValueError, yaml.YAMLError):
            continue  # damaged, and about to be replaced
        resume = config.get("resume") if isinstance(config, dict) else str(AUTO)
        if resume != str(AUTO):
            return None if resume is None else Path(resume)
    return None


def _check_run(out: Path) -> None:
    if not out.is_dir():
        raise UserError(f"--out {out}: is not a folder, so no run can continue in it")
    contents = [path for path in out.iterdir() if not path.name.startswith(".")]
    if contents and not (out / "config.yaml").exists():
        raise UserError(f"--out {out}: is not a run folder, so no run can continue in it")
    for path in contents:
        if path.suffix in (".yaml", ".json", ".jsonl") and path.is_dir():
            raise UserError(f"--out {out}: {path.name} is a folder there: choose another run")
    with contextlib.suppress(OSError):  # a file system without locks
        if (holder := FolderLock(out).holder()) is not None:
            raise UserError(in_use(out, holder))


def _read_launch(out: Path) -> dict[str, Any]:
    launch = json_object(out / "environment.json").get(LAUNCH)
    return launch if isinstance(launch, dict) else {}


def _restarts(environment: Mapping[str, str]) -> int:
    return number_of(environment, "TORCHELASTIC_RESTART_COUNT", default=0)


def _requeues(environment: Mapping[str, str]) -> int:
    return number_of(environment, "SLURM_RESTART_COUNT", default=0)


def _job(environment: Mapping[str, str]) -> str | None:
    number, cluster = environment.get("SLURM_JOB_ID"), environment.get("SLURM_CLUSTER_NAME")
    return None if number is None else f"{cluster or 'slurm'} {number}"


def _on_one_node(environment: Mapping[str, str]) -> bool:
    """Return whether this process knows all agents; on several nodes ranks exchange them first."""
    size = number_of(environment, "WORLD_SIZE", default=1)
    return number_of(environment, "LOCAL_WORLD_SIZE", default=size) == size


def _start_ticks(process: psutil.Process) -> str:
    # Ticks since the machine's start: its clock may be set meanwhile.
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return str(process.create_time())
    return stat.rpartition(")")[2].split()[19]  # field 22, starttime (proc_pid_stat)
