"""NVML: readings of one GPU, and the UUID of a CUDA device. All uses of `pynvml` are here.

Importing this module neither loads libnvidia-ml nor starts it.
"""

import contextlib
import enum
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Self

import pynvml

if TYPE_CHECKING:
    import torch


class Outcome(enum.Enum):
    """Meaning of an NVML error for a reading."""

    MISSING = "missing"  # no library or driver: permanent for this process
    LOST = "lost"  # the GPU itself is gone
    CLOSED = "closed"  # NVML was shut down in this process: reopen the device
    UNAVAILABLE = "unavailable"  # not for this GPU, driver or user
    TRANSIENT = "transient"  # may succeed next time


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
_SCALARS: Final[dict[str, tuple[str, tuple[int, ...], str, float]]] = {
    "power": ("PowerUsage", (), "power_w", 1e3),
    # since the driver was loaded; updated every 20 to 100 ms
    "energy": ("TotalEnergyConsumption", (), "energy_j", 1e3),
    "temperature": ("Temperature", (pynvml.NVML_TEMPERATURE_GPU,), "temperature_c", 1.0),
    # NVML documents KB/s; taken as 1024 bytes, as nvitop does.
    **{
        f"pcie_{way}": ("PcieThroughput", (counter,), f"pcie_{way}_bytes_per_s", 1 / 1024)
        for way, counter in (
            ("tx", pynvml.NVML_PCIE_UTIL_TX_BYTES),
            ("rx", pynvml.NVML_PCIE_UTIL_RX_BYTES),
        )
    },
}
"""Reading -> nvmlDeviceGet's function, its arguments behind the handle, the field of GpuRecord, and
NVML's units in one of the field's."""
READINGS: Final = ("memory", "utilization", *_SCALARS)
"""In the order they are read: PCIe waits 20 ms each, so nothing comes after it."""


class NvmlFault(Exception):
    """An NVML call failed."""

    def __init__(self, code: int) -> None:
        # An unknown code of a newer driver may be transient.
        name, outcome = ERRORS.get(code, (f"ERROR_{code}", Outcome.TRANSIENT))
        super().__init__(f"NVML: {name}")
        self.code = code
        self.name = name
        self.outcome = outcome


class NvmlDevice:
    """One GPU or MIG instance. Every method but `close` may raise NvmlFault.

    A MIG instance has its own memory; power, energy, temperature and PCIe belong to the shared GPU,
    and NVML does not report them.
    """

    def __init__(self, handle: Any, uuid: str) -> None:
        self._handle = handle
        self.has_memory_v2 = True
        self.uuid = uuid

    @classmethod
    def open(cls, uuid: str) -> Self:
        """Start NVML in this process and find the device; call `close` afterwards."""
        call("nvmlInit")
        try:
            # unless an instance is named, CUDA uses the first one that it may
            handle = next(_instances(_handle(uuid)), None)
            if handle is None:
                raise NvmlFault(NOT_FOUND)
            return cls(handle, call("nvmlDeviceGetUUID", handle))
        except NvmlFault:
            with contextlib.suppress(NvmlFault):
                call("nvmlShutdown")
            raise

    def close(self) -> None:
        """Release NVML; other users in this process keep it (NVML counts them).

        Raises:
            NvmlFault: it was shut down for all.
        """
        call("nvmlShutdown")

    def memory_bytes(self) -> tuple[int, int]:
        """Return (used, total) of the whole device, without the driver's and firmware's reserve.

        Without version 2 of the call, version 1 replaces it permanently, which counts the reserve
        as used. A transient error of version 2 is raised: version 1 would show a false peak.
        """
        if self.has_memory_v2:
            try:
                info = call("nvmlDeviceGetMemoryInfo", self._handle, pynvml.nvmlMemory_v2)
                return info.used, info.total
            except NvmlFault as fault:
                if fault.outcome is not Outcome.UNAVAILABLE:
                    raise
        info = call("nvmlDeviceGetMemoryInfo", self._handle)
        self.has_memory_v2 = False
        return info.used, info.total

    def read(self, name: str) -> dict[str, float]:
        """Return one of `READINGS` as fields of GpuRecord."""
        if name == "memory":
            used_bytes, total_bytes = self.memory_bytes()
            return {"memory_used_bytes": used_bytes, "memory_total_bytes": total_bytes}
        if name == "utilization":  # of the last sampling window: a kernel, memory traffic
            rates = call("nvmlDeviceGetUtilizationRates", self._handle)
            kinds = {"gpu": rates.gpu, "memory": rates.memory}
            return {f"{kind}_utilization_percent": float(rate) for kind, rate in kinds.items()}
        function, arguments, field, divisor = _SCALARS[name]
        return {field: call(f"nvmlDeviceGet{function}", self._handle, *arguments) / divisor}


