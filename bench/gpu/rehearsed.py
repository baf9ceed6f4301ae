"""Programs that know nothing of this project: rehearsed without the GPU, then run on it.

    python bench/gpu/rehearsed.py FOLDER

Bytes of torch's allocator and seconds of a step, side by side, in FOLDER/rehearsed.json. All
rehearsals run at the same time, without the GPU; then the programs run one after the other.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import is_null_gpu
from runs import ROOT, table

from launcher.measure.hardware import gpu_named

PROGRAMS = ("loop", "accumulating", "trainer")
PROGRAM = (sys.executable, str(Path(__file__).with_name("programs.py")))
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    gpu = gpu_named(torch.cuda.get_device_name()).name
    started = {name: start_rehearsal(name, gpu, folder) for name in PROGRAMS}
    rehearsed = {name: rehearsal(process) for name, process in started.items()}
    found = {}
    for name in PROGRAMS:
        # On the null GPU this one is no measurement, but shows that the program ends.
        found[name] = {"rehearsed": rehearsed[name], "measured": run(name)}
        (folder / "rehearsed.json").write_text(json.dumps(found, indent=1) + "\n")
        print(name, json.dumps(found[name]), flush=True)
    print(table(HEADER, [row(name, sides) for name, sides in found.items()]))
    if failed := [name for name in PROGRAMS if "error" in str(found[name])]:
        sys.exit(f"failed: {', '.join(failed)}")


def start_rehearsal(name: str, gpu: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher", "rehearse", "--json", f"--gpu={gpu}"]
    command += ["--out", str(folder / f"rehearsal-{name}"), "--", *PROGRAM, name]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def rehearsal(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate()
    try:
        (rank,) = json.loads(output)["ranks"]
    except (ValueError, KeyError):
        return {"error": (output + errors)[-2000:]}
    seconds = rank["seconds"] or {"total_s": None, "least_s": None, "most_s": None}
    return {
        **{f"{name}_peak_bytes": rank[f"{name}_peak_bytes"] for name in ("allocated", "reserved")},
        **{"step_s": seconds["total_s"], "least_s": seconds["least_s"]},
        "most_s": seconds["most_s"],
    }


def run(name: str) -> dict[str, Any]:
    done = subprocess.run([*PROGRAM, name], cwd=ROOT, capture_output=True, text=True)
    try:
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"allocated')]
        found: dict[str, Any] = json.loads(lines[-1])
    except IndexError:
        return {"error": done.stderr[-2000:]}
    return found | {"step_s": None} if is_null_gpu() else found


HEADER = ("program", "allocated GiB", "measured", "reserved GiB", "measured", "s/step", "measured")


def row(name: str, sides: dict[str, dict[str, Any]]) -> list[str]:
    cells = [name]
    for figure in ("allocated_peak_bytes", "reserved_peak_bytes", "step_s"):
        scale, digits = (1, 4) if figure == "step_s" else (GIB, 3)
        for side in ("rehearsed", "measured"):
            value = sides[side].get(figure)
            cells.append("n/a" if value is None else f"{value / scale:.{digits}f}")
    return cells


if __name__ == "__main__":
    main()
