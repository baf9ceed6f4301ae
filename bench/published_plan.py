"""Plan published runs."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from published_rows import Row

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import Resolved, resolve
from launcher.forecast.cluster import find_cluster
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.timing import StepTime, step_seconds
from launcher.tools.plan_from.assess import assessed
from launcher.util.errors import UserError


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
    """Plan the row's flags as another trainer's run, as `shardscale plan --from` does."""
    options, flags = parse_options(row.arguments)
    cluster, _ = find_cluster(options)
    try:
        found = assessed(parse_run_config(flags, row.gpus), cluster)
    except UserError as error:
        return Planned(key=row.key, refused=str(error))
    return Planned(
        key=row.key,
        verdict=found.verdict,
        planned_allocated_bytes=max(found.prediction.peaks.values()),
        planned_reserved_bytes=found.used_bytes - cluster.fixed_bytes,
        planned_step_s=time_of(row, found.run).total_s,
    )


def planned_seconds(row: Row, before: Planned) -> Planned:
    """The same with seconds of today's constants."""
    if before.refused is not None:
        return before
    return replace(before, planned_step_s=time_of(row, run_of(row)).total_s)


def run_of(row: Row) -> Resolved:
    """Return the run that a row's command would start.

    Raises:
        UserError: it is refused.
    """
    _, flags = parse_options(row.arguments)
    config = parse_run_config(flags, row.gpus)
    run = resolve(config, world_size=row.gpus, device_type="cuda")
    return replace(run, of_another_trainer=True)


def time_of(row: Row, run: Resolved) -> StepTime:
    """Return the predicted time of a step of a row's run on its GPUs."""
    options, _ = parse_options(row.arguments)
    cluster, _ = find_cluster(options)
    return step_seconds(
        run,
        gpus_per_node=cluster.ranks_per_node,
        machine=cluster.machine,
    )
