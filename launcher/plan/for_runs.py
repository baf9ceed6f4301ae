"""The forecast as a run asks for it (`launcher/run/forecast.py`)."""

from launcher.plan.against import against_run
from launcher.plan.budget import within_budget
from launcher.plan.suggestions import suggestions

__all__ = ["against_run", "suggestions", "within_budget"]
