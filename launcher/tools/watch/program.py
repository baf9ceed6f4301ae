"""Start a program, pass signals on to it, and end as it ends."""

import os
import signal
from collections.abc import Mapping, Sequence

from launcher.util.errors import UserError

_PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)


def run_program(
    command: Sequence[str], environment: Mapping[str, str], *, stdout_to_stderr: bool = False
) -> int:
    """Run a program to its end; return its exit code, or minus the signal that has ended it.

    Signals sent to this process go to the program. One that a terminal sends reaches both by
    itself, and is not sent again.

    Raises:
        UserError: the program cannot be started.
    """
    watched = {*_PASSED_ON, signal.SIGCHLD}
    # Blocked before the program starts: `_wait` takes them one by one, and none ends this process
    # in between. `setsigmask` gives the program the mask that was there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, 2, 1)] if stdout_to_stderr else []
        process_id = os.posix_spawnp(
            command[0], list(command), dict(environment), setsigmask=before, file_actions=actions
        )
        return _wait(process_id, watched)
    except OSError as error:
        raise UserError(
            f"{command[0]} cannot be started ({error.strerror}): check the command after --"
        ) from None
    finally:
        while signal.sigtimedwait(watched, 0) is not None:
            pass  # meant for a program that has ended
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(process_id: int, watched: set[signal.Signals]) -> int:
    while True:
        heard = signal.sigwaitinfo(watched)
        # SIGCHLD also comes when the program is stopped or continued, then it has not ended
        if heard.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(process_id, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        elif heard.si_code <= 0:  # by a process; the kernel's own are positive
            os.kill(process_id, heard.si_signo)


def end_as(code: int) -> int:
    """Return the exit code of a program, or end by the signal that has ended it."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
        os._exit(128 - code)  # one that does not end a process
    return code
