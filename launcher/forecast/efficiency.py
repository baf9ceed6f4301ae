"""Shares of a data sheet's peaks that training reaches, and costs of each start of something.

All constants of predicted seconds on GPUs without a measurement, each with its source. Fitted
ones come from `bench/published_fit.py`, on those runs alone that its rule gives it, published ones
and some of ours; what they are worth is in docs/accuracy.md. `shardscale profile` measures the same
ones where it can.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from launcher.measure.hardware import Gpu

Architecture = Literal["volta", "turing", "ampere", "ampere-86", "ada", "hopper", "blackwell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the data sheet's peaks that one architecture reaches."""

    matmul: float
    """Share of 16-bit tensor cores, in products whose tiles leave no multiprocessor idle; writing
    their results comes on top."""
    matmul_fp32: float
    """The same without tensor cores."""
    attention: float
    """Share of 16-bit tensor cores, forward and backward, counting the causal half:
    FlashAttention-2's, on Blackwell cuDNN's, which torch prefers there."""
    elementwise: float
    """Share of memory bandwidth, in norms, activations and sums, each a kernel of its own."""
    operator_s: float
    """Seconds of the host, for one operator that torch dispatches, views among them."""


# Fitted: elementwise and operator_s of volta; matmul, attention and elementwise of ampere
# and hopper; operator_s of hopper; matmul and attention of blackwell. Rates of the kernels alone
# agree: FlashAttention-2 reaches 50 to 73% of the peak on A100 (arXiv:2307.08691, abstract) and up
# to 35% on H100 (arXiv:2407.08608, abstract); on B200 SimuMax measured 0.38 to 0.43 for the kernel
# of Transformer Engine (configs/system/b200_bf16_ceperm.json, 64 heads of 4,096 and 16 of 131,072
# tokens, halved for the causal mask). Assumed: attention of volta and turing, which have older
# kernels than FlashAttention-2, what 8.6 and 8.9 have but fp32, all else of turing and blackwell,
# as the architecture beside them, matmul of volta, whose published runs are bound by what eager
# attention moves, and matmul_fp32 where an fp32 product has a multiprocessor's
# lanes to itself (7.0, 8.0). Where integers share the lanes (8.6, 8.9, 12.0) published training in
# fp32 reaches 0.40 to 0.46 of the data sheet.
EFFICIENCIES: Final[dict[Architecture, Efficiency]] = {
    "volta": Efficiency(
        matmul=0.66, matmul_fp32=0.85, attention=0.25, elementwise=0.63, operator_s=11.3e-6
    ),
    "turing": Efficiency(
        matmul=0.60, matmul_fp32=0.80, attention=0.25, elementwise=0.46, operator_s=11.3e-6
    ),
    "ampere": Efficiency(
        matmul=0.80, matmul_fp32=0.85, attention=0.62, elementwise=0.465, operator_s=8e-6
    ),
    "ampere-86": Efficiency(
        matmul=0.75, matmul_fp32=0.45, attention=0.40, elementwise=0.5, operator_s=8e-6
    ),
    "ada": Efficiency(
        matmul=0.75, matmul_fp32=0.45, attention=0.40, elementwise=0.5, operator_s=8e-6
    ),
    "hopper": Efficiency(
        matmul=0.67, matmul_fp32=0.75, attention=0.345, elementwise=0.38, operator_s=4.7e-6
    ),
    "blackwell": Efficiency(
        matmul=0.54, matmul_fp32=0.45, attention=0.364, elementwise=0.34, operator_s=6e-6
    ),
}

# FlashAttention-2 takes half of the time of its predecessors (arXiv:2307.08691, abstract), of which
# PyTorch's memory-efficient kernel is one; on Hopper cuDNN's is about 1.5 times as fast as it
# (FlashAttention-3, arXiv:2407.08608, figure 5).
BACKEND_ATTENTION: Final = {"efficient": 0.5, "cudnn": 1.5}
"""Rates of sdpa's backends where one is asked for, over that of FlashAttention-2."""

# Fitted.
FUSED_RATE: Final = 0.64
"""Rate of kernels that torch.compile has fused, over that of a copy."""
RING_ATTENTION: Final = 0.5
"""Rate of attention over keys that a ring has brought, over that of a rank's own: smaller kernels,
sums in fp32 between them. Of torch's ring, the only one with published runs."""
FP8_GAIN: Final = 1.32
"""Rate of products in fp8 over that in bf16, without the casts around them."""
CONTENTION: Final = 0.97
"""Share of the shorter that communication and computation lose side by side: NCCL's kernels take
multiprocessors and memory bandwidth, and prefetched parameters do not always arrive in time."""

# Assumed, of the order that torch's profiler shows.
KERNEL_S: Final = 2.5e-6
"""Seconds of the device, between the end of one kernel and the work of the next."""

