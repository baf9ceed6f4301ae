"""A rank's memory over time, as a strategy and a trace write it down together."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal

from launcher.memory.allocator_blocks import EMPTY_CACHE, page_locked_bytes, rounded_bytes
from launcher.memory.ledger import CATEGORIES, STATES, Ledger, LedgerLines

Where = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True)
class _High:
    size_bytes: int
    event: int
    phase: str


class Timeline:
    """Storages by name, from allocation to free, and the highest level of each phase.

    Events are (storage, bytes), 0 bytes meaning freed: what an allocator would be asked for; among
    them (EMPTY_CACHE, 0). Host memory is counted apart where the device is not the host itself. On
    a GPU levels are those of whole blocks, of multiples of 512 bytes.
    """

    def __init__(self, device_type: str) -> None:
        self.period, self.phase = "init", "build"
        self.events: list[tuple[int, int]] = []
        self.peaks: dict[tuple[str, str], int] = {}
        self.peaks_elsewhere = {"host": 0, "disk": 0}
        self.streams: dict[int, str] = {}
        self._on_host_itself = device_type == "cpu"
        self._current = 0
        self._elsewhere = {"host": 0, "disk": 0}
        self._phase_high = 0
        self._highs: dict[str, _High] = {}
        self._live: dict[Hashable, tuple[int, int]] = {}
        # By the number of a storage.
        self._categories: list[str] = []
        self._places: list[Where] = []

    def enter(self, phase: str) -> None:
        """Phases may come several times in a period; the highest counts."""
        self.phase = phase
        self._note()

    def allocate(
        self,
        key: Hashable,
        size_bytes: int,
        category: str,
        *,
        where: Where = "device",
        stream: str | None = None,
        pinned: bool = False,
    ) -> None:
        """A storage under a name that is free; `category` is one of the ledger's, `stream` a GPU's
        that it is allocated on, where it is not the one that computes; `pinned` host memory is
        page-locked."""
        if size_bytes == 0:
            return
        if where == "host" and self._on_host_itself:
            where = "device"
        if pinned and where == "host":
            size_bytes = page_locked_bytes(size_bytes)
        assert key not in self._live, key
        number = len(self._categories)
        self._categories.append(category)
        self._places.append(where)
        self._live[key] = (number, size_bytes)
        if where == "device":
            self.events.append((number, size_bytes))
            self._current += self._occupied(size_bytes)
            if stream is not None:
                self.streams[number] = stream
            if self._current > self._phase_high:
                self._note()
        else:
            self._elsewhere[where] += size_bytes
            highest = max(self.peaks_elsewhere[where], self._elsewhere[where])
            self.peaks_elsewhere[where] = highest

    def free(self, key: Hashable) -> None:
        """A storage goes; nothing happens where it was empty or is gone already."""
        number, size_bytes = self._live.pop(key, (-1, 0))
        if size_bytes:
            where = self._places[number]
            if where == "device":
                self.events.append((number, 0))
                self._current -= self._occupied(size_bytes)
            else:
                self._elsewhere[where] -= size_bytes

    def empty_cache(self) -> None:
        """A GPU's allocator gives back what nothing lies in."""
        if not self._on_host_itself:
            self.events.append((EMPTY_CACHE, 0))

    def rename(self, key: Hashable, new: Hashable, category: str) -> None:
        """A storage changes hands."""
        number, size_bytes = self._live.pop(key)
        self._live[new] = (number, size_bytes)
        self._categories[number] = category

    def has(self, key: Hashable) -> bool:
        """Whether a storage lives, wherever it is."""
        return key in self._live

    def size_bytes(self, key: Hashable) -> int:
        """Bytes of a live storage."""
        return self._live[key][1]

    def held(self) -> Ledger:
        """The states alive now."""

        def lines(where: Where) -> LedgerLines:
            here = [entry for entry in self._live.values() if self._places[entry[0]] == where]
            states = {n: size for n, size in self._by_category(here).items() if n in STATES}
            return LedgerLines(**{f"{name}_bytes": size for name, size in states.items()})

        return Ledger(
            moment="predicted", device=lines("device"), host=lines("host"), disk=lines("disk")
        )

    def peak_of(self, period: str) -> Ledger:
        """The ledger at a period's highest moment."""
        high = self._highs[period]
        alive: dict[int, int] = {}
        for number, size_bytes in self.events[: high.event]:
            if size_bytes:
                alive[number] = size_bytes
            elif number != EMPTY_CACHE:
                del alive[number]
        lines = dict.fromkeys(CATEGORIES, 0) | self._by_category(alive.items())
        # What rounding adds is nobody's tensor.
        lines["temporary"] += high.size_bytes - sum(lines.values())
        return Ledger(
            moment="predicted",
            phase=high.phase,
            device=LedgerLines(
                **{f"{name}_bytes": size for name, size in lines.items()},
                used_bytes=high.size_bytes,
            ),
            host=LedgerLines(used_bytes=self.peaks_elsewhere["host"]),
            disk=LedgerLines(used_bytes=self.peaks_elsewhere["disk"]),
        )

    def _occupied(self, size_bytes: int) -> int:
        return size_bytes if self._on_host_itself else rounded_bytes(size_bytes)

    def _by_category(self, alive: Iterable[tuple[int, int]]) -> dict[str, int]:
        lines: dict[str, int] = {}
        for number, size_bytes in alive:
            category = self._categories[number]
            lines[category] = lines.get(category, 0) + size_bytes
        return lines

    def _note(self) -> None:
        key = (self.period, self.phase)
        self._phase_high = self.peaks[key] = max(self._current, self.peaks.get(key, 0))
        if self.period not in self._highs or self._current > self._highs[self.period].size_bytes:
            self._highs[self.period] = _High(self._current, len(self.events), self.phase)
