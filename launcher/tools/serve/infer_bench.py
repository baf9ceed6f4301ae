"""`shardscale infer-bench`: memory, latency and perplexity of trained models per runtime."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from launcher.checkpoint.pretrained.loading import chosen_device
from launcher.checkpoint.pretrained.weight_files import new_folder
from launcher.compare.inference import FOLDER, RESULT_FILE, markdown_text, page, print_rows
from launcher.config.resolve import check_run_folder
from launcher.measure.hardware import cpu_name
from launcher.tools.serve import tensorrt as tensorrt_engine
from launcher.tools.serve.case import Case, Measured
from launcher.tools.serve.choice import InferBenchOptions
from launcher.tools.serve.export import missing_packages
from launcher.tools.serve.text import BenchRun, open_run, text_of
from launcher.util.errors import UserError
from launcher.util.packages import version_of
from launcher.util.processes import for_children
from launcher.util.sizes import duration

VERSION = 1
REFERENCE = ("pytorch", "fp32")
"""Engine and weights that the others of a run are compared with."""


def infer_bench(options: InferBenchOptions) -> None:
    """Measure, write the folder, print the table.

    Raises:
        UserError: runs that cannot be compared, or prompts longer than their context.
    """
    device_type = chosen_device(options.device).type
    out = options.out or options.runs[0].absolute().parent / FOLDER
    check_run_folder(out)
    runs = [open_run(run) for run in options.runs]
    for run in runs:
        if (wanted := options.prompt_tokens + options.new_tokens) > run.model.context:
            raise UserError(
                f"{run.path}: --prompt-tokens {options.prompt_tokens} and --new-tokens "
                f"{options.new_tokens} are {wanted} tokens, more than its context of "
                f"{run.model.context}: give fewer"
            )
    prompts, sequences = text_of(runs, options)
    found = _measured(options, runs, prompts, sequences, device_type)
    with new_folder(out) as folder:
        (folder / RESULT_FILE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (folder / "inference.md").write_text(markdown_text(found), encoding="utf-8")
        (folder / "inference.html").write_text(page(found), encoding="utf-8")
    print_rows(found, out)


def _measured(
    options: InferBenchOptions,
    runs: Sequence[BenchRun],
    prompts: list[list[int]],
    sequences: Mapping[str, np.ndarray],
    device_type: str,
) -> dict[str, Any]:
    """Measure all cases; returns the content of inference.json."""
    names = _names([run.path for run in runs])
    rows: list[dict[str, Any]] = []
    nothing: dict[str, Any] = dict.fromkeys((*(f.name for f in fields(Measured)), "reason"))
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch, "text.npz")
        np.savez(text, tokens=sequences["tokens"], targets=sequences["targets"])
        cases = [
            Case(
                run=str(run.path),
                engine=engine,
                weights=weights,
                graph=str(Path(scratch, str(number), f"{weights}.onnx")),
                prepares=False,
                device=device_type,
                threads=torch.get_num_threads(),
                prompts=prompts,
                new_tokens=options.new_tokens,
                repeats=options.repeats,
                text=str(text),
            )
            for number, run in enumerate(runs)
            for engine in options.engines
            for weights in options.weights
        ]
        for case in _announced(cases):
            row = {"run": names[Path(case.run)], "engine": case.engine, "weights": case.weights}
            rows.append(row | nothing | _outcome(case))
    return {
        "version": VERSION,
        "made_unix_s": time.time(),
        "machine": _machine(device_type),
        "threads": torch.get_num_threads(),
        "memory": "resident set of the process" if device_type == "cpu" else "allocated",
        "settings": {
            name: getattr(options, name)
            for name in ("prompts", "prompt_tokens", "new_tokens", "repeats", "seed")
        }
        | {"sequences": len(sequences["tokens"])},  # the split may hold fewer than requested
        "parameters": {names[run.path]: run.model.parameter_count for run in runs},
        "rows": [row | _beside(row, rows) for row in rows],  # the reference may come last
    }


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    alone = len({path.name for path in paths}) == len(set(paths))
    return {path: path.name if alone else str(path) for path in paths}


def _announced(cases: Sequence[Case]) -> Iterator[Case]:
    started = time.monotonic()
    for done, case in enumerate(cases):
        left = (time.monotonic() - started) / done * (len(cases) - done) if done else None
        eta = "" if left is None else f", about {duration(left)} left"
        label = f"{Path(case.run).name}, {case.engine}, {case.weights}{eta}"
        print(f"[{done + 1}/{len(cases)}] {label}", file=sys.stderr, flush=True)
        yield case


def _outcome(case: Case) -> dict[str, Any]:
    """Measure one case; returns its figures, or the `reason` why there are none."""
    reason = _obstacle(case)
    if reason is not None:
        return {"reason": reason}
    # The engines share a graph. A process of its own writes it, or the memory of the export would
    # count as that of the engine.
    if case.engine in ("onnxruntime", "tensorrt") and not Path(case.graph).exists():
        Path(case.graph).parent.mkdir(exist_ok=True)
        prepared = _alone(replace(case, prepares=True, device="cpu"))
        if "reason" in prepared:
            return prepared
    return _alone(case)


def _obstacle(case: Case) -> str | None:
    """Explain why a case cannot run here, if it is known in advance."""
    if case.engine in ("onnxruntime", "tensorrt") and (missing := missing_packages()):
        return f"needs {', '.join(missing)} (the extra onnx)"
    if case.engine == "onnxruntime" and case.device == "cuda":
        return "ONNX Runtime of the onnx extra has no GPU kernels: give --device cpu"
    if case.engine == "tensorrt":
        if missing := tensorrt_engine.missing():
            return f"needs {' and '.join(missing)}"
        if case.device == "cpu":
            return "runs on GPUs only"
        if case.weights == "int8":
            return "needs calibrated int8 scales, which the graph does not have"
    elif case.engine != "onnxruntime" and case.weights == "int8" and version_of("torchao") is None:
        return "needs torchao"
    return None


def _alone(case: Case) -> dict[str, Any]:
    """Run a case in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher.tools.serve.case"],
        input=json.dumps(asdict(case)),
        # PYTHONPATH: the child finds modules where this process does
        env=os.environ | for_children() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.splitlines() or [""])[-1]
        return {"reason": f"its process ended with {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _beside(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the throughput ratio to the run's `REFERENCE` among the rows, and the length of the
    common token prefix."""
    wanted = (row["run"], *REFERENCE)
    first = next((r for r in rows if (r["run"], r["engine"], r["weights"]) == wanted), None)
    ratio, same = None, None
    if first is not None and row["tokens"] is not None and first["tokens"] is not None:
        ratio = row["tokens_per_s"] / first["tokens_per_s"]
        same = min(map(_common_prefix, row["tokens"], first["tokens"]))
    return {"tokens_per_s_ratio": ratio, "same_tokens": same}


def _common_prefix(mine: Sequence[int], others: Sequence[int]) -> int:
    pairs = zip(mine, others, strict=True)
    return next((n for n, (one, other) in enumerate(pairs) if one != other), len(mine))


def _machine(device_type: str) -> dict[str, Any]:
    packages = ("torch", "onnx", "onnxruntime", "torchao", "tensorrt")
    name = torch.cuda.get_device_name() if device_type == "cuda" else cpu_name()
    versions = {package: version_of(package) for package in packages}
    return {"device": name, "python": platform.python_version(), "packages": versions}
