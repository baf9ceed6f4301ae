"""Programs of many libraries under `shardscale rehearse`: which run unchanged.

    python bench/rehearsals_unchanged.py --work FOLDER [--only NAME ...]

FOLDER is that of rehearsals.py, whose newest environment runs them. Writes
results/rehearsals_unchanged.md, a line for each program of published/programs/unchanged.py.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = HERE / "published" / "programs" / "unchanged.py"
RESULT = HERE / "results" / "rehearsals_unchanged.json"
PAGE = RESULT.with_suffix(".md")
ENVIRONMENT = "torch-2.13"
ALONE = ("trainer-lora", "trainer-qlora", "liger", "resnet", "vit", "unet", "trl-dpo")
ALL = (
    *("trainer", "trainer-lora", "trainer-qlora", "trl-sft", "trl-dpo", "accelerate-fsdp2"),
    *("deepspeed-zero2", "deepspeed-zero3", "deepspeed-offload", "lightning", "nanogpt-loop"),
    *("compile", "torchtitan-loop", "liger", "resnet", "vit", "unet"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="environments and inputs")
    parser.add_argument("--only", nargs="+", default=ALL, choices=ALL, metavar="NAME")
    options = parser.parse_args()
    results = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for name in options.only:
        results[name] = rehearsed(name, options.work.resolve())
        print(name, results[name], file=sys.stderr, flush=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(results), encoding="utf-8")


def rehearsed(name: str, work: Path) -> dict[str, object]:
    """Return what happened to one program."""
    python = work / ENVIRONMENT / "bin" / "python"
    ranks = 1 if name in ALONE else 2
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        started_s = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "launcher", "rehearse", "--json", "--gpu", "H100"),
                *("--out", f"{folder}/run", "--", str(python), *launcher, str(PROGRAM), name),
                str(work / "inputs" / "llama-3.2-3b"),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        seconds = round(time.monotonic() - started_s)
    (work / "logs").mkdir(exist_ok=True)
    (work / "logs" / f"{name}.log").write_text(done.stderr + done.stdout, encoding="utf-8")
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"ran": False, "ranks": ranks, "why": "".join(done.stderr.splitlines()[-1:])[:300]}
    ran = found["verdict"] == "fits" and found["steps"] >= 1
    peak = max((rank["allocated_peak_bytes"] or 0 for rank in found["ranks"]), default=0)
    why = "" if ran else str(found["status"].get("reason"))[:300]
    steps = [rank["seconds"]["total_s"] for rank in found["ranks"] if rank["seconds"]]
    if ran and not steps:
        why = next((line for line in found["report"] if line.startswith("no seconds")), "")
    return {
        "ran": ran,
        "ranks": ranks,
        "peak": peak,
        "step_s": max(steps, default=None),
        "seconds": seconds,
        "why": why,
    }


def page(results: dict[str, dict[str, object]]) -> str:
    """Return the page."""
    count = sum(bool(result["ran"]) for result in results.values())
    lines = [
        "# Programs that run unchanged in a rehearsal",
        "",
        f"{count} of {len(results)}, by `bench/rehearsals_unchanged.py`; real allocator, no "
        "kernels run. LitGPT and torchtune are in rehearsals.md.",
        "",
        "| program | ranks | runs | allocated peak, MiB | ms per step on an H100 | took, s | |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for name, one in results.items():
        peak = f"{int(str(one.get('peak', 0))) / 2**20:.0f}"
        ran = "yes" if one["ran"] else "no"
        why = " ".join(str(one["why"]).split())
        step_s = one.get("step_s")
        step = "" if step_s is None else f"{1e3 * float(str(step_s)):.1f}"
        cells = (name, one["ranks"], ran, peak, step, one.get("seconds", ""), why)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
