"""Entry point of a browser's Python: placeholders first, then the planner."""

from launcher.tools.site.inside.absent import stand_in

PACKAGES = (
    *("annotated_types", "deepspeed", "numpy", "psutil", "pydantic", "pynvml", "rich", "torch"),
    *("tyro", "typing_extensions", "yaml"),
)
"""Packages that the planner's modules import at their top, beside the standard library."""
stand_in(PACKAGES)

from launcher.tools.site.inside.answer import assessed, choices_of  # noqa: E402

__all__ = ["assessed", "choices_of"]
