"""What all ranks must do at the same step, though their clocks and their signals differ.

Each rank says what it requests; requests travel with the all-reduce of a logged step, and where
steps are slow, in a few bytes between logged steps, so that a stop is agreed within seconds.
"""

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from launcher.parallel.world import World

WITHIN_S = 2.0  # or one step, where a step takes longer
REQUESTS = 4
TEST_SHARE = 0.1  # of the time for training, so that a run out of time still has a result


class Agreement:
    """Stopping and saving on time, agreed by all ranks.

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
        self._step, self._settled_s = 0, now_s
        self._next = 0
        self.stop_requested = False
        """This rank's own request to save and end, set by a signal."""
        self.asked_by: int | None = None
        """The first such signal."""
        self.time_is_up = False
        self.preempted = False
        self.save_is_due = False

    def turn_to_test(self) -> None:
        """Training is over; what counts now are the batches of the test split."""
        self._step, self._next, self._settled_s = 0, 1, time.monotonic()
        self.time_is_up = False
        self._deadline_s += TEST_SHARE * self._max_seconds

    def ends_test_after(self, batch: int) -> bool:
        """Whether no more is read. All ranks call this after the same batches."""
        self.between_logged_steps(batch)
        return self.preempted or self.time_is_up

    def saved(self) -> None:
        """A checkpoint was written at this step; the next one by the clock is due later."""
        self._saved_s = time.monotonic()
        self.save_is_due = False

    def requests(self, step: int) -> list[float]:
        """This rank's share of the sum that `settle` reads."""
        now_s = time.monotonic()
        main = self._world.is_main
        over = now_s > self._deadline_s
        save = now_s - self._saved_s > self._save_seconds
        step_s = (now_s - self._settled_s) / max(1, step - self._step)
        return [
            float(main and over),
            float(self.stop_requested),
            float(main and save),
            step_s if main else 0.0,
        ]

    def settle(self, step: int, requests: Sequence[float]) -> None:
        """Take the sum of everybody's requests at the end of a step."""
        over, stop, save, step_s = requests
        self.time_is_up, self.preempted, self.save_is_due = over > 0, stop > 0, save > 0
        self._step, self._settled_s = step, time.monotonic()
        steps = int(WITHIN_S / step_s) if step_s > 0 else self.log_every
        self._next = step + min(max(1, steps), self.log_every)

    def between_logged_steps(self, step: int) -> None:
        """Agree now, if the last time was long ago. All ranks call this after the same steps."""
        if step < self._next:
            return
        requests = torch.tensor(self.requests(step), dtype=torch.float64)
        if self._world.size > 1:
            dist.all_reduce(requests)  # of host memory: a GPU's queue goes on undisturbed
        self.settle(step, requests.tolist())
