"""What NVML says about one GPU, and which GPU a CUDA device is.

Everything that touches `pynvml` is here. Importing this module neither loads libnvidia-ml nor
starts it.
"""

import contextlib
import enum
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import pynvml

if TYPE_CHECKING:
    import torch

UUID_LENGTH = len("GPU-00000000-0000-0000-0000-000000000000")


class Outcome(enum.Enum):
    """What an NVML error means for whoever wants the number."""

    MISSING = "missing"  # no library, no driver: nothing will come while this process lives
    LOST = "lost"  # the GPU itself is gone
    CLOSED = "closed"  # somebody shut NVML down in this process: open the device again
    UNAVAILABLE = "unavailable"  # this GPU, driver or user does not get this number
    TRANSIENT = "transient"  # may work the next time


# Every nvmlReturn_t, by value: older nvidia-ml-py releases lack the newer constants.
ERRORS: dict[int, tuple[str, Outcome]] = {
    1: ("UNINITIALIZED", Outcome.CLOSED),
    2: ("INVALID_ARGUMENT", Outcome.UNAVAILABLE),
    3: ("NOT_SUPPORTED", Outcome.UNAVAILABLE),
    4: ("NO_PERMISSION", Outcome.UNAVAILABLE),
    5: ("ALREADY_INITIALIZED", Outcome.TRANSIENT),
    6: ("NOT_FOUND", Outcome.UNAVAILABLE),
    7: ("INSUFFICIENT_SIZE", Outcome.UNAVAILABLE),
    8: ("INSUFFICIENT_POWER", Outcome.UNAVAILABLE),
    9: ("DRIVER_NOT_LOADED", Outcome.MISSING),
    10: ("TIMEOUT", Outcome.TRANSIENT),
    11: ("IRQ_ISSUE", Outcome.TRANSIENT),
    12: ("LIBRARY_NOT_FOUND", Outcome.MISSING),
    13: ("FUNCTION_NOT_FOUND", Outcome.UNAVAILABLE),
    14: ("CORRUPTED_INFOROM", Outcome.UNAVAILABLE),
    15: ("GPU_IS_LOST", Outcome.LOST),
    16: ("RESET_REQUIRED", Outcome.LOST),
    17: ("OPERATING_SYSTEM", Outcome.UNAVAILABLE),
    18: ("LIB_RM_VERSION_MISMATCH", Outcome.MISSING),
    19: ("IN_USE", Outcome.TRANSIENT),
    20: ("MEMORY", Outcome.TRANSIENT),
    21: ("NO_DATA", Outcome.TRANSIENT),
    22: ("VGPU_ECC_NOT_SUPPORTED", Outcome.UNAVAILABLE),
    23: ("INSUFFICIENT_RESOURCES", Outcome.TRANSIENT),
    24: ("FREQ_NOT_SUPPORTED", Outcome.UNAVAILABLE),
    25: ("ARGUMENT_VERSION_MISMATCH", Outcome.UNAVAILABLE),
    26: ("DEPRECATED", Outcome.UNAVAILABLE),
    27: ("NOT_READY", Outcome.TRANSIENT),
    28: ("GPU_NOT_FOUND", Outcome.UNAVAILABLE),
    29: ("INVALID_STATE", Outcome.TRANSIENT),
    30: ("RESET_TYPE_NOT_SUPPORTED", Outcome.UNAVAILABLE),
    999: ("UNKNOWN", Outcome.TRANSIENT),
}
NOT_FOUND = 6


