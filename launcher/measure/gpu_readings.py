"""Readings of one GPU through NVML, each of which may fail alone."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from launcher.measure.nvml import READINGS, NvmlDevice, NvmlFault, Outcome

UNAVAILABLE_RETRY_NS = 30 * 10**9  # rights and drivers seldom change
NEVER_NS = 2**63

Values = dict[str, Any]  # fields of GpuRecord
T = TypeVar("T")
EnergyReading = tuple[float, float]
"""Seconds since the sampler's start, joules since the first reading of the counter."""


class GpuReadings:
    """Readings of one GPU: each fails alone, is reported once, and retried when it may work."""

    def __init__(self, uuid: str, event: Callable[..., None]) -> None:
        self.uuid = uuid  # after opening, that of the MIG instance if there is one
        self.lost = False
        self.doing = "nothing yet"
        self.energy: EnergyReading | None = None
        self._faults: dict[str, Counter[str]] = {}
        self._event = event
        self._device: NvmlDevice | None = None
        self._first_energy_j: float | None = None
        self._retry_ns: dict[str, int] = {}
        self._succeeded: set[str] = set()
        self._reported_v1 = False

    def read(self, now_ns: int, t_s: float, *, with_memory: bool, with_rest: bool) -> Values | None:
        """Return the values that could be read; None while the GPU cannot be opened."""
        names = [name for name in READINGS if (with_memory if name == "memory" else with_rest)]
        if self._device is None and with_rest:
            self._device = self._try("device", now_ns, partial(NvmlDevice.open, self.uuid))
            if self._device is not None:
                self.uuid = self._device.uuid
        device = self._device
        if device is None:
            return None
        values: Values = {}
        for name in names:
            values.update(self._try(name, now_ns, partial(device.read, name)) or {})
            if self.lost or self._device is None:
                break
        if "energy_j" in values:
            if self._first_energy_j is None:
                self._first_energy_j = values["energy_j"]
            values["energy_j"] -= self._first_energy_j
            self.energy = (t_s, values["energy_j"])
        if not (device.has_memory_v2 or self._reported_v1):
            self._reported_v1 = True
            self._event("nvml_memory_v1", note="memory_used_bytes includes reserved bytes")
        return values

    def close(self) -> None:
        """Close the device."""
        device, self._device = self._device, None
        if device is not None:
            self._try("shutdown", 0, device.close)

    def missing(self) -> dict[str, str]:
        """Return the readings that never succeeded, with their last error."""
        wanted = list(READINGS) if "device" in self._succeeded else ["device"]
        faults = {name: list(self._faults.get(name, ("not read",))) for name in wanted}
        return {name: faults[name][-1] for name in wanted if name not in self._succeeded}

    def counted_faults(self) -> dict[str, dict[str, int]]:
        """Count the errors of each reading."""
        return {name: dict(counts) for name, counts in list(self._faults.items())}

    def _try(self, name: str, now_ns: int, read: Callable[[], T]) -> T | None:
        if now_ns < self._retry_ns.get(name, 0):
            return None
        self.doing = name
        try:
            value = read()
        except NvmlFault as fault:
            self._failed(name, fault, now_ns)
            return None
        self._succeeded.add(name)
        return value

    def _failed(self, name: str, fault: NvmlFault, now_ns: int) -> None:
        counts = self._faults.setdefault(name, Counter())
        counts[fault.name] += 1
        outcome = fault.outcome
        kind = "nvml_unavailable" if name == "device" else "gpu_reading_failed"
        if outcome is Outcome.LOST:
            self.lost = True
            kind = "gpu_lost"
        elif outcome is Outcome.UNAVAILABLE:
            self._retry_ns[name] = now_ns + UNAVAILABLE_RETRY_NS
        elif outcome is Outcome.MISSING:
            self._retry_ns["device"] = NEVER_NS
            kind = "nvml_unavailable"
        if counts[fault.name] == 1:
            self._event(
                kind,
                reading=name,
                error=fault.name,
                code=fault.code,
                outcome=outcome.value,
                uuid=self.uuid,
            )
        if outcome is Outcome.MISSING:
            self.close()
        elif outcome is Outcome.CLOSED:
            self._device = None  # reopened at the next tick that allows it
