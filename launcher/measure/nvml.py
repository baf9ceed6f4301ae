"""What NVML says about one GPU, and which GPU a CUDA device is.

Everything that touches `pynvml` is here. Importing this module neither loads libnvidia-ml nor
starts it.
"""

import contextlib
import enum
import os
from typing import TYPE_CHECKING, Any, Self

import pynvml

if TYPE_CHECKING:
    import torch


class Outcome(enum.Enum):
    """What an NVML error means for whoever wants the number."""

    MISSING = "missing"  # no library, no driver: nothing will come while this process lives
    LOST = "lost"  # the GPU itself is gone
    CLOSED = "closed"  # somebody shut NVML down in this process: open the device again
    UNAVAILABLE = "unavailable"  # this GPU, driver or user does not get this number
    TRANSIENT = "transient"  # may work the next time


_ERRORS = {
    Outcome.CLOSED: "UNINITIALIZED",
    Outcome.MISSING: "DRIVER_NOT_LOADED LIBRARY_NOT_FOUND LIB_RM_VERSION_MISMATCH",
    Outcome.LOST: "GPU_IS_LOST RESET_REQUIRED",
    Outcome.UNAVAILABLE: (
        "INVALID_ARGUMENT NOT_SUPPORTED NO_PERMISSION NOT_FOUND INSUFFICIENT_SIZE "
        "INSUFFICIENT_POWER FUNCTION_NOT_FOUND CORRUPTED_INFOROM OPERATING_SYSTEM "
        "VGPU_ECC_NOT_SUPPORTED FREQ_NOT_SUPPORTED ARGUMENT_VERSION_MISMATCH DEPRECATED "
        "GPU_NOT_FOUND RESET_TYPE_NOT_SUPPORTED"
    ),
    Outcome.TRANSIENT: (
        "ALREADY_INITIALIZED TIMEOUT IRQ_ISSUE IN_USE MEMORY NO_DATA INSUFFICIENT_RESOURCES "
        "NOT_READY INVALID_STATE UNKNOWN"
    ),
}
ERRORS: dict[int, tuple[str, Outcome]] = {
    getattr(pynvml, f"NVML_ERROR_{name}"): (name, outcome)
    for outcome, names in _ERRORS.items()
    for name in names.split()
    if hasattr(pynvml, f"NVML_ERROR_{name}")  # older releases lack the newest
}
"""Every nvmlReturn_t, by value."""
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND


class NvmlFault(Exception):
    """NVML gave an error instead of a number."""

    def __init__(self, code: int) -> None:
        # A code of a newer driver says nothing about the GPU: worth another try.
        name, outcome = ERRORS.get(code, (f"ERROR_{code}", Outcome.TRANSIENT))
        super().__init__(f"NVML: {name}")
        self.code = code
        self.name = name
        self.outcome = outcome


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

    def memory_bytes(self) -> tuple[int, int]:
        """(used, total) of the whole device; what driver and firmware reserve is not used.

        The first version of the call, which counts the reserved bytes as used, steps in for good
        where there is no second. A passing error of the second is not papered over with it: that
        would show a peak that never was.
        """
        if self.has_memory_v2:
            try:
                info = _call("nvmlDeviceGetMemoryInfo", self._handle, pynvml.nvmlMemory_v2)
                return info.used, info.total
            except NvmlFault as fault:
                if fault.outcome is not Outcome.UNAVAILABLE:
                    raise
        info = _call("nvmlDeviceGetMemoryInfo", self._handle)
        self.has_memory_v2 = False
        return info.used, info.total

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

    The CUDA runtime is asked: NVML's order is not CUDA's, NVML ignores CUDA_VISIBLE_DEVICES, and
    under Slurm its GPU 0 may be another job's. A MIG instance is named by the environment before
    that, because the CUDA 12 runtime gives its parent's UUID.
    """
    import torch

    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible[index].strip() if index < len(visible) else ""
    if named.startswith("MIG-"):
        return named
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def openable_gpus() -> list[str]:
    """UUIDs of the GPUs that this process may use; empty without NVML."""
    gpus = []
    try:
        _call("nvmlInit")
    except NvmlFault:
        return []
    with contextlib.suppress(NvmlFault):
        for index in range(_call("nvmlDeviceGetCount")):
            with contextlib.suppress(NvmlFault):  # NO_PERMISSION: hidden by a cgroup
                handle = _call("nvmlDeviceGetHandleByIndex", index)
                gpus.append(str(_call("nvmlDeviceGetUUID", handle)))
        _call("nvmlShutdown")
    return gpus


def names_gpu(index: int) -> bool:
    """Whether NVML finds CUDA's device of this number by its PCI address.

    torch asks that as an expandable segment grows, and any failure ends the process, in torch 2.13
    without a word where there is no library.
    """
    import torch

    gpu: Any = torch.cuda.get_device_properties(index)  # declared without addresses
    address = f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        _call("nvmlInit")
        try:
            _call("nvmlDeviceGetHandleByPciBusId", address)
        finally:
            _call("nvmlShutdown")
    except NvmlFault:
        return False
    return True


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
