"""The comparison as text: a console table, CSV and Markdown."""

import csv
import io
from typing import Any

from rich.text import Text

from launcher import tables
from launcher.compare.report.columns import COLUMNS, Column, shown
from launcher.tables import say

_STATES = {"completed": "green", "oom": "red", "failed": "red", "running": "yellow"}
_STATES |= {"timeout": "red", "interrupted": "yellow"}
# What a narrow terminal shows first; the rest of the brief columns comes after these.
_FIRST = (
    *("run", "state", "tokens_per_s", "allocated_peak_bytes", "tracked_live_bytes", "perplexity"),
    *("step_time_s", "reserved_peak_bytes", "device_used_bytes", "resident_set_bytes"),
    *("loss_difference", "differs", "strategy", "precision", "world_size"),
)
_LONG_NAME = 40  # longer ones go on in a second line where the terminal is narrow
STUDY_COLUMNS = (
    ("run", "run"),
    ("measured_on", "measured on"),
    ("forward", "forward"),
    ("backward", "backward"),
    ("step", "step"),
    ("step_time_s", "s/step"),
    ("batch", "batch"),
    ("largest_batch", "largest batch"),
)


def brief_columns(data: dict[str, Any]) -> list[Column]:
    """What fits beside each other: the main columns that any run has a value for."""
    return [column for column in COLUMNS if column.brief and column.key in data["columns"]]


def print_report(data: dict[str, Any], where: str) -> None:
    """Print the table, why runs failed, what is best, and the study where it belongs.

    `where` has the columns that there is no room for.
    """
    print_table(data, where)
    for row in data["runs"]:
        if row["reason"]:
            say(f"{row['run']}: {_ending(row)}: {row['reason']}")
        for note in row["notes"]:
            say(f"{row['run']}: {note}")
    for line in goal_lines(data):
        say(line)
    if data["study"]:
        say("\nBeside the published study")
        titles = [title for _, title in STUDY_COLUMNS]
        columns = [tables.Column(title=title, rank=n, folds=20) for n, title in enumerate(titles)]
        tables.print_table(columns, study_cells(data), otherwise=f"{where} has them all")
        say(data["study"]["caption"])
        say(data["study"]["perplexities"])


def print_table(data: dict[str, Any], where: str) -> None:
    """Print the table alone."""
    columns = brief_columns(data)
    ranks = {key: rank for rank, key in enumerate(_FIRST)}
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


def _cell(row: dict[str, Any], column: Column) -> str:
    if column.key == "loss_difference" and row["loss_note"] == "reference":
        return "reference"
    value = row["differs_brief" if column.key == "differs" else column.key]
    if column.key in ("position", "differs") and value is None:
        return ""  # there is nothing to say, rather than nothing known
    return shown(value, column.kind)


def goal_lines(data: dict[str, Any]) -> list[str]:
    """`fastest: zero2 (582 MiB resident set, 5,391 tokens/s)`, for each setting."""
    lines = []
    for part in data["settings"]:
        if len(data["settings"]) > 1 and part["goals"]:
            lines.append(f"{part['setting']}:")
        for goal in part["goals"]:
            lines.append(f"{goal['goal']}: {goal['text']}")
    return lines


def study_cells(data: dict[str, Any]) -> list[list[str]]:
    """The rows of the study's table, as text."""
    rows = []
    for row in data["study"]["rows"]:
        peaks = [row[phase] for phase in ("forward", "backward", "step")]
        memory = [shown(peak, "loss") if peak is None else f"{peak:.1f}" for peak in peaks]
        memory = [text if text == "n/a" else f"{text} {row['unit']}" for text in memory]
        batches = [shown(row[key], "count") for key in ("batch", "largest_batch")]
        time = shown(row["step_time_s"], "seconds")
        if row["unit"] == "GB":
            time = f"{row['step_time_s']:.2f} s"  # no more digits than the study prints
        rows.append([row["run"], row["measured_on"], *memory, time, *batches])
    return rows


def csv_text(data: dict[str, Any]) -> str:
    """All columns, raw values in the units of their names; an unknown value is `n/a`."""
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
    """The main columns as a GitHub table, with what is best and why runs failed."""
    columns = brief_columns(data)
    parts = [_markdown_table([c.title for c in columns], _markdown_rows(data, columns))]
    parts.append("\n".join(f"- {escaped(line)}" for line in goal_lines(data)))
    failures = [
        f"- {escaped(row['run'])}: {escaped(_ending(row))}: {escaped(row['reason'])}"
        for row in data["runs"]
        if row["reason"]
    ]
    notes = [f"{row['run']}: {note}" for row in data["runs"] for note in row["notes"]]
    parts.append("\n".join([*failures, *(f"- {escaped(note)}" for note in notes)]))
    if data["study"]:
        titles = [title for _, title in STUDY_COLUMNS]
        parts += [_markdown_table(titles, study_cells(data)), data["study"]["caption"]]
        parts.append(data["study"]["perplexities"])
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_rows(data: dict[str, Any], columns: list[Column]) -> list[list[str]]:
    return [[_cell(row, column) for column in columns] for row in data["runs"]]


def _markdown_table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles)]
    lines += [[escaped(cell) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|#~!$&" else c for c in text)
