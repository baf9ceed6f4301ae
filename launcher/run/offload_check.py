"""What offload needs of this machine, refused before anything is allocated.

Without this, a host that runs out of memory kills a rank silently, and a disk that runs full
stops a run in its first steps.
"""

import shutil
from pathlib import Path

import psutil

from launcher.config.schema import RunConfig
from launcher.errors import UserError
from launcher.model.config import ModelConfig
from launcher.sizes import gib
from launcher.strategies.offload_sizes import OffloadSizes, offload_sizes
from launcher.strategies.zero import nvme_build, nvme_folder

CGROUP = Path("/sys/fs/cgroup")
CAP_IPC_LOCK = 14  # linux/capability.h: locks memory beyond the limit


def nvme_refusal(config: RunConfig) -> str | None:
    """Why a config cannot offload to NVMe, or None: DeepSpeed cannot, or does something else."""
    sharding = config.sharding
    flags = _offloaded(config, "nvme")
    if not flags:
        return None
    if sharding.strategy != "zero":
        return (
            f"{flags} needs --zero 3, not --strategy {sharding.strategy}: give it, or use "
            "--strategy fsdp with cpu"
        )
    if sharding.zero != 3:
        return (
            f"{flags} needs --zero 3, not {sharding.zero}: at lower stages DeepSpeed keeps in host "
            "memory what it should write to a disk; give --zero 3, or use cpu"
        )
    if config.offload.nvme_path is None:
        return f"{flags} needs --nvme-path: give a folder on a local disk"
    if sharding.offload_param == "nvme" and config.optim.precision != "bf16":
        return (
            f"--offload-param nvme needs --precision bf16, not {config.optim.precision}: "
            "DeepSpeed reads parameters back as bf16 only"
        )
    return None


def activation_refusal(config: RunConfig) -> str | None:
    """Why a resolved config cannot offload activations, or None."""
    if config.model.activation_checkpointing != "offload":
        return None
    if config.loop.device == "cpu":
        return (
            "--activation-checkpointing offload moves activations from a GPU to host memory, and "
            "on a CPU they are there: use full"
        )
    if config.loop.compile:
        return (
            "--activation-checkpointing offload copies between blocks' operators, which compiled "
            "code has no hooks for: use full, or leave out --compile"
        )
    return None


def check_offload(
    config: RunConfig, model: ModelConfig, *, world_size: int, ranks_per_node: int
) -> None:
    """Refuse what does not fit on this machine; for NVMe, make ready what it needs.

    Raises:
        UserError: with the figures; or DeepSpeed's I/O cannot be built.
    """
    sizes = offload_sizes(config, model, world_size)
    _check_host(config, sizes, ranks_per_node)
    on_disk = _offloaded(config, "nvme")
    if on_disk:
        path = config.offload.nvme_path
        assert path is not None  # resolve has refused it
        nvme_folder.check_folder(path, "--nvme-path")
        nvme_folder.remove_abandoned(path)
        _check_disk(on_disk, path, sizes, ranks_per_node)
        _check_locked(on_disk, sizes)
        nvme_build.ensure_built(config.loop.device)


def available_host_bytes() -> int:
    """Host memory that can still be had, by the kernel and by this control group's limit."""
    available = psutil.virtual_memory().available
    for folder, limit, used in (
        (CGROUP, "memory.max", "memory.current"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        words = _words(folder / limit)
        if words and words[0].isdecimal():
            statistics = _words(folder / "memory.stat")
            cached = int(statistics[statistics.index("inactive_file") + 1])  # given back on demand
            available = min(available, int(words[0]) - int(_words(folder / used)[0]) + cached)
    return available


def host_limit_bytes() -> int:
    """All that processes here could ever have: the host's or the control group's, and swap."""
    memory = psutil.virtual_memory().total
    for limit in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        words = _words(limit)
        if words and words[0].isdecimal():
            memory = min(memory, int(words[0]))
    return memory + psutil.swap_memory().total


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except OSError:
        return []


def _offloaded(config: RunConfig, place: str) -> str:
    """The flags that ask for `place`, as one would type them."""
    sharding = config.sharding
    chosen = {
        "--offload-optimizer": sharding.offload_optimizer,
        "--offload-param": sharding.offload_param,
    }
    return " ".join(f"{name} {place}" for name, value in chosen.items() if value == place)


def _check_host(config: RunConfig, sizes: OffloadSizes, ranks: int) -> None:
    needed, free = ranks * (sizes.host_bytes + sizes.locked_bytes), available_host_bytes()
    if needed > free:
        flags = " ".join(filter(None, (_offloaded(config, p) for p in ("cpu", "nvme"))))
        raise UserError(
            f"{flags}: {gib(needed)} of host memory are needed for {_ranks(ranks)} on this "
            f"machine, but {gib(free)} are free: use more machines or a smaller model"
            + ("" if "nvme" in flags else ", or --offload-optimizer nvme")
        )


def _check_disk(flags: str, path: Path, sizes: OffloadSizes, ranks: int) -> None:
    needed, free = ranks * sizes.disk_bytes, shutil.disk_usage(path).free
    if needed > free:
        raise UserError(
            f"{flags}: {gib(needed)} are needed in --nvme-path {path} for {_ranks(ranks)} on this "
            f"machine, but {gib(free)} are free: make room, or give another disk"
        )


def _check_locked(flags: str, sizes: OffloadSizes) -> None:
    import resource  # not on Windows, where there is no such offload either

    _, limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or sizes.locked_bytes <= limit or _may_lock_any():
        return
    raise UserError(
        f"{flags}: each rank page-locks {gib(sizes.locked_bytes)} of buffers, but the limit is "
        f"{gib(limit)}: raise it (ulimit -l unlimited; in a container --ulimit memlock=-1), or "
        "give a smaller --nvme-buffer"
    )


def _may_lock_any() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def _ranks(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"
