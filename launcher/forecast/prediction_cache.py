"""Cache of predictions: one small file per candidate in the cache folder.

The name of a file is a hash of everything its predictions depend on: this package's sources, the
versions of the libraries whose allocations are followed, the candidate and the GPU. So no entry
ever goes stale, and a file that is damaged, or written by two processes at once, is only ignored.
Candidates with a user's `--deepspeed` file are not cached: that file may change.
"""

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from launcher.config.resolve import Resolved
from launcher.forecast.allocator import AllocatorUse
from launcher.forecast.cluster import Cluster
from launcher.forecast.fit import reserved
from launcher.forecast.predict import Prediction, predict
from launcher.measure.hardware import find_gpu
from launcher.strategies.ledger import Ledger, LedgerLines
from launcher.util.files import default_cache_dir, replace_text
from launcher.util.packages import version_of

FOLDER: Final = "plan"
MAX_FILES: Final = 4096
"""Entries, a few KB each; the oldest are removed beyond."""
_LEDGERS: Final = ("held", "first_step", "peak")
_NUMBERS: Final = ("host_bytes", "disk_bytes", "micro_batch_bytes")


class PredictionCache:
    """Predictions of one candidate, at any micro-batch.

    Args:
        first: one of its runs.
    """

    def __init__(self, first: Resolved, cluster: Cluster) -> None:
        self._cluster = cluster
        self._fresh: dict[str, Prediction] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._path: Path | None = None
        self._changed = False
        if first.config.sharding.deepspeed is None:
            machine = (cluster.world_size, cluster.gpu, cluster.memory_bytes)
            name = _digest([_code_version(), repr(first), *map(str, machine)])
            self._path = default_cache_dir() / FOLDER / f"{name}.json"
            self._entries = _read(self._path)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was predicted for this candidate before."""
        return not self._entries

    def prediction(self, run: Resolved) -> Prediction:
        """Predict one run of the candidate; a cached prediction has no events."""
        key = repr(run)
        if key in self._fresh:
            return self._fresh[key]
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return _prediction(self._entries[_digest([key])]["prediction"])
        found = self._predict(run)
        self._put(run, "prediction", _as_record(found))
        return found

    def use(self, run: Resolved, *, limit_bytes: int | None) -> AllocatorUse:
        """Replay one run through a model of CUDA's caching allocator."""
        name, key = f"within {limit_bytes}", repr(run)
        with contextlib.suppress(KeyError, TypeError):
            return AllocatorUse(**self._entries[_digest([key])][name])
        found = self._fresh[key] if key in self._fresh else self._predict(run)
        use = reserved(found, run, limit_bytes=limit_bytes)
        self._put(run, name, asdict(use))
        return use

    def save(self) -> None:
        """Save new entries; a cache that cannot be written does not fail the plan."""
        self._fresh.clear()
        if self._changed and self._path is not None:
            text = json.dumps(self._entries)
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._path, f"{_digest([text])}\n{text}\n")
        self._changed = False

    def _predict(self, run: Resolved) -> Prediction:
        found = predict(
            run,
            gpu=find_gpu(self._cluster.gpu),
            memory_bytes=self._cluster.memory_bytes,
        )
        self._fresh[repr(run)] = found
        return found

    def _put(self, run: Resolved, name: str, value: dict[str, Any]) -> None:
        self._entries.setdefault(_digest([repr(run)]), {})[name] = value
        self._changed = True


def remove_oldest_files() -> None:
    """Keep the folder small; called once per plan."""
    with contextlib.suppress(OSError):
        files = [entry for entry in (default_cache_dir() / FOLDER).iterdir() if entry.is_file()]
        if len(files) > MAX_FILES:
            by_age = sorted(files, key=lambda path: path.stat().st_mtime)
            # down to half, or each plan from then on would remove a few
            for path in by_age[: len(files) - MAX_FILES // 2]:
                path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()  # see `save`
        entries = json.loads(text) if digest == _digest([text]) else {}
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _as_record(found: Prediction) -> dict[str, Any]:
    ledgers = {name: getattr(found, name).as_dict() for name in _LEDGERS}
    peaks = [[*when, size_bytes] for when, size_bytes in found.peaks.items()]
    return ledgers | {name: getattr(found, name) for name in _NUMBERS} | {"peaks": peaks}


def _prediction(record: dict[str, Any]) -> Prediction:
    return Prediction(
        held=_ledger(record["held"]),
        first_step=_ledger(record["first_step"]),
        peak=_ledger(record["peak"]),
        **{name: record[name] for name in _NUMBERS},
        peaks={(period, phase): size for period, phase, size in record["peaks"]},
        events=(),
        streams={},
    )


def _ledger(record: dict[str, Any]) -> Ledger:
    places = ("device", "host", "disk")
    others = {k: v for k, v in record.items() if k not in (*places, "kind")}
    device, host, disk = (LedgerLines(**record[name]) for name in places)
    return Ledger(**others, device=device, host=host, disk=disk)


_LIBRARIES = ("torch", "deepspeed", "torchao", "transformers")


@cache
def _code_version() -> str:
    """Hash of the package's sources and the versions it runs on."""
    package = Path(__file__).resolve().parents[1]
    folders = {package, (package / "model").resolve()}  # the latter may be a link
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    libraries = [f"{name} {version_of(name)}" for name in _LIBRARIES]
    texts = (path.read_text(encoding="utf-8") for path in sorted(files))
    return _digest([*libraries, torch.__version__, platform.python_version(), *texts])


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode())
        found.update(b"\0")  # or "ab", "c" were equal to "a", "bc"
    return found.hexdigest()[:32]
