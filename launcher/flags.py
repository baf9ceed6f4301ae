"""What every section of the config checks by, and how its fields are spelled as flags."""

import math
from typing import Any

from launcher.errors import UserError


def flag(name: str) -> str:
    """`micro_batch` -> `--micro-batch`."""
    return "--" + name.replace("_", "-")


def require_positive(section: Any, *names: str) -> None:
    """Refuse fields that are 0, negative or infinite; `None` means not given.

    Raises:
        UserError: naming the first of them.
    """
    for name in names:
        value = getattr(section, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{flag(name)} {value} must be more than 0")
