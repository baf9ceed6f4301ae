"""The environment in which a program sees GPUs that are not there.

The library answers for CUDA's runtime and driver, cuBLAS, cuDNN's attention, NCCL and NVML. Device
memory is counted and costs no host memory. A kernel is counted and not run; bytes that the host has
sent to the device are kept (64 KiB at most per copy) until the next kernel, all others read as 0. A
single byte that is not known is a check's answer (has a step overflowed?): false, or what
$SHARDSCALE_NULL_GPU_CHECKS says. Messages of at most 64 KiB travel between the processes of a
communicator. $SHARDSCALE_NULL_GPU_ALONE=1 lets one rank, with RANK and WORLD_SIZE set, run without
the others, which answer as it does; ranks that a launcher starts besides $SHARDSCALE_NULL_GPU_RANK
end at once. Tensors of the host beyond $SHARDSCALE_NULL_GPU_HOST_BYTES per process, an eighth of
what is free, share their pages (library/host.h). $SHARDSCALE_NULL_GPU_TIMEOUT_S is how long a rank
waits for another (1800). $SHARDSCALE_NULL_GPU_LOG names a file for each wait and read.
"""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.measure.hardware import CONTEXT_BYTES, NULL_GPUS, Gpu
from launcher.measure.host_memory import available_host_bytes
from launcher.tools import watch
from launcher.tools.rehearse.build import built_for
from launcher.util.errors import UserError
from launcher.util.files import default_cache_dir

MOST_GPUS = 64
ALONE = "SHARDSCALE_NULL_GPU_ALONE"
ONLY_RANK = "SHARDSCALE_NULL_GPU_RANK"
PRELOADED = "libcuda.so.1"
INSIDE = Path(__file__).parent / "inside"
"""Code for the program's own interpreter: needs the standard library and its torch only."""

# What CUDA calls a GPU, where that is not "NVIDIA" and the table's name. Programs read it:
# accelerate turns off peer access by it.
_NAMES = {
    "GH200": "NVIDIA GH200 480GB",
    "H200-NVL": "NVIDIA H200 NVL",
    "H100-PCIe": "NVIDIA H100 PCIe",
    "H100-NVL": "NVIDIA H100 NVL",
    "H100": "NVIDIA H100 80GB HBM3",
    "A100-40GB-PCIe": "NVIDIA A100-PCIE-40GB",
    "A100-80GB-PCIe": "NVIDIA A100 80GB PCIe",
    "A100-40GB": "NVIDIA A100-SXM4-40GB",
    "A100-80GB": "NVIDIA A100-SXM4-80GB",
    "A800-80GB-PCIe": "NVIDIA A800 80GB PCIe",
    "A800": "NVIDIA A800-SXM4-80GB",
    "RTX-PRO-6000": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "RTX-6000-Ada": "NVIDIA RTX 6000 Ada Generation",
    "V100-32GB-PCIe": "Tesla V100-PCIE-32GB",
    "V100-16GB-PCIe": "Tesla V100-PCIE-16GB",
    "V100-32GB": "Tesla V100-SXM2-32GB",
    "V100-16GB": "Tesla V100-SXM2-16GB",
    "T4": "Tesla T4",
}

_AUTOTUNED = tuple(f"TORCHINDUCTOR_MAX_AUTOTUNE_{kind}_BACKENDS" for kind in ("GEMM", "CONV"))
"""Variables of torch.compile: the kernels that mode="max-autotune" chooses among."""


def environment(
    python: str, gpus: Sequence[Gpu], *, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment variables with which every program of `python` sees `gpus` and no real GPU.

    Compiles the library at the first call for this build of torch, which takes seconds.

    Args:
        python: An interpreter: a path, or a name on $PATH.
        gpus: Entries of the table, device 0 first. Several may differ.
        inherited: What the program would inherit, os.environ if None: its LD_PRELOAD and
            LD_LIBRARY_PATH stay behind ours.

    Returns:
        Only the variables to set, to go over `inherited`.

    Raises:
        UserError: no such interpreter, no torch in it or a CPU build, no C compiler.
    """
    if not 1 <= len(gpus) <= MOST_GPUS:
        raise UserError(f"{len(gpus)} GPUs per node: rehearse between 1 and {MOST_GPUS}")
    before = os.environ if inherited is None else inherited
    folder = str(built_for(python))
    return {
        "LD_PRELOAD": _first(f"{folder}/{PRELOADED}", before.get("LD_PRELOAD", ""), " "),
        "LD_LIBRARY_PATH": _first(folder, before.get("LD_LIBRARY_PATH", ""), ":"),
        # else Triton searches by ldconfig, which ignores LD_LIBRARY_PATH
        "TRITON_LIBCUDA_PATH": folder,
        "PATH": _first(folder, before.get("PATH", os.defpath), ":"),  # for its nvidia-smi
        # The sitecustomize of watch/ starts what is in INSIDE, and hands over to the program's own.
        "PYTHONPATH": _first(
            str(INSIDE), _first(str(watch.INSIDE), before.get("PYTHONPATH", ""), ":"), ":"
        ),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(len(gpus)))),
        # No kernel can be timed against another, and to compile all of them takes minutes.
        **{name: before.get(name, "ATEN") for name in _AUTOTUNED},
        # A real GPU of this name would take from the cache what was chosen by timing no kernel.
        "TORCHINDUCTOR_CACHE_DIR": str(default_cache_dir() / "null-gpu-compiled"),
        NULL_GPUS: ";".join(map(_described, gpus)),
        "SHARDSCALE_NULL_GPU_CHECKS": before.get("SHARDSCALE_NULL_GPU_CHECKS", "false"),
        "SHARDSCALE_NULL_GPU_HOST_BYTES": before.get(
            "SHARDSCALE_NULL_GPU_HOST_BYTES",
            str(available_host_bytes() // (8 * len(gpus))),
        ),
        # the same for all processes, whatever each one's TMPDIR.
        "SHARDSCALE_NULL_GPU_RENDEZVOUS": before.get(
            "SHARDSCALE_NULL_GPU_RENDEZVOUS", tempfile.gettempdir()
        ),
    }


def cuda_name(gpu: Gpu) -> str:
    """Name of the GPU in CUDA ("NVIDIA H100 80GB HBM3")."""
    if re.fullmatch(r"RTX-\d{4}", gpu.name):
        return f"NVIDIA GeForce {gpu.name.replace('-', ' ')}"
    if re.fullmatch(r"A\d{4}", gpu.name):
        return f"NVIDIA RTX {gpu.name}"
    return _NAMES.get(gpu.name, f"NVIDIA {gpu.name}")


def _described(gpu: Gpu) -> str:
    """One GPU as library/device.c reads it."""
    name = cuda_name(gpu)
    # NVIDIA's driver has no peer access between GeForce cards.
    peer_access = int("GeForce" not in name)
    major, minor = gpu.capability
    shape = (major, minor, gpu.multiprocessors, gpu.l2_mib)
    return ",".join(map(str, (name, gpu.memory_bytes, CONTEXT_BYTES, *shape, peer_access)))


def _first(ours: str, others: str, separator: str) -> str:
    """`ours` before the entries that are there already, once."""
    kept = [entry for entry in others.split(separator) if entry not in ("", ours)]
    return separator.join((ours, *kept))
