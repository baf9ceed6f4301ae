"""Runs jobs against the NVML on LD_LIBRARY_PATH, each in a forked process; see `stub.py`."""

import ctypes
import dataclasses
import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from launcher.measure import nvml
from launcher.util.json_file import Record

PATIENCE_S = 20.0  # only a broken sampler makes a job last that long


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Fit a line for as long as it takes to see `samples` samples, or until the GPU is lost."""
    import torch

    from launcher.measure.sampler import Sampler

    records: list[Record] = []
    sampler = Sampler(
        uuid=job["uuid"],
        emit=records.append,
        memory_every_s=0.002,
        rest_every_s=0.006,
        line_every_s=0.002,
    )
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 1)
    inputs = torch.randn(64, 4)
    targets = inputs.sum(dim=1, keepdim=True)
    losses = []
    sampler.start()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        loss = torch.nn.functional.mse_loss(layer(inputs), targets)
        gradients = torch.autograd.grad(loss, list(layer.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.sub_(0.05 * gradient)
        losses.append(loss.item())
        ended = any(getattr(record, "name", "") == "gpu_lost" for record in records)
        seen = sum(record.kind == "gpu" for record in records)
        if len(losses) >= 20 and (ended or seen >= job.get("samples", 30)):
            break
        time.sleep(0.001)
    before = len(records)
    started = time.monotonic()
    summary = sampler.stop()
    stop_s = time.monotonic() - started
    after_stop = len(records)
    time.sleep(0.01)
    return {
        "losses": [losses[0], losses[-1]],
        "stop_was_short": stop_s < 5.0,
        "late_records": len(records) - after_stop,
        "records": [record.as_dict() for record in records],
        "records_before_stop": before,
        "summary": dataclasses.asdict(summary),
        "energy": sampler.energy is not None,
        "references": references(),
    }


def simulate(job: dict[str, Any]) -> dict[str, Any]:
    """Run the sampler on a clock of our own, late by random amounts and once by `stall_s`."""
    from launcher.measure.sampler import Sampler

    rng = random.Random(job["seed"])
    now_ns, stalled = 0, False
    records: list[Record] = []
    deadlines: list[int] = []

    def wait(timeout_s: float) -> bool:
        nonlocal now_ns, stalled
        now_ns += round(timeout_s * 1e9)
        deadlines.append(now_ns)
        now_ns += round(rng.uniform(0.0, job["jitter_s"]) * 1e9)
        if not stalled and now_ns > job["stall_at_s"] * 1e9:
            stalled = True
            now_ns += round(job["stall_s"] * 1e9)
        return bool(now_ns >= job["until_s"] * 1e9)

    sampler = Sampler(uuid=job["uuid"], emit=records.append, clock_ns=lambda: now_ns, wait=wait)
    sampler.run()
    return {
        "deadlines_ns": deadlines,
        "records": [record.as_dict() for record in records],
        "summary": dataclasses.asdict(sampler.stop()),
    }


def device(job: dict[str, Any]) -> dict[str, Any]:
    """Read everything once, `times` times over."""
    try:
        opened = nvml.NvmlDevice.open(job["uuid"])
    except nvml.NvmlFault as fault:
        return {"fault": fault.name, "outcome": fault.outcome.value, "references": references()}
    found: dict[str, Any] = {"uuid": opened.uuid, "memory": []}
    for _ in range(job.get("times", 1)):
        try:
            found["memory"].append(opened.memory_bytes())
        except nvml.NvmlFault as fault:
            found["memory"].append(fault.name)
    for name in ("utilization", "power", "energy", "temperature"):
        try:
            found |= opened.read(name)
        except nvml.NvmlFault as fault:
            found[name] = fault.name
    opened.close()
    return {**found, "references": references()}


def gpus(_: dict[str, Any]) -> dict[str, Any]:
    return {"gpus": nvml.openable_gpus(), "references": references()}


def references() -> int | None:
    """nvmlInit calls without their nvmlShutdown, as the stub counts them."""
    try:
        return int(ctypes.CDLL("libnvidia-ml.so.1").stub_references())
    except (OSError, AttributeError):
        return None


MODES = {"train": train, "simulate": simulate, "device": device, "gpus": gpus}


def main(jobs_path: str) -> None:
    jobs = json.loads(Path(jobs_path).read_text())
    if any(job["mode"] in ("train", "simulate") for job in jobs):
        import launcher.measure.sampler  # noqa: F401  (once for all children: torch takes seconds)
    gc.freeze()  # or each child walks, and so copies, all of torch when it exits
    for job in jobs:
        child = os.fork()
        if child == 0:
            os.environ["NVML_STUB_SCRIPT"] = job["script"]
            result = MODES[job["mode"]](job)
            Path(job["result"]).write_text(json.dumps(result))
            if not job.get("is_torn_down", True):
                os._exit(0)
            return  # through the interpreter's own exit, which must not hang or fail
        _, status = os.waitpid(child, 0)
        path = Path(job["result"])
        result = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**result, "exit_code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main(sys.argv[1])
