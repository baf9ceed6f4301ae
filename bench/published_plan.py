"""What `shardscale plan` says of a published run."""

import contextlib
import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from published_rows import Row

from launcher.plan.cli import main as plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One row's prediction, or why there is none."""

    key: str
    refused: str | None = None
    verdict: str | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    step_s: float | None = None
    least_step_s: float | None = None
    most_step_s: float | None = None

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
        (record,) = json.loads(path.read_text(encoding="utf-8"))
    phases = record["forward_s"] + record["backward_s"] + record["step_s"]
    return Planned(
        key=row.key,
        verdict=record["verdict"],
        allocated_bytes=max(record["peaks_bytes"].values()),
        reserved_bytes=record["reserved_bytes"],
        step_s=phases,
        least_step_s=record.get("least_total_s", phases),
        most_step_s=record.get("most_total_s", phases),
    )
