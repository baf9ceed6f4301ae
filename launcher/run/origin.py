"""Where a run begins: at step 0, at another run's checkpoint, or where it was before.

A run goes on in its own folder with `--resume auto`, and without being asked when torchrun
restarts its ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from launcher.checkpoint.store import CheckpointFolder, candidates
from launcher.config.schema import LoopChoice
from launcher.parallel.world import number_of
from launcher.run import launch
from launcher.run.folder import RunFolder, in_use
from launcher.util.errors import ExitCode, UserError
from launcher.util.files import FolderLock

AUTO = Path("auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """`source` is what to load, None for fresh weights; `reopens`: the run folder is there."""

    source: Path | None
    reopens: bool
    over: bool = False
    """An earlier attempt has reached the end of the run."""


def find_origin(loop: LoopChoice, environment: Mapping[str, str]) -> Origin:
    """What `--resume` and `--out` come to, given what is on disk.

    Raises:
        UserError: nothing to go on from, or a folder to go on in that is no run's.
    """
    out, resume = loop.out, loop.resume
    if resume == AUTO and out is None:
        raise UserError("--resume auto goes on in a run folder: name it with --out")
    elsewhere = None if resume == AUTO else resume
    refused = out is not None and _was_refused(out)
    restarted = launch.is_restarted(environment)
    goes_on = resume == AUTO or restarted or refused
    if out is None or not out.exists() or not goes_on:
        if elsewhere is not None:
            candidates(elsewhere)  # raises where there is none
        return Origin(source=elsewhere, reopens=False)
    _check_run(out)
    if restarted and resume != AUTO and _has_one_agent(environment):
        check_launch(out, [launch.agent()], environment)
    if refused:
        return Origin(source=elsewhere, reopens=True)
    try:
        saved = CheckpointFolder(out / "checkpoints").list()
    except OSError as error:
        what = f"its checkpoints cannot be read ({error.strerror})"
        raise UserError(f"--out {out}: {what}; repair the folder or choose another") from None
    source = out if saved else elsewhere or _first_source(out)
    return Origin(
        source=source, reopens=True, over=RunFolder(out).read_status().get("state") == "completed"
    )


def check_launch(out: Path, agents: list[str], environment: Mapping[str, str]) -> None:
    """Refuse to restart what another launch has begun.

    Raises:
        UserError: these agents and this job have not begun the run in the folder.
    """
    if not launch.continues(out, agents, environment):
        raise UserError(
            f"--out {out}: another start took this folder first, and restarts go on only with what "
            "their own has begun: choose another one, or add --resume auto to go on with that run"
        )


def _has_one_agent(environment: Mapping[str, str]) -> bool:
    """Whether this process knows all: of several nodes, ranks tell each other first."""
    size = number_of(environment, "WORLD_SIZE", default=1)
    return number_of(environment, "LOCAL_WORLD_SIZE", default=size) == size


def ended_out_of_memory(out: Path | None, environment: Mapping[str, str]) -> bool:
    """Whether torchrun has restarted a run that would only run out of memory again."""
    return (
        launch.restarts(environment) > 0
        and out is not None
        and RunFolder(out).read_status().get("exit_code") == ExitCode.OUT_OF_MEMORY
    )


def _was_refused(out: Path) -> bool:
    """Whether a run has begun there and was refused before it saved anything, as weights with NaN
    are: the next try needs no other folder."""
    if RunFolder(out).read_status().get("exit_code") != ExitCode.REFUSED:
        return False
    return not (out / "checkpoints").exists()


def _first_source(out: Path) -> Path | None:
    """What the run was resumed from in its first attempt, which has saved nothing of its own."""
    for path in out.glob("config*.yaml"):
        resume = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("resume")
        if resume not in (None, str(AUTO)):
            return Path(resume)
    return None


def _check_run(out: Path) -> None:
    if not out.is_dir():
        raise UserError(f"--out {out}: is not a folder, so no run can go on in it")
    contents = [path for path in out.iterdir() if not path.name.startswith(".")]
    if contents and not (out / "config.yaml").exists():
        raise UserError(f"--out {out}: is not a run folder, so no run can go on in it")
    holder = FolderLock(out).holder()
    if holder is not None:
        raise UserError(in_use(out, holder))
