"""Plan the seconds of each training run of `bench/results/gpu-h200` with today's constants.

    python bench/gpu_planned.py

Writes `bench/results/gpu_h200_planned.json`: part -> seconds of a step.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from decoders import write_config
from gpu_results import GPU, measured, planned_path

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.cluster import find_cluster
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.timing import step_seconds


def main() -> None:
    found = {run["part"]: seconds_of(resolved_of(run)) for run in measured()}
    planned_path().write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def resolved_of(run: Mapping[str, Any]) -> Resolved:
    """Resolve a record's flags, with the micro-batch that was found and `--compile` as it was."""
    flags = list(run["flags"])
    if "auto" in flags:
        flags[flags.index("auto")] = str(run["micro_batch"])
        limit = flags.index("--memory-limit")
        del flags[limit : limit + 2]
    if "--compile" not in flags:
        flags += ["--compile", "off"]
    with TemporaryDirectory() as folder:
        if "--decoder" in flags:
            place = flags.index("--decoder")
            config = write_config(flags[place + 1], Path(folder))
            flags[place : place + 2] = ["--model", str(config)]
        return resolve(parse_run_config(flags, 1), world_size=1, device_type="cuda")


def seconds_of(resolved: Resolved) -> float:
    """Predict the seconds of a step on that GPU by its data sheet."""
    options, _ = parse_options(["--gpus", "1", "--gpu", GPU, "--no-calibration"])
    cluster, _ = find_cluster(options)
    machine = cluster.machine
    return step_seconds(resolved, gpus_per_node=1, machine=machine).total_s


if __name__ == "__main__":
    main()