# nccl-tests: a ring all-reduce over NVSwitch has a bus bandwidth of about 235 GB/s on DGX A100
# (peak 300) and 360 on DGX H100 (peak 450); over PCIe, which neighbours share, half.
NVLINK_EFFICIENCY = 0.8
PCIE_RING_EFFICIENCY = 0.5
# Pinned host memory: 25 of 31.5 GB/s on PCIe 4 (CUDA's bandwidthTest).
PCIE_COPY_EFFICIENCY = 0.8
NETWORK_EFFICIENCY = 0.9
# Ring, Simple protocol: hwLat and baseLat in NCCL's src/graph/tuning.cc.
NVLINK_HOP_S, PCIE_HOP_S, NETWORK_HOP_S, COLLECTIVE_START_S = 3.4e-6, 5.7e-6, 14e-6, 8.4e-6
# ZeRO-Offload (arXiv:2101.06840), table 4: CPU-Adam takes 2.57 s for 10 billion parameters.
CPU_ADAM_PARAMETERS_PER_S = 10e9 / 2.57
# STREAM-like kernels on HBM reach 85 to 90% of the data sheet; copies of torch a little less.
COPY_EFFICIENCY = 0.8
# A data-centre NVMe drive on PCIe 3 (data sheets: 3.0 GB/s read, 2.0 GB/s written).
DISK_READ_BYTES_PER_S, DISK_WRITE_BYTES_PER_S = 3.0e9, 2.0e9

# What hooks take of the host, in operators that it could dispatch meanwhile: a slow one is slow at
# both. The first two are fitted; no published run tells the third apart.
FETCH_HOOK_OPERATORS: Final = 142
"""DeepSpeed ZeRO-3, for a module's parameters: fetch, wait, release."""
GRADIENT_HOOK_OPERATORS: Final = 17
"""DeepSpeed ZeRO-1 to 3, for a parameter's gradient."""
GROUP_HOOK_OPERATORS: Final = 50
"""FSDP, for a group of parameters: gather and reshard, or reduce."""

LEAST_OF_PREDICTED, MOST_OF_PREDICTED = 0.74, 1.12
"""Between these multiples of the prediction lie four of five runs that the constants were fitted
to, without those that are one project's many."""


def predicted_range(seconds: float) -> tuple[float, float]:
    """Return predicted seconds where a machine does better than most that were published, and
    where it does worse."""
    return LEAST_OF_PREDICTED * seconds, MOST_OF_PREDICTED * seconds


# Tiles of cuBLAS, (rows, columns), and what each reaches of the largest one's rate: a narrower tile
# loads more for each product (NVIDIA, Matrix Multiplication Background User's Guide, section 3).
TILES: Final = (((256, 128), 1.0), ((128, 128), 0.9), ((128, 64), 0.75), ((64, 64), 0.55))
# Assumed.
SPLIT_INNER: Final = 2048
"""Least length of a sum's parts, where cuBLAS shares it among multiprocessors (split-K)."""


def architecture(gpu: Gpu) -> Architecture:
    """By compute capability."""
    if gpu.capability >= (10, 0):
        return "blackwell"
    known: dict[tuple[int, int], Architecture] = {
        (7, 0): "volta",
        (7, 5): "turing",
        (8, 0): "ampere",
        (8, 6): "ampere-86",
        (8, 9): "ada",
        (9, 0): "hopper",
    }
    return known[gpu.capability]


def backend_rate(backend: str, gpu: Gpu | None) -> float:
    """Rate of sdpa's `backend` over that of the one that torch chooses."""
    rate = BACKEND_ATTENTION.get(backend, 1.0)
    chosen_is_cudnn = gpu is not None and architecture(gpu) == "blackwell"
    return min(rate, 1.0) if chosen_is_cudnn else rate


def busy_share(
    rows: int, columns: int, multiprocessors: int, *, batch: int = 1, inner: int = 0
) -> float:
    """Return the share of the peak rate that a product of so many rows and columns reaches at most,
    or a `batch` of them at a time: tiles go in waves over the multiprocessors, the last of
    which is not full. Where even the smallest leave half of them idle, as the gradient of a small
    weight over many tokens does, its long sums of `inner` numbers are shared, too."""
    shares = []
    smallest = batch * math.ceil(rows / TILES[-1][0][0]) * math.ceil(columns / TILES[-1][0][1])
    most_parts = inner // SPLIT_INNER if 2 * smallest <= multiprocessors else 1
    for (tile_rows, tile_columns), rate in TILES:
        tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        parts = max(1, min(most_parts, multiprocessors // tiles))
        waves = math.ceil(tiles * parts / multiprocessors)
        each = batch * rows * columns / (tile_rows * tile_columns)
        shares.append(rate * each * parts / (waves * multiprocessors))
    return max(shares)
