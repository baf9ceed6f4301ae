"""Programs of other people, rehearsed without a GPU, against what they publish of bytes and time.

    python bench/rehearsals.py --work FOLDER [--only TEXT ...]

Each row of `published/rehearsals.csv` is one published figure. Its program runs as it is, in an
environment of its own with versions close to theirs, under `shardscale rehearse`: real allocator,
no kernels run. FOLDER takes the environments (5 GB each, `python -m venv` and pip), the programs
that no package has (`git clone` into FOLDER/sources), and weights, tokenizers and data that have
the right shapes and no content (`rehearsals_inputs.py`). Plans of the same runs come from
`results/published.json`. `--only` runs the rows whose key contains one of the texts; results of the
others stay. Writes results/rehearsals.jsonl and rehearsals.md.
"""

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rehearsals_inputs import make_inputs
from rehearsals_table import markdown

HERE = Path(__file__).parent
ROOT = HERE.parent
ROWS = HERE / "published" / "rehearsals.csv"
ENVIRONMENTS = HERE / "published" / "rehearsals_environments.csv"
RESULTS = HERE / "results"
UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "s": 1.0}
TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure of one run."""

    key: str
    run: str
    """Key of the row whose command this is; its own where it has one."""
    program: str
    source: str
    published: float
    """Bytes, or seconds of a step."""
    figure: str
    """peak, kept (allocated after the last step), reserved, or step."""
    plan: str
    cause: str
    """Of a miss, or what differs."""
    gpu: str
    environment: str
    folder: str
    flags: str
    command: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="environments, programs, inputs")
    parser.add_argument("--only", nargs="+", default=[""], help="texts in the keys of rows")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    results = known_results()
    make_inputs(work / "inputs")
    rows = read_rows()
    wanted = {row.run for row in rows if any(text in row.key for text in options.only)}
    for row in rows:
        if row.run == row.key and row.key in wanted:
            print(f"{row.key} ...", file=sys.stderr, flush=True)
            results[row.key] = rehearsed(row, work)
            print(f"  {json.dumps(results[row.key])[:300]}", file=sys.stderr, flush=True)
        write(rows, results)


def read_rows() -> list[Row]:
    """All published figures, those of one run next to one another."""
    rows = []
    with ROWS.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            published = float(line.pop("published")) * UNITS[line.pop("unit")]
            line["run"] = line["run"] or line["key"]
            rows.append(Row(published=published, **line))
    return rows


def known_results() -> dict[str, dict[str, Any]]:
    """Results of earlier runs, by key."""
    path = RESULTS / "rehearsals.jsonl"
    if not path.exists():
        return {}
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {record["run"]: record["result"] for record in records if record["result"]}


def rehearsed(row: Row, work: Path) -> dict[str, Any]:
    """Rehearse a row's program; bytes of the worst rank, or why there are none."""
    environment = prepared(row.environment, work)
    names = {"bin": environment / "bin", "work": work, "inputs": work / "inputs"}
    words = shlex.split(row.command.format(**names, programs=HERE / "published" / "programs"))
    path = f"{environment / 'bin'}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory(dir=work) as folder:
        started_s = time.monotonic()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "launcher", "rehearse", "--json"),
                *("--gpu", row.gpu, "--out", f"{folder}/run", *shlex.split(row.flags)),
                *("--", *words),
            ],
            cwd=work / row.folder if row.folder else folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        seconds = time.monotonic() - started_s
    (work / "logs").mkdir(exist_ok=True)
    (work / "logs" / f"{row.key}.log").write_text(done.stderr + done.stdout, encoding="utf-8")
    versions = installed(environment)
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"failed": done.stderr.strip().splitlines()[-1:], "versions": versions}
    if found["verdict"] is None or not found["ranks"]:
        return {"failed": found["status"].get("reason", "")[:300], "versions": versions}
    worst = max(found["ranks"], key=lambda rank: rank["allocated_peak_bytes"] or 0)
    steps = [rank["seconds"] for rank in found["ranks"] if rank["seconds"]]
    return {
        "step": max(steps, key=lambda step: step["total_s"], default=None),
        "peak": worst["allocated_peak_bytes"],
        "kept": worst["end"]["total_bytes"] if worst["end"] else None,
        "reserved": worst["reserved_peak_bytes"],
        "fits": found["verdict"],
        "steps": found["steps"],
        "seconds": round(seconds, 1),
        "versions": versions,
    }


def prepared(name: str, work: Path) -> Path:
    """Folder of an environment, which is installed if it is not there yet."""
    with ENVIRONMENTS.open(encoding="utf-8", newline="") as file:
        line = next(line for line in csv.DictReader(file) if line["name"] == name)
    folder = work / name
    if not (folder / "installed").exists():
        python = shutil.which("python3.12") or sys.executable
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *line["packages"].split()], check=True)
        (folder / "installed").touch()
    for source in line["sources"].split():
        repository, _, commit = source.partition("@")
        beside = work / "sources" / repository.split("/")[-1]
        if not beside.is_dir():
            subprocess.run(
                ["git", "clone", f"https://github.com/{repository}", str(beside)], check=True
            )
            subprocess.run(["git", "-C", str(beside), "checkout", commit], check=True)
    return folder


def installed(environment: Path) -> dict[str, str]:
    """Versions of what matters here."""
    names = "torch torchtune torchao deepspeed transformers peft trl accelerate lightning litgpt "
    names += "llamafactory bitsandbytes"
    folders = environment.glob("lib/python3*/site-packages/*.dist-info")
    found = dict(folder.name.removesuffix(".dist-info").split("-")[:2] for folder in folders)
    return {name: found[name] for name in (*names.split(), "liger_kernel", "timm") if name in found}


def write(rows: list[Row], results: dict[str, dict[str, Any]]) -> None:
    """Write both files."""
    plans = json.loads((RESULTS / "published.json").read_text(encoding="utf-8"))["rows"]
    planned = {plan["key"]: plan for plan in plans}
    records = []
    for row in rows:
        result = results.get(row.run, {})
        kind = "reserved" if row.figure == "reserved" else "allocated"
        if row.figure == "step":
            found = {
                "published_s": row.published,
                "rehearsed_s": (result.get("step") or {}).get("total_s"),
            }
        else:
            found = {
                "published_bytes": row.published,
                "rehearsed_bytes": result.get(row.figure),
                "planned_bytes": planned.get(row.plan, {}).get(f"planned_{kind}_bytes"),
            }
        records.append(
            {
                "key": row.key,
                "run": row.run,
                "program": row.program,
                "source": row.source,
                "gpu": row.gpu,
                "figure": row.figure,
                **found,
                "cause": row.cause,
                "result": result,
            }
        )
    text = "".join(json.dumps(record) + "\n" for record in records)
    (RESULTS / "rehearsals.jsonl").write_text(text, encoding="utf-8")
    (RESULTS / "rehearsals.md").write_text(markdown(records), encoding="utf-8")


if __name__ == "__main__":
    main()
