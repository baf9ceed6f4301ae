"""Checks of GPUs: NVML, driver and torch build, NCCL, hardware features, allocator."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.config.sharding import MODEL_PARALLEL
from launcher.measure.nvml import NvmlFault, Outcome, call, memory_of_gpus, started
from launcher.tools.doctor.finding import Finding, fail, not_applicable, ok, warn
from launcher.util.flags import flag
from launcher.util.sizes import GIB, gib
from launcher.util.startup import allocator_variable, expands_segments

BUSY_BYTES = 2 * GIB
# Feature -> lowest compute capability with hardware (and torch kernels) for it.
NEEDS_CAPABILITY = {"bf16": (8, 0), "flash attention": (8, 0), "fp8": (8, 9)}
CPU_BF16 = ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16")  # the last is ARM's


def nvml() -> Finding:
    """Check that GPU memory, power and utilization can be sampled."""
    try:
        with started():
            driver, count = call("nvmlSystemGetDriverVersion"), call("nvmlDeviceGetCount")
    except NvmlFault as fault:
        return _without_nvml(fault)
    version = ".".join(map(str, driver_cuda() or ("unknown",)))
    return ok(f"driver {driver}, up to CUDA {version}, {count} GPU{'s' * (count != 1)}")


def torch_and_driver() -> Finding:
    """Check that this torch build can use the installed GPUs."""
    version = torch.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 11):
        return fail(version, "shardscale needs torch 2.11", "pip install --upgrade 'torch>=2.11'")
    built_for, driver = torch.version.cuda, driver_cuda()
    there = device_files()
    if built_for is None:
        if not there or torch.version.hip is not None:
            return ok(f"{version}; trains on the CPU" if not there else version)
        return fail(
            f"{version} is a CPU build, but this machine has {len(there)} NVIDIA GPUs",
            "training uses the CPU",
            "install the CUDA build of torch that pytorch.org names for this driver",
        )
    usable = torch.cuda.is_available()  # a container may lack the device files
    if not there and not usable:
        return ok(f"{version} for CUDA {built_for}; no GPU here, so it trains on the CPU")
    if driver is not None and driver[0] < int(built_for.split(".")[0]):
        return fail(
            f"{version} is built for CUDA {built_for}, the driver goes up to "
            + ".".join(map(str, driver)),
            "torch cannot use the GPUs",
            "update the driver, or install torch for an older CUDA (pytorch.org)",
        )
    if not usable:
        return fail(
            f"{version} for CUDA {built_for} sees none of the {len(there)} GPUs",
            "training uses the CPU",
            "check CUDA_VISIBLE_DEVICES, then run nvidia-smi",
        )
    return ok(f"{version} for CUDA {built_for}")


def gpus() -> Finding:
    """Report names and memory, and whether other processes use it."""
    if not torch.cuda.is_available():
        return not_applicable("none usable by torch; training runs on the CPU")
    all_properties = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    names = [
        f"{p.name} ({gib(p.total_memory)}, compute capability {p.major}.{p.minor})"
        for p in all_properties
    ]
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    used = [used_bytes for used_bytes, _ in memory_of_gpus() if used_bytes > BUSY_BYTES]
    if used:
        return warn(
            f"{found}; {len(used)} already in use, up to {gib(max(used))}",
            "less memory than planned, and slower steps",
            "nvidia-smi names the processes; choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
    flags = " and ".join(map(flag, MODEL_PARALLEL))
    near = f"{flags} up to {len(names)} stay on this node"
    return ok(f"{found}; {near}" if len(names) > 1 else found)


def allocator() -> Finding:
    """Check that the environment does not disable expandable segments of torch's allocator."""
    if not torch.cuda.is_available():
        return not_applicable("no GPU usable by torch")
    variable = allocator_variable()
    if variable is None:
        return ok("expandable segments")
    name, value = variable
    if expands_segments():
        return ok(f"expandable segments, by {name}={value}")
    return warn(
        f"{name}={value} disables expandable segments",
        "more fragmentation of freed memory; plans account for it",
        f"unset {name}, or add expandable_segments:True",
    )


