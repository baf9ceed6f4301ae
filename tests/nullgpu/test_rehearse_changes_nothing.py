"""Programs of others take the way on the stand-in GPU that they would take on a real one."""

import json
import sys
from pathlib import Path
from typing import Any

from nullgpu.runs import MIB
from nullgpu.test_rehearse_programs import shardscale

PROGRAMS = Path(__file__).parent / "programs"


def rehearse(folder: Path, program: str, *words: str, gpu: str = "H100") -> tuple[Any, list[str]]:
    """Return what a rehearsal found, and the lines that the program printed."""
    flags = ("--gpu", gpu, "--json", "--out", str(folder / "run"), "--")
    done = shardscale("rehearse", *flags, sys.executable, str(PROGRAMS / program), *words)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr.splitlines()


def test_a_caught_out_of_memory_error_keeps_nothing(tmp_path: Path) -> None:
    found, lines = rehearse(tmp_path, "batch_search.py", gpu="A100-80GB")
    words = [line.split() for line in lines if line.startswith(("left ", "found "))]
    assert words[-1] == ["found", "65536"], lines[-10:]
    # Weights of 24 layers, and no activation of any.
    weights = 24 * 4 * 4097 * 4096
    assert int(words[0][1]) < weights + 64 * MIB
    assert found["steps"] == 1