class NvmlFault(Exception):
    """NVML gave an error instead of a number."""

    def __init__(self, code: int) -> None:
        # A code of a newer driver says nothing about the GPU: worth another try.
        name, outcome = ERRORS.get(code, (f"ERROR_{code}", Outcome.TRANSIENT))
        super().__init__(f"NVML: {name}")
        self.code = code
        self.name = name
        self.outcome = outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of the whole device. `used_bytes` leaves out `reserved_bytes` (driver, firmware).

    NVML's first version of this call counts the reserved bytes as used and does not tell them
    apart: then `reserved_bytes` is None.
    """

    used_bytes: int
    total_bytes: int
    reserved_bytes: int | None


class NvmlDevice:
    """One GPU or MIG instance. Every method but `close` may raise NvmlFault.

    A MIG instance has memory of its own; power, energy, temperature and PCIe belong to the GPU it
    shares with others, and NVML refuses them.
    """

    def __init__(self, handle: Any, uuid: str) -> None:
        self._handle = handle
        self.has_memory_v2 = True
        self.uuid = uuid

    @classmethod
    def open(cls, uuid: str) -> Self:
        """Start NVML in this process and find the device; pair it with `close`."""
        _call("nvmlInit")
        try:
            handle = _mig_instance(_handle(uuid))
            return cls(handle, _call("nvmlDeviceGetUUID", handle))
        except NvmlFault:
            with contextlib.suppress(NvmlFault):
                _call("nvmlShutdown")
            raise

    def close(self) -> None:
        """Give NVML back; other users in this process keep it (NVML counts them).

        Raises:
            NvmlFault: somebody else shut it down for all.
        """
        _call("nvmlShutdown")

    def memory(self) -> Memory:
        """Bytes in use. The first version of the call steps in for good where there is no second.

        A passing error of the second version is not papered over with the first: its `used`
        includes the reserved bytes and would show a peak that never was.
        """
        if self.has_memory_v2:
            try:
                info = _call("nvmlDeviceGetMemoryInfo", self._handle, pynvml.nvmlMemory_v2)
                return Memory(
                    used_bytes=info.used, total_bytes=info.total, reserved_bytes=info.reserved
                )
            except NvmlFault as fault:
                if fault.outcome is not Outcome.UNAVAILABLE:
                    raise
        info = _call("nvmlDeviceGetMemoryInfo", self._handle)
        self.has_memory_v2 = False
        return Memory(used_bytes=info.used, total_bytes=info.total, reserved_bytes=None)

    def utilization_percent(self) -> tuple[float, float]:
        """Share of the driver's last sampling window in which (a kernel ran, memory was busy)."""
        rates = _call("nvmlDeviceGetUtilizationRates", self._handle)
        return float(rates.gpu), float(rates.memory)

    def power_w(self) -> float:
        """Watts of the whole board."""
        return float(_call("nvmlDeviceGetPowerUsage", self._handle)) / 1e3

    def energy_j(self) -> float:
        """Joules since the driver was loaded. The counter moves every 20 to 100 ms."""
        return float(_call("nvmlDeviceGetTotalEnergyConsumption", self._handle)) / 1e3

    def temperature_c(self) -> float:
        """Degrees Celsius of the GPU die."""
        return float(_call("nvmlDeviceGetTemperature", self._handle, pynvml.NVML_TEMPERATURE_GPU))

    def pcie_tx_bytes_per_s(self) -> float:
        """Bytes/s the GPU sends. NVML counts for 20 ms, during which the call waits."""
        return self._pcie(pynvml.NVML_PCIE_UTIL_TX_BYTES)

    def pcie_rx_bytes_per_s(self) -> float:
        """Bytes/s the GPU receives. NVML counts for 20 ms, during which the call waits."""
        return self._pcie(pynvml.NVML_PCIE_UTIL_RX_BYTES)

    def _pcie(self, counter: int) -> float:
        # NVML's manual says KB/s without saying which; read as 1024 bytes, as nvitop does.
        return float(_call("nvmlDeviceGetPcieThroughput", self._handle, counter)) * 1024


def resolve_uuid(device: "torch.device") -> str | None:
    """UUID of the GPU that this process computes on, None where there is none to name.

    The CUDA runtime is asked first: NVML's order is not CUDA's, NVML ignores
    CUDA_VISIBLE_DEVICES, and under Slurm its GPU 0 may be another job's. A MIG instance is named
    by the environment before that, because the CUDA 12 runtime gives its parent's UUID.
    """
    import torch

    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    named = uuid_from_environment(os.environ, index, [])
    if named is not None and named.startswith("MIG-"):
        return named
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    return uuid_from_environment(os.environ, index, openable_gpus())


