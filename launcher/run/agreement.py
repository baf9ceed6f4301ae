"""Agreement of ranks: stopping and saving at the same step, though clocks and signals differ.

The requests of each rank travel with the all-reduce of a logged step and, where steps are slow, in
a few bytes between logged steps, so that a stop is agreed within seconds.
"""

import math
import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from launcher.parallel.world import World
from launcher.util.errors import ExitCode
from launcher.util.startup import hears

STOP_SIGNALS: tuple[signal.Signals, ...] = (
    *(signal.SIGINT, signal.SIGHUP),  # of a terminal: Ctrl-C, and its end
    *(signal.SIGTERM, signal.SIGUSR1),  # of schedulers
)
WITHIN_S = 2.0  # or one step, where a step takes longer
REQUESTS = 4  # summands that `Agreement.requests` returns
# A rank's request is 2, not 1: where no kernel runs (`shardscale rehearse`), sums read as 1.
REQUEST = 2.0
TEST_SHARE = 0.1  # of the time for training, so that a run out of time still has a result


def heard_signals() -> list[signal.Signals]:
    """Return the stop signals to handle: not those that `&` in a script, or nohup, ignores."""
    return [n for n in STOP_SIGNALS if n not in (signal.SIGINT, signal.SIGHUP) or hears(n)]


def stop_reason(number: int | None) -> str:
    """Describe the signal that stopped a run; None where another rank received it."""
    source = "a signal to another rank" if number is None else signal.Signals(number).name
    return f"stopped by {source}"


def stop_exit_code(number: int | None) -> ExitCode:
    """Return the exit code of a run that a signal stopped."""
    return ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED


class Agreement:
    """Stops and timed saves that all ranks agree on.

    Args:
        log_every: steps between the all-reduces that carry requests anyway.
        max_seconds: the main rank asks to stop after this long.
        save_seconds: the main rank asks to save this long after the last save.
    """

    def __init__(
        self,
        world: World,
        *,
        log_every: int,
        max_seconds: float = math.inf,
        save_seconds: float = math.inf,
    ) -> None:
        now_s = time.monotonic()
        self._world = world
        self.log_every = log_every
        self._max_seconds = max_seconds
        self._deadline_s = now_s + max_seconds
        self._save_seconds = save_seconds
        self._saved_s = now_s
        # The first step of a start, whatever its number, is settled alone.
        self._step, self._settled_s = math.inf, now_s
        self._next = 0
        self.stop_requested = False
        """This rank's own request to save and end, set by a signal."""
        self.stop_signal: int | None = None
        """The first stop signal that this rank received."""
        self.time_is_up = False
        self.preempted = False
        self.save_is_due = False

    def turn_to_test(self) -> None:
        """Count batches of the test split from now on, with time of their own."""
        self._step, self._next, self._settled_s = 0, 1, time.monotonic()
        self.time_is_up = False
        self._deadline_s += TEST_SHARE * self._max_seconds

    def ends_test_after(self, batch: int) -> bool:
        """Return whether testing ends here; all ranks call this after the same batches."""
        self.between_logged_steps(batch)
        return self.preempted or self.time_is_up

    def saved(self) -> None:
        """Restart the clock of timed saves."""
        self._saved_s = time.monotonic()
        self.save_is_due = False

    def requests(self, step: int) -> list[float]:
        """Return this rank's summands of the vector that `settle` takes."""
        now_s = time.monotonic()
        main = self._world.is_main
        over = now_s > self._deadline_s
        save = now_s - self._saved_s > self._save_seconds
        step_s = (now_s - self._settled_s) / max(1, step - self._step)
        return [
            REQUEST * (main and over),
            REQUEST * self.stop_requested,
            REQUEST * (main and save),
            step_s if main else 0.0,  # so that the sum over ranks is the main rank's
        ]

    def settle(self, step: int, requests: Sequence[float]) -> None:
        """Apply the sum of all ranks' requests at the end of a step."""
        over, stop, save, step_s = requests
        asked = [total >= REQUEST for total in (over, stop, save)]
        self.time_is_up, self.preempted, self.save_is_due = asked
        self._step, self._settled_s = step, time.monotonic()
        steps = int(WITHIN_S / step_s) if step_s > 0 else self.log_every
        self._next = step + min(max(1, steps), self.log_every)

    def between_logged_steps(self, step: int) -> None:
        """Agree now if that is due; all ranks call this after the same steps."""
        if step < self._next:
            return
        requests = torch.tensor(self.requests(step), dtype=torch.float64)
        if self._world.size > 1:
            dist.all_reduce(requests)  # of host memory: a GPU's queue goes on undisturbed
        self.settle(step, requests.tolist())
