"""The report as one HTML page: its data, thinned out to what charts can show."""

import dataclasses
from typing import Any

from launcher.compare.report.analysis import LossDifference
from launcher.compare.report.build import Report, clean
from launcher.compare.report.columns import COLUMNS
from launcher.compare.report.runs import Run
from launcher.compare.report.steps import thin
from launcher.compare.report.timeline import Timeline
from launcher.page import page_html

CURVE_POINTS = 500
GAP_POINTS = 250
# Timelines in the page: 50 runs of 8 ranks stay below 6 MB, and more runs show fewer ranks.
MOST_TIMELINES = 400
MOST_RANKS = 8
SCRIPTS = ("scatter.js", "lines.js", "report.js")


def report_page(report: Report) -> str:
    """The whole page."""
    return page_html("shardscale report", SCRIPTS, _page_data(report))


def _page_data(report: Report) -> dict[str, Any]:
    columns = {column.key: column for column in COLUMNS}
    shown = [dataclasses.asdict(columns[key]) for key in report.data["columns"]]
    ranks = max(1, min(MOST_RANKS, MOST_TIMELINES // len(report.runs)))
    return {
        **report.data,
        "runs": [{**row, "differs": row["differs_brief"]} for row in report.data["runs"]],
        "columns": shown,
        "curves": [_curve(run) for run in report.runs],
        "gaps": [_gap(report.differences.get(run.name)) for run in report.runs],
        "timelines": [
            [clean(_timeline(timeline)) for timeline in run.timelines[:ranks]]
            for run in report.runs
        ],
    }


def _curve(run: Run) -> dict[str, Any] | None:
    if run.steps is None:
        return None
    x, y = thin(run.steps.step, run.steps.loss, CURVE_POINTS)
    return {"x": x, "y": [_short(value) for value in y]}


def _gap(difference: LossDifference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    x, y = thin(difference.gap_steps, difference.gaps, GAP_POINTS)
    return {"x": x, "y": [_short(value) for value in y]}


def _timeline(timeline: Timeline) -> dict[str, Any]:
    return {
        "rank": timeline.rank,
        "source": timeline.source,
        "t_s": [_short(t_s) for t_s in timeline.t_s],
        **{name: [_short(v) for v in values] for name, values in timeline.readings.items()},
    }


def _short(value: float | None) -> float | None:
    """Six digits are more than a chart can show, and a third of the file's size."""
    return None if value is None else float(f"{value:.6g}")
