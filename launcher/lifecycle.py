"""How a rank ends: done, refused, or failed - told once, in one place, with the real cause."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from launcher.errors import ExitCode, UserError
from launcher.measure.limit import is_out_of_memory, lift_limit, requested_bytes
from launcher.measure.memory import dump_snapshot
from launcher.measure.session import Session
from launcher.sizes import gib
from launcher.world import World, leave


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived. Not an Exception: nothing on the way may swallow it."""


class Ending:
    """Where a failure is reported, once the run has a folder."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def watches(self, session: Session) -> None:
        """From now on failures are recorded in the session's folder, and SIGUSR1 saves and ends."""
        self.session = session
        signal.signal(signal.SIGUSR1, lambda number, frame: session.request_stop())


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
        _fail(error, end.session, world)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def _fail(error: BaseException, session: Session | None, world: World) -> NoReturn:
    # A second signal must not cut the report short.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    out_of_memory = is_out_of_memory(error)
    code = ExitCode.OUT_OF_MEMORY if out_of_memory else ExitCode.FAILED
    if session is None:
        # Nobody to agree with about who was first.
        traceback.print_exception(error)
        leave(code, together=False)
    lift_limit(world.device)
    folder, where = session.folder, session.where
    if folder.claim_failure(error, rank=world.rank, phase=where, code=code):
        reason = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        detail: dict[str, Any] = {}
        if out_of_memory:
            detail = session.failure_details() | {"requested_bytes": requested_bytes(error)}
            detail["snapshot"] = dump_snapshot(folder.path, world)
            _say_out_of_memory(world, where, detail)
        elif isinstance(error, Interrupted):
            reason = str(error)
            print(f"memscale: {reason} while in {where}", file=sys.stderr)
        else:
            print(f"memscale: rank {world.rank} failed while in {where}:", file=sys.stderr)
            traceback.print_exception(error)
        folder.write_status(
            "oom" if out_of_memory else "failed",
            phase=where,
            reason=reason,
            rank=world.rank,
            exit_code=code,
            detail=detail,
        )
    leave(code, together=False)


def _say_out_of_memory(world: World, where: str, detail: dict[str, Any]) -> None:
    wanted = gib(detail["requested_bytes"])
    print(
        f"memscale: out of memory on rank {world.rank} in {where}: {wanted} were asked for",
        file=sys.stderr,
    )
    ledger = detail["ledger"]
    if ledger is not None:
        held = {k: v for k, v in ledger["device"].items() if v}
        lines = ", ".join(f"{name.removesuffix('_bytes')} {gib(v)}" for name, v in held.items())
        print(f"memscale: at that moment: {lines}", file=sys.stderr)
