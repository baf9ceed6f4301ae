"""How a rank ends: done, refused, or failed - told once, in one place, with the real cause."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from launcher.errors import ExitCode, UserError
from launcher.measure.folder import RunFolder
from launcher.world import World, leave


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception: nothing on the way may swallow it."""


class Ending:
    """Where a failure is reported, once the run has a folder."""

    def __init__(self) -> None:
        self.folder: RunFolder | None = None

    def watches(self, folder: RunFolder) -> None:
        """From now on failures are recorded in `folder`."""
        self.folder = folder


def refuse(error: UserError) -> NoReturn:
    """Print the sentence once (on rank 0) and end with exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"memscale: {error}", file=sys.stderr)
    leave(ExitCode.REFUSED, together=False)


@contextlib.contextmanager
def ending(world: World) -> Iterator[Ending]:
    """Turn an exception or a signal into a recorded, once-printed end of the run."""
    end = Ending()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        yield end
    except (Exception, Interrupted, KeyboardInterrupt) as error:
        _fail(error, end.folder, world)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def _fail(error: BaseException, folder: RunFolder | None, world: World) -> NoReturn:
    # A second signal must not cut the report short.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if folder is None:
        # Nobody to agree with about who was first.
        traceback.print_exception(error)
        leave(ExitCode.FAILED, together=False)
    phase = (folder.read_status() or {}).get("phase", "start")
    if folder.claim_failure(error, rank=world.rank, phase=phase):
        if isinstance(error, Interrupted):
            reason = str(error)
            print(f"memscale: {reason}", file=sys.stderr)
        else:
            reason = "".join(traceback.format_exception_only(error)).strip()
            print(f"memscale: rank {world.rank} failed while in {phase}:", file=sys.stderr)
            traceback.print_exception(error)
        folder.write_status(
            "failed", phase=phase, reason=reason, rank=world.rank, exit_code=ExitCode.FAILED
        )
    leave(ExitCode.FAILED, together=False)
