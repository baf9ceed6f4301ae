"""The forecast as a run asks for it (`launcher/run/forecast_protocol.py`)."""

from launcher.forecast.against import against_run
from launcher.forecast.budget import within_budget
from launcher.forecast.suggestions import suggestions

__all__ = ["against_run", "suggestions", "within_budget"]
