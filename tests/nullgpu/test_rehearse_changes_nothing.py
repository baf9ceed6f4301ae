"""Programs of others take the way on the stand-in GPU that they would take on a real one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from nullgpu.runs import MIB
from nullgpu.test_rehearse_programs import TORCHRUN, shardscale

PROGRAMS = Path(__file__).parent / "programs"


def rehearse(
    folder: Path, program: str, *flags: str, gpu: str = "H100", ranks: bool = False
) -> tuple[Any, list[str]]:
    """Return what a rehearsal found, and the lines that the program printed."""
    words = ("--gpu", gpu, "--json", "--out", str(folder / "run"), *flags, "--", sys.executable)
    start = TORCHRUN if ranks else ()
    done = shardscale("rehearse", *words, *start, str(PROGRAMS / program))
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


@pytest.mark.parametrize("program", ["on_the_meta_device.py", "pipeline.py"])
def test_ranks_agree_on_values_that_a_library_sends(program: str, tmp_path: Path) -> None:
    found, lines = rehearse(tmp_path, program, ranks=True)
    assert (found["verdict"], found["steps"], len(found["ranks"])) == ("fits", 3, 2), lines[-20:]
    assert [rank["values"] for rank in found["ranks"]] == [[], []]
