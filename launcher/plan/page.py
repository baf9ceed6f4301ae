"""A plan as one HTML page: every choice in a table and as a bar of bytes, to sort and to filter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.page import page_html
from launcher.plan.assess import Assessment, Place
from launcher.plan.table import LINES, as_records

_NOT_SHOWN = ("config", "ledger", "peaks_bytes")


def write_page(path: Path, found: Sequence[Assessment], place: Place, command: str) -> None:
    """Write the page to `path`."""
    data = _page_data(found, place, command)
    page = page_html("shardscale plan", ("scatter.js", "plan.js"), data)
    path.write_text(page, encoding="utf-8")


def _page_data(found: Sequence[Assessment], place: Place, command: str) -> dict[str, Any]:
    run = found[0].run
    return {
        "model": run.config.model.model,
        "parameters": run.model.parameter_count,
        "global_batch": run.global_batch,
        "seq_len": run.seq_len,
        "devices": place.world_size,
        "memory_bytes": place.memory_bytes,
        "machine": place.machine.name,
        "source": place.machine.source,
        "command": command,
        "rows": [
            {name: value for name, value in record.items() if name not in _NOT_SHOWN}
            | _more(assessment, place)
            for record, assessment in zip(as_records(found, place), found, strict=True)
        ],
    }


def _more(a: Assessment, place: Place) -> dict[str, Any]:
    fits = a.verdict != "does not fit"
    device = a.highest.device
    lines = {f"{name}_bytes": getattr(device, f"{name}_bytes") or 0 for name in LINES}
    lines["allocator_slack_bytes"] = max(0, a.reserved_bytes - (device.used_bytes or 0))
    lines["context_bytes"] = place.fixed_bytes
    return {
        "share": a.used_bytes / a.memory_bytes,
        "step_time_s": a.time.total_s if fits else None,
        "tokens_per_s": a.time.tokens_per_s if fits else None,
        "highest_in": a.why_not,
        "lines": lines,
    }