def kernels() -> Finding:
    """Report hardware support for bf16, flash attention and fp8."""
    if not torch.cuda.is_available():
        return cpu_kernels(_cpu_flags())
    capabilities = sorted(
        {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    )
    return gpu_kernels(capabilities[0], torch.cuda.get_arch_list())


def gpu_kernels(capability: tuple[int, int], arch_list: Sequence[str]) -> Finding:
    """Compare a compute capability with the features and with torch's architectures."""
    major, minor = capability
    shown = f"compute capability {major}.{minor}"
    if not _runs_on(capability, arch_list):
        return fail(
            f"{shown}, but this torch is built for {', '.join(arch_list)}",
            "the first kernel fails with `no kernel image is available`",
            "install a torch build that lists this GPU (pytorch.org)",
        )
    missing = [name for name, lowest in NEEDS_CAPABILITY.items() if capability < lowest]
    has = [name for name in NEEDS_CAPABILITY if name not in missing]
    if "bf16" in missing:
        return warn(
            f"{shown}: no hardware for {', '.join(missing)}",
            "--precision bf16 is emulated and slow; attention runs without flash kernels",
            "train with --precision fp32 on this GPU",
        )
    return ok(f"{shown}: {', '.join(has)}" + (f"; no {missing[0]}" if missing else ""))


def cpu_kernels(flags: set[str]) -> Finding:
    """Report bf16 support of a CPU by its feature flags."""
    level = torch.backends.cpu.get_cpu_capability()
    if not flags:
        return not_applicable(f"CPU ({level}); its bf16 support is unknown")
    if flags & set(CPU_BF16):
        return ok(f"CPU ({level}) computes bf16 in hardware; flash attention and fp8 need a GPU")
    return warn(
        f"CPU ({level}) has no bf16 arithmetic",
        "--precision bf16 saves memory but is slower than fp32",
        "use --precision fp32 if speed matters",
    )


def communication() -> Finding:
    """Check NCCL for GPUs and gloo for CPUs."""
    if not dist.is_available() or not dist.is_gloo_available():
        return fail(
            "this torch has no gloo",
            "multi-process training fails",
            "install a torch build with distributed support (pytorch.org)",
        )
    if not torch.cuda.is_available():
        return ok("gloo (NCCL needs GPUs)")
    if not dist.is_nccl_available():
        return fail(
            "this torch has no NCCL",
            "multi-GPU training fails",
            "install the CUDA build of torch for Linux (pytorch.org)",
        )
    nccl: Any = torch.cuda.nccl  # not annotated
    return ok(f"NCCL {'.'.join(map(str, nccl.version()))}, gloo")


def device_files() -> list[Path]:
    """List NVIDIA GPUs by their device files, without driver calls or torch."""
    return sorted(Path("/dev").glob("nvidia[0-9]*"))


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA (major, minor) that the driver supports; None without NVML."""
    with contextlib.suppress(NvmlFault), started():
        version: int = call("nvmlSystemGetCudaDriverVersion_v2")
        return version // 1000, version % 1000 // 10  # 12040 is CUDA 12.4
    return None


def _without_nvml(fault: NvmlFault) -> Finding:
    if fault.outcome is Outcome.MISSING and not device_files():
        return not_applicable("no NVIDIA driver; process memory is sampled instead")
    fixes = {
        "LIB_RM_VERSION_MISMATCH": "the driver was updated while loaded: reboot the machine",
        "DRIVER_NOT_LOADED": "load the driver (modprobe nvidia) or reinstall it",
        "LIBRARY_NOT_FOUND": "make libnvidia-ml.so.1 visible; in a container: --gpus all",
    }
    return warn(
        f"NVML does not respond: {fault.name}",
        "no GPU memory, power and utilization in records; a broken driver also stops training",
        fixes.get(fault.name, "run nvidia-smi for details"),
    )


def _runs_on(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Check architectures: binaries (sm_) run within their major version, PTX on newer GPUs."""
    major, minor = capability
    for arch in arch_list:
        kind, _, digits = arch.partition("_")
        number = int("".join(c for c in digits if c.isdigit()))
        if kind == "compute" and number <= 10 * major + minor:
            return True
        if kind == "sm" and number // 10 == major and number % 10 <= minor:
            return True
    return False


def _cpu_flags() -> set[str]:
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    return set(" ".join(re.findall(r"^(?:flags|Features)\s*:(.*)", known, re.MULTILINE)).split())
