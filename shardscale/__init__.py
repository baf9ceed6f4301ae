"""Plan, rehearse, measure and read trainings: `plan()`, `rehearse()`, `measure()`, `load()`.

These names and their parameters are a promise: a change of meaning comes with a new major version.
Nothing is imported until it is asked for. Bad input raises `UserError`, one sentence with the fix.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launcher.util.errors import UserError
    from shardscale.measuring import measure
    from shardscale.planning import Plan, plan
    from shardscale.rehearsing import RehearsalReport, rehearse
    from shardscale.results import Results, load, load_model
    from shardscale.tables import Table

__all__ = [
    "Plan",
    "RehearsalReport",
    "Results",
    "Table",
    "UserError",
    "load",
    "load_model",
    "measure",
    "plan",
    "rehearse",
]

_HOMES = {
    **{"Plan": "shardscale.planning", "plan": "shardscale.planning"},
    **dict.fromkeys(("Results", "load", "load_model"), "shardscale.results"),
    **{"Table": "shardscale.tables", "UserError": "launcher.util.errors"},
    "measure": "shardscale.measuring",
    # IPython asks for the last at %load_ext.
    **dict.fromkeys(
        ("RehearsalReport", "rehearse", "load_ipython_extension"), "shardscale.rehearsing"
    ),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("shardscale")
    if name not in _HOMES:
        raise AttributeError(f"module 'shardscale' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
