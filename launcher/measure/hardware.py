"""Known GPUs: data-sheet figures, and the memory overhead of a CUDA context and NCCL.

The one table of GPUs: MFU's peak rates are read from it, and `launcher.forecast.machine` makes of
an entry a machine without a measurement. A `shardscale profile` of the real one beats all of it.
"""

import contextlib
import difflib
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from launcher.util.errors import UserError
from launcher.util.sizes import GIB, MIB

GPUS_PER_NODE = 8
ASSUMED_NETWORK_BYTES_PER_S = 1.5625e9  # one link of 100 Gbit/s for 8 GPUs
NULL_GPUS: Final = "SHARDSCALE_NULL_GPUS"
"""Environment variable that describes the GPUs of a rehearsal."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of GPU; rates are peaks, dense, without sparsity."""

    name: str
    pattern: str
    """Regular expression for what CUDA or a user calls it (case does not matter)."""
    capability: tuple[int, int]
    """Compute capability (developer.nvidia.com/cuda-gpus)."""
    memory_gib: float
    """Total that CUDA reports, which is less than the size on the box."""
    tensor_flops_per_s: float
    """Peak of 16-bit tensor cores with fp32 accumulation."""
    fp32_flops_per_s: float
    """Without tensor cores: torch uses TF32 only where it is asked to."""
    memory_bytes_per_s: float
    pcie_generation: int
    """With 16 lanes."""
    multiprocessors: int
    l2_mib: int
    """L2 cache (data sheets; on Hopper 10 MiB for each stack of HBM, as an H200 reports)."""
    source: str
    """The maker, whose data sheet has the figures."""
    nvlink_bytes_per_s: float | None = None
    """To all GPUs of the node together, in one direction; None for PCIe and for bridged pairs."""
    network_bytes_per_s: float = ASSUMED_NETWORK_BYTES_PER_S
    """A GPU's share of its node's network."""
    chip_link_bytes_per_s: float | None = None
    """To the host, in one direction, where that is not PCIe (NVLink-C2C)."""

    @property
    def memory_bytes(self) -> int:
        """Memory as CUDA reports it."""
        return int(self.memory_gib * GIB)

    @property
    def bf16_flops_per_s(self) -> float | None:
        """None before compute capability 8.0, whose tensor cores have fp16 only."""
        return self.tensor_flops_per_s if self.capability >= (8, 0) else None

    @property
    def fp8_flops_per_s(self) -> float | None:
        """Twice the 16-bit rate on all data sheets that have it, from capability 8.9 on."""
        return 2 * self.tensor_flops_per_s if self.capability >= (8, 9) else None

    @property
    def pcie_bytes_per_s(self) -> float:
        """One direction of 16 lanes after 128b/130b coding: 15.75 GB/s at generation 3, doubling
        with each (PCI-SIG base specifications)."""
        return 15.754e9 * 2.0 ** (self.pcie_generation - 3)

    @property
    def host_bytes_per_s(self) -> float:
        """Between the GPU and its host, in one direction."""
        return self.chip_link_bytes_per_s or self.pcie_bytes_per_s

    @property
    def resident_threads(self) -> int:
        """That run at a time: each multiprocessor holds so many (CUDA C++ Programming Guide, by
        compute capability)."""
        each = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
        return self.multiprocessors * each.get(self.capability, 2048)

    @property
    def takes_flash(self) -> bool:
        """Return whether PyTorch takes FlashAttention for attention in 16 bits: since 2.5 it takes
        cuDNN's on Hopper and data-centre Blackwell (check_prefer_cudnn_attention in torch 2.13.0's
        aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
        return self.capability >= (8, 0) and self.capability[0] not in (9, 10)

    @property
    def cublas_workspace_bytes(self) -> int:
        """Workspace that torch gives cuBLAS per handle and stream, out of its own allocator.

        getChosenWorkspaceSize in aten/src/ATen/cuda/CUDABlas / CublasHandlePool.cpp: 32 MiB on
        compute capability 9 and 10, else `:4096:2:16:8` = 8 MiB + 128 KiB.
        """
        return 32 * MIB if self.capability[0] in (9, 10) else 8 * MIB + 128 * 2**10


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
# 4 x 100 for 8); otherwise ASSUMED_NETWORK_BYTES_PER_S.
_NDR, _HDR, _EDR = 50e9, 25e9, 6.25e9


# The first match wins, so longer names come first. Columns as in `Gpu`.
# fmt: off
GPUS = (
    Gpu("B200", "B200", (10, 0), 178, 2250e12, 75e12, 8000e9, 5, 148, 126, "DGX B200", 900e9, _NDR),
    Gpu("GH200",
        "GH200", (9, 0), 94.5, 989.4e12, 67e12, 4000e9, 5, 132, 60, "GH200", 450e9, _NDR, 450e9),
    Gpu("H200",
        "H200(?!.?NVL)", (9, 0), 139.8, 989.4e12, 66.9e12, 4800e9, 5, 132, 60, "H200", 450e9, _NDR),
    Gpu("H200-NVL", "H200.?NVL", (9, 0), 139.8, 835.5e12, 60e12, 4800e9, 5, 132, 60, "H200 NVL"),
    Gpu("H100-PCIe", "H100.?PCIE", (9, 0), 79.1, 756e12, 51.2e12, 2000e9, 5, 114, 50, "H100"),
    Gpu("H100-NVL", "H100.?NVL", (9, 0), 93, 835e12, 60e12, 3900e9, 5, 132, 60, "H100 NVL"),
    Gpu("H100-96GB", "H100.*96", (9, 0), 95.04, 989.4e12, 66.9e12, 2400e9, 5, 132, 60,
        "H100, memory as torchtitan/benchmarks says", 450e9, _NDR),
    Gpu("H100", "H100", (9, 0), 79.1, 989.4e12, 66.9e12, 3350e9, 5, 132, 50, "H100", 450e9, _NDR),
    Gpu("A100-40GB-PCIe",
        "A100.*PCIE.*40|A100.*40.*PCIE", (8, 0), 39.3, 312e12, 19.5e12, 1555e9, 4, 108, 40, "A100"),
    Gpu("A100-80GB-PCIe", "A100.*PCIE", (8, 0), 79.1, 312e12, 19.5e12, 1935e9, 4, 108, 40, "A100"),
    Gpu("A100-40GB",
        "A100.*40", (8, 0), 39.3, 312e12, 19.5e12, 1555e9, 4, 108, 40, "A100", 300e9, _HDR),
    Gpu("A100-80GB",
        "A100", (8, 0), 79.1, 312e12, 19.5e12, 2039e9, 4, 108, 40, "A100", 300e9, _HDR),
    Gpu("A800-80GB-PCIe", "A800.*PCIE", (8, 0), 79.1, 312e12, 19.5e12, 1935e9, 4, 108, 40, "A800"),
    Gpu("A800", "A800", (8, 0), 79.1, 312e12, 19.5e12, 2039e9, 4, 108, 40, "A800", 200e9, _HDR),
    Gpu("A40", "A40", (8, 6), 44.3, 149.7e12, 37.4e12, 696e9, 4, 84, 6, "A40"),
    Gpu("A30", "A30", (8, 0), 23.5, 165e12, 10.3e12, 933e9, 4, 56, 24, "A30"),
    Gpu("A10G", "A10G", (8, 6), 22, 70e12, 31.5e12, 600e9, 4, 80, 6, "A10G"),
    Gpu("A10", "A10", (8, 6), 22, 125e12, 31.2e12, 600e9, 4, 72, 6, "A10"),
    Gpu("RTX-PRO-6000", "(?:RTX.?)?PRO.?6000", (12, 0), 94.9, 503.8e12, 126e12, 1792e9, 5, 188, 128,
        "RTX PRO 6000 Blackwell Workstation Edition"),
    Gpu("RTX-6000-Ada", "RTX.?6000.?Ada|6000.?Ada", (8, 9), 47.4, 364.2e12, 91.1e12, 960e9, 4, 142,
        96, "RTX 6000 Ada"),
    Gpu("A6000", "A6000", (8, 6), 47.4, 154.8e12, 38.7e12, 768e9, 4, 84, 6, "RTX A6000"),
    Gpu("A5000", "A5000", (8, 6), 23.5, 111.1e12, 27.8e12, 768e9, 4, 64, 6, "RTX A5000"),
    Gpu("A4000", "A4000", (8, 6), 15.7, 76.7e12, 19.2e12, 448e9, 4, 48, 4, "RTX A4000"),
    Gpu("L40S", "L40S", (8, 9), 44.3, 362.05e12, 91.6e12, 864e9, 4, 142, 96, "L40S"),
    Gpu("L40", "L40", (8, 9), 44.3, 181.05e12, 90.5e12, 864e9, 4, 142, 96, "L40"),
    Gpu("L4", "L4", (8, 9), 21.9, 121e12, 30.3e12, 300e9, 4, 58, 48, "L4"),
    Gpu("RTX-5090", "(?:RTX.?)?5090(?! D)", (12, 0), 31.3, 209.5e12, 104.8e12, 1792e9, 5, 170, 96,
        "Blackwell architecture"),
    Gpu("RTX-4090", "(?:RTX.?)?4090(?! D)", (8, 9), 23.5, 165.2e12, 82.6e12, 1008e9, 4, 128, 72,
        "Ada architecture"),
    Gpu("RTX-3090", "(?:RTX.?)?3090(?! Ti)", (8, 6), 23.5, 71e12, 35.6e12, 936e9, 4, 82, 6,
        "GA102 architecture"),
    Gpu("V100-32GB-PCIe",
        "V100.*PCIE.*32|V100.*32.*PCIE", (7, 0), 31.7, 112e12, 14e12, 900e9, 3, 80, 6, "V100"),
    Gpu("V100-16GB-PCIe", "V100.*PCIE", (7, 0), 15.7, 112e12, 14e12, 900e9, 3, 80, 6, "V100"),
    Gpu("V100-32GB",
        "V100.*32", (7, 0), 31.7, 125e12, 15.7e12, 900e9, 3, 80, 6, "V100", 150e9, _EDR),
    Gpu("V100-16GB", "V100", (7, 0), 15.7, 125e12, 15.7e12, 900e9, 3, 80, 6, "V100", 150e9, _EDR),
    Gpu("T4", "T4", (7, 5), 14.5, 65e12, 8.1e12, 320e9, 3, 40, 4, "T4"),
)
# fmt: on
KNOWN_GPUS = ", ".join(gpu.name for gpu in GPUS)


def is_rehearsal() -> bool:
    """Return whether this process sees null GPUs, whose seconds and context are no GPU's."""
    return NULL_GPUS in os.environ


