"""Ending of a rank: done, refused, stopped or failed, reported once and with the real cause."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from launcher.measure.limit import is_out_of_memory, lift_limit, requested_bytes
from launcher.measure.memory import MemoryMeter, TracedMemory, dump_snapshot
from launcher.measure.records import Status
from launcher.parallel.world import OWN_AGENT, World, leave
from launcher.run.agreement import STOP_SIGNALS, heard_signals, stop_exit_code
from launcher.run.forecast_protocol import LoadForecast
from launcher.run.run_folder import RunFolder, stack_file
from launcher.run.session import Session
from launcher.util.errors import ExitCode, Failure, UserError, tell
from launcher.util.sizes import gib

_AGAIN_AFTER_S = 0.02
_FIRST_LEAVES_WITHIN_S = 5.0
_TIMEOUTS = ("timed out waiting", "application timeout")  # gloo's words, by where it waits


class Interrupted(BaseException):
    """A signal ends this process now. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, number: int, *, has_begun: bool = True) -> None:
        when = "" if has_begun else " before its first step"
        super().__init__(f"stopped by {signal.Signals(number).name}{when}")
        self.number = number
        self.has_begun = has_begun
        """False before the first step of this start: there is nothing to save."""


class Ending:
    """Handles stop signals, and knows where a failure is to be recorded.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 finish the step, save and end; before the first step they
    end at once. Schedulers signal more than once, so further signals change nothing, except for
    SIGINT: a second Ctrl-C ends the run at once. So does a signal after another rank has failed.
    """

    def __init__(self, load_forecast: LoadForecast | None) -> None:
        self.load_forecast = load_forecast
        self.session: Session | None = None
        self.folder: RunFolder | None = None
        """Set before this process makes or reopens it."""
        self._stacks: TextIO | None = None

    def takes(self, folder: RunFolder) -> None:
        """Note the folder that this process is about to make or reopen."""
        self.folder = folder

    def watches(self, session: Session) -> None:
        """Record failures in the session's folder from now on, and on SIGUSR2 all threads' stacks,
        even while this rank hangs inside a collective."""
        self.session = session
        self._stacks = stack_file(session.folder.path, session.record.rank).open("w")
        faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)
        # Where NCCL's watchdog leaves its own record of the last collectives.
        record = str(session.folder.path / "flight-recorder-nccl-rank")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", record)

    def close(self) -> None:
        """Stop handling SIGUSR2."""
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR2)
            self._stacks.close()
            Path(self._stacks.name).unlink(missing_ok=True)

    def receives_signals(self) -> None:
        """Handle signals from now on."""
        for number in heard_signals():
            signal.signal(number, self._ask)
        sys.unraisablehook = _send_again

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.session is not None and self.session.folder.has_failed:
            if number != signal.SIGUSR1:  # torch's agent sends SIGTERM; SIGUSR1 only asks to save
                raise Interrupted(number)
        elif self.session is None or not self.session.begun:
            raise Interrupted(number, has_begun=False)
        # Our own agent repeats the first signal every second.
        elif (
            self.session.agreement.stop_signal
            and number == signal.SIGINT
            and OWN_AGENT not in os.environ
        ):
            raise Interrupted(number)
        else:
            self.session.agreement.stop_signal = self.session.agreement.stop_signal or number
            self.session.agreement.stop_requested = True  # all ranks end at the same step


