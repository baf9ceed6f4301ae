"""The run folder: what is in it, and who may write which file when."""

import dataclasses
import json
import os
import platform
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml

from launcher.errors import ExitCode, Failure, UserError
from launcher.folder_lock import FolderLock
from launcher.measure.records import FailureReport, State, Status
from launcher.version import version_of


class RunFolder:
    """One run's files. Small files are replaced whole, so a reader never sees half of one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FolderLock(path)

    def create(self, config: dict[str, Any]) -> None:
        """Make the folder and write what is known at the start (main rank only).

        Raises:
            FileExistsError: somebody else's run is here.
        """
        self.path.mkdir(parents=True, exist_ok=False)
        self._begin(config)

    def reopen(self, config: dict[str, Any]) -> None:
        """Go on in the folder of a run that ended early (main rank only).

        What tells of its end stays under another name, and so does a config that has changed.

        Raises:
            UserError: the run is still alive.
        """
        self._begin(config)

    def _begin(self, config: dict[str, Any]) -> None:
        if not self._lock.take():
            raise UserError(in_use(self.path, self._lock.holder() or "another run"))
        text = yaml.safe_dump(config, sort_keys=False)
        config_file = self.path / "config.yaml"
        if config_file.exists() and config_file.read_text(encoding="utf-8") != text:
            _set_aside(config_file)
        for name in ("failure.json", "summary.json"):
            _set_aside(self.path / name)
        _replace(config_file, text)
        _replace(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        self.write_status("running", phase="start")

    def write_status(
        self,
        state: State,
        *,
        phase: str,
        reason: str | None = None,
        rank: int | None = None,
        exit_code: int | None = None,
        detail: dict[str, Any] | None = None,
    ) -> None:
        """Say how the run stands, in `status.json`; what failed runs no more."""
        if state == "running" and self._failure.exists():
            return
        status = Status(
            state=state,
            phase=phase,
            reason=reason,
            rank=rank,
            exit_code=exit_code,
            detail=detail or {},
            updated_unix_s=time.time(),
        )
        text = json.dumps(dataclasses.asdict(status), indent=2) + "\n"
        try:
            _replace(self.path / "status.json", text)
        except OSError as error:
            # Training matters more; and this is the last place left to say how it ends.
            ends = "" if state == "running" else f": the run is {state} ({reason or phase})"
            print(
                f"shardscale: {self.path / 'status.json'} cannot be written ({error.strerror})"
                f"{ends}",
                file=sys.stderr,
            )

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed in this attempt."""
        return self._failure.exists()

    def read_status(self) -> dict[str, Any] | None:
        """The content of `status.json`, None where there is none."""
        return _read(self.path / "status.json")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`."""
        _replace(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def conclude(self, summary: dict[str, Any], failure: Failure | None) -> Failure | None:
        """Write the summary, and that the run is completed; returns why it is not."""
        try:
            self.write_summary(summary)
        except OSError as error:
            failure = failure or Failure(f"{self.path} cannot be written to ({error.strerror})")
        if failure is None:
            self.write_status("completed", phase="end", exit_code=ExitCode.DONE)
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

    def settle(self, seen: str, rank: int | None, *, certain: bool = False) -> dict[str, Any]:
        """The final status, for the agent, when all ranks have gone.

        A main rank that had not noticed yet may have written "running" over another rank's
        failure; a rank that was killed could not write anything: then `seen` is the reason, and
        where that is `certain`, whatever the others reported is a consequence.
        """
        status = self.read_status()
        if certain or status is None or status["state"] == "running":
            found = {"phase": (status or {}).get("phase", "start"), "reason": seen, "rank": rank}
            found |= {"state": "failed", "exit_code": int(ExitCode.FAILED)}
            if not certain:
                found |= _read(self._failure) or {}
            found.pop("traceback", None)
            self.write_status(**found)
            return found
        return status

    @property
    def is_anothers(self) -> bool:
        """For the agent, whose ranks have gone: whether another run of this machine has it now."""
        return (self._lock.holder() or "").endswith(f" on {socket.gethostname()}")

    @property
    def _failure(self) -> Path:
        return self.path / "failure.json"


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


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file's content; None where there is none, or no room was left to write it."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content


def _set_aside(path: Path) -> None:
    """`summary.json` -> `summary-1.json`: what an attempt of the run has left is kept."""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
