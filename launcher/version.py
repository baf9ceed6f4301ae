"""Which versions these are, without importing what they are of."""

import platform
import tomllib
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).parents[1]


def version_of(package: str) -> str | None:
    """The installed version; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """What the sources say of themselves, else what was installed from them."""
    try:
        project = tomllib.loads((SOURCES / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "shardscale":
            return str(project["version"])
    except (OSError, ValueError, KeyError):
        pass  # installed without its sources
    return version_of("shardscale") or "unknown"


def line() -> str:
    """What `--version` prints."""
    others = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in ("torch", "deepspeed"))
    return f"shardscale {own_version()} ({others}, Python {platform.python_version()})"
