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

    def within_budget(self, resolved: Resolved, *, world_size: int) -> Resolved:
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
    ) -> tuple[Ledger | None, dict[str, Any], list[str]]:
        """Predict a finished run, beside what it measured, or say why that fails.

        Returns the predicted ledger, the entry of `summary.json`, and lines for the console.

        Args:
            peak: the measured ledger at the highest moment of a step.
            step_times_s: of the latest steps after the warm-up.
            peaks: (period, phase) -> highest measured bytes.
            resumed: the first step found the optimizer's states.
        """

    def suggestions(
        self, failed: Resolved, device: torch.device, *, world_size: int, ranks_per_node: int
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        """Return the cheapest changes with which a run that ran out of memory would have fitted:
        for each a line for the console, with flags to paste, and the entry of `status.json`."""


LoadForecast = Callable[[], Forecast]
