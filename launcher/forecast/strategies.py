"""Each strategy's forecast, which stands beside the strategy and is imported from here alone."""

from importlib import import_module
from typing import Protocol, cast

from launcher.config.schema import RunConfig
from launcher.forecast.buffers import Buffers
from launcher.forecast.timeline import Timeline
from launcher.forecast.traffic import Traffic, Wire
from launcher.strategies import strategy_of
from launcher.strategies.rank import Rank


class StrategyForecast(Protocol):
    """The two functions of `launcher/strategies/<name>/forecast`."""

    def buffers(self, rank: Rank, timeline: Timeline) -> Buffers:
        """Return what the strategy allocates around the model, written on a timeline."""

    def traffic(self, wire: Wire) -> Traffic:
        """Bytes that one rank sends and moves in a step."""


def forecast_of(config: RunConfig) -> StrategyForecast:
    """The forecast of the chosen strategy."""
    module = import_module(f"launcher.strategies.{strategy_of(config).name}.forecast")
    return cast(StrategyForecast, module)
