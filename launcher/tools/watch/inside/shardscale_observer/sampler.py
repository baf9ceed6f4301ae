"""Sample this rank's GPU through NVML, by ctypes alone, and the resident set of the process."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Any

from shardscale_observer.guard import guarded

# memory takes NVML about 12 us; the slower readings come once per line
MEMORY_EVERY_S = 0.1
LINE_EVERY_S = 1.0


class Nvml:
    """One GPU by UUID. A reading that fails is left out.

    Raises:
        OSError: no library, no driver, or no such GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._handle = ctypes.c_void_p()
        if self._library.nvmlInit_v2():
            raise OSError("NVML does not start")
        name = uuid.encode()
        if self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)):
            raise OSError(f"NVML does not find {uuid}")

    def memory(self) -> dict[str, int]:
        """Return used and total bytes, without the driver's reserve where NVML tells it apart."""
        info = (ctypes.c_ulonglong * 5)()  # version, total, reserved, free, used
        # structs of NVML carry their size and, from bit 24 on, their version
        info[0] = ctypes.sizeof(info) | 2 << 24
        if self._call("nvmlDeviceGetMemoryInfo_v2", info):
            return {"memory_used_bytes": info[4], "memory_total_bytes": info[1]}
        before = (ctypes.c_ulonglong * 3)()  # total, free, used
        if self._call("nvmlDeviceGetMemoryInfo", before):
            return {"memory_used_bytes": before[2], "memory_total_bytes": before[0]}
        return {}

    def rest(self) -> dict[str, float]:
        """Return utilization, power and temperature."""
        rates, number = (ctypes.c_uint * 2)(), ctypes.c_uint()
        values: dict[str, float] = {}
        if self._call("nvmlDeviceGetUtilizationRates", rates):
            values["gpu_utilization_percent"] = float(rates[0])
            values["memory_utilization_percent"] = float(rates[1])
        if self._call("nvmlDeviceGetPowerUsage", number):
            values["power_w"] = number.value / 1e3  # mW
        # 0: NVML_TEMPERATURE_GPU
        if not self._library.nvmlDeviceGetTemperature(self._handle, 0, ctypes.byref(number)):
            values["temperature_c"] = float(number.value)
        return values

    def _call(self, name: str, result: Any) -> bool:
        function = getattr(self._library, name, None)
        return function is not None and not function(self._handle, ctypes.byref(result))


def resident_bytes() -> int:
    """Return the resident set of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Sampler(threading.Thread):
    """Writes a `gpu` record each second, with the highest memory since the last one."""

    def __init__(self, uuid: str | None, add: Any) -> None:
        super().__init__(name="shardscale-sampler", daemon=True)
        self._uuid = uuid
        self._add = add
        self._end = threading.Event()

    def stop(self) -> None:
        """End after the current reading."""
        self._end.set()
        self.join(1.0)

    @guarded
    def run(self) -> None:
        nvml = None
        if self._uuid is not None:
            try:
                nvml = Nvml(self._uuid)
            except OSError:
                nvml = None
        start = due = time.monotonic()
        line_due = start + LINE_EVERY_S
        line: dict[str, Any] = {}
        while not self._end.wait(max(0.0, due - time.monotonic())):
            due += MEMORY_EVERY_S
            memory = {"host_rss_bytes": resident_bytes(), **(nvml.memory() if nvml else {})}
            line |= {name: max(value, line.get(name, 0)) for name, value in memory.items()}
            now = time.monotonic()
            if now >= line_due:
                self._write(now - start, line, nvml)
                line, line_due = {}, now + LINE_EVERY_S
        if line:
            self._write(time.monotonic() - start, line, nvml)

    def _write(self, t_s: float, line: dict[str, Any], nvml: Nvml | None) -> None:
        of_gpu = "memory_used_bytes" in line
        more = {"uuid": self._uuid, **nvml.rest()} if nvml is not None and of_gpu else {}
        self._add("gpu", t_s=t_s, source="nvml" if of_gpu else "psutil", **line, **more)
