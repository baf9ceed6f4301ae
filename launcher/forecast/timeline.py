"""A rank's memory over time, as a strategy and a trace write it down together."""

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from launcher.forecast.allocator_blocks import EMPTY_CACHE
from launcher.forecast.trace.allocation_summaries import AllocationSummary
from launcher.strategies.ledger import CATEGORIES, STATES, Ledger, LedgerLines, Where
from launcher.util.sizes import K_MIN_BLOCK_SIZE, page_locked_bytes


@dataclass(slots=True)
class _Live:
    """A storage; `block_bytes` are what it takes of the device's level."""

    number: int
    size_bytes: int
    block_bytes: int
    category: str
    where: Where


@dataclass(slots=True)
class _High:
    size_bytes: int
    phase: str
    next_number: int
    """Storages with smaller ones that live later on were there."""
    lines: dict[str, int]
    """Bytes on the device by category."""


class Events:
    """Requests to an allocator: (storage, bytes) in program order, 0 bytes meaning freed; among
    them (EMPTY_CACHE, 0). Summaries are taken apart during iteration."""

    def __init__(self, log: list[tuple[int, int] | AllocationSummary], storages: int) -> None:
        self._log = log
        self._storages = storages

    def __iter__(self) -> Iterator[tuple[int, int]]:
        numbers: dict[Hashable, int] = {}
        # Keys of a summary come back in every micro-batch, so that each allocation gets a fresh
        # number, above those of named storages.
        fresh = itertools.count(self._storages)
        for entry in self._log:
            if not isinstance(entry, AllocationSummary):
                yield entry
                continue
            for key, size_bytes in entry.events:
                if size_bytes:
                    number = numbers[key] = next(fresh)
                else:
                    number = numbers.pop(key)
                yield number, size_bytes


class Timeline:
    """Storages by name, from allocation to free, and the highest level of each phase.

    Host memory is counted apart where the device is not the host itself. On a GPU levels are those
    of whole blocks, of multiples of 512 bytes.
    """

    def __init__(self, device_type: str) -> None:
        self.period, self.phase = "init", "build"
        self.peaks: dict[tuple[str, str], int] = {}
        self.peaks_elsewhere = {"host": 0, "disk": 0}
        self.streams: dict[int, str] = {}
        self.whole_blocks = device_type != "cpu"
        """A GPU's allocator has whole blocks; a CPU is the host itself."""
        self._log: list[tuple[int, int] | AllocationSummary] = []
        self.current_bytes = 0
        """On the device now."""
        self._elsewhere = {"host": 0, "disk": 0}
        self._phase_high = 0
        self._highs: dict[str, _High] = {}
        self._live: dict[Hashable, _Live] = {}
        self._storages = 0
        self._lines = dict.fromkeys(CATEGORIES, 0)

    @property
    def events(self) -> Events:
        """All of them so far."""
        return Events(self._log, self._storages)

    def enter(self, phase: str) -> None:
        """Phases may come several times in a period; the highest counts."""
        self.phase = phase
        # sets `_phase_high`, too, which else would still be that of the phase before
        self._note(self.current_bytes)

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
        if where == "host" and not self.whole_blocks:
            where = "device"
        if pinned and where == "host":
            size_bytes = page_locked_bytes(size_bytes)
        assert key not in self._live, key
        number = self._storages
        self._storages = number + 1
        if where == "device":
            # Rounded here and not by a function: a plan is here millions of times.
            blocks = size_bytes
            if self.whole_blocks:
                blocks = -(-size_bytes // K_MIN_BLOCK_SIZE) * K_MIN_BLOCK_SIZE
            self._live[key] = _Live(number, size_bytes, blocks, category, where)
            self._log.append((number, size_bytes))
            self._lines[category] += size_bytes
            self.current_bytes += blocks
            if stream is not None:
                self.streams[number] = stream
            if self.current_bytes > self._phase_high:
                self._note(self.current_bytes)
        else:
            self._live[key] = _Live(number, size_bytes, 0, category, where)
            self._elsewhere[where] += size_bytes
            highest = max(self.peaks_elsewhere[where], self._elsewhere[where])
            self.peaks_elsewhere[where] = highest

    def free(self, key: Hashable) -> None:
        """A storage goes; nothing happens where it was empty or is gone already."""
        live = self._live.pop(key, None)
        if live is None:
            return
        if live.where == "device":
            self._log.append((live.number, 0))
            self._lines[live.category] -= live.size_bytes
            self.current_bytes -= live.block_bytes
        else:
            self._elsewhere[live.where] -= live.size_bytes

    def run(self, summary: AllocationSummary) -> None:
        """Take in what lies between; its storages have no names here."""
        self._log.append(summary)
        top = self.current_bytes + summary.rise_bytes
        if top > self._phase_high:
            lines = dict(self._lines)
            for category, change in summary.lines_at_rise:
                lines[category] += change
            self._note(top, lines)
        self.current_bytes += summary.net_bytes
        for category, change in summary.lines:
            self._lines[category] += change

    def empty_cache(self) -> None:
        """A GPU's allocator gives back what nothing lies in."""
        if self.whole_blocks:
            self._log.append((EMPTY_CACHE, 0))

    def rename(self, key: Hashable, new: Hashable, category: str) -> None:
        """A storage changes hands, and is counted as what it has become for all of its life."""
        live = self._live[new] = self._live.pop(key)
        before, live.category = live.category, category
        if before == category or live.where != "device":
            return
        # It has lived since before each of these.
        highs = [high.lines for high in self._highs.values() if live.number < high.next_number]
        for lines in (self._lines, *highs):
            lines[before] -= live.size_bytes
            lines[category] += live.size_bytes

    def has(self, key: Hashable) -> bool:
        """Return whether a storage is allocated, on any device."""
        return key in self._live

    def size_bytes(self, key: Hashable) -> int:
        """Bytes of a live storage."""
        return self._live[key].size_bytes

    def held(self) -> Ledger:
        """The states alive now."""

        def lines(where: Where) -> LedgerLines:
            found = {f"{name}_bytes": 0 for name in STATES}
            for live in self._live.values():
                if live.where == where and live.category in STATES:
                    found[f"{live.category}_bytes"] += live.size_bytes
            return LedgerLines(**found)

        return Ledger(
            moment="predicted", device=lines("device"), host=lines("host"), disk=lines("disk")
        )

    def peak_of(self, period: str) -> Ledger:
        """The ledger at a period's highest moment."""
        high = self._highs[period]
        lines = dict(high.lines)
        # No tensor owns what rounding adds.
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

    def _note(self, level: int, lines: dict[str, int] | None = None) -> None:
        """A level that is reached, and what is there by category, where that is not what is now."""
        key = (self.period, self.phase)
        self._phase_high = self.peaks[key] = max(level, self.peaks.get(key, 0))
        high = self._highs.get(self.period)
        if high is None or level > high.size_bytes:
            self._highs[self.period] = _High(
                level, self.phase, self._storages, lines or dict(self._lines)
            )