@cache  # a plan asks for each of its choices
def find_gpu(device_name: str | None) -> Gpu | None:
    """Return the entry for what CUDA calls a GPU (`NVIDIA A100-SXM4-80GB`), None if unknown."""
    # a MIG instance ("A100-SXM4-80GB MIG 3g.40gb") is a fraction of the GPU in its name
    if device_name is None or re.search(r"laptop|max-q|\bMIG\b", device_name, re.IGNORECASE):
        return None
    for gpu in GPUS:
        if gpu.name.lower() == device_name.lower():
            return gpu
    for gpu in GPUS:
        if re.search(rf"\b(?:{gpu.pattern})(?!\d)", device_name, re.IGNORECASE):  # no A10 in A100
            return gpu if _has_named_memory(gpu, device_name) else None
    return None


def _has_named_memory(gpu: Gpu, device_name: str) -> bool:
    """Return whether a GPU has the memory in a name, if there is any: Leonardo's `A100-SXM-64GB` is
    no A100 with 80 GB."""
    named = re.search(r"\b(\d+) ?G(?:i?B)?\b", device_name, re.IGNORECASE)
    if named is None or gpu.chip_link_bytes_per_s:  # a GH200's name has its host's memory
        return True
    return 0.85 < gpu.memory_gib / int(named[1]) < 1.05


