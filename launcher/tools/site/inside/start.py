"""The first thing that a browser's Python runs."""

import json

from launcher.tools.site.inside.absent import stand_in

PACKAGES = (
    *("annotated_types", "deepspeed", "numpy", "psutil", "pydantic", "pynvml", "rich", "torch"),
    *("tyro", "typing_extensions", "yaml"),
)
"""What the planner's modules import at their top, beside the standard library."""
stand_in(PACKAGES)

from launcher.tools.site.inside import answer  # noqa: E402


def choices_of(argv: str) -> str:
    """JSON in, JSON out: see `launcher.tools.site.inside.answer`."""
    return json.dumps(answer.choices_of(tuple(json.loads(argv))))


def assessed(argv: str, number: int) -> str:
    """The same of one of the choices."""
    return json.dumps(answer.assessed(tuple(json.loads(argv)), number))
