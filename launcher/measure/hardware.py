"""Known GPUs: data-sheet figures, and the memory overhead of a CUDA context and NCCL.

The one table of GPUs: `launcher.measure.flops` reads MFU's peak rates from it, and
`launcher.plan.machine` makes of an entry a machine that nobody has measured. A `shardscale profile`
of the real one beats all of it.
"""

import re
from dataclasses import dataclass

from launcher.errors import UserError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One model of GPU; rates are peaks, dense, without sparsity."""

    name: str
    pattern: str
    """Regular expression for what CUDA or a user calls it (case does not matter)."""
    memory_bytes: int
    """What CUDA reports as total, which is less than the size on the box."""
    bf16_flops_per_s: float | None
    """Tensor cores with fp32 accumulation; None where the GPU has no bf16 ones."""
    fp32_flops_per_s: float
    """Without tensor cores: torch uses TF32 only where it is asked to."""
    memory_bytes_per_s: float
    pcie_generation: int
    """With 16 lanes."""
    nvlink_bytes_per_s: float | None
    """To all GPUs of the node together, in one direction; None for PCIe and for bridged pairs."""
    network_bytes_per_s: float
    """A GPU's share of its node's network."""
    source: str
    """Whose data sheet the figures are from."""

    @property
    def pcie_bytes_per_s(self) -> float:
        """One direction of 16 lanes after 128b/130b coding: 15.75 GB/s at generation 3, doubling
        with each (PCI-SIG base specifications)."""
        return 15.754e9 * 2.0 ** (self.pcie_generation - 3)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What torch gives cuBLAS per handle and stream, out of its own allocator.

        getChosenWorkspaceSize in aten/src/ATen/cuda/CUDABlas / CublasHandlePool.cpp: 32 MiB on
        compute capability 9 and 10, else `:4096:2:16:8` = 8 MiB + 128 KiB.
        """
        hopper_or_later = self.name.startswith(("H", "GH", "B"))
        return 32 * MIB if hopper_or_later else 8 * MIB + 128 * 2**10


CONTEXT_BYTES = 520 * MIB
"""CUDA context with torch's kernels loaded: 450 to 600 MiB are reported in public threads on A100
and H100 with CUDA 12 (lazy module loading). Replaced by what a run measures (device used less
reserved)."""

NCCL_GROUP_BYTES = 650 * MIB
"""NCCL's channel buffers for a process group over NVLink: 544 to 688 MB are reported on A100.
Taken once a group has communicated."""

# Dense peaks and bandwidths from NVIDIA's data sheet (or whitepaper) of what `source` names; where
# a sheet prints the rate with sparsity, half of it. Memory as cudaMemGetInfo reports it. Network:
# the DGX of that GPU (A100: 8 x 200 Gbit/s, H100 and later: 8 x 400 Gbit/s for 8 GPUs, V100:
# 4 x 100 for 8); otherwise one link of 100 Gbit/s for 8 GPUs is assumed.
_NDR, _HDR, _EDR, _ETHERNET = 50e9, 25e9, 6.25e9, 1.5625e9
ASSUMED_NETWORK_BYTES_PER_S = _ETHERNET


def _gpu(
    name: str,
    pattern: str,
    memory_gib: float,
    bf16_tflops: float | None,
    fp32_tflops: float,
    memory_gb_per_s: float,
    pcie_generation: int,
    nvlink_gb_per_s: float | None,
    network_bytes_per_s: float,
    source: str,
) -> Gpu:
    return Gpu(
        name=name,
        pattern=pattern,
        memory_bytes=int(memory_gib * GIB),
        bf16_flops_per_s=None if bf16_tflops is None else bf16_tflops * 1e12,
        fp32_flops_per_s=fp32_tflops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        pcie_generation=pcie_generation,
        nvlink_bytes_per_s=None if nvlink_gb_per_s is None else nvlink_gb_per_s * 1e9,
        network_bytes_per_s=network_bytes_per_s,
        source=source,
    )


