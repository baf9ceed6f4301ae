"""What boards show of a logged step, by tag; what nobody could measure has no tag."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean

from launcher.measure.device_memory import MemoryReading
from launcher.measure.phases import PhaseTimes
from launcher.measure.records import GpuRecord
from launcher.sizes import GIB


def of_time(times: Sequence[PhaseTimes]) -> dict[str, float]:
    """Seconds of a step and of its phases on the main rank, mean since the last logged step."""
    spent = [asdict(step) for step in times]
    means = {name: fmean(step[name] for step in spent) for name in spent[0]}
    return {"step_s": means.pop("duration_s")} | {f"phase/{n}": s for n, s in means.items()}


def of_flops(flops_per_s: float, peak_flops_per_s: float | None) -> dict[str, float]:
    """Per device, where the device's peak is known."""
    if peak_flops_per_s is None:
        return {}
    return {"tflops_per_device": flops_per_s / 1e12, "mfu": flops_per_s / peak_flops_per_s}


def of_memory(
    live_peaks: Sequence[int | None], memory: MemoryReading, used_bytes: int
) -> dict[str, float]:
    """The main rank's peaks, and what the worst device (on a CPU: process) uses."""
    reserved = memory.reserved_peak_bytes  # which only a GPU has
    live, used = ("allocated_peak", "device_used") if reserved else ("live_peak", "resident_set")
    live_peak = max((peak for peak in live_peaks if peak is not None), default=None)
    sizes = {live: live_peak, "reserved_peak": reserved, used: used_bytes}
    return _gib({f"memory/{name}_gib": size for name, size in sizes.items()})


def of_sample(sample: GpuRecord | None) -> dict[str, float]:
    """The main rank's GPU at the newest sample."""
    if sample is None or sample.source != "nvml":
        return {}
    readings = {
        "gpu/utilization_percent": sample.gpu_utilization_percent,
        "gpu/power_w": sample.power_w,
        "gpu/temperature_c": sample.temperature_c,
    }
    sizes = {
        "gpu/memory_used_gib": sample.memory_used_bytes,
        "memory/resident_set_gib": sample.host_rss_bytes,
    }
    return {tag: value for tag, value in readings.items() if value is not None} | _gib(sizes)


def _gib(sizes: Mapping[str, int | None]) -> dict[str, float]:
    return {tag: size / GIB for tag, size in sizes.items() if size is not None}