def _send_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeat a signal whose exception Python had to ignore: it came inside a `__del__`, such as
    those by which torch counts references to storages."""
    error = unraisable.exc_value
    if not isinstance(error, Interrupted):
        sys.__unraisablehook__(unraisable)
        return
    again = threading.Timer(_AGAIN_AFTER_S, os.kill, (os.getpid(), error.number))
    again.daemon = True
    again.start()


def refuse(error: UserError | Failure, *, by_all: bool = False) -> NoReturn:
    """Print the sentence once per node (`by_all`: on each rank) and end with exit code 2, or 4
    for a failure."""
    if by_all or os.environ.get("LOCAL_RANK", "0") == "0":
        tell(error)
    else:
        # Were it to leave first, the agent would end rank 0 before its sentence. So rank 0 leaves
        # first, and the agent ends this one; without an agent it leaves by itself.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_FIRST_LEAVES_WITHIN_S)
    code = ExitCode.FAILED if isinstance(error, Failure) else ExitCode.REFUSED
    leave(code, together=False)


@contextlib.contextmanager
def ending(world: World, load_forecast: LoadForecast | None = None) -> Iterator[Ending]:
    """Turn an exception or a signal into a recorded, once-printed end of the run."""
    end = Ending(load_forecast)
    end.receives_signals()
    try:
        yield end
        end.close()
    except (Exception, Interrupted, KeyboardInterrupt) as error:
        _fail(error, end, world)


def _fail(error: BaseException, end: Ending, world: World) -> NoReturn:
    # Further signals must not interrupt the report.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    session = end.session
    # In its first step a rank may lose others that were stopped before theirs and have ended.
    stopped = session is not None and session.agreement.stop_requested and session.begun == 1
    if not error.has_begun if isinstance(error, Interrupted) else stopped:
        _end_with_nothing(end, error)
    out_of_memory = is_out_of_memory(error)
    code = ExitCode.OUT_OF_MEMORY if out_of_memory else ExitCode.FAILED
    if isinstance(error, UserError):
        code = ExitCode.REFUSED  # a damaged checkpoint shows only when it is read
    elif isinstance(error, Interrupted) and error.number == signal.SIGINT:
        code = ExitCode.INTERRUPTED
    if session is None:
        _fail_at_start(error, end, code)
    lift_limit(world.device)
    status = Status(
        state="oom" if out_of_memory else "failed",
        phase=session.where,
        reason=_reason(error),
        rank=world.rank,
        exit_code=code,
    )
    if session.folder.claim_failure(status, error):
        detail = _report(error, session, world)
        session.folder.write_status(replace(status, detail=detail))
        if out_of_memory:  # the report is safe by now
            detail |= _suggest(session, world, end.load_forecast)
            session.folder.write_status(replace(status, detail=detail, updated_unix_s=time.time()))
    with contextlib.suppress(Exception):  # the failure that is reported comes first
        session.close()
    leave(code, together=False)


def _reason(error: BaseException) -> str:
    if isinstance(error, UserError | Failure | Interrupted):
        return str(error)
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    return next(line for line in lines if not line.startswith(" "))  # as places in a program do


def _report(error: BaseException, session: Session, world: World) -> dict[str, Any]:
    """Print a failure; returns what `status.json` has of it besides."""
    where = session.where
    if is_out_of_memory(error):
        detail = _memory_details(session.memory, where=where, step=session.step)
        detail["requested_bytes"] = requested_bytes(error)
        detail["snapshot"] = dump_snapshot(session.folder.path, world)
        _say_out_of_memory(world, where, detail)
        return detail
    if _is_timeout(error):
        from launcher.run.hang import where_ranks_are

        ranks = where_ranks_are(session.folder.path, world)
        tell(f"rank {world.rank} waited longer than --collective-timeout-s allows, in {where}")
        for rank, frame in ranks.items():
            tell(f"rank {rank} was in {frame}")
        traceback.print_exception(error)
        return {"ranks_of_this_node": ranks}
    if isinstance(error, UserError | Failure):
        tell(error)
    elif isinstance(error, Interrupted):
        tell(f"{error} while in {where}")
    else:
        tell(f"rank {world.rank} failed while in {where}:")
        traceback.print_exception(error)
    return {}


def _is_timeout(error: BaseException) -> bool:
    """Return whether a collective has waited too long for another rank."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _TIMEOUTS)


def _fail_at_start(error: BaseException, end: Ending, code: ExitCode) -> NoReturn:
    """End without a session: no other rank knows of this one yet."""
    if end.folder is not None and end.folder.is_ours:
        reason = _reason(error)
        end.folder.write_status(
            Status(state="failed", phase="start", reason=reason, exit_code=code)
        )
    if isinstance(error, UserError):
        refuse(error)
    traceback.print_exception(error)
    leave(code, together=False)


def _end_with_nothing(end: Ending, error: BaseException) -> NoReturn:
    if OWN_AGENT in os.environ:  # which knows whether a signal came, or another rank has failed
        leave(ExitCode.DONE, together=False)
    number = error.number if isinstance(error, Interrupted) else None
    session, code = end.session, stop_exit_code(number)
    if session is not None:
        session.agreement.stop_signal = session.agreement.stop_signal or number
        session.agreement.preempted = True
        session.finish_preempted()
        session.close()
        leave(session.exit_code, together=False)
    if end.folder is not None and end.folder.is_ours:
        state = Status(state="preempted", phase="start", reason=str(error), exit_code=code)
        end.folder.write_status(state)
    if os.environ.get("RANK", "0") == "0":
        tell(f"{error}: there was nothing to save")
    leave(code, together=False)


def _memory_details(memory: MemoryMeter, *, where: str, step: int) -> dict[str, Any]:
    """Return the ledger, and with `--memory-trace` the largest tensors."""
    ledger = memory.now()
    details: dict[str, Any] = {
        "where": where,
        "step": step,
        "ledger": None if ledger is None else {**ledger.as_dict(), "moment": "oom"},
    }
    if isinstance(memory, TracedMemory):
        details["largest_tensors"] = [
            {
                "bytes": live.size_bytes,
                "shape": live.shape,
                "dtype": live.dtype,
                "born_in": live.phase,
                "module": live.module,
            }
            for live in memory.trace.largest(10)
        ]
    return details


def _say_out_of_memory(world: World, where: str, detail: dict[str, Any]) -> None:
    wanted = gib(detail["requested_bytes"])
    tell(f"out of memory on rank {world.rank} in {where}: tried to allocate {wanted}")
    ledger = detail["ledger"]
    if ledger is not None:
        held = {k: v for k, v in ledger["device"].items() if v}
        lines = ", ".join(f"{name.removesuffix('_bytes')} {gib(v)}" for name, v in held.items())
        tell(f"at that moment: {lines}")


def _suggest(session: Session, world: World, load_forecast: LoadForecast | None) -> dict[str, Any]:
    """Print the changes that would have fitted.

    An error of the forecast is only recorded, beside the failure of the run itself.
    """
    if load_forecast is None:
        return {"suggestions": []}
    try:
        suggestions = load_forecast().suggestions(
            session.resolved,
            world.device,
            ranks_per_node=world.local_size,
        )
    except Exception as error:
        return {"suggestions": [], "suggestions_failed": f"{type(error).__name__}: {error}"}
    for line, _ in suggestions:
        tell(line)
    return {"suggestions": [record for _, record in suggestions]}
