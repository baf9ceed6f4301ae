"""Forecast protocol: the three questions that a run asks.

The forecast reads the core and is never imported by it: the doors pass a function that imports it
on first use. Without a forecast a run trains, measures, saves and ends the same.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from launcher.config.resolve import Resolved
from launcher.parallel.world import World
from launcher.strategies.ledger import Ledger


class Forecast(Protocol):
    """Memory budget of blocks, prediction of a run, suggestions after out of memory."""

    def within_budget(self, resolved: Resolved) -> Resolved:
        """Divide the bytes of `--activation-checkpointing budget=...` among the blocks.

        Raises:
            UserError: the budget is too small for any choice.
        """

    def against_run(
        self,
        resolved: Resolved,
        world: World,
        peak: Ledger,
        step_times_s: Sequence[float],
        *,
        peaks: Mapping[tuple[str, str], int],
        resumed: bool,
    ) -> tuple[list[str], dict[str, Any], Ledger | None]:
        """Return a finished run beside its prediction, or why there is none: lines for the console,
        the entry of `summary.json`, and the predicted ledger.

        Args:
            peak: the measured ledger at the highest moment of a step.
            step_times_s: of the latest steps after the warm-up.
            peaks: (period, phase) -> highest measured bytes.
            resumed: the first step found the optimizer's states.
        """

    def suggestions(
        self, failed: Resolved, device: torch.device, *, ranks_per_node: int
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        """Return the cheapest changes with which a run that ran out of memory would have fitted,
        each as a line for the console, with flags to paste, and as an entry of `status.json`."""


LoadForecast = Callable[[], Forecast]
