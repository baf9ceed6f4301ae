"""`shardscale plan` of random questions: every model, 1 to 512 GPUs, 256 to 1,048,576 tokens and
every technique, each in a process of its own with an empty cache. Modules are imported once, before
these processes fork, and the CPU seconds of that are counted in each.

    python bench/plan_fuzz.py [--plans 400] [--seed 0] [--only N] [--again]

A question that is refused in one sentence (exit code 2) is drawn again. No plan may end in a
traceback, have a row that failed, or take more than 40 CPU seconds. Results are written plan by
plan, and a second run plans what is missing; `--again` repeats the plans that missed one of these.
A question is drawn from the models and GPUs that are known; one that has a result is asked again as
it was drawn then.
"""

import argparse
import importlib
import itertools
import json
import os
import random
import re
import resource
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from launcher.__main__ import main as command_line
from launcher.measure.hardware import GPUS
from launcher.model.sizes import NAMED

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
for module in ("launcher.forecast.plan_answer", "torch._dynamo"):  # which tracing loads
    importlib.import_module(module)
IMPORTED_CPU_S: Final = time.process_time()

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
MOST_CPU_S: Final = 40.0
LONGEST_S: Final = 1200.0
ODD_GPUS: Final = (3, 6, 12, 24, 48, 96, 192, 384)
DONE: Final = (0, 1)
"""Exit codes of a plan: something fits, or nothing does."""
REFUSED: Final = 2

Draw = Callable[[random.Random], str]


def one_of(*texts: str) -> Draw:
    """Draw one of these."""
    return lambda draw: draw.choice(texts)


TECHNIQUES: Final[tuple[tuple[float, Draw], ...]] = (
    (
        0.4,
        one_of(
            *(
                "--precision " + name
                for name in ("bf16", "bf16", "bf16-pure", "fp16", "fp8", "fp32")
            )
        ),
    ),
    (
        0.4,
        one_of(
            *("--activation-checkpointing " + mode for mode in ("none", "selective", "full")),
            *("--activation-checkpointing " + mode for mode in ("offload", "every=2")),
            "--activation-checkpointing keep=qkv,attention",
            "--activation-checkpointing budget=16GiB",
        ),
    ),
    (0.3, one_of("--compile")),
    (
        0.3,
        lambda draw: (
            f"--lora-rank {draw.choice((1, 8, 64))} "
            f"--lora-targets {draw.choice(('qkv,proj', 'mlp', 'all'))} "
            + draw.choice(("", "", "--quantize-base nf4", "--quantize-base nf4", "--rslora"))
        ),
    ),
    (
        0.35,
        one_of(
            *("--optimizer " + name for name in ("adam", "sgd", "adafactor", "adamw8bit")),
            *("--optimizer muon", "--optimizer apollo", "--moments-dtype bf16"),
            "--optimizer-in-backward --clip 0 --precision bf16",
        ),
    ),
    (
        0.35,
        one_of(
            *("--strategy ddp", "--strategy fsdp", "--strategy fsdp --no-reshard-after-forward"),
            *(f"--zero {stage}" for stage in range(4)),
            *("--zero 2 --offload-optimizer cpu", "--zero 3 --offload-optimizer cpu"),
            "--zero 3 --offload-param nvme --offload-optimizer nvme --nvme-path /tmp",
            "--strategy fsdp --offload-param cpu",
        ),
    ),
    (
        0.15,
        lambda draw: (
            f"--context-parallel {draw.choice((2, 4, 8))} "
            f"--context-parallel-method {draw.choice(('auto', 'ulysses', 'ring'))}"
        ),
    ),
    (0.1, lambda draw: f"--tensor-parallel {draw.choice((2, 4, 8))}"),
    (0.1, lambda draw: f"--mlp-tile {draw.choice((512, 2048, 10_000))}"),
    (0.1, lambda draw: f"--loss-chunk {draw.choice((0, 1000, 4096))}"),
    (0.1, one_of("--window 255", "--dropout 0.1", "--document-attention")),
    (0.1, one_of("--attention eager", "--attention flex", "--attention sdpa-math")),
    (0.1, one_of("--layers 80", "--layers 1")),
    (0.15, lambda draw: f"--micro-batch {draw.choice((1, 3, 8, 32))}"),
    (0.2, one_of("--goal least-memory", "--goal largest-batch", "--goal largest-model", "--all")),
)