def uuid_from_environment(
    environ: Mapping[str, str], index: int, gpus: Sequence[tuple[int, str]]
) -> str | None:
    """UUID of CUDA device `index` by CUDA's own rules for its environment variables.

    Args:
        environ: holds CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        index: as in `cuda:<index>`.
        gpus: (NVML index, UUID) of the GPUs that this process may open; NVML's order is the PCI
            bus order. Empty when unknown: then only whole UUIDs in the environment count.

    None where the environment does not settle it: unless CUDA_DEVICE_ORDER=PCI_BUS_ID, CUDA counts
    the fastest GPU first, and what it holds for fast is not known here.
    """
    uuids = [uuid for _, uuid in sorted(gpus)]
    by_bus = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len(uuids) == 1
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        entries = [str(position) for position in range(len(uuids))]
    else:
        entries = [entry.strip() for entry in visible.split(",")]
    if len(set(entries)) < len(entries):
        return None  # CUDA shows no device at all when one is named twice

    def named(entry: str) -> str | None:
        if entry.startswith("MIG-"):
            return entry
        if entry.startswith("GPU-"):
            matches = [uuid for uuid in uuids if uuid.startswith(entry)]
            whole = not uuids and len(entry) == UUID_LENGTH
            return entry if whole else matches[0] if len(matches) == 1 else None
        # A position among the GPUs that can be opened, not an NVML index: where cgroups hide some,
        # CUDA counts only the others.
        known = by_bus and entry.isdecimal() and int(entry) < len(uuids)
        return uuids[int(entry)] if known else None

    # CUDA's list ends at the first entry that names nothing.
    chosen = list(itertools.takewhile(lambda uuid: uuid is not None, map(named, entries)))
    return chosen[index] if index < len(chosen) else None


def openable_gpus() -> list[tuple[int, str]]:
    """(NVML index, UUID) of the GPUs that this process may use; empty without NVML."""
    gpus = []
    try:
        _call("nvmlInit")
    except NvmlFault:
        return []
    with contextlib.suppress(NvmlFault):
        for index in range(_call("nvmlDeviceGetCount")):
            with contextlib.suppress(NvmlFault):  # NO_PERMISSION: hidden by a cgroup
                handle = _call("nvmlDeviceGetHandleByIndex", index)
                gpus.append((index, str(_call("nvmlDeviceGetUUID", handle))))
        _call("nvmlShutdown")
    return gpus


def _call(function: str, *arguments: Any) -> Any:
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlFault(error.value) from None


def _handle(uuid: str) -> Any:
    try:
        return _call("nvmlDeviceGetHandleByUUID", uuid)
    except NvmlFault as fault:
        # From CUDA 13 on the runtime gives a MIG instance's own UUID, without saying so.
        if fault.code != NOT_FOUND or not uuid.startswith("GPU-"):
            raise
        return _call("nvmlDeviceGetHandleByUUID", "MIG-" + uuid.removeprefix("GPU-"))


def _mig_instance(handle: Any) -> Any:
    """The MIG instance that CUDA takes on a GPU split into instances; else the GPU itself.

    CUDA computes on one instance, the first it may use, when none is named. The whole GPU's
    numbers would be those of all its tenants.
    """
    try:
        enabled, _ = _call("nvmlDeviceGetMigMode", handle)
    except NvmlFault as fault:
        if fault.outcome is not Outcome.UNAVAILABLE:
            raise
        return handle  # no such mode, or already an instance
    if not enabled:
        return handle
    for position in range(_call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        try:
            return _call("nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
        except NvmlFault as fault:
            if fault.outcome is not Outcome.UNAVAILABLE:
                raise
    raise NvmlFault(NOT_FOUND)
