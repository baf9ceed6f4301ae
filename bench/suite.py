"""The distributed tests, run after run: every one of them must pass in every run.

    python bench/suite.py [--runs 20] [--workers 4] [--output bench/results/suite.json]

Runs the committed state from a copy, so that the working tree may change meanwhile. Each run is
written down when it has ended, and the count goes on in the same file as long as the code that is
tested is the same: some hours may be collected in several sittings.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from runs import ROOT

TESTED = ("launcher", "model", "tests/distributed", "constraints.txt")
SUITE = "tests/distributed"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=4, help="of pytest, at a time")
    default = Path(__file__).parent / "results" / "suite.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    code = {path: git("rev-parse", f"HEAD:{path}").decode().strip() for path in TESTED}
    result: dict[str, Any] = {"code": code, "cpus": os.cpu_count(), "runs": []}
    if options.output.exists():
        result = json.loads(options.output.read_text())
        if result["code"] != code:
            sys.exit(f"{options.output} is of other code: nothing is overwritten, move it away")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        while len(result["runs"]) < options.runs:
            result["runs"].append(one_run(Path(folder), options.workers))
            print(json.dumps(result["runs"][-1]), flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    clean = [run["exit_code"] == 0 for run in result["runs"]]
    print(f"{sum(clean)} of {len(clean)} runs without a failure")
    sys.exit(0 if all(clean) else 1)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def one_run(copy: Path, workers: int) -> dict[str, Any]:
    """All distributed tests once, each file by one worker, as `make test` does."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile"]
    started_s = time.monotonic()
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", SUITE],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-20_000:], flush=True)
    return {
        "exit_code": done.returncode,
        **{what: int(count) for count, what in COUNTS.findall(done.stdout.splitlines()[-1])},
        "failures": FAILED.findall(done.stdout),
        "duration_s": round(time.monotonic() - started_s),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
