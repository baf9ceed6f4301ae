"""How far a checkpoint's run had got, and how far it got afterwards."""

import json
from pathlib import Path

from launcher.checkpoint import Checkpoint, CheckpointFolder

_STEP = b'{"kind": "step", '


def which_step(checkpoint: Checkpoint) -> str:
    """The step that a checkpoint holds, and whether it is the last of its run."""
    step = checkpoint.step
    of_all = checkpoint.extra.get("steps")
    if of_all is None:
        return f"step {step}"
    said = f"step {step} of {of_all}"
    newest = CheckpointFolder(checkpoint.path.parent).latest()
    recorded = _last_recorded(checkpoint.path.absolute().parents[1])
    if newest is not None and newest.name > checkpoint.path.name:
        return f"{said}, not the last that is saved: {newest.name} is"
    if recorded > step:
        return f"{said}, not the run's last: it went on to step {recorded}, which is not saved"
    if step < of_all:
        return f"{said}, not the last: the run has not got there"
    return said


def _last_recorded(run: Path) -> int:
    """The last step in the run's records; 0 where there are none."""
    last = b""
    try:
        with (run / "rank0.jsonl").open("rb") as file:
            for line in file:
                last = line if line.startswith(_STEP) and line.endswith(b"\n") else last
        return int(json.loads(last)["step"]) if last else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
