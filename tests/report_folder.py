"""Writes run folders from the real record classes, for tests of what reads them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.config.schema import RunConfig
from launcher.measure.records import GpuRecord, PhaseRecord, RunRecord, StepRecord
from launcher.strategies.ledger import Ledger, LedgerLines
from launcher.util.json_file import Record

GIB = 2**30
LABELS = {"ddp": "ZeRO-0", "fsdp": "ZeRO-3", "single": "one device", "zero2": "FSDP shard grad op"}


def write_run(
    folder: Path,
    *,
    losses: Sequence[float] = (),
    strategy: str = "ddp",
    state: str = "completed",
    reason: str | None = None,
    ranks: int = 2,
    step_s: float = 0.5,
    peak_bytes: int = GIB,
    gpu: bool = False,
    summary: bool = True,
    ledgers: bool = True,
    **config: Any,
) -> Path:
    """One run with the given losses; every other figure follows from the arguments."""
    folder.mkdir(parents=True)
    zero = int(strategy[4:]) if strategy.startswith("zero") else None
    values: dict[str, Any] = {"model": "nano", "global_batch": 16, "seq_len": 128, "steps": 20}
    values |= {"seed": 0} | config
    name = strategy if zero is None else "zero"
    run_config = RunConfig().replace(strategy=name, zero=zero, **values)
    (folder / "config.yaml").write_text(yaml.safe_dump(run_config.flat()))
    ended = {"state": state, "phase": "end", "reason": reason, "rank": None, "exit_code": 0}
    if state != "completed":
        ended |= {"phase": "backward of step 1", "rank": 1, "exit_code": 3}
    (folder / "status.json").write_text(json.dumps(ended))
    environment = {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "git": "abc"}
    (folder / "environment.json").write_text(json.dumps(environment))
    for rank in range(ranks):
        device = f"cuda:{rank}" if gpu else "cpu"
        records: list[Record] = [
            RunRecord(
                run=folder.name,
                rank=rank,
                world_size=ranks,
                hostname="host",
                device=device,
                device_name="NVIDIA A100-SXM4-80GB" if gpu else None,
                strategy=strategy,
                strategy_also_called=LABELS[strategy],
                precision=values.get("precision", "fp32"),
                model=values["model"],
                parameters=1_000_000,
                matmul_parameters=900_000,
                flops_per_token=6_000_000,
                micro_batch=8,
                accumulation=1,
                global_batch=values["global_batch"],
                seq_len=values["seq_len"],
                steps=values["steps"],
                started_unix_s=1.0,
            )
        ]
        records += steps(losses, step_s=step_s, gpu=gpu, peak_bytes=peak_bytes)
        records += measurements(rank, gpu=gpu, peak_bytes=peak_bytes, ledgers=ledgers)
        lines = [json.dumps(record.as_dict()) + "\n" for record in records]
        (folder / f"rank{rank}.jsonl").write_text("".join(lines))
    if state == "completed" and summary:
        totals = {
            "perplexity": 600.0,
            "test_loss": 6.4,
            "tokens_per_s": 2048 / step_s,
            "peak_bytes": peak_bytes,
            "peak_kind": "allocated on the GPU" if gpu else "resident set of the process",
            "duration_s": 30.0,
        }
        (folder / "summary.json").write_text(json.dumps(totals))
    return folder


def steps(
    losses: Sequence[float], *, step_s: float = 0.5, gpu: bool = False, peak_bytes: int = GIB
) -> list[StepRecord]:
    return [
        StepRecord(
            step=step,
            loss=loss,
            grad_norm=1.5 if step > 1 else None,
            lr=1e-3,
            tokens=2048,
            duration_s=step_s if step > 2 else 10 * step_s,
            applied=True,
            data_s=0.01 * step_s,
            forward_s=0.3 * step_s,
            backward_s=0.6 * step_s,
            step_s=0.05 * step_s,
            allocated_peak_bytes=peak_bytes if gpu else None,
            reserved_peak_bytes=peak_bytes + GIB if gpu else None,
            device_used_bytes=peak_bytes + 2 * GIB if gpu else peak_bytes // 2,
        )
        for step, loss in enumerate(losses, start=1)
    ]


def measurements(rank: int, *, gpu: bool, peak_bytes: int, ledgers: bool) -> list[Record]:
    states = LedgerLines(
        params_bytes=peak_bytes // 8,
        grads_bytes=peak_bytes // 8,
        optimizer_bytes=peak_bytes // 4,
        activations_bytes=peak_bytes // 4,
        temporary_bytes=peak_bytes // 4,
        used_bytes=peak_bytes,
    )
    ledger = Ledger(
        moment="peak",
        step=3,
        phase="backward",
        device=states,
        host=LedgerLines(),
        disk=LedgerLines(),
    )
    phases = [
        PhaseRecord(period="steady", phase=phase, steps=18, mean_s=0.1, peak_bytes=peak)
        for phase, peak in (("forward", peak_bytes // 2), ("backward", peak_bytes), ("step", None))
    ]
    samples = [
        GpuRecord(
            t_s=t / 10,
            source="nvml" if gpu else "psutil",
            uuid=f"GPU-{rank}" if gpu else None,
            memory_used_bytes=peak_bytes + 2 * GIB if gpu else None,
            power_w=300.0 if gpu and t % 10 == 0 else None,
            host_rss_bytes=None if gpu else peak_bytes // 2,
        )
        for t in range(50)
    ]
    return [*([ledger, *phases] if ledgers else []), *samples]
