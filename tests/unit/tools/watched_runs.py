"""Starting programs under `shardscale watch`, and reading what it records of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PROGRAM = str(Path(__file__).parent / "watched_program.py")
WATCH = (sys.executable, "-m", "launcher", "watch", "--out")
MORE = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(*words: str, more: dict[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        words,
        env={**os.environ, **MORE, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return content


def watched(folder: Path, how: str, *, sends: int | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of the program, watched; a signal goes to the launcher."""
    process = start(*WATCH, str(folder), "--", sys.executable, PROGRAM, how)
    output = ""
    if sends is not None:
        assert process.stdout is not None
        while not output.endswith("ready\n"):
            line = process.stdout.readline()
            assert line, process.communicate()
            output += line
        process.send_signal(sends)
    rest, errors = process.communicate(timeout=120)
    return process.returncode, output + rest, errors
