"""Start-up times: the help of each verb, a ZeRO rank's imports with Python's collector held back
and not, in turns, and the first training step of `nano` on a warm corpus.

    python bench/startup.py [--runs 5] [--output bench/results/startup.json]

Seconds on the machine that runs it; the medians are what counts.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launcher.__main__ import VERBS

# All that a ZeRO rank imports: its CPU seconds, and those of one full collection afterwards.
IMPORTS = """
import contextlib, gc, sys, time
import launcher.util.startup
if sys.argv[1] == "collecting":
    launcher.util.startup.importing = contextlib.nullcontext
import launcher.train, launcher.strategies.zero.engine, torch
with launcher.util.startup.importing():
    import torch._dynamo
launcher.strategies.zero.engine.import_deepspeed(torch.device("cpu"))
imported_s = time.process_time()
gc.collect()
print(imported_s, time.process_time() - imported_s)
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    help_s = [seconds("-m", "launcher", "--help") for _ in range(options.runs)]
    flags_s = [seconds("-m", "launcher.train", "--help") for _ in range(options.runs)]
    verbs_s = {
        verb: statistics.median(
            seconds("-m", "launcher", verb, "--help") for _ in range(options.runs)
        )
        for verb in VERBS
        if verb != "run"  # torchrun's own help
    }
    slowest = max(verbs_s, key=verbs_s.__getitem__)
    pairs = [(imports("collecting"), imports("held back")) for _ in range(options.runs)]
    first_step(["--strategy", "single"], ranks=1)  # builds the corpus's cache
    results = {
        "launcher --help": summary(help_s),
        "launcher.train --help": summary(flags_s),
        "launcher VERB --help, slowest of the medians": {
            "verb": slowest,
            "median_s": round(verbs_s[slowest], 2),
        },
        "CPU time of imports, collecting": summary([before[0] for before, _ in pairs]),
        "CPU time of imports, held back": summary([after[0] for _, after in pairs]),
        "one full collection, collecting": summary([before[1] for before, _ in pairs]),
        "one full collection, held back": summary([after[1] for _, after in pairs]),
    }
    ratio = statistics.median(after[0] / before[0] for before, after in pairs)
    results["CPU time of imports, held back over collecting"] = {"median": round(ratio, 3)}
    for name, flags, ranks in (
        ("first step, single", ["--strategy", "single"], 1),
        ("first step, ddp x2", ["--strategy", "ddp"], 2),
        ("first step, zero2 x2", ["--zero", "2"], 2),
    ):
        results[name] = summary([first_step(flags, ranks) for _ in range(options.runs)])
        print(f"{name}: {results[name]}", flush=True)
    print(json.dumps(results, indent=2))
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def imports(how: str) -> tuple[float, float]:
    """CPU seconds of a rank's imports, and of a full collection after them."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, how], check=True, capture_output=True, text=True
    )
    imported_s, collected_s = map(float, done.stdout.split())
    return imported_s, collected_s


def first_step(flags: list[str], ranks: int) -> float:
    """Seconds from the command to its first console line of a step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher.torchrun", f"--nproc={ranks}"]
        command += ["-m", "launcher.train", *flags, "--device", "cpu", "--steps", "2"]
        command += ["--log-every", "1", "--out", f"{folder}/run"]
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step: 1 "):
                    elapsed = time.perf_counter() - start
                    process.terminate()
                    process.communicate()
                    return elapsed
    raise SystemExit("the run ended without a step")


def summary(values: list[float]) -> dict[str, float]:
    return {
        "median_s": round(statistics.median(values), 2),
        "min_s": round(min(values), 2),
        "max_s": round(max(values), 2),
    }


if __name__ == "__main__":
    main()
