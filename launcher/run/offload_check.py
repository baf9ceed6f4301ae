"""What offload needs of this machine, refused before anything is allocated.

Without this, a host that runs out of memory kills a rank silently, and a disk that runs full
stops a run in its first steps.
"""

import shutil
from pathlib import Path

from launcher.config.schema import RunConfig
from launcher.errors import UserError
from launcher.measure.host_memory import available_host_bytes
from launcher.model.config import ModelConfig
from launcher.sizes import gib
from launcher.strategies.offload_sizes import OffloadSizes, offload_sizes
from launcher.strategies.zero import nvme_build, nvme_folder

CAP_IPC_LOCK = 14  # linux/capability.h: locks memory beyond the limit


def check_offload(
    config: RunConfig, model: ModelConfig, *, world_size: int, ranks_per_node: int
) -> None:
    """Refuse what does not fit on this machine; for NVMe, make ready what it needs.

    Raises:
        UserError: with the figures; or DeepSpeed's I/O cannot be built.
    """
    sizes = offload_sizes(config, model, world_size)
    _check_host(config, sizes, ranks_per_node)
    on_disk = config.sharding.flags_to("nvme")
    if on_disk:
        path = config.offload.nvme_path
        assert path is not None  # resolve has refused it
        nvme_folder.check_folder(path, "--nvme-path")
        nvme_folder.remove_abandoned(path)
        _check_disk(on_disk, path, sizes, ranks_per_node)
        _check_locked(on_disk, sizes)
        nvme_build.ensure_built(config.loop.device)


def _check_host(config: RunConfig, sizes: OffloadSizes, ranks: int) -> None:
    needed, free = ranks * (sizes.host_bytes + sizes.locked_bytes), available_host_bytes()
    if needed > free:
        sharding = config.sharding
        flags = f"{sharding.flags_to('cpu')} {sharding.flags_to('nvme')}".strip()
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
