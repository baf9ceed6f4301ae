"""The plan of bench/gpu on the null GPU: does every command still run?

    PYTHON=ENV/bin/python ENV/bin/python tests/nullgpu/rehearse.py FOLDER [FLAG...]

ENV is what a GPU machine has: Python 3.12, torch's CUDA build, NumPy, and nothing else. Flags are
the plan's own (`--only default`). Results go to FOLDER/out; bytes in them are those of torch's real
allocator with no kernels run. Parts that compare values or time kernels fail here, or say 0: they
are recorded as failed, and the plan continues. Whether a step is finite is answered with "yes", or
with SHARDSCALE_NULL_GPU_CHECKS=false "no": DeepSpeed's parts ask for overflows, and need that.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from nullgpu.runs import ROOT, environment

# A machine without a GPU may have few cores.
PATIENCE = ("--minutes", "600", "--patience", "10")


def main(folder: Path, flags: list[str]) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    checks = os.environ.get("SHARDSCALE_NULL_GPU_CHECKS", "true")
    more = {"OUT": str(folder / "out"), "SHARDSCALE_NULL_GPU_CHECKS": checks}
    python = os.environ.get("PYTHON", sys.executable)
    command = [python, "bench/gpu/plan.py", *PATIENCE, *flags]
    return subprocess.run(
        command, cwd=ROOT, env=environment(folder, more, python=python)
    ).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
