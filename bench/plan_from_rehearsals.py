"""Plans of other people's configs against rehearsals of their trainers.

    python bench/plan_from_rehearsals.py --work FOLDER [--only TEXT ...] [--plans]

Configs are generated (`plan_from_generated.py`) and written as the file that their trainer takes.
`shardscale plan --from` plans that file; the trainer itself runs with it, unchanged, under
`shardscale rehearse`: real allocator, no kernels run. FOLDER is that of rehearsals.py. `--only`
takes the runs whose key contains one of the texts; results of the others stay. `--plans` plans
again and keeps the rehearsals. Writes results/plan_from_rehearsals.json and .md.
"""

import argparse
import contextlib
import csv
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plan_from_environments import environment, versions
from plan_from_generated import TRAINERS, Generated, generated
from plan_from_inputs import make_hub
from plan_from_recipes import RECIPES
from plan_from_rehearsals_page import markdown

from launcher.tools.plan_from.assess import plan_of
from launcher.tools.plan_from.output import record_of
from launcher.tools.plan_from.reading import read_source
from launcher.util.errors import UserError

HERE = Path(__file__).parent
RESULT = HERE / "results" / "plan_from_rehearsals.json"
CAUSES = HERE / "published" / "plan_from_causes.csv"
GPU = "H100"
TIMEOUT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="environments and inputs")
    parser.add_argument("--only", nargs="+", default=[""], help="texts in the keys of runs")
    parser.add_argument("--plans", action="store_true", help="plan again, rehearse nothing")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    known = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    rehearsals = {row["key"]: row["rehearsal"] for row in known}
    plans = {row["key"]: row["plan"] for row in known}
    make_hub(work / "inputs" / "hub")
    every = list(generated({**TRAINERS, **RECIPES}))
    for run in every:
        if not any(text in run.key for text in options.only):
            continue
        if not options.plans:
            print(f"{run.key} {run.chosen} ...", file=sys.stderr, flush=True)
            rehearsals[run.key] = rehearsed(run, work)
        plans[run.key] = planned(run)
        shown = [rehearsals.get(run.key), plans[run.key]]
        print(f"{run.key} {json.dumps(shown)[:900]}", file=sys.stderr, flush=True)
        write(every, rehearsals, plans)
    write(every, rehearsals, plans)


def planned(run: Generated) -> dict[str, Any]:
    """Plan the files of a run; its allocated peak and ledger, or why there is none."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in run.files.items():
            Path(name).write_text(text, encoding="utf-8")
        sources = [read_source(Path(name)) for name in run.planned]
        place = ["--gpu", GPU, "--gpus", str(run.gpus), "--no-calibration"]
        try:
            plan = plan_of(sources, place)
        except UserError as error:
            return {"refused": str(error)}
    record = record_of(plan, [])
    names = ("allocated_bytes", "ledger_bytes", "flags", "not_taken_into_account")
    peaks = plan.assessment.prediction.peaks
    phases = {f"{period} {phase}": size for (period, phase), size in peaks.items()}
    return {name: record[name] for name in names} | {"phases": phases}


def rehearsed(run: Generated, work: Path) -> dict[str, Any]:
    """Rehearse the trainer with the files of a run; bytes of the worst rank, or why there are
    none."""
    programs = environment(run.environment, work) / "bin"
    command = run.command.format(bin=programs, programs=HERE / "published" / "programs")
    path = f"{programs}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for place in (work / "inputs" / "hub").iterdir():
            (Path(folder) / place.name).symlink_to(place)
        for name, text in run.files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        started_s = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "launcher", "rehearse", "--json", "--gpu", GPU),
                *("--gpus", str(run.gpus), "--out", f"{folder}/run", "--", *shlex.split(command)),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "PATH": path} | _OFFLINE,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        seconds = time.monotonic() - started_s
    (work / "logs").mkdir(exist_ok=True)
    (work / "logs" / f"{run.key}.log").write_text(done.stderr + done.stdout, encoding="utf-8")
    which = versions(run.environment, work)
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"failed": done.stderr.strip().splitlines()[-1:], "versions": which}
    if found["verdict"] is None or not found["ranks"]:
        return {"failed": str(found["status"].get("reason"))[:300], "versions": which}
    worst = max(found["ranks"], key=lambda rank: rank["allocated_peak_bytes"] or 0)
    return {
        "allocated_bytes": worst["allocated_peak_bytes"],
        "phases": {f"{row['period']} {row['phase']}": row["peak_bytes"] for row in worst["phases"]},
        "peak": _content(worst["peak"]),
        "end": _content(worst["end"]),
        "steps": found["steps"],
        "seconds": round(seconds, 1),
        "versions": which,
    }


def _content(moment: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return what was held then, by category."""
    return moment and {name: moment[name] for name in ("phase", "by_category")}


_OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}


def write(
    every: Sequence[Generated], rehearsals: dict[str, Any], plans: dict[str, dict[str, Any]]
) -> None:
    """Write both files, with a row for each run that was rehearsed."""
    with CAUSES.open(encoding="utf-8", newline="") as file:
        causes = {line["key"]: line["cause"] for line in csv.DictReader(file)}
    rows = []
    for run in every:
        if run.key not in rehearsals:
            continue
        rehearsal, plan = rehearsals[run.key], plans[run.key]
        found, true = plan.get("allocated_bytes"), rehearsal.get("allocated_bytes")
        rows.append(
            {
                "key": run.key,
                "trainer": run.trainer,
                "chosen": run.chosen,
                "gpus": run.gpus,
                "ratio": found / true if found and true else None,
                "cause": causes.get(run.key, ""),
                "plan": plan,
                "rehearsal": rehearsal,
            }
        )
    RESULT.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    RESULT.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
