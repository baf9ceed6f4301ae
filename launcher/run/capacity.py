"""Capacity checks: memory and disk that a run needs of this machine, before anything is built.

Otherwise a host that runs out of memory kills a rank silently, and a full disk stops a run in its
first steps. These are lower bounds; `shardscale plan` predicts what fits.
"""

import math
import resource
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.measure.host_memory import available_host_bytes, host_bytes
from launcher.optim.registry import OPTIMIZERS, states_of
from launcher.strategies import strategy_of
from launcher.strategies.parameters import frozen_bytes, trained_shapes
from launcher.util.errors import UserError
from launcher.util.files import nearest_existing
from launcher.util.flags import as_flags
from launcher.util.sizes import MIB, counted, gib, parse_bytes

if TYPE_CHECKING:
    from launcher.strategies.offload_sizes import OffloadSizes

CAP_IPC_LOCK = 14  # linux/capability.h: locks memory beyond the limit
PROCESS_BYTES = 64 * MIB
"""Private memory of a Python process that has imported torch, at least."""
TOKEN_BYTES = 8


class TooLarge(UserError):
    """A run that no setting of the allocator could fit."""


def check_minimum_memory(resolved: Resolved, *, ranks_per_node: int) -> None:
    """Compare the least memory that a run takes with all of this machine's, used or free, and swap.

    Raises:
        TooLarge: naming the flags, the need and the capacity.
    """
    config, model = resolved.config, resolved.model
    limit = config.measure.memory_limit
    if limit is not None and parse_bytes(limit, "--memory-limit") < MIB:
        raise TooLarge(f"--memory-limit {limit} is less than any model takes: give 1MiB or more")
    states = _state_bytes(resolved)
    data = config.data
    # The micro-batch's tokens and targets, and its embeddings, which start every forward.
    element = strategy_of(config).dtypes(config).computed.itemsize
    batch = data.micro_batch * resolved.local_seq_len * (2 * TOKEN_BYTES + element * model.d_model)
    # This rank's rows of the global batch, in host memory.
    rows = resolved.global_batch // resolved.data_ranks * (resolved.seq_len + 1) * TOKEN_BYTES
    sequences = f"--seq-len {resolved.seq_len}"
    on_device = {
        f"{_changed(config)}: the states of {model.parameter_count:,} parameters": states,
        f"--micro-batch {data.micro_batch} with {sequences}: its embeddings": batch,
    }
    on_host = {
        f"{counted(ranks_per_node, 'rank')} on this machine": PROCESS_BYTES,
        f"--global-batch {data.global_batch} with {sequences}: its tokens": rows,
    }
    if config.loop.device == "cuda":
        _compare(on_device, _device_bytes(), "a GPU")
    else:
        on_host = on_device | on_host
    share = "this host" if ranks_per_node == 1 else f"1/{ranks_per_node} of this host"
    there = host_bytes() + psutil.swap_memory().total
    _compare(on_host, there // ranks_per_node, share)


def _state_bytes(resolved: Resolved) -> int:
    """Return a lower bound of parameters, gradients and optimizer states on each rank's device;
    `check_offload` counts offloaded ones."""
    sharding, optim = resolved.config.sharding, resolved.config.optim
    strategy = strategy_of(resolved.config)
    types, variant = strategy.dtypes(resolved.config), strategy.variant(sharding)
    # ranks over which one replica's states are sharded
    group = sharding.shard_ranks(resolved.world_size) // sharding.replicate
    entry = OPTIMIZERS[optim.optimizer]
    model = resolved.own_model
    count = model.trained_parameter_count
    element = (types.parameters if strategy.keeps_master else types.stored).itemsize
    parameters = states = 0
    if sharding.offload_param == "none":
        parameters = element * count
        parameters += frozen_bytes(model, types.computed.itemsize)
    if sharding.offload_optimizer == "none":
        if entry.elementwise:
            # Others depend on the shape of each matrix; 0 keeps this a lower bound.
            states += entry.costs("", (count,), optim, resolved.config.loop.device).state_bytes
        if not optim.optimizer_in_backward:
            # gradients, sharded as the states are
            states += element * count
    shares = group if variant.shards_parameters else 1
    return parameters // shares + states // (group if variant.level else 1)


def _device_bytes() -> int:
    """Return the memory of the largest GPU, by NVML, which takes none; unlimited if unknown."""
    from launcher.measure.nvml import memory_of_gpus

    return max((total for _, total in memory_of_gpus()), default=sys.maxsize)


def _changed(config: RunConfig) -> str:
    """Return the model and its changed shape as flags."""
    shape = ("model", "layers", "d_model", "d_ff", "context", "vocab_size")
    given = {name: getattr(config.model, name) for name in shape}
    return as_flags({name: value for name, value in given.items() if value is not None})


def _compare(parts: dict[str, int], there: int, where: str) -> None:
    if (needed := sum(parts.values())) > there:
        largest = max(parts, key=lambda name: parts[name])
        raise TooLarge(
            f"{largest} and the rest need at least {gib(needed)} per rank, and {where} has "
            f"{gib(there)}: give less, or use more ranks or machines"
        )


def check_offload(resolved: Resolved, *, ranks_per_node: int) -> None:
    """Refuse offload that does not fit on this machine; for NVMe, clean its folder and build
    DeepSpeed's I/O.

    Raises:
        UserError: with the figures; or DeepSpeed's I/O cannot be built.
    """
    config = resolved.config
    on_disk = config.sharding.flags_to("nvme")
    if not (on_disk or config.sharding.flags_to("cpu")):
        return
    from launcher.strategies.offload_sizes import offload_sizes

    shard_ranks = config.sharding.shard_ranks(resolved.world_size)
    sizes = offload_sizes(config, resolved.own_model, shard_ranks)
    _check_host(config, sizes, ranks_per_node)
    if on_disk:
        from launcher.strategies.zero import nvme_build, nvme_folder

        path = config.sharding.nvme_path
        assert path is not None  # held by resolve
        nvme_folder.check_folder(path, "--nvme-path")
        nvme_folder.remove_abandoned(path)
        _check_disk(on_disk, path, sizes, ranks_per_node)
        _check_locked(on_disk, sizes)
        nvme_build.ensure_built(config.loop.device)


def _check_host(config: RunConfig, sizes: "OffloadSizes", ranks: int) -> None:
    needed, free = ranks * (sizes.host_bytes + sizes.locked_bytes), available_host_bytes()
    if needed > free:
        sharding = config.sharding
        flags = f"{sharding.flags_to('cpu')} {sharding.flags_to('nvme')}".strip()
        raise UserError(
            f"{flags}: {gib(needed)} of host memory are needed for {counted(ranks, 'rank')} on "
            f"this machine, but {gib(free)} are free: use more machines or a smaller model"
            + ("" if "nvme" in flags else ", or --offload-optimizer nvme")
        )


def _check_disk(flags: str, path: Path, sizes: "OffloadSizes", ranks: int) -> None:
    needed, free = ranks * sizes.disk_bytes, shutil.disk_usage(path).free
    if needed > free:
        raise UserError(
            f"{flags}: {gib(needed)} are needed in --nvme-path {path} for {counted(ranks, 'rank')} "
            f"on this machine, but {gib(free)} are free: make room, or give another disk"
        )


def _check_locked(flags: str, sizes: "OffloadSizes") -> None:
    # the hard limit, to which the swapper raises the soft one (strategies/zero/swap.py)
    _, limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or sizes.locked_bytes <= limit or _may_lock_any():
        return
    raise UserError(
        f"{flags}: each rank page-locks {gib(sizes.locked_bytes)} of buffers, but the limit is "
        f"{gib(limit)}: raise it (ulimit -l unlimited; in a container --ulimit memlock=-1), or "
        "give a smaller zero_optimization.sub_group_size in a --deepspeed file"
    )


def _may_lock_any() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return False


def check_checkpoint_room(out: Path, resolved: Resolved) -> None:
    """Refuse a run that saves checkpoints on a disk without room for one.

    Raises:
        UserError: with the figures.
    """
    loop = resolved.config.loop
    if not (loop.saves_last or loop.saves_after_s < math.inf):
        return
    needed_bytes = checkpoint_bytes(resolved)
    parent = nearest_existing(out)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"--out {out}: a checkpoint takes {gib(needed_bytes)}, but {parent} has only "
            f"{gib(free_bytes)} free: make room, choose another place, or keep no model with "
            "--save-every 0"
        )


def checkpoint_bytes(resolved: Resolved) -> int:
    """Bytes of all tensors of a checkpoint: parameters and optimizer states in fp32, and masks."""
    optim, device_type = resolved.config.optim, resolved.config.loop.device
    entry = OPTIMIZERS[optim.optimizer]
    shapes = trained_shapes(resolved.model)
    total = 4 * resolved.model.trained_parameter_count
    for name, shape in shapes.items():
        if entry.elementwise:  # stored in fp32, in whatever precision they are kept
            total += 4 * len(states_of(optim, name, shape)) * math.prod(shape)
        else:
            # An empty tensor's states are counters, which a checkpoint holds apart from tensors.
            counters = entry.costs(name, (0,) * len(shape), optim, device_type).state_bytes
            total += entry.costs(name, shape, optim, device_type).state_bytes - counters
    if resolved.model.masks:
        from launcher.strategies.masks import mask_shapes

        total += sum(map(math.prod, mask_shapes(shapes).values()))
    return total
