"""Installed packages, without importing them, and how to install optional ones."""

import platform
import re
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "shardscale"
INSTALL_FLASH_ATTENTION = "pip install flash-attn --no-build-isolation"
"""No extra: it compiles against the installed torch, which an isolated build does not see."""
SOURCE = Path(__file__).resolve().parents[2]


@cache  # a plan asks for each of its choices, and each time files are read
def version_of(package: str) -> str | None:
    """Return the installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def files_of(package: str) -> list[Path]:
    """Return the installed files of a package; none if it is missing."""
    try:
        return [Path(str(file.locate())) for file in metadata.files(package) or []]
    except metadata.PackageNotFoundError:
        return []


def own_version() -> str:
    """Return the version of the sources, else of the installed package."""
    try:
        project = tomllib.loads((SOURCE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == DISTRIBUTION:
            return str(project["version"])
    except (OSError, ValueError, KeyError):
        pass  # installed without its sources
    return version_of(DISTRIBUTION) or "unknown"


def version_line() -> str:
    """Return the line of `--version`."""
    others = ", ".join(f"{name} {version_of(name) or 'missing'}" for name in ("torch", "deepspeed"))
    return f"{DISTRIBUTION} {own_version()} ({others}, Python {platform.python_version()})"


def how_to_install(extra: str) -> str:
    """Return the `pip install` line for an extra of pyproject.toml.

    Somebody else may publish a package of our name, so the line names the source tree; where the
    package was installed from a wheel and there is none, it names what the extra consists of.
    """
    if (SOURCE / "pyproject.toml").exists():
        return f"pip install -e '{SOURCE}[{extra}]'"
    needed = metadata.requires(DISTRIBUTION) or []
    of_extra = [
        entry.partition(";")[0].strip()
        for entry in needed
        if re.search(rf"extra == ['\"]{extra}['\"]", entry)
    ]
    return "pip install " + " ".join(f"'{entry}'" for entry in of_extra)
