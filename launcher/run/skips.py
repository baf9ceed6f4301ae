"""Steps that went wrong, because a gradient or the loss was no number: counted, and borne only so
many."""

from launcher.util.errors import Failure

MOST_LOSS = 700.0  # the perplexity of a larger one is no number any more
REMEDY = (
    "lower --lr or --clip, or lengthen --warmup-steps, and go on from a checkpoint before that "
    "with --resume"
)


class Diverged(Failure):
    """Training has left the numbers, and will not come back by itself."""


MOST_IN_A_ROW = 20
"""More skipped steps in a row end a run: its gradients stay NaN or infinite."""


class SkippedSteps:
    """Counts skipped steps over the whole run, its earlier attempts included.

    All ranks see the same global gradient norm and loss, so all of them give up at the same step.
    """

    def __init__(self, *, most_in_a_row: int) -> None:
        self._most = most_in_a_row
        self._in_a_row = 0
        self._loss = 0.0
        self.total = 0
        self.lost_since: int | None = None
        """The first of the newest steps in a row whose loss tells that the weights are lost."""

    def note(self, step: int, *, applied: bool, loss: float) -> None:
        """Count an ended step.

        Raises:
            Diverged: it is the one too many that went wrong.
        """
        self._loss = loss
        if loss < MOST_LOSS:
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = step
        self.total += not applied
        if applied and self.lost_since is None:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row < self._most:
            return
        self.refuse_lost()
        raise Diverged(
            f"{self._in_a_row} steps in a row were skipped, up to step {step}: their gradients are "
            f"not finite: {REMEDY}"
        )

    def refuse_lost(self) -> None:
        """What follows would come from weights that are of no use.

        Raises:
            Diverged: the newest loss says so.
        """
        if self.lost_since is not None:
            raise Diverged(
                f"training has diverged: the loss is {self._loss:.4g} from step "
                f"{self.lost_since} on: {REMEDY}"
            )
