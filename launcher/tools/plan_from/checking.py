"""`plan --check`: one line per config and an exit code, for continuous integration."""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.config.arguments import parse_run_config
from launcher.forecast.cluster import find_cluster
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.plan_records import as_records
from launcher.tools.plan_from.assess import assessed, plan_of
from launcher.tools.plan_from.output import fits_line, record_of, verdict_line
from launcher.tools.plan_from.reading import SUFFIXES, Source, read_source
from launcher.tools.plan_from.translate import WrongValue, kind_of
from launcher.util.errors import ExitCode, Failure, UserError

TOO_CLOSE: Final = 3
"""Exit code of a run within the error of a prediction. It is not `ExitCode.OUT_OF_MEMORY`, since
nothing has run."""
MOST_FILES: Final = 10_000
_PASSED_OVER: Final = frozenset({"node_modules", "site-packages", "__pycache__"})
_CODES: Final = {
    **{"fits": 0, "tight": TOO_CLOSE, "does not fit": int(ExitCode.NOTHING_FITS)},
    "wrong": int(ExitCode.REFUSED),
}


def check(paths: Sequence[Path], argv: Sequence[str], *, as_json: bool) -> int:
    """Check files, and the configs of folders; return 0 where all fit with room, 1 where one does
    not, else 2 where one has a value that is wrong, else 3 where one is too close to call.

    A config of a folder that lacks a fact is listed and does not fail the check.

    Raises:
        UserError: a file cannot be read or lacks a fact, or a folder has no config.
    """
    records, codes = [], []
    for source, alone in _sources(paths):
        record = _checked(source, argv, alone=alone)
        records.append(record)
        codes.append(_CODES.get(record["verdict"], 0))
        if not as_json:
            print(record["line"], flush=True)
    if not records:
        raise UserError(f"{', '.join(map(str, paths))}: no config of a known trainer in there")
    if as_json:
        print(json.dumps(records, indent=2, default=str))
    return next((code for code in (1, 2) if code in codes), max(codes))


def check_flags(argv: Sequence[str], *, as_json: bool) -> int:
    """Check the run of our own flags, as `check` does.

    Raises:
        UserError: a flag is invalid, or the run cannot be planned.
    """
    options, training = parse_options(argv)
    cluster, _ = find_cluster(options)
    config = parse_run_config(training, cluster.world_size)
    if config.optim.precision == "auto" and "bf16" not in cluster.machine.matmul_flops_per_s:
        config = config.replace(precision="fp32")
    a = assessed(config, cluster, own=True)
    line = (
        f"{a.run.config.model.label}: {fits_line(a.verdict, a.used_bytes, a.memory_bytes, a.time)}"
    )
    if as_json:
        print(json.dumps(as_records([a], cluster), indent=2))
    else:
        print(line)
    return _CODES[a.verdict]


def _checked(source: Source, argv: Sequence[str], *, alone: bool) -> dict[str, Any]:
    try:
        planned = plan_of([source], argv)
    except (UserError, Failure) as error:
        if alone:
            raise
        reason = str(error).removeprefix(f"{source.path}: ")
        verdict = "wrong" if isinstance(error, WrongValue) else "not known"
        line = f"{source.path}: {reason}"
        return {"file": str(source.path), "verdict": verdict, "reason": reason, "line": line}
    return record_of(planned, []) | {"line": f"{source.path}: {verdict_line(planned)}"}


def _sources(paths: Sequence[Path]) -> Iterator[tuple[Source, bool]]:
    """Yield the configs, and whether each was named itself."""
    for path in paths:
        if not path.is_dir():
            yield read_source(path), True
            continue
        for inner in itertools.islice(_files(path), MOST_FILES):
            try:
                source = read_source(inner)
            except UserError:
                continue  # a repository holds all kinds of YAML
            if kind_of(source) is not None:
                yield source, False


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that may be configs, in order; hidden folders are passed over."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f[0] != "." and f not in _PASSED_OVER)
        yield from (Path(place, name) for name in sorted(names) if name.lower().endswith(SUFFIXES))
