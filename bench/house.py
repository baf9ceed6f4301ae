"""Counts of the code, for `make house`: lines, files, classes and flags by wing, and the files
that a training loads before its first step."""

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher.__main__ import VERBS
from launcher.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
CORE = ("config", "data", "optim", "parallel", "strategies", "checkpoint", "measure", "run")

# Own modules are counted when the first learning rate is asked for: then all is built.
UNTIL_THE_FIRST_STEP = """
import os, sys
import launcher.train as train
ask = train.learning_rate
def first(*args):
    ours = [m for name, m in sys.modules.items() if name.split(".")[0] == "launcher"]
    print(len({m.__file__ for m in ours}))
    sys.stdout.flush()
    os._exit(0)
train.learning_rate = first
train.main(sys.argv[1:])
"""
TRAINING = "--model nano --layers 1 --steps 2 --micro-batch 2 --device cpu --log-level warning"


class Counts(NamedTuple):
    """Counts of a wing's Python files."""

    files: int
    lines: int
    classes: int
    functions: int


def counts(paths: Iterator[Path]) -> Counts:
    """Count the files; a line is any line, blank ones and comments among them."""
    files = lines = classes = functions = 0
    for path in paths:
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        files += 1
        lines += len(text.splitlines())
        classes += sum(isinstance(node, ast.ClassDef) for node in nodes)
        functions += sum(isinstance(node, ast.FunctionDef) for node in nodes)
    return Counts(files, lines, classes, functions)


def wing_of(path: Path) -> str:
    """The wing that a file of launcher/ belongs to, by the first folders of its path."""
    parts = path.relative_to(ROOT / "launcher").parts
    if parts[0] == "strategies" and any(part.startswith("forecast") for part in parts[2:]):
        return "forecast"
    if parts[0] in CORE:
        return "core"
    return parts[0] if len(parts) > 1 else "doors"


def loaded_files() -> int:
    """Own files that `python -m launcher.train` has loaded when its first step begins."""
    command = [sys.executable, "-c", UNTIL_THE_FIRST_STEP, *TRAINING.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


def main() -> None:
    """Print the tables."""
    launcher = [path for path in (ROOT / "launcher").rglob("*.py") if "model" not in path.parts]
    wings = {"model": counts((ROOT / "model").rglob("*.py"))}
    for name in ("util", "core", "forecast", "compare", "tools", "doors"):
        wings[name] = counts(path for path in launcher if wing_of(path) == name)
    wings["launcher/ in all"] = counts(iter(launcher))
    wings["tests"] = counts((ROOT / "tests").rglob("*.py"))
    wings["bench"] = counts((ROOT / "bench").rglob("*.py"))
    print(f"{'wing':16} {'files':>7} {'lines':>7} {'classes':>7} {'functions':>9}")
    for name, found in wings.items():
        files, lines, classes, functions = found
        print(f"{name:16} {files:7,} {lines:7,} {classes:7,} {functions:9,}")
    flags = sum(
        len(dataclasses.fields(getattr(RunConfig(), section.name)))
        for section in dataclasses.fields(RunConfig)
    )
    print(f"flags of a training: {flags}; verbs: {len(VERBS)}")
    print(f"own files loaded before the first step of a training: {loaded_files()}")


if __name__ == "__main__":
    main()
