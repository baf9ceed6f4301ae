"""The run folder: what is in it, and who may write which file when."""

import dataclasses
import json
import os
import platform
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from launcher.measure.records import FailureReport, Status, Summary
from launcher.run import launch
from launcher.util.errors import ExitCode, Failure, UserError
from launcher.util.files import FolderLock, replace_text
from launcher.util.packages import version_of


class RunFolder:
    """One run's files. Small files are replaced whole, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(path)
        self._failure = path / "failure.json"

    def begin(self, config: dict[str, Any], *, reopens: bool, agents: Sequence[str] = ()) -> None:
        """Write what is known at the start (main rank only), in a folder of one's own, or in that
        of a run that ended early.

        What tells of an earlier end stays under another name, and so does a config that has
        changed.

        Args:
            agents: of the launch that has the folder from now on.

        Raises:
            FileExistsError: somebody else's run is where a new one is to be.
            UserError: the run to go on with is still alive.
        """
        if not reopens:
            self.path.mkdir(parents=True)
        if not self._lock.take():
            raise UserError(in_use(self.path, self._lock.holder() or "another run"))
        text = yaml.safe_dump(config, sort_keys=False)
        config_file = self.path / "config.yaml"
        if config_file.exists() and config_file.read_text(encoding="utf-8") != text:
            _set_aside(config_file)
        for name in ("failure.json", "summary.json"):
            _set_aside(self.path / name)
        # Before the config: a run without one is nobody's yet.
        known = {**environment(), launch.KEY: launch.record(list(agents))}
        replace_text(self.path / "environment.json", json.dumps(known, indent=2) + "\n")
        replace_text(config_file, text)
        self.write_status(Status(state="running", phase="start"))

    def write_status(self, status: Status) -> None:
        """Say how the run stands, in `status.json`; what failed runs no more."""
        state = status.state
        if state == "running" and self._failure.exists():
            return
        text = json.dumps(dataclasses.asdict(status), indent=2) + "\n"
        try:
            replace_text(self.path / "status.json", text)
        except OSError as error:
            # Training matters more; and this is the last place left to say how it ends.
            sentence = f"{self.path / 'status.json'} cannot be written ({error.strerror})"
            if state != "running":
                sentence += f": the run is {state} ({status.reason or status.phase})"
            print(f"shardscale: {sentence}", file=sys.stderr)

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed in this attempt."""
        return self._failure.exists()

    def read_status(self) -> dict[str, Any]:
        """The content of `status.json`, nothing where there is none."""
        return _read(self.path / "status.json")

    def write_summary(self, summary: Summary) -> None:
        """Write `summary.json`."""
        values = dataclasses.asdict(summary)
        if summary.plan is None:
            del values["plan"]
        replace_text(self.path / "summary.json", json.dumps(values, indent=2) + "\n")

    def conclude(self, summary: Summary, failure: Failure | None) -> Failure | None:
        """Write the summary, and that the run is completed; returns why it is not."""
        try:
            self.write_summary(summary)
        except OSError as error:
            failure = failure or Failure(f"{self.path} cannot be written to ({error.strerror})")
        if failure is None:
            self.write_status(Status(state="completed", phase="end", exit_code=ExitCode.DONE))
        return failure

    def claim_failure(self, error: BaseException, *, rank: int, phase: str, code: int) -> bool:
        """Record a failure in `failure.json`, first come first served.

        One rank's error makes the others fail in their collectives; the first to get here is the
        one to be believed, and the only one that returns True. Where nothing can be written, it is
        True as well: then the console is where it is told.
        """
        report = FailureReport(
            state="oom" if code == ExitCode.OUT_OF_MEMORY else "failed",
            phase=phase,
            reason="".join(traceback.format_exception_only(error)).strip(),
            rank=rank,
            exit_code=code,
            traceback=traceback.format_exception(error),
        )
        try:
            with self._failure.open("x") as file:
                json.dump(dataclasses.asdict(report), file, indent=2)
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
        """The final status, for the agent, when all ranks have gone.

        A main rank that had not noticed yet may have written "running" over another rank's
        failure; a rank that was killed could not write anything: then `seen` is the reason, and
        where that is `certain`, whatever the others reported is a consequence.
        """
        status = self.read_status()
        if certain or not status or status["state"] == "running":
            found = {"phase": status.get("phase", "start"), "reason": seen, "rank": rank}
            found |= {"state": "failed", "exit_code": int(code)}
            if not certain:
                found |= _read(self._failure)
            found.pop("traceback", None)
            self.write_status(Status(**found))
            return found
        return status

    @property
    def is_ours(self) -> bool:
        """Whether this process has begun a run, or goes on with one, in it."""
        return self._lock.is_held

    @property
    def is_anothers(self) -> bool:
        """For the agent, whose ranks have gone: whether another launch has begun the run in it."""
        agents = launch.read(self.path).get("agents")
        return isinstance(agents, list) and launch.agent() not in agents


def in_use(path: Path, holder: str) -> str:
    """The sentence of a refusal: two runs never share a folder."""
    return f"--out {path}: in use by a run that is alive ({holder}): wait for it, or stop it"


def environment() -> dict[str, Any]:
    """Versions, hardware and source revision; no variables, which may hold secrets."""
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


def _read(path: Path) -> dict[str, Any]:
    """A JSON file's content; nothing where there is none, or no room was left to write it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _set_aside(path: Path) -> None:
    """`summary.json` -> `summary-1.json`: what an attempt of the run has left is kept."""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
