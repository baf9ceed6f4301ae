"""A run that goes back to a checkpoint takes back what it has written of later steps."""

import json
import os
import re
from pathlib import Path

_FILE = re.compile(r"rank(\d+)\.jsonl")


def rewind(path: Path, step: int) -> None:
    """Keep of a `rank<N>.jsonl` what is complete and not later than `step`.

    What closes a run (phases, the test split) is written anew at its next end. The file is
    replaced whole: killed on the way, the next one to go back does it again.
    """
    kept = path.with_name(f".{path.name}.rewinding")
    with (
        path.open(encoding="utf-8", errors="replace") as old,
        kept.open("w", encoding="utf-8") as new,
    ):
        new.writelines(line for line in old if _stays(line, step))
        new.flush()
        os.fsync(new.fileno())
    kept.replace(path)


def rank_files(folder: Path) -> dict[int, Path]:
    """Rank -> its file, for every rank that an earlier attempt of the run had."""
    found = ((_FILE.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _stays(line: str, step: int) -> bool:
    try:
        record = json.loads(line)
        kind, at = record["kind"], record.get("step")
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # the writer was killed inside this line
    if kind == "phase" or (kind == "eval" and record.get("split") == "test"):
        return False
    return at is None or at <= step
