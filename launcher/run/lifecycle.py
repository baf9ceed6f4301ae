"""How a rank ends: done, refused, or failed - told once, in one place, with the real cause."""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import FrameType
from typing import Any, NoReturn

from launcher.errors import ExitCode, Failure, UserError
from launcher.measure.limit import is_out_of_memory, lift_limit, requested_bytes
from launcher.measure.memory import MemoryMeter, TracedMemory, dump_snapshot
from launcher.measure.records import Status
from launcher.parallel.world import OWN_AGENT, World, leave
from launcher.run.advice import advise, room_there_was
from launcher.run.hang import StackOnRequest, is_timeout, where_ranks_are
from launcher.run.session import Session
from launcher.sizes import gib


class Interrupted(BaseException):
    """A signal says: end now. Not an Exception: nothing on the way may swallow it."""


class NothingToSave(Interrupted):
    """Asked to stop before the first step of this attempt of the run."""


class Ending:
    """Where a failure is reported, once the run has a folder, and where signals arrive.

    SIGTERM and SIGUSR1 ask to finish the step, save and end; before the first step, to end
    at once. Schedulers send them more than once, so the next ones change nothing: who cannot wait
    sends SIGINT, which ends at once. So does SIGTERM after another rank has failed.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.stack: StackOnRequest | None = None

    def watches(self, session: Session) -> None:
        """From now on failures are recorded in the session's folder."""
        self.session = session
        self.stack = StackOnRequest(session.folder.path, session.record.rank)
        # Where NCCL's watchdog leaves its own record of the last collectives.
        record = str(session.folder.path / "flight-recorder-nccl-rank")
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", record)

    def receives_signals(self) -> None:
        """Handle signals from now on."""
        signal.signal(signal.SIGINT, _interrupt)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.session is not None and self.session.folder.has_failed:
            if number == signal.SIGTERM:
                _interrupt(number, frame)
        elif self.session is None or not self.session.begun:
            raise NothingToSave(f"stopped by {signal.Signals(number).name} before its first step")
        else:
            self.session.agreement.stop_requested = True  # all ranks end at the same step, soon


def refuse(error: UserError, *, by_all: bool = False) -> NoReturn:
    """Print the sentence once (on rank 0; `by_all`: on each) and end with exit code 2."""
    if by_all or os.environ.get("RANK", "0") == "0":
        _say(str(error))
    leave(ExitCode.REFUSED, together=False)


@contextlib.contextmanager
def ending(world: World) -> Iterator[Ending]:
    """Turn an exception or a signal into a recorded, once-printed end of the run."""
    end = Ending()
    end.receives_signals()
    try:
        yield end
        if end.stack is not None:
            end.stack.close()
    except (Exception, Interrupted, KeyboardInterrupt) as error:
        _fail(error, end.session, world)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(f"stopped by {signal.Signals(number).name}")


def _fail(error: BaseException, session: Session | None, world: World) -> NoReturn:
    # A second signal must not cut the report short.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if isinstance(error, UserError) and session is None:
        refuse(error)
    # In its first step a rank may have lost others, which were asked before theirs and have ended.
    asked = session is not None and session.agreement.stop_requested and session.begun == 1
    if isinstance(error, NothingToSave) or asked:
        _end_with_nothing(session)
    out_of_memory = is_out_of_memory(error)
    code = ExitCode.OUT_OF_MEMORY if out_of_memory else ExitCode.FAILED
    if isinstance(error, UserError):
        code = ExitCode.REFUSED  # a damaged checkpoint shows only when it is read
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
            detail = _memory_details(session.memory, where=where, step=session.step)
            detail["requested_bytes"] = requested_bytes(error)
            detail["snapshot"] = dump_snapshot(folder.path, world)
            _say_out_of_memory(world, where, detail)
        elif is_timeout(error):
            ranks = where_ranks_are(folder.path, world)
            detail = {"ranks_of_this_node": ranks}
            _say(f"rank {world.rank} waited longer than --collective-timeout-s allows, in {where}")
            for rank, frame in ranks.items():
                _say(f"rank {rank} was in {frame}")
            traceback.print_exception(error)
        elif isinstance(error, UserError | Failure):
            reason = str(error)
            _say(str(error))
        elif isinstance(error, Interrupted):
            reason = str(error)
            _say(f"{reason} while in {where}")
        else:
            _say(f"rank {world.rank} failed while in {where}:")
            traceback.print_exception(error)
        status = Status(
            state="oom" if out_of_memory else "failed",
            phase=where,
            reason=reason,
            rank=world.rank,
            exit_code=code,
            detail=detail,
        )
        folder.write_status(status)
        if out_of_memory:  # the report is safe by now
            detail |= _advise(session, world)
            folder.write_status(replace(status, detail=detail, updated_unix_s=time.time()))
    leave(code, together=False)


def _end_with_nothing(session: Session | None) -> NoReturn:
    if OWN_AGENT in os.environ:  # it knows whether somebody asked, or another rank has failed
        leave(ExitCode.DONE, together=False)
    if session is None:
        leave(ExitCode.PREEMPTED, together=False)
    session.agreement.preempted = True
    session.finish_preempted()
    leave(session.exit_code, together=False)


def _memory_details(memory: MemoryMeter, *, where: str, step: int) -> dict[str, Any]:
    """The ledger, and with `--memory-trace` the largest tensors."""
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


def _say(sentence: str) -> None:
    print(f"shardscale: {sentence}", file=sys.stderr)


def _say_out_of_memory(world: World, where: str, detail: dict[str, Any]) -> None:
    wanted = gib(detail["requested_bytes"])
    _say(f"out of memory on rank {world.rank} in {where}: tried to allocate {wanted}")
    ledger = detail["ledger"]
    if ledger is not None:
        held = {k: v for k, v in ledger["device"].items() if v}
        lines = ", ".join(f"{name.removesuffix('_bytes')} {gib(v)}" for name, v in held.items())
        _say(f"at that moment: {lines}")


def _advise(session: Session, world: World) -> dict[str, Any]:
    """Print what would have fitted; what the planner cannot say is nothing to fail for."""
    try:
        room = room_there_was(session.resolved, world.device, ranks_per_node=world.local_size)
        advice = advise(
            session.resolved, room, world_size=world.size, ranks_per_node=world.local_size
        )
    except Exception as error:
        return {"advice": [], "advice_failed": f"{type(error).__name__}: {error}"}
    for one in advice:
        _say(one.line())
    return {"advice": [asdict(one) for one in advice]}