def resolve_uuid(device: "torch.device") -> str | None:
    """Return the UUID of the GPU that this process computes on; None on a CPU.

    It comes from the CUDA runtime: NVML orders GPUs differently, ignores CUDA_VISIBLE_DEVICES, and
    under Slurm its GPU 0 may be another job's. A MIG instance comes from the environment, because
    the CUDA 12 runtime returns its parent's UUID.
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
    """List the UUIDs of the GPUs that this process may use, of a partitioned one those of its MIG
    instances; empty without NVML."""
    gpus: list[str] = []
    with contextlib.suppress(NvmlFault), started():
        for index in range(call("nvmlDeviceGetCount")):
            with contextlib.suppress(NvmlFault):  # NO_PERMISSION: hidden by a cgroup
                for handle in _instances(call("nvmlDeviceGetHandleByIndex", index)):
                    gpus.append(str(call("nvmlDeviceGetUUID", handle)))
    return gpus


def memory_of_gpus() -> list[tuple[int, int]]:
    """Return (used, total) bytes of the GPUs that this process may use; takes none of either."""
    found = []
    for uuid in openable_gpus():
        with contextlib.suppress(NvmlFault), contextlib.closing(NvmlDevice.open(uuid)) as gpu:
            found.append(gpu.memory_bytes())
    return found


def names_gpu(index: int) -> bool:
    """Return whether NVML finds the CUDA device of this index by its PCI address.

    torch looks it up when an expandable segment grows, and any failure ends the process, in torch
    2.13 without a message if the library is missing.
    """
    import torch

    gpu: Any = torch.cuda.get_device_properties(index)  # declared without addresses
    address = f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    with contextlib.suppress(NvmlFault), started():
        call("nvmlDeviceGetHandleByPciBusId", address)
        return True
    return False


@contextlib.contextmanager
def started() -> Iterator[None]:
    """Start NVML for the block; raises NvmlFault where it does not start."""
    call("nvmlInit")
    try:
        yield
    finally:
        call("nvmlShutdown")


def call(function: str, *arguments: Any) -> Any:
    """Return what a function of pynvml returns; raises NvmlFault where it fails."""
    try:
        return getattr(pynvml, function)(*arguments)
    except pynvml.NVMLError as error:
        raise NvmlFault(error.value) from None


def _handle(uuid: str) -> Any:
    try:
        return call("nvmlDeviceGetHandleByUUID", uuid)
    except NvmlFault as fault:
        if fault.code != NOT_FOUND:
            raise
        # From CUDA 13 on, the runtime returns a MIG instance's own UUID with the prefix GPU-. From
        # the environment it may be the first letters only.
        begin = "MIG-" + uuid[len("GPU-") :]
        found = [known for known in openable_gpus() if known.startswith(begin)]
        if len(found) != 1:
            raise
        return call("nvmlDeviceGetHandleByUUID", found[0])


def _instances(handle: Any) -> Iterator[Any]:
    """Yield the MIG instances of a partitioned GPU, whose readings would be those of all its
    tenants; else the GPU itself."""
    mode = _if_available("nvmlDeviceGetMigMode", handle)
    if mode is None or not mode[0]:  # no such mode, or already an instance
        yield handle
        return
    for position in range(call("nvmlDeviceGetMaxMigDeviceCount", handle)):
        instance = _if_available("nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
        if instance is not None:
            yield instance


def _if_available(function: str, *arguments: Any) -> Any:
    try:
        return call(function, *arguments)
    except NvmlFault as fault:
        if fault.outcome is not Outcome.UNAVAILABLE:
            raise
        return None
