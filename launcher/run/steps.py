"""Ended steps: their figures, and those that were skipped because a number was not finite."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from launcher.util.errors import Failure

MOST_LOSS = 700.0  # the perplexity of a larger one overflows
REMEDY = (
    "lower --lr or --clip, or lengthen --warmup-steps, and resume from a checkpoint before that"
)


EXPERT_FIELDS = ("expert_load_min", "expert_load_max", "expert_entropy")
"""Fields of a step record for how tokens are spread over experts, as `load_of` returns them."""
STRAGGLES_FROM = 1.5  # times the median of the other ranks
MOST_IN_A_ROW = 20
"""Skipped steps in a row that end a run."""


class SkippedSteps:
    """Counts skipped steps over the whole run, earlier starts included.

    All ranks see the same global gradient norm and loss, so all end at the same step.
    """

    def __init__(self, *, most_in_a_row: int = MOST_IN_A_ROW) -> None:
        self._most = most_in_a_row
        self._in_a_row = 0
        self._loss = 0.0
        self.total = 0
        self.lost_since: int | None = None
        """First of the latest consecutive steps whose loss shows that the weights are lost."""

    def note(self, step: int, *, applied: bool, loss: float) -> None:
        """Count an ended step.

        Raises:
            Failure: it is one skipped step in a row too many.
        """
        self._loss = loss
        if loss < MOST_LOSS:  # False for NaN
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
        raise Failure(
            f"{self._in_a_row} steps in a row were skipped, up to step {step}: their gradients are "
            f"not finite: {REMEDY}"
        )

    def refuse_lost(self) -> None:
        """Refuse to continue with weights that are lost.

        Raises:
            Failure: by the latest losses.
        """
        if self.lost_since is not None:
            raise Failure(
                f"training has diverged: the loss is {self._loss:.4g} from step "
                f"{self.lost_since} on: {REMEDY}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedStep:
    """One rank's step, on its device: mean loss over its micro-batches, allocated peak."""

    step: int
    loss: Tensor
    grad_norm: Tensor | float
    applied: Tensor | bool
    lr: float
    peak_bytes: int | None = None
    routed: Tensor | None = None
    """This rank's tokens [blocks, experts]."""


def read_together(*groups: Sequence[Tensor | float]) -> list[list[float]]:
    """Return scalars as plain numbers, in their groups.

    Scalars on a GPU come in one copy: the host waits once, not once per number.

    Args:
        groups: scalars, within a group of one type where they are tensors on a GPU.
    """
    there = [[value for value in group if _on_gpu(value)] for group in groups]
    stacked = [torch.stack(group).double() for group in there if group]
    copied = iter(torch.cat(stacked).tolist() if stacked else ())
    return [
        [next(copied) if _on_gpu(value) else float(value) for value in group] for group in groups
    ]


def _on_gpu(value: Tensor | float) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def straggler(alone_s: Sequence[float]) -> tuple[int, float] | None:
    """Return the rank that keeps the others waiting, if one does, and its time over their median.

    Args:
        alone_s: each rank's time outside collectives.
    """
    if len(alone_s) < 2:
        return None
    slowest = max(range(len(alone_s)), key=alone_s.__getitem__)
    # without its own time: the median of two ranks would hide the slower one
    others = statistics.median([*alone_s[:slowest], *alone_s[slowest + 1 :]])
    if others == 0:  # ranks that are not there, in a rehearsal of one of them
        return None
    ratio = alone_s[slowest] / others
    return (slowest, ratio) if ratio > STRAGGLES_FROM else None
