"""How optional packages are installed: from this source tree, never from an index by name."""

import importlib.metadata
import re
from pathlib import Path

DISTRIBUTION = "shardscale"
SOURCE = Path(__file__).resolve().parents[1]


def how_to_install(extra: str) -> str:
    """The `pip install` line for an extra of pyproject.toml.

    Somebody else may publish a package of our name, so the line names the source tree; where the
    package was installed from a wheel and there is none, it names what the extra consists of.
    """
    if (SOURCE / "pyproject.toml").exists():
        return f"pip install -e '{SOURCE}[{extra}]'"
    needed = importlib.metadata.requires(DISTRIBUTION) or []
    of_extra = [
        entry.partition(";")[0].strip()
        for entry in needed
        if re.search(rf"extra == ['\"]{extra}['\"]", entry)
    ]
    return "pip install " + " ".join(f"'{entry}'" for entry in of_extra)
