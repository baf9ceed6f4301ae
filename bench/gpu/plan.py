"""Measure on one GPU in 25 minutes: one command, one order, stopped and continued anywhere.

    bench/gpu/prepare.sh                   # before, where there is a network: wheels, once
    python bench/gpu/plan.py               # on the machine with the GPU, as often as needed
    python bench/gpu/plan.py --list        # parts and their budgets

Each part's result is written the moment it is there, with the GPU's name, driver and torch: into
$OUT if that is set, otherwise into bench/results/gpu-NAME. Parts that have a result for this GPU,
this code (launcher/ and model/) and this command are left out, so the same command continues where
the one before ended; results that came back from $OUT are found in bench/results/gpu-NAME. Logs
and records of runs stay in build/gpu/NAME; in $OUT they are records.tar.gz.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parts import parts
from processes import Stop
from runner import ROOT, Part, Results, refuse, run_plan
from table import table

BUILD = ROOT / "build" / "gpu"
WHEELS, SITE = BUILD / "wheels", BUILD / "site"
WHEELS_PYTHON = (3, 12)  # as in prepare.sh
MOST_RECORD_BYTES = 2**21  # of a file in records.tar.gz: no checkpoints, no traces
INSTALL_S = 45  # estimate, for the wheels and the first import of torch


def main() -> None:
    options = parse()
    chosen = select(parts(), options.only)
    if options.list:
        show(chosen)
        return
    ends_s = time.monotonic() + 60 * options.minutes
    with Stop() as stop:
        environment = environment_of(install(WHEELS, SITE))
        machine = ask_machine(environment)
        name = f"gpu-{slug(machine['name'])}"
        work, published = BUILD / name, ROOT / "bench" / "results" / name
        out = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
        if out is None and machine["name"].startswith("null GPU"):
            refuse("results of the null GPU are no measurements: set OUT to another folder")
        results = Results(
            machine,
            {"commit": commit(), "sources": digest(ROOT)},
            read=(published, work),
            written=(work, out or published),
        )
        driver, torch = machine["driver"], machine["torch"]
        print(f"{machine['name']}, driver {driver}, torch {torch}: results in {out or published}")
        failed = run_plan(
            chosen,
            results,
            work,
            environment=environment,
            ends_s=ends_s,
            patience=options.patience,
            again=options.again,
            stop=stop,
            kept=lambda: archive(work, out) if out else None,
        )
    print(table(results.records.values()))
    sys.exit(128 + stop.heard[0] if stop.heard else int(failed > 0))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the parts and their budgets")
    parser.add_argument("--only", nargs="+", metavar="PART", help="sections, or SECTION/NAME")
    parser.add_argument("--again", action="store_true", help="also parts that have a result")
    parser.add_argument("--minutes", type=float, default=25, help="of all, then it stops (25)")
    parser.add_argument(
        "--patience", type=float, default=2, help="a part's limit over its budget (2)"
    )
    return parser.parse_args()


def select(every: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    if names is None:
        return list(every)
    known = {name for part in every for name in (part.section, part.label)}
    if unknown := [name for name in names if name not in known]:
        refuse(f"--only {unknown[0]}: no such part; --list shows all")
    return [part for part in every if part.section in names or part.label in names]


def show(chosen: Sequence[Part]) -> None:
    for part in chosen:
        print(f"{part.budget_s:5d} s  {part.label:32} {' '.join(part.words)}")
    seconds = sum(part.budget_s for part in chosen)
    print(f"{seconds:5d} s  in all, and {INSTALL_S} s before the first (estimates)")


def install(wheels: Path, site: Path) -> Path | None:
    """The folder of the wheels' packages, installed once; None where this Python needs none."""
    if not wheels.exists() or sys.version_info[:2] != WHEELS_PYTHON:
        return None
    chosen = sorted(wheels.glob("*.whl"))
    # By name, not by time: a copy of the folder is no reason to install again.
    names, installed = "\n".join(wheel.name for wheel in chosen), site / "installed.txt"
    if not installed.exists() or installed.read_text() != names:
        shutil.rmtree(site, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        command += ["--no-compile", "--target", str(site), *map(str, chosen)]
        if subprocess.run(command, check=False).returncode:
            refuse(f"the wheels in {wheels} cannot be installed: run bench/gpu/prepare.sh anew")
        installed.write_text(names)
    return site


def environment_of(site: Path | None) -> dict[str, str]:
    """In which parts find this checkout, bench's scripts, and the wheels' packages first."""
    before = os.environ.get("PYTHONPATH")
    folders = [str(folder) for folder in (site, ROOT, ROOT / "bench") if folder]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(folders + ([before] if before else []))
    if site:  # scripts such as ninja
        environment["PATH"] = os.pathsep.join((str(site / "bin"), os.environ["PATH"]))
    return environment


def ask_machine(environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "bench/gpu/machine.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(2)  # it has said why
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def slug(gpu: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")


def commit() -> str | None:
    """Return the commit of the checkout; None in a copy without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def digest(root: Path) -> str:
    """Return a digest of the code that is measured, which a copy without git has, too."""
    found = hashlib.sha256()
    for folder in ("launcher", "model"):
        for path in sorted((root / folder).rglob("*.py")):
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def archive(work: Path, out: Path) -> None:
    """Logs and records of all parts so far as one file, which is never half."""

    def small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        left_out = {"checkpoints", "tb"} & set(Path(entry.name).parts)
        return None if left_out or entry.size > MOST_RECORD_BYTES else entry

    new = out / "records.tar.gz.new"
    with tarfile.open(new, "w:gz") as file:
        file.add(work, arcname=work.name, filter=small)
    new.replace(out / "records.tar.gz")


if __name__ == "__main__":
    main()
