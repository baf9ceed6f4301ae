"""Outputs of the comparison: console table, CSV, Markdown and one HTML page."""

import csv
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from launcher.compare.report.columns import COLUMNS, NARROW_FIRST, ReportColumn, shown
from launcher.compare.report.comparison import Report, clean
from launcher.compare.report.series import DeviceSamples, Floats, thin
from launcher.util import tables
from launcher.util.page import page_html
from launcher.util.tables import say

_STATES = {"completed": "green", "oom": "red", "failed": "red", "running": "yellow"}
_STATES |= {"timeout": "red", "interrupted": "yellow", "lost": "red"}
_LONG_NAME = 40  # longer names wrap on a narrow terminal
CURVE_POINTS = 500
GAP_POINTS = 250
# Timelines in the page: 50 runs of 8 ranks take 6 MB; with more runs, fewer ranks are shown.
MOST_TIMELINES = 400
MOST_RANKS = 8
SCRIPTS = ("scatter.js", "lines.js", "inference.js", "report.js")


def brief_columns(data: dict[str, Any]) -> list[ReportColumn]:
    """Return the main columns that any run has a value for."""
    return [c for c in COLUMNS if c.show != "full" and c.key in data["columns"]]


def print_report(data: dict[str, Any], where: str) -> None:
    """Print the table, why runs failed, and the winners.

    `where` names the file with the columns that do not fit.
    """
    print_table(data, where)
    for row in data["runs"]:
        if row["reason"]:
            say(f"{row['run']}: {_ending(row)}: {row['reason']}")
        for note in row["notes"]:
            say(f"{row['run']}: {note}")
    for line in goal_lines(data):
        say(line)


def print_table(data: dict[str, Any], where: str) -> None:
    """Print the table alone."""
    columns = brief_columns(data)
    ranks = {key: rank for rank, key in enumerate(NARROW_FIRST)}
    rows = [
        [
            Text(_cell(row, column), _STATES.get(row["state"], "") if column.key == "state" else "")
            for column in columns
        ]
        for row in data["runs"]
    ]
    tables.print_table(
        [
            tables.Column(
                title=column.title,
                rank=ranks.get(column.key, len(ranks)),
                right=column.kind != "text",
                folds=_LONG_NAME if column.key == "run" else None,
            )
            for column in columns
        ],
        rows,
        otherwise=f"{where} has them all",
    )


def _ending(row: dict[str, Any]) -> str:
    return f"{row['state']} in {row['where']}" if row["where"] else str(row["state"])


def _cell(row: dict[str, Any], column: ReportColumn) -> str:
    if column.key == "loss_difference" and row["loss_note"] == "reference":
        return "reference"
    value = row["differs_brief" if column.key == "differs" else column.key]
    if column.key in ("position", "differs") and value is None:
        return ""  # empty rather than unknown
    return shown(value, column.kind)


def goal_lines(data: dict[str, Any]) -> list[str]:
    """Format the winners of each setting: `fastest: zero2 (582 MiB resident set, ...)`."""
    lines = []
    for part in data["settings"]:
        if len(data["settings"]) > 1 and part["goals"]:
            lines.append(f"{part['setting']}:")
        for goal in part["goals"]:
            lines.append(f"{goal['goal']}: {goal['text']}")
    return lines


def csv_text(data: dict[str, Any]) -> str:
    """Write all columns with raw values in the units of their names; unknown values are `n/a`."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.key for column in COLUMNS])
    for row in data["runs"]:
        writer.writerow([_csv_cell(row[column.key]) for column in COLUMNS])
    return file.getvalue()


def _csv_cell(value: Any) -> Any:
    if value is None:
        return "n/a"
    # A spreadsheet would run such a text as a formula.
    return f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@") else value


def markdown_text(data: dict[str, Any]) -> str:
    """Write the main columns as a GitHub table, with the winners and why runs failed."""
    columns = brief_columns(data)
    rows = [[column.title for column in columns], ["---"] * len(columns)]
    rows += [[escaped(_cell(row, column)) for column in columns] for row in data["runs"]]
    notes = [
        f"{row['run']}: {_ending(row)}: {row['reason']}" for row in data["runs"] if row["reason"]
    ]
    notes += [f"{row['run']}: {note}" for row in data["runs"] for note in row["notes"]]
    parts = ["\n".join("| " + " | ".join(cells) + " |" for cells in rows)]
    parts += [
        "\n".join(f"- {escaped(line)}" for line in lines) for lines in (goal_lines(data), notes)
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(text: str) -> str:
    """Escape text so that Markdown shows it literally."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#~!$&" else c for c in text)


def report_page(report: Report, inference: Mapping[str, Any] | None = None) -> str:
    """Write the HTML page, with the table of `infer-bench` if there is one."""
    return page_html("shardscale report", SCRIPTS, {**_page_data(report), "inference": inference})


def _page_data(report: Report) -> dict[str, Any]:
    columns = {column.key: column for column in COLUMNS}
    shown = [
        {"key": c.key, "title": c.title, "kind": c.kind, "help": c.help, "brief": c.show != "full"}
        for c in (columns[key] for key in report.data["columns"])
    ]
    ranks = max(1, min(MOST_RANKS, MOST_TIMELINES // len(report.compared)))
    return {
        **report.data,
        "runs": [{**row, "differs": row["differs_brief"]} for row in report.data["runs"]],
        "columns": shown,
        "curves": [
            one.run.steps and _thinned(one.run.steps.step, one.run.steps.loss, CURVE_POINTS)
            for one in report.compared
        ],
        "gaps": [
            one.difference and _thinned(one.difference.gap_steps, one.difference.gaps, GAP_POINTS)
            for one in report.compared
        ],
        "timelines": [
            [clean(_timeline(timeline)) for timeline in one.run.timelines[:ranks]]
            for one in report.compared
        ],
    }


def _thinned(x: NDArray[np.int64], y: Floats, points: int) -> dict[str, Any]:
    shown_x, shown_y = thin(x, y, points)
    return {"x": shown_x, "y": [_short(value) for value in shown_y]}


def _timeline(timeline: DeviceSamples) -> dict[str, Any]:
    return {
        "rank": timeline.rank,
        "source": timeline.source,
        "t_s": [_short(t_s) for t_s in timeline.t_s],
        **{name: [_short(v) for v in values] for name, values in timeline.readings.items()},
    }


def _short(value: float | None) -> float | None:
    # Six digits are enough for any chart, and a third of the file's size.
    return None if value is None else float(f"{value:.6g}")