# The first match wins, so longer names come first. Columns as in `_gpu`:
# name, pattern, GiB, bf16 and fp32 TFLOP/s, memory GB/s, PCIe, NVLink GB/s, network B/s, source
GPUS = (
    _gpu("B200", "B200", 178.0, 2250.0, 75.0, 8000.0, 5, 900.0, _NDR, "DGX B200"),
    _gpu("GH200", "GH200", 94.5, 989.4, 67.0, 4000.0, 5, 450.0, _NDR, "GH200"),
    _gpu("H200", "H200", 139.8, 989.4, 66.9, 4800.0, 5, 450.0, _NDR, "H200"),
    _gpu("H100-PCIe", "H100.?PCIE", 79.1, 756.0, 51.2, 2000.0, 5, None, _ETHERNET, "H100"),
    _gpu("H100-NVL", "H100.?NVL", 93.0, 835.0, 60.0, 3900.0, 5, None, _ETHERNET, "H100 NVL"),
    _gpu("H100", "H100", 79.1, 989.4, 66.9, 3350.0, 5, 450.0, _NDR, "H100"),
    _gpu(
        "A100-40GB-PCIe",
        "A100.*PCIE.*40|A100.*40.*PCIE",
        39.3,
        312.0,
        19.5,
        1555.0,
        4,
        None,
        _ETHERNET,
        "A100",
    ),
    _gpu("A100-80GB-PCIe", "A100.*PCIE", 79.1, 312.0, 19.5, 1935.0, 4, None, _ETHERNET, "A100"),
    _gpu("A100-40GB", "A100.*40", 39.3, 312.0, 19.5, 1555.0, 4, 300.0, _HDR, "A100"),
    _gpu("A100-80GB", "A100", 79.1, 312.0, 19.5, 2039.0, 4, 300.0, _HDR, "A100"),
    _gpu("A800", "A800", 79.1, 312.0, 19.5, 2039.0, 4, 200.0, _HDR, "A800"),
    _gpu("A40", "A40", 44.3, 149.7, 37.4, 696.0, 4, None, _ETHERNET, "A40"),
    _gpu("A30", "A30", 23.5, 165.0, 10.3, 933.0, 4, None, _ETHERNET, "A30"),
    _gpu("A10G", "A10G", 22.0, 70.0, 31.5, 600.0, 4, None, _ETHERNET, "A10G"),
    _gpu("A10", "A10", 22.0, 125.0, 31.2, 600.0, 4, None, _ETHERNET, "A10"),
    _gpu("A6000", "A6000", 47.4, 154.8, 38.7, 768.0, 4, None, _ETHERNET, "RTX A6000"),
    _gpu("L40S", "L40S", 44.3, 362.05, 91.6, 864.0, 4, None, _ETHERNET, "L40S"),
    _gpu("L40", "L40", 44.3, 181.05, 90.5, 864.0, 4, None, _ETHERNET, "L40"),
    _gpu("L4", "L4", 21.9, 121.0, 30.3, 300.0, 4, None, _ETHERNET, "L4"),
    _gpu(
        "RTX-5090",
        "RTX.?5090(?! D)",
        31.3,
        209.5,
        104.8,
        1792.0,
        5,
        None,
        _ETHERNET,
        "RTX Blackwell architecture",
    ),
    _gpu(
        "RTX-4090",
        "RTX.?4090(?! D)",
        23.5,
        165.2,
        82.6,
        1008.0,
        4,
        None,
        _ETHERNET,
        "Ada architecture",
    ),
    _gpu(
        "RTX-3090",
        "RTX.?3090(?! Ti)",
        23.5,
        71.0,
        35.6,
        936.0,
        4,
        None,
        _ETHERNET,
        "GA102 architecture",
    ),
    _gpu("V100-32GB", "V100.*32", 31.7, None, 15.7, 900.0, 3, 150.0, _EDR, "V100"),
    _gpu("V100-16GB", "V100", 15.7, None, 15.7, 900.0, 3, 150.0, _EDR, "V100"),
    _gpu("T4", "T4", 14.5, None, 8.1, 320.0, 3, None, _ETHERNET, "T4"),
)


def find_gpu(device_name: str | None) -> Gpu | None:
    """The entry for what CUDA calls a GPU (`NVIDIA A100-SXM4-80GB`), None when it is not known."""
    if device_name is None or re.search("laptop|max-q", device_name, re.IGNORECASE):
        return None
    for gpu in GPUS:
        if gpu.name.lower() == device_name.lower():
            return gpu
    for gpu in GPUS:
        if re.search(rf"\b(?:{gpu.pattern})(?!\d)", device_name, re.IGNORECASE):
            return gpu
    return None


def gpu_named(name: str) -> Gpu:
    """The entry for what a user calls a GPU (`h100`, `A100-80GB`).

    Raises:
        UserError: not in the table; lists what is.
    """
    gpu = find_gpu(name)
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise UserError(
            f"GPU {name!r} is not known: use one of {known}, or measure yours with "
            "shardscale profile"
        )
    return gpu
