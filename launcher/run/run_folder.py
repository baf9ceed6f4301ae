"""The run folder and its small files: config, environment, status, failure, summary."""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from launcher.checkpoint.store import candidates
from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.data.files import HUB_PREFIX, TOKENIZER_FILE
from launcher.measure.records import Status, Summary
from launcher.strategies import variant_of
from launcher.util.errors import ExitCode, Failure, UserError, tell
from launcher.util.files import FolderLock, is_empty, replace_text, run_folder_of
from launcher.util.json_file import json_object
from launcher.util.packages import version_of

if TYPE_CHECKING:
    from launcher.checkpoint.extra import Extra

LAUNCH = "launch"
"""Key of the launch's identity in `environment.json`."""
RUNS = Path("runs")
LONGEST_LABEL = 150  # bytes; file names may have 255, and a model may be named as its folder


class RunFolder:
    """One run's files. Small files are replaced whole, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(path)
        self._failure = path / "failure.json"

    def begin(
        self, config: dict[str, Any], *, reopens: bool, launch: Mapping[str, Any] | None = None
    ) -> None:
        """Write config, environment and status, in a new folder or in that of a run that ended
        early; main rank only.

        The report and summary of an earlier end are kept under other names, and so is a config
        that has changed.

        Args:
            launch: identity of the launch that has the folder from now on.

        Raises:
            FileExistsError: a new run's folder exists already.
            UserError: the run to continue is still alive.
        """
        if not reopens:
            # of two starts into one folder the slower fails here, or cannot lock it
            self.path.mkdir(parents=True, exist_ok=is_empty(self.path))
        if not self._lock.take():
            raise UserError(in_use(self.path, self._lock.holder() or "another run"))
        text = yaml.safe_dump(config, sort_keys=False)
        config_file = self.path / "config.yaml"
        if config_file.exists() and config_file.read_bytes() != text.encode():
            # Copied: no run continues in a folder without one, should this start end here.
            before = config_file.read_text(encoding="utf-8", errors="replace")
            replace_text(_free_name(config_file), before)
        # From here on failure.json is of this start: the first of its ranks to fail creates it.
        for name in ("failure.json", "summary.json"):
            if (earlier := self.path / name).exists():
                earlier.rename(_free_name(earlier))
        # Before the config: a folder without one belongs to no launch yet.
        known = {**environment(), LAUNCH: dict(launch or {})}
        replace_text(self.path / "environment.json", json.dumps(known, indent=2) + "\n")
        replace_text(config_file, text)
        self.write_status(Status(state="running", phase="start"))

    def write_status(self, status: Status) -> None:
        """Write `status.json`; "running" never replaces the status of a failed run."""
        state = status.state
        if state == "running" and self._failure.exists():
            return
        text = json.dumps(dataclasses.asdict(status), indent=2) + "\n"
        try:
            replace_text(self.path / "status.json", text)
        except OSError as error:
            # Training goes on without it; standard error is the last place left for the outcome.
            sentence = f"{self.path / 'status.json'} cannot be written ({error.strerror})"
            if state != "running":
                sentence += f": the run is {state} ({status.reason or status.phase})"
            tell(sentence)

    @property
    def has_failed(self) -> bool:
        """True if a rank has failed since this start."""
        return self._failure.exists()

    def read_status(self) -> dict[str, Any]:
        """Return the content of `status.json`; empty where there is none, or the disk was too full
        to write it."""
        return json_object(self.path / "status.json")

    def configs(self) -> list[Path]:
        """List the configs of the run's starts, the latest first."""
        found: list[Path] = []
        while (aside := self.path / f"config-{len(found) + 1}.yaml").exists():
            found.append(aside)
        latest = self.path / "config.yaml"
        return [*([latest] if latest.exists() else []), *reversed(found)]

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`."""
        values = dataclasses.asdict(summary)
        if summary.plan is None:
            del values["plan"]
        replace_text(self.path / "summary.json", json.dumps(values, indent=2) + "\n")

    def conclude(self, summary: Summary, failure: Failure | None) -> Failure | None:
        """Write the summary, and the status "completed" unless there is a failure; returns it."""
        try:
            self.write_summary(summary)
        except OSError as error:
            failure = failure or Failure(f"{self.path} cannot be written to ({error.strerror})")
        if failure is None:
            self.write_status(Status(state="completed", phase="end", exit_code=ExitCode.DONE))
        return failure

    def claim_failure(self, status: Status, error: BaseException) -> bool:
        """Write `failure.json`; returns whether this rank is the one to report the failure.

        One rank's error makes the others fail in their collectives, so the first report counts, and
        only it returns True. Where nothing can be written, every rank reports on the console.
        """
        report = dataclasses.asdict(status) | {"traceback": traceback.format_exception(error)}
        try:
            with self._failure.open("x") as file:
                json.dump(report, file, indent=2)
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def settle(
        self,
        seen: str,
        rank: int | None,
        *,
        certain: bool = False,
        code: ExitCode = ExitCode.FAILED,
    ) -> dict[str, Any]:
        """Write and return the final status; the agent calls this when all ranks have ended.

        A main rank may have written "running" over another rank's failure, and a killed rank could
        write nothing.

        Args:
            seen: the reason as the agent sees it, where no rank has reported one.
            certain: `seen` is the cause, and the failures that ranks reported its consequence.
        """
        status = self.read_status()
        if certain or not status or status["state"] == "running":
            found = {"phase": status.get("phase", "start"), "reason": seen, "rank": rank}
            found |= {"state": "failed", "exit_code": int(code)}
            if not certain:
                found |= json_object(self._failure)
            found.pop("traceback", None)
            self.write_status(Status(**found))
            return found
        return status

    @property
    def is_ours(self) -> bool:
        """True if this process has begun or reopened the run."""
        return self._lock.is_held


def in_use(path: Path, holder: str) -> str:
    """Return the refusal of a folder that another run uses."""
    return f"--out {path}: in use by a run that is alive ({holder}): wait for it, or stop it"


def default_run_folder(resolved: Resolved) -> Path:
    """Return an unused name, runs/TIME-MODEL-STRATEGY."""
    time = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    label = resolved.config.model.label.encode()[:LONGEST_LABEL].decode(errors="ignore")
    stem = f"{time}-{label}-{variant_of(resolved.config).label}"
    folder = RUNS / stem
    attempt = 2
    while folder.exists():
        folder = RUNS / f"{stem}-{attempt}"
        attempt += 1
    return folder


def reserve_run_folder(resolved: Resolved) -> Path:
    """Make an empty folder of such a name, so that no run that starts meanwhile takes the name."""
    while True:
        folder = default_run_folder(resolved)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder


def release_run_folder(folder: Path) -> None:
    """Remove a reserved folder in which no run has begun."""
    if folder.parent == RUNS:
        with contextlib.suppress(OSError):  # it has: it is not empty
            folder.rmdir()


def stack_file(folder: Path, rank: int) -> Path:
    """Return the hidden file that a rank's stacks are written to."""
    return folder / f".stack-rank{rank}"


def environment() -> dict[str, Any]:
    """Return versions, hardware and source revision; no variables, which may hold secrets."""
    packages = ("torch", "deepspeed", "numpy", "tokenizers", "nvidia-nccl-cu13", "transformers")
    return {
        "command": sys.argv,
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in packages if (found := version_of(name))},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cpus": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "git": _git_revision(),
    }


def _git_revision() -> str | None:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _free_name(path: Path) -> Path:
    """Return `summary-1.json` for `summary.json`, or the next free number."""
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return kept


def with_own_inputs(config: RunConfig, source: Path | None, saved: "Extra") -> RunConfig:
    """Return the config with what the resumed run began with, where config.yaml no longer leads
    there: its copy of a tokenizer file that is gone, as that of an import which was removed since;
    and the checkpoint beside which its adapters were trained, whose run may have saved others."""
    given = Path(config.data.tokenizer.removeprefix(HUB_PREFIX)).expanduser()
    is_path, beside = given.suffix == ".json" or given.is_absolute(), config.model.init_from
    if source is not None and is_path and not given.exists():
        own = run_folder_of(candidates(source)[0]) / TOKENIZER_FILE
        config = config.replace(tokenizer=str(own)) if own.is_file() else config
    base = saved.get("base")
    if beside is None or base is None or base.path is None or not Path(base.path).exists():
        return config
    of_it = run_folder_of(Path(base.path)) == beside.absolute()
    return config.replace(init_from=Path(base.path)) if of_it else config
