"""`shardscale snapshot`: show what a memory snapshot of torch holds."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from launcher.tools.snapshot.history import DeviceHistory, Held, device_histories
from launcher.tools.snapshot.places import PHASES
from launcher.tools.snapshot.read import read_snapshot
from launcher.util.errors import ExitCode, UserError, refusing
from launcher.util.files import check_new_file
from launcher.util.flags import OptionParser
from launcher.util.page import page_html
from launcher.util.sizes import gib
from launcher.util.tables import MUST, Column, print_table

SCHEMA_VERSION: Final = 1
MOST_ROWS: Final = 12
_MOST_ON_PAGE: Final = 300
_COLUMNS: Final = (
    Column(title="phase", rank=MUST),
    Column(title="bytes", rank=MUST, right=True),
    Column(title="of peak", rank=1, right=True),
    Column(title="tensors", rank=2, right=True),
    Column(title="where", rank=MUST, folds=40),
)


@refusing
def main(arguments: Sequence[str]) -> int:
    """Print the peak and its contents; write a page or JSON where asked."""
    options = snapshot_parser().parse_args(arguments)
    if options.page is not None:
        check_new_file(options.page)
    found = device_histories(read_snapshot(options.file))
    if not found:
        raise UserError(
            f"{options.file} has no event and no segment: record with "
            "torch.cuda.memory._record_memory_history() before the steps to look at"
        )
    if options.json:
        print(json.dumps(_as_record(options.file, found)))
    else:
        for history in found:
            _print(history)
    if options.page is not None:
        record = _as_record(options.file, found)
        page = page_html(f"Memory of {options.file.name}", ("lines.js", "snapshot.js"), record)
        options.page.write_text(page, encoding="utf-8")
        if not options.json:
            print(f"page: {options.page}")
    return ExitCode.DONE


def snapshot_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = OptionParser(
        prog="shardscale snapshot",
        description="Show a memory snapshot of torch (torch.cuda.memory._dump_snapshot): the "
        "timeline, the contents of the peak, lifetimes and fragmentation. Nothing in the file is "
        "executed.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the snapshot, a pickle")
    parser.add_argument("--page", type=Path, metavar="FILE.html", help="write it as a page, too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def _print(history: DeviceHistory) -> None:
    peak, end = history.peak, history.fragmentation
    print(
        f"GPU {history.device}: peak {gib(peak.allocated_bytes)} allocated at event "
        f"{max(0, peak.event):,} of {history.events:,}; peak {gib(history.peak_reserved_bytes)} "
        "reserved"
    )
    for wanted in history.out_of_memory:
        print(f"  out of memory: {gib(wanted)} were asked for in vain")
    rows = [
        [
            held.origin.phase,
            gib(held.size_bytes),
            f"{held.size_bytes / max(1, peak.allocated_bytes):.1%}",
            f"{held.tensors:,}",
            held.origin.label,
        ]
        for held in history.at_peak[:MOST_ROWS]
    ]
    print_table(_COLUMNS, rows, otherwise="--page FILE.html has them all")
    print(
        f"at the end {gib(end['reserved_bytes'])} reserved in {end['segments']:,} segments, "
        f"{gib(end['free_bytes'])} of it free: largest free block "
        f"{gib(end['largest_free_bytes'])}, {gib(end['stuck_bytes'])} in segments that "
        "tensors in use hold"
    )


def _as_record(file: Path, found: Sequence[DeviceHistory]) -> dict[str, Any]:
    return {
        "version": SCHEMA_VERSION,
        "file": str(file),
        "phases": PHASES,
        "devices": [_device_record(history) for history in found],
    }


def _device_record(history: DeviceHistory) -> dict[str, Any]:
    return {
        "device": history.device,
        "events": history.events,
        "peak_allocated_bytes": history.peak.allocated_bytes,
        "peak_event": history.peak.event,
        "peak_reserved_bytes": history.peak_reserved_bytes,
        "out_of_memory_bytes": list(history.out_of_memory),
        "fragmentation": history.fragmentation,
        "timeline": {
            "event": [point.event for point in history.points],
            "reserved_bytes": [point.reserved_bytes for point in history.points],
            "allocated_bytes": [list(point.by_phase) for point in history.points],
        },
        "at_peak": [_held_record(held) for held in history.at_peak[:_MOST_ON_PAGE]],
        "over_time": [
            _held_record(held)
            | {"lived_share": held.byte_events / (max(1, held.size_bytes) * max(1, history.events))}
            for held in history.over_time[:_MOST_ON_PAGE]
        ],
    }


def _held_record(held: Held) -> dict[str, Any]:
    return {
        "phase": held.origin.phase,
        "where": held.origin.label,
        "line": held.origin.line,
        "size_bytes": held.size_bytes,
        "tensors": held.tensors,
    }
