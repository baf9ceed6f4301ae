"""Predictions that were made before, one small file for each choice, in the cache folder.

A file's name is a hash of all that its answers follow from: this package's own sources, the
versions of the libraries whose allocations are followed, the choice and the GPU. So nothing has to
be thrown away after a change, and a file that is damaged, or written by two at once, is at worst
not used. Not kept is what follows from a file that somebody may change (`--deepspeed`).
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
from launcher.data.cache import default_cache_dir
from launcher.forecast.allocator import AllocatorUse
from launcher.forecast.fit import replayed
from launcher.forecast.predict import Prediction, predict
from launcher.measure.hardware import find_gpu
from launcher.strategies.ledger import Ledger, LedgerLines
from launcher.util.files import replace_text
from launcher.util.packages import version_of

FOLDER: Final = "plan"
MOST_FILES: Final = 4096
"""Beyond them the oldest are removed; one has a few KB."""
_LEDGERS: Final = ("held", "first_step", "peak")


class Answers:
    """What is known of the runs of one choice, at any micro-batch.

    Args:
        first: one of them.
        gpu: by its name; None on a CPU.
        memory_bytes: of each.
    """

    def __init__(
        self, first: Resolved, *, world_size: int, gpu: str | None, memory_bytes: int
    ) -> None:
        self._world_size, self._gpu, self._memory_bytes = world_size, gpu, memory_bytes
        self._fresh: dict[str, Prediction] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._path: Path | None = None
        self._changed = False
        if first.config.sharding.deepspeed is None:
            name = _digest([_sources(), repr(first), str(world_size), str(gpu), str(memory_bytes)])
            self._path = default_cache_dir() / FOLDER / f"{name}.json"
            self._entries = _read(self._path)

    def prediction(self, run: Resolved) -> Prediction:
        """One of the choice's runs, without events where it was predicted before."""
        key = repr(run)
        if key in self._fresh:
            return self._fresh[key]
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return _prediction(self._entries[_digest([key])]["prediction"])
        found = self._predict(run)
        self._put(run, "prediction", _as_record(found))
        return found

    def use(self, run: Resolved, *, limit_bytes: int | None) -> AllocatorUse:
        """What CUDA's caching allocator makes of it."""
        segments = run.config.loop.expandable_segments
        name, key = f"within {limit_bytes}", repr(run)
        with contextlib.suppress(KeyError, TypeError):
            return AllocatorUse(**self._entries[_digest([key])][name])
        found = self._fresh[key] if key in self._fresh else self._predict(run)
        use = replayed(found, limit_bytes=limit_bytes, expandable_segments=segments)
        self._put(run, name, asdict(use))
        return use

    def keep(self) -> None:
        """Write down what was added; a cache that cannot be written is no fault of the plan."""
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
            world_size=self._world_size,
            device_type="cpu" if self._gpu is None else "cuda",
            gpu=find_gpu(self._gpu),
            memory_bytes=self._memory_bytes,
        )
        self._fresh[repr(run)] = found
        return found

    def _put(self, run: Resolved, name: str, value: dict[str, Any]) -> None:
        self._entries.setdefault(_digest([repr(run)]), {})[name] = value
        self._changed = True


def forget_oldest() -> None:
    """Keep the folder small; called once for a plan."""
    with contextlib.suppress(OSError):
        files = [entry for entry in (default_cache_dir() / FOLDER).iterdir() if entry.is_file()]
        if len(files) > MOST_FILES:
            by_age = sorted(files, key=lambda path: path.stat().st_mtime)
            for path in by_age[: len(files) - MOST_FILES // 2]:
                path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """What a file holds; nothing where it is not whole."""
    try:
        digest, text = path.read_text(encoding="utf-8").splitlines()
        entries = json.loads(text) if digest == _digest([text]) else {}
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _as_record(found: Prediction) -> dict[str, Any]:
    ledgers = {name: getattr(found, name).as_dict() for name in _LEDGERS}
    return ledgers | {
        "peaks": [[*when, size_bytes] for when, size_bytes in found.peaks.items()],
        "host_bytes": found.host_bytes,
        "disk_bytes": found.disk_bytes,
    }


def _prediction(record: dict[str, Any]) -> Prediction:
    return Prediction(
        held=_ledger(record["held"]),
        first_step=_ledger(record["first_step"]),
        peak=_ledger(record["peak"]),
        peaks={(period, phase): size for period, phase, size in record["peaks"]},
        host_bytes=record["host_bytes"],
        disk_bytes=record["disk_bytes"],
        events=(),
        streams={},
    )


def _ledger(record: dict[str, Any]) -> Ledger:
    places = ("device", "host", "disk")
    others = {k: v for k, v in record.items() if k not in (*places, "kind")}
    device, host, disk = (LedgerLines(**record[name]) for name in places)
    return Ledger(**others, device=device, host=host, disk=disk)


@cache
def _sources() -> str:
    """Of the package, and the versions that it runs on."""
    package = Path(__file__).resolve().parents[1]
    folders = {package, (package / "model").resolve()}  # the latter may be a link
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    libraries = [f"{name} {version_of(name)}" for name in ("torch", "deepspeed", "torchao")]
    texts = (path.read_text(encoding="utf-8") for path in sorted(files))
    return _digest([*libraries, torch.__version__, platform.python_version(), *texts])


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode())
        found.update(b"\0")
    return found.hexdigest()[:32]
