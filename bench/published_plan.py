"""What `shardscale plan` says of a published run."""

import contextlib
import io
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from published_rows import Row

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.cluster import find_cluster
from launcher.forecast.plan_cli import main as plan
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.timing import StepTime, step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One row's prediction, or why there is none."""

    key: str
    refused: str | None = None
    verdict: str | None = None
    planned_allocated_bytes: int | None = None
    planned_reserved_bytes: int | None = None
    planned_step_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def planned(row: Row) -> Planned:
    """Runs the command, as a user would."""
    said = io.StringIO()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            code = plan([*row.arguments, "--quiet", "--json", str(path)])
        if code != 0:
            return Planned(key=row.key, refused=said.getvalue().strip().splitlines()[-1])
        # The same run may be found under two labels.
        record = json.loads(path.read_text(encoding="utf-8"))[0]
    return Planned(
        key=row.key,
        verdict=record["verdict"],
        planned_allocated_bytes=max(record["peaks_bytes"].values()),
        planned_reserved_bytes=record["reserved_bytes"],
        planned_step_s=record["forward_s"] + record["backward_s"] + record["step_s"],
    )


def planned_seconds(row: Row, before: Planned) -> Planned:
    """The same with seconds of today's constants."""
    if before.refused is not None:
        return before
    return replace(before, planned_step_s=time_of(row, run_of(row)).total_s)


def run_of(row: Row) -> Resolved:
    """What a row's command would run.

    Raises:
        UserError: it is refused.
    """
    _, flags = parse_options(row.arguments)
    config = parse_run_config(flags, row.gpus)
    return resolve(config, world_size=row.gpus, device_type="cuda")


def time_of(row: Row, run: Resolved) -> StepTime:
    """Of a row's run on its GPUs."""
    options, _ = parse_options(row.arguments)
    cluster, _ = find_cluster(options)
    return step_seconds(
        run,
        world_size=cluster.world_size,
        gpus_per_node=cluster.ranks_per_node,
        machine=cluster.machine,
    )
