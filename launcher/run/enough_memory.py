"""The least that a run takes, in closed form: what could never fit is refused before anything is
read, traced or built. What fits by this may still not fit: `shardscale plan` tells."""

import contextlib
import sys

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.errors import UserError
from launcher.flags import flag
from launcher.measure.host_memory import host_limit_bytes
from launcher.measure.nvml import NvmlDevice, NvmlFault, openable_gpus
from launcher.optim.dtypes import dtypes
from launcher.optim.registry import OPTIMIZERS
from launcher.sizes import MIB, gib, parse_bytes
from launcher.strategies import strategy_of

PROCESS_BYTES = 64 * MIB
"""Of private memory that a Python with torch in it has at least."""
TOKEN_BYTES = 8


class TooLarge(UserError):
    """What no setting of the allocator could fit."""


def refuse_what_cannot_fit(resolved: Resolved, *, world_size: int, ranks_per_node: int) -> None:
    """Compare with all the memory that this machine has, in use or not, and its swap.

    Raises:
        TooLarge: naming the flags, what they need and what there is.
    """
    config, model = resolved.config, resolved.model
    limit = config.measure.memory_limit
    if limit is not None and parse_bytes(limit, "--memory-limit") < MIB:
        raise TooLarge(f"--memory-limit {limit} is less than any model takes: give 1MiB or more")
    states = state_bytes(resolved, world_size)
    data = config.data
    # The micro-batch's tokens and targets, and its embeddings, which start every forward.
    element = 4 if config.optim.precision == "fp32" else 2
    batch = data.micro_batch * resolved.seq_len * (2 * TOKEN_BYTES + element * model.d_model)
    # This rank's rows of the global batch, in host memory.
    rows = resolved.global_batch // world_size * (resolved.seq_len + 1) * TOKEN_BYTES
    sequences = f"--seq-len {resolved.seq_len}"
    bucket = element * (config.sharding.bucket or 0) if config.sharding.zero else 0
    parts = {
        f"{_changed(config)}: the states of {model.parameter_count:,} parameters": states,
        f"--micro-batch {data.micro_batch} with {sequences}: its embeddings": batch,
        f"{ranks_per_node} ranks on this machine": PROCESS_BYTES,
        f"--bucket {config.sharding.bucket}: its buffer": bucket,
        f"--global-batch {data.global_batch} with {sequences}: its tokens": rows,
    }
    host = rows + PROCESS_BYTES
    if config.loop.device == "cuda":
        _compare(parts, states + batch + bucket, device_bytes(), "a GPU")
    else:
        host += states + batch + bucket
    share = "this host" if ranks_per_node == 1 else f"1/{ranks_per_node} of this host"
    _compare(parts, host, host_limit_bytes() // ranks_per_node, share)


def state_bytes(resolved: Resolved, world_size: int) -> int:
    """At least these of parameters, gradients and optimizer states are on each rank's device; what
    is offloaded is checked by itself."""
    sharding, optim = resolved.config.sharding, resolved.config.optim
    strategy, types = strategy_of(resolved.config), dtypes(optim)
    variant = strategy.variant(sharding)
    group = world_size // sharding.replicate
    entry = OPTIMIZERS[optim.optimizer]
    count = resolved.model.parameter_count
    low = strategy.keeps_master and strategy.casts_parameters(sharding)
    element = (types.computed if low else types.stored).itemsize
    parameters = states = 0
    if sharding.offload_param == "none":
        parameters = element * count
    if sharding.offload_optimizer == "none":
        if entry.elementwise:
            states += entry.state_bytes("", (count,), optim)
        if not optim.optimizer_in_backward:
            states += element * count
    shares = group if variant.shards_parameters else 1
    return parameters // shares + states // (group if variant.level else 1)


def device_bytes() -> int:
    """Memory of the largest GPU, asked without taking some of it; no limit where nobody knows."""
    sizes = []
    for _, uuid in openable_gpus():
        with contextlib.suppress(NvmlFault):
            gpu = NvmlDevice.open(uuid)
            sizes.append(gpu.memory().total_bytes)
            gpu.close()
    return max(sizes, default=sys.maxsize)


def _changed(config: RunConfig) -> str:
    """The model and what was changed of it, as flags."""
    shape = ("model", "layers", "d_model", "d_ff", "context", "vocab_size")
    given = {name: getattr(config.model, name) for name in shape}
    return " ".join(f"{flag(name)} {value}" for name, value in given.items() if value is not None)


def _compare(parts: dict[str, int], needed: int, there: int, where: str) -> None:
    if needed > there:
        largest = max(parts, key=lambda name: parts[name])
        raise TooLarge(
            f"{largest} and the rest need at least {gib(needed)} per rank, and {where} has "
            f"{gib(there)}: give less, or use more ranks or machines"
        )
