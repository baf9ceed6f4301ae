"""Environments of plan_from_rehearsals.py: those of rehearsals.py, and thin ones on top of them.

A line of `published/plan_from_environments.csv` names packages that are installed without their
dependencies, in an environment that sees the packages of another one.
"""

import csv
import subprocess
from pathlib import Path
from typing import Final

from rehearsals import installed, prepared

LAYERS: Final = Path(__file__).parent / "published" / "plan_from_environments.csv"


def environment(name: str, work: Path) -> Path:
    """Return the folder of an environment, which is installed if it is not there yet."""
    with LAYERS.open(encoding="utf-8", newline="") as file:
        lines = {line["name"]: line for line in csv.DictReader(file)}
    if name not in lines:
        return prepared(name, work)
    base, folder = prepared(lines[name]["on"], work), work / name
    if not (folder / "installed").exists():
        subprocess.run([str(base / "bin" / "python"), "-m", "venv", str(folder)], check=True)
        packages = next(folder.glob("lib/python3*/site-packages"))
        below = next(base.glob("lib/python3*/site-packages"))
        line = f"import site; site.addsitedir({str(below)!r})\n"
        (packages / "base.pth").write_text(line, encoding="utf-8")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--no-deps", *lines[name]["packages"].split()], check=True)
        (folder / "installed").touch()
    return folder


def versions(name: str, work: Path) -> dict[str, str]:
    """Return versions of what decides on bytes."""
    with LAYERS.open(encoding="utf-8", newline="") as file:
        below = {line["name"]: line["on"] for line in csv.DictReader(file)}
    found = installed(work / below[name]) if name in below else {}
    return found | installed(work / name)
