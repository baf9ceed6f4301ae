"""`measure()`: phases, steps and memory of any training loop, in this process."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.compare.report.find import FoundRun
from launcher.compare.report.runs import load_run
from launcher.tools.watch import INSIDE
from launcher.tools.watch.folder import complete, new_folder
from launcher.util.errors import UserError
from shardscale.results import Results

_measuring = False


@contextlib.contextmanager
def measure(out: str | Path | None = None) -> Iterator[Results]:
    """Record the training steps of the block: any model, any loop, on a GPU or a CPU.

    The loop is not changed: hooks of torch follow forward, backward, optimizer, data and saves, and
    are removed at the end. The results are there once the block has ended, if by an exception.

    Args:
        out: a new run folder to keep, for `load()` and `shardscale report`; none by default.

    Raises:
        UserError: `out` exists, or another measurement is going on.
    """
    global _measuring
    if _measuring:
        raise UserError("measure() is going on already: end its block first")
    results = Results()
    with tempfile.TemporaryDirectory(prefix="shardscale-") as temporary:
        path = Path(temporary) / "measured" if out is None else Path(out)
        folder = new_folder(path, ["measure"], "measure")
        _measuring = True
        try:
            yield from _observed(folder, results)
        finally:
            _measuring = False


def _observed(folder: Path, results: Results) -> Iterator[Results]:
    import torch

    if str(INSIDE) not in sys.path:
        sys.path.append(str(INSIDE))
    from shardscale_observer.hooks import attach

    observer = attach(torch, {"folder": str(folder), "mode": "watch"})
    code = 1
    try:
        yield results
        code = 0
    except BaseException as error:
        observer.session.fails(error)
        raise
    finally:
        observer.session.end("measure")
        observer.remove()
        complete(folder, code)
        results.complete(load_run(folder.name, FoundRun(path=folder)))
