"""Steps that were skipped because a gradient was NaN or infinite: counted, and only so many."""

import math


class Diverged(Exception):
    """Too many steps in a row were skipped."""


class SkippedSteps:
    """Counts skipped steps over the whole run, its earlier lives included.

    All ranks see the same global gradient norm, so all of them give up at the same step.
    """

    def __init__(self, *, most_in_a_row: int) -> None:
        self._most = most_in_a_row
        self._in_a_row = 0
        self.total = 0

    def note(self, step: int, *, applied: bool, loss: float) -> None:
        """Count an ended step.

        Raises:
            Diverged: it is the one too many.
        """
        if applied:
            self._in_a_row = 0
            return
        self.total += 1
        self._in_a_row += 1
        if self._in_a_row >= self._most:
            loss_is = "finite" if math.isfinite(loss) else str(loss)
            raise Diverged(
                f"{self._in_a_row} steps in a row were skipped, up to step {step}: the gradients "
                f"are not finite and the loss is {loss_is}; lower --lr, or go on from an earlier "
                "checkpoint (--max-skipped-steps sets how many are borne)"
            )
