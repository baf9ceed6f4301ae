"""A plan as plain records, and as a page to sort and filter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from launcher.forecast.assess import Assessment
from launcher.forecast.cluster import Cluster
from launcher.forecast.efficiency import LEAST_OF_PREDICTED, MOST_OF_PREDICTED
from launcher.forecast.evaluation import Failed
from launcher.forecast.predict import by_category
from launcher.forecast.table import FAILED, same_batch
from launcher.forecast.timing import StepTime
from launcher.util.page import page_html

_NOT_ON_THE_PAGE: Final = ("config", "ledger", "peaks_bytes")
_SECONDS: Final = {
    **{name: name for name in ("forward_s", "backward_s", "step_s", "exposed_communication_s")},
    **{"least_total_s": "least_s", "most_total_s": "most_s", "tokens_per_s": "tokens_per_s"},
}
"""Key of a record -> field of `StepTime`."""


def as_records(found: Sequence[Assessment], cluster: Cluster) -> list[dict[str, Any]]:
    """Return a plain record per candidate; its ledger has the schema of measured ones."""
    return [
        {
            "sharding": a.choice.label,
            "precision": a.choice.precision,
            "activation_checkpointing": a.choice.checkpointing,
            "blocks_keep": a.run.model.activation_checkpointing,
            "micro_batch": a.run.config.data.micro_batch,
            "accumulation": a.run.accumulation,
            "largest_micro_batch": a.largest_micro_batch,
            "verdict": a.verdict,
            "used_bytes": a.used_bytes,
            "reserved_bytes": a.used_bytes - cluster.fixed_bytes,
            "fixed_bytes": cluster.fixed_bytes,
            "memory_bytes": a.memory_bytes,
            "margin_bytes": a.margin_bytes,
            "host_bytes": a.prediction.host_bytes,
            "disk_bytes": a.prediction.disk_bytes,
            "ledger": a.highest.as_dict(),
            "peaks_bytes": {" ".join(key): value for key, value in a.prediction.peaks.items()},
            **_seconds(a.time),
            "config": a.run.config.flat(),
        }
        for a in found
    ]


def _seconds(time: StepTime | None) -> dict[str, float | None]:
    return {
        name: None if time is None else getattr(time, field) for name, field in _SECONDS.items()
    }


def failed_records(failed: Sequence[Failed]) -> list[dict[str, Any]]:
    """Return a plain record per failure, in the names of those that have a prediction."""
    return [
        {
            "sharding": each.choice.label,
            "precision": each.choice.precision,
            "activation_checkpointing": each.choice.checkpointing,
            "verdict": FAILED,
            "error": each.reason,
        }
        for each in failed
    ]


def write_page(path: Path, found: Sequence[Assessment], cluster: Cluster, command: str) -> None:
    """Write an HTML page: every candidate in a table and as a bar of bytes."""
    run = found[0].run
    data = {
        "model": run.config.model.label,
        "parameters": run.model.parameter_count,
        "global_batch": run.global_batch if same_batch(found) else None,
        "seq_len": run.seq_len,
        "devices": cluster.world_size,
        "memory_bytes": cluster.memory_bytes,
        "machine": cluster.machine.name,
        "source": cluster.machine.source,
        "command": command,
        "range": [LEAST_OF_PREDICTED, MOST_OF_PREDICTED],
        "rows": [page_row(assessment, cluster) for assessment in found],
    }
    page = page_html("shardscale plan", ("scatter.js", "plan.js"), data)
    path.write_text(page, encoding="utf-8")


def page_row(a: Assessment, cluster: Cluster) -> dict[str, Any]:
    """Return one candidate as pages show it."""
    (record,) = as_records([a], cluster)
    lines = {f"{name}_bytes": size for name, size in by_category(a.highest).items()}
    beside = a.used_bytes - cluster.fixed_bytes - (a.highest.device.used_bytes or 0)
    return {name: value for name, value in record.items() if name not in _NOT_ON_THE_PAGE} | {
        "share": a.used_bytes / a.memory_bytes,
        "simplicity": a.merit.simplicity,
        "tokens_per_step": a.run.global_batch * a.run.seq_len,
        "step_time_s": a.time and a.time.total_s,
        "highest_in": a.highest_in,
        "lines": lines
        | {"allocator_slack_bytes": max(0, beside), "context_bytes": cluster.fixed_bytes},
    }
