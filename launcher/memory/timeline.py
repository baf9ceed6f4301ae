"""A rank's memory over time, as a strategy and a trace write it down together."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from launcher.memory.ledger import STATES, Ledger, LedgerLines

Where = Literal["device", "host", "disk"]


class Tag(NamedTuple):
    """What a storage is, for whoever looks into a peak."""

    category: str
    module: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeTensor:
    """One of the biggest storages alive at a peak."""

    size_bytes: int
    category: str
    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class _High:
    size_bytes: int
    event: int
    phase: str


class Timeline:
    """Storages by name, from allocation to free, and the highest level of each phase.

    Events are (storage, bytes), 0 bytes meaning freed: what an allocator would be asked for. Host
    memory is counted apart where the device is not the host itself.
    """

    def __init__(self, device_type: str) -> None:
        self.period, self.phase = "init", "build"
        self.events: list[tuple[int, int]] = []
        self.peaks: dict[tuple[str, str], int] = {}
        self.peaks_elsewhere = {"host": 0, "disk": 0}
        self._on_host_itself = device_type == "cpu"
        self._current = 0
        self._phase_high = 0
        self._highs: dict[str, _High] = {}
        self._live: dict[Hashable, tuple[int, int]] = {}
        self._tags: list[Tag] = []
        # Beside the device: where, bytes and what it is, by name.
        self._elsewhere: dict[Hashable, tuple[Where, int, Tag]] = {}
        self._bytes_elsewhere = {"host": 0, "disk": 0}

    def enter(self, phase: str) -> None:
        """Phases may come several times in a period; the highest counts."""
        self.phase = phase
        self._note()

    def allocate(
        self, key: Hashable, size_bytes: int, tag: Tag, *, where: Where = "device"
    ) -> None:
        """A storage under a name that is free."""
        if where != "device" and not (where == "host" and self._on_host_itself):
            self._elsewhere[key] = (where, size_bytes, tag)
            self._bytes_elsewhere[where] += size_bytes
            highest = max(self.peaks_elsewhere[where], self._bytes_elsewhere[where])
            self.peaks_elsewhere[where] = highest
            return
        if size_bytes == 0:
            return
        assert key not in self._live, key
        number = len(self._tags)
        self._tags.append(tag)
        self._live[key] = (number, size_bytes)
        self.events.append((number, size_bytes))
        self._current += size_bytes
        if self._current > self._phase_high:
            self._note()

    def free(self, key: Hashable) -> None:
        """A storage goes; nothing happens where it was empty or is gone already."""
        number, size_bytes = self._live.pop(key, (-1, 0))
        if size_bytes:
            self.events.append((number, 0))
            self._current -= size_bytes
        elif key in self._elsewhere:
            where, size_bytes, _ = self._elsewhere.pop(key)
            self._bytes_elsewhere[where] -= size_bytes

    def rename(self, key: Hashable, new: Hashable, category: str) -> None:
        """A storage changes hands."""
        number, size_bytes = self._live.pop(key)
        self._live[new] = (number, size_bytes)
        self._tags[number] = self._tags[number]._replace(category=category)

    def has(self, key: Hashable) -> bool:
        """Whether a storage lives, wherever it is."""
        return key in self._live or key in self._elsewhere

    def size_bytes(self, key: Hashable) -> int:
        """Bytes of a live storage."""
        return self._live[key][1]

    def held(self, moment: str) -> Ledger:
        """The states alive now."""
        states: dict[str, dict[str, int]] = {
            place: dict.fromkeys(STATES, 0) for place in ("device", "host", "disk")
        }
        device = self._lines(iter(self._live.values()))
        states["device"] |= {name: size for name, size in device.items() if name in STATES}
        for place, size_bytes, tag in self._elsewhere.values():
            if tag.category in STATES:
                states[place][tag.category] += size_bytes
        lines = {
            place: LedgerLines(**{f"{name}_bytes": size for name, size in found.items()})
            for place, found in states.items()
        }
        return Ledger(moment=moment, device=lines["device"], host=lines["host"], disk=lines["disk"])

    def peak_of(self, period: str) -> tuple[Ledger, tuple[LargeTensor, ...]]:
        """The ledger at a period's highest moment, and what is biggest there."""
        high = self._highs[period]
        alive: dict[int, int] = {}
        for number, size_bytes in self.events[: high.event]:
            if size_bytes:
                alive[number] = size_bytes
            else:
                del alive[number]
        lines = self._lines(iter(alive.items()))
        activations, temporary = lines.pop("activations", 0), lines.pop("temporary", 0)
        largest = sorted(alive.items(), key=lambda entry: -entry[1])[:10]
        ledger = Ledger(
            moment="predicted",
            phase=high.phase,
            device=LedgerLines(
                **{f"{name}_bytes": size for name, size in lines.items()},
                activations_bytes=activations,
                temporary_bytes=temporary,
                used_bytes=high.size_bytes,
            ),
            host=LedgerLines(used_bytes=self.peaks_elsewhere["host"]),
            disk=LedgerLines(used_bytes=self.peaks_elsewhere["disk"]),
        )
        return ledger, tuple(
            LargeTensor(size_bytes=size, **self._tags[number]._asdict()) for number, size in largest
        )

    def _lines(self, alive: Iterator[tuple[int, int]]) -> dict[str, int]:
        lines: dict[str, int] = {}
        for number, size_bytes in alive:
            category = self._tags[number].category
            lines[category] = lines.get(category, 0) + size_bytes
        return lines

    def _note(self) -> None:
        key = (self.period, self.phase)
        self._phase_high = self.peaks[key] = max(self._current, self.peaks.get(key, 0))
        if self.period not in self._highs or self._current > self._highs[self.period].size_bytes:
            self._highs[self.period] = _High(self._current, len(self.events), self.phase)
