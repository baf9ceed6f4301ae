"""Many short 2-process trainings in a row: every one must end with exit code 0.

    python bench/flake.py [--runs 30] [--output bench/results/flake.json]

Plain interpreter exit after gloo training aborts now and then; see launcher/parallel/world.py.
"""

import argparse
import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

FLAGS = ["--device", "cpu", "--steps", "3", "--tokenizer", "byte", "--vocab-size", "257"]
FLAGS += ["--layers", "2", "--d-model", "64", "--context", "32", "--report-to=none"]
FLAGS += ["--save-every=0"]
STRATEGIES = (["--strategy", "ddp"], ["--strategy", "fsdp"], ["--zero", "2"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    codes: collections.Counter[int] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text(Path(argparse.__file__).read_text())
        for index in range(options.runs):
            command = [sys.executable, "-m", "launcher.torchrun", "--nproc", "2"]
            command += ["-m", "launcher.train", *FLAGS, *STRATEGIES[index % 3]]
            command += ["--data", str(corpus), "--out", f"{folder}/{index}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            codes[done.returncode] += 1
            if done.returncode:
                print(done.stderr[-2000:], flush=True)
            print(f"run {index + 1}: exit code {done.returncode}", flush=True)
    result = {"runs": options.runs, "exit_codes": {str(k): v for k, v in codes.items()}}
    print(json.dumps(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if set(codes) == {0} else 1)


if __name__ == "__main__":
    main()
