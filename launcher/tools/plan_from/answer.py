"""Answers of `plan --from`: the plan of a config, or the cheapest change as a patch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.tools.plan_from.assess import plan_of
from launcher.tools.plan_from.changes import changes_of, patch_of
from launcher.tools.plan_from.output import print_planned
from launcher.tools.plan_from.reading import read_source
from launcher.util.errors import ExitCode


def plan_files(files: Sequence[Path], rest: Sequence[str], *, patch: bool, as_json: bool) -> int:
    """Plan the run that files describe, and print the plan, or a patch; return an exit code."""
    planned = plan_of([read_source(path) for path in files], rest)
    changes = changes_of(planned, rest)
    if patch:
        if not changes:
            path = planned.reading.source.path
            print(f"shardscale: {path}: no change of its keys fits", file=sys.stderr)
            return ExitCode.NOTHING_FITS
        print(patch_of(planned.reading.source, changes[0]), end="")
        return ExitCode.DONE
    print_planned(planned, changes, as_json=as_json)
    fits = planned.verdict != "does not fit"
    return ExitCode.DONE if fits else ExitCode.NOTHING_FITS
