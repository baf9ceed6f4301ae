"""Parts of bench/gpu on the stand-in GPU, as short as can be: does every command still run?

    NULLGPU_LIBRARIES=... PYTHON=ENV/bin/python python tests/nullgpu/rehearse.py FOLDER [PART...]

ENV is what a GPU machine has: Python 3.12, torch's CUDA build, NumPy, and nothing else. Results, as
on a real GPU, go to build/gpu/results; the peaks in them are those of torch's real allocator with
no kernels run. FOLDER keeps what would otherwise go into the home folder.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from nullgpu.runs import ROOT, environment


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    surroundings = environment(folder, {"SHORT": "1"})
    parts = [ROOT / "bench" / "gpu" / f"{name}.sh" for name in names]
    for part in parts or sorted((ROOT / "bench" / "gpu").glob("[0-9]_*.sh")):
        subprocess.run([str(part)], cwd=ROOT, env=surroundings, check=True)


if __name__ == "__main__":
    if "NULLGPU_LIBRARIES" not in os.environ or len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
