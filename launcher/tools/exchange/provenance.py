"""Read from a checkpoint its run's step."""

import json
from pathlib import Path

from launcher.checkpoint import Checkpoint, CheckpointFolder

# found without parsing each line, of which a long run has millions
_STEP = b'{"kind": "step", '


def which_step(checkpoint: Checkpoint) -> str:
    """Describe a checkpoint's step, and whether it is the last of its run."""
    step = checkpoint.step
    of_all = checkpoint.extra.get("steps")
    if of_all is None:
        return f"step {step}"
    description = f"step {step} of {of_all}"
    newest = CheckpointFolder(checkpoint.path.parent).latest()
    recorded = _last_recorded(checkpoint.run_folder)
    if newest is not None and newest.name > checkpoint.path.name:
        return f"{description}; a newer checkpoint exists, {newest.name}"
    if recorded > step:
        return f"{description}; the run went on to step {recorded}, which was not saved"
    if step < of_all:
        return f"{description}; the run is not complete"
    return description


def _last_recorded(run: Path) -> int:
    """Return the last step in the run's records; 0 without records."""
    last = b""
    try:
        with (run / "rank0.jsonl").open("rb") as file:
            for line in file:
                last = line if line.startswith(_STEP) and line.endswith(b"\n") else last
        return int(json.loads(last)["step"]) if last else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