def cpu_name() -> str:
    """Return the name of this machine's processor, or else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def peak_flops_per_s(device_name: str | None) -> float | None:
    """bf16 tensor-core FLOP/s of a GPU by its name, for MFU; None when it has none or is not
    known."""
    gpu = find_gpu(device_name)
    return None if gpu is None else gpu.bf16_flops_per_s


def gpu_named(name: str) -> Gpu:
    """Return the entry for what a user calls a GPU (`h100`, `A100-80GB`).

    Raises:
        UserError: not in the table, or a list of GPUs.
    """
    if len([part for part in re.split(r"[,;+&]|\band\b", name) if part.strip()]) > 1:
        raise UserError(
            f"GPU {name!r} names several: a plan is for one kind of GPU, so plan once for each"
        )
    if re.search(r"^\d+ ?[x*]|.(?:(?<!T)x|[:*]) ?\d+$", name, re.IGNORECASE):
        raise UserError(f"GPU {name!r} has a number: give one name, and the number with --gpus")
    gpu = find_gpu(name)
    if gpu is None:
        by_name = {gpu.name.lower(): gpu.name for gpu in GPUS}
        close = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.0)
        nearest = ", ".join(by_name[known] for known in close)
        raise UserError(
            f"GPU {name!r:.80} is not known: the nearest names are {nearest}; or plan with "
            "--gpu-memory SIZE, or measure yours with shardscale profile"
        )
    return gpu