def flags_of(seed: int, number: int) -> list[str]:
    """Draw one question."""
    draw = random.Random(f"{seed} {number}")
    models = sorted(NAMED)
    model = models[number % len(models)]  # each as often
    gpus = draw.choice((2 ** draw.randint(0, 9), 2 ** draw.randint(0, 9), draw.choice(ODD_GPUS)))
    seq_len = 2 ** draw.randint(8, 20)
    if draw.random() < 0.3:
        seq_len = max(256, seq_len * 11 // 16)
    flags = ["--model", model, "--gpus", str(gpus), "--seq-len", str(seq_len)]
    flags += ["--gpu", draw.choice(GPUS).name]
    if seq_len > NAMED[model].context:
        flags += ["--context", str(seq_len)]
    if draw.random() < 0.5:
        flags += ["--global-batch", str(gpus * 2 ** draw.randint(0, 7))]
    for chance, technique in TECHNIQUES:
        if draw.random() < chance:
            flags += technique(draw).split()
    return flags


def planned(flags: Sequence[str]) -> dict[str, Any]:
    """Plan once, cold: how it ended, and CPU seconds of the process and of all that it started,
    those of its imports among them."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as printed:
        pid = os.fork()
        if not pid:
            _plan(flags, cache, printed.fileno())
        usage, code = _waited(pid)
        printed.seek(0)
        text = printed.read()
    problem = _problem(code, text)
    found = {"flags": shlex.join(flags), "code": code, "problem": problem}
    return found | {"cpu_s": round(IMPORTED_CPU_S + usage.ru_utime + usage.ru_stime, 1)}


def _plan(flags: Sequence[str], cache: str, output: int) -> NoReturn:
    """Be `shardscale plan` in this process, a fork of one that has imported its modules."""
    os.environ |= {"SHARDSCALE_CACHE": cache, "COLUMNS": "200"}
    os.chdir(cache)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["shardscale", "plan", "--quiet", "--no-calibration", *flags]
    try:
        command_line()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _waited(pid: int) -> tuple[resource.struct_rusage, int]:
    """Wait for a process and take its usage; kill it when it takes too long."""
    began_s = time.monotonic()
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return usage, os.waitstatus_to_exitcode(status)
        if time.monotonic() - began_s > LONGEST_S:
            os.kill(pid, signal.SIGKILL)  # its workers die with it
        time.sleep(0.1)


def _problem(code: int, text: str) -> str | None:
    """Return what must not be, or None: a traceback, a row that failed, a refusal of several lines,
    another exit code."""
    failed = [line for line in text.splitlines() if re.search(r"\bfailed\b", line)]
    if "Traceback (most recent call last)" in text:
        return "traceback: " + text.strip().splitlines()[-1][:300]
    if failed and code in DONE:
        return "row: " + failed[0].strip()[:300]
    if code == REFUSED:
        return None if len(text.splitlines()) == 1 else "refused in many lines: " + text[:300]
    return None if code in DONE else f"exit code {code}: {text[-300:]}"


def main() -> None:
    """Write bench/results/plan_fuzz.json and .md, plan by plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="plan this question, and write nothing")
    parser.add_argument(
        "--again", action="store_true", help="repeat plans with a problem, slow ones"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "plan_fuzz.json")
    options = parser.parse_args()
    cases: dict[str, Any] = {}
    if options.out.exists():
        known = json.loads(options.out.read_text())
        cases = known["cases"] if known["seed"] == options.seed else {}
    drawn = {number: shlex.split(case["flags"]) for number, case in cases.items()}
    if options.only is not None:
        flags = drawn.get(str(options.only)) or flags_of(options.seed, options.only)
        print(json.dumps(planned(flags), indent=2))
        return

    def ask(number: str) -> None:
        flags = drawn.get(number) or flags_of(options.seed, int(number))
        cases[number] = planned(flags)
        print(number, cases[number], flush=True)
        found = dict(sorted(cases.items(), key=lambda item: int(item[0])))
        record = {"seed": options.seed, "cores": os.cpu_count(), "cases": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(found, options.seed))

    if options.again:
        for number in [n for n, case in cases.items() if not _holds(case)]:
            ask(number)
    for number in map(str, itertools.count()):
        if len([case for case in cases.values() if case["code"] != REFUSED]) >= options.plans:
            break
        if number not in cases:
            ask(number)


def _holds(case: dict[str, Any]) -> bool:
    return not case["problem"] and case["cpu_s"] <= MOST_CPU_S


def page(cases: dict[str, Any], seed: int) -> str:
    """The summary, in Markdown."""
    plans = {number: case for number, case in cases.items() if case["code"] != REFUSED}
    problems = {number: case for number, case in cases.items() if case["problem"]}
    seconds = sorted(case["cpu_s"] for case in plans.values()) or [0.0]
    slow = {number: case for number, case in plans.items() if case["cpu_s"] > MOST_CPU_S}
    lines = [
        "# `shardscale plan` of random questions",
        "",
        f"`python bench/plan_fuzz.py --plans {len(plans)} --seed {seed}`: {len(cases)} questions, "
        f"of which {len(cases) - len(plans)} were refused in one sentence.",
        "",
        f"| plans | with a problem | median CPU s | 95% | most | above {MOST_CPU_S:.0f} CPU s |",
        "|---:|---:|---:|---:|---:|---:|",
        f"| {len(plans)} | {len(problems)} | {seconds[len(seconds) // 2]:.1f} "
        f"| {seconds[int(0.95 * (len(seconds) - 1))]:.1f} | {seconds[-1]:.1f} | {len(slow)} |",
        "",
    ]
    for number, case in (problems | slow).items():
        lines.append(f"- {number}: {case['cpu_s']} s, {case['problem']}: `{case['flags']}`")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    main()
