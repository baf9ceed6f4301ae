"""Corrections learnt from finished runs on this machine: one small file beside the data cache."""

import datetime
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

from launcher.measure.hardware import find_gpu, is_rehearsal
from launcher.util.files import default_cache_dir, replace_text
from launcher.util.sizes import counted, gib

SCHEMA_VERSION: Final = 2
"""Version 1 noted rehearsals, too, whose seconds are the host's."""
KEPT: Final = 20
"""Newest readings of each constant, whose median counts."""
PLAUSIBLE_RATIOS: Final = (0.05, 20.0)


Constant = dict[str, Any]
"""`values`, the newest readings of a constant, and `last`, the date of the newest (ISO 8601)."""


class Calibration:
    """Constants by name: `fixed_bytes/GPU/group` and `time/MACHINE/PRECISION/STRATEGY`.

    A rehearsal teaches nothing: its seconds are the host's, its context a constant of ours.
    """

    def __init__(self, constants: dict[str, Constant], path: Path) -> None:
        self._constants = constants
        self._path = path

    @classmethod
    def load(cls, path: Path | None = None) -> Self:
        """Read what is known; nothing where the file is missing, damaged or of another version."""
        path = path or default_cache_dir() / "calibration.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = None
        return cls(dict(_constants(content)), path)

    def fixed_bytes(self, gpu: str, *, grouped: bool) -> int | None:
        """Device memory of a process outside its allocator: context, and NCCL in a group."""
        known = self._constants.get(_fixed_key(gpu, grouped=grouped))
        return None if known is None else round(_median(known))

    def time_ratio(self, machine: str, precision: str, strategy: str) -> float | None:
        """Measured over predicted seconds of a step."""
        known = self._constants.get(_time_key(machine, precision, strategy))
        return None if known is None else _median(known)

    def learn_fixed_bytes(self, gpu: str, *, grouped: bool, size_bytes: int) -> None:
        """Note what one run has found."""
        if size_bytes > 0:
            self._note(_fixed_key(gpu, grouped=grouped), size_bytes)

    def learn_time(self, machine: str, precision: str, strategy: str, *, ratio: float) -> None:
        """Note what one run has found; a ratio that says more of the run than of the machine (a
        debugger, a busy host) is not taken."""
        least, most = PLAUSIBLE_RATIOS
        if least <= ratio <= most:
            self._note(_time_key(machine, precision, strategy), ratio)

    def save(self) -> None:
        """Write the file, whole or not at all.

        Of two runs that end at once, one's readings may be lost, which the next ones make good.

        Raises:
            OSError: the cache folder cannot be written.
        """
        content = {"schema_version": SCHEMA_VERSION, "constants": self._constants}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self._path, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def describe(self, machine: str, *, grouped: bool) -> list[str]:
        """Say what a plan for this machine takes from it, one line for each constant."""
        lines = []
        fixed = self._constants.get(_fixed_key(machine, grouped=grouped))
        if fixed is not None:
            what = "context + NCCL" if grouped else "context"
            lines.append(f"from {_runs(fixed)} here: {what} {gib(round(_median(fixed)))}")
        for name, known in sorted(self._constants.items()):
            match name.split("/"):
                case ["time", gpu, precision, strategy] if gpu == _plain(machine):
                    lines.append(
                        f"from {_runs(known)} here: time x{_median(known):.2f} for {strategy} in "
                        f"{precision}"
                    )
        return lines

    def _note(self, key: str, value: float) -> None:
        if is_rehearsal():
            return
        values = [*self._constants.get(key, {"values": ()})["values"], value][-KEPT:]
        self._constants[key] = {"values": values, "last": datetime.date.today().isoformat()}


def _constants(content: Any) -> Iterable[tuple[str, Constant]]:
    """Those entries that are what `save` writes."""
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        return
    constants = content.get("constants")
    for name, known in (constants if isinstance(constants, dict) else {}).items():
        values = known.get("values") if isinstance(known, dict) else None
        if isinstance(values, list) and values and all(_is_reading(v) for v in values):
            yield name, {"values": values[-KEPT:], "last": str(known.get("last", ""))}


def _is_reading(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**60


def _median(known: Constant) -> float:
    return float(statistics.median(known["values"]))


def _runs(known: Constant) -> str:
    return f"{counted(len(known['values']), 'run')} (last {known['last']})"


def _fixed_key(gpu: str, *, grouped: bool) -> str:
    return f"fixed_bytes/{_plain(gpu)}/{'group' if grouped else 'alone'}"


def _time_key(machine: str, precision: str, strategy: str) -> str:
    return f"time/{_plain(machine)}/{precision}/{strategy}"


def _plain(name: str) -> str:
    """A GPU goes by its name in the table, whatever CUDA calls it."""
    known = find_gpu(name)
    return (name if known is None else known.name).replace("/", "-")
