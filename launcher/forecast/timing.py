"""Seconds per step, by phase, of a run that has not started.

Arithmetic over the achieved rate, bytes over memory bandwidth, transfers over links, less what the
device does at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from launcher.config.resolve import Resolved
from launcher.forecast.collectives import TimedTransfer, groups_of, timed
from launcher.forecast.efficiency import (
    CONTENTION,
    FETCH_HOOK_OPERATORS,
    GRADIENT_HOOK_OPERATORS,
    GROUP_HOOK_OPERATORS,
    predicted_range,
)
from launcher.forecast.machine import Machine
from launcher.forecast.on_gpu import device_s
from launcher.forecast.strategies import forecast_of
from launcher.forecast.trace.work import Work
from launcher.forecast.traffic import Hooks, Wire
from launcher.forecast.work import passes_work
from launcher.measure.hardware import find_gpu
from launcher.model.config import ModelConfig
from launcher.optim.choice import OptimChoice
from launcher.optim.registry import OPTIMIZERS
from launcher.strategies import strategy_of
from launcher.strategies.offload_sizes import state_bytes
from launcher.strategies.parameters import parameters_of
from launcher.util.errors import UserError

NORM_BYTES: Final = 4
CLIP_BYTES: Final = 8
# 28 is the `update_bytes` of fused Adam: 16 read (weight, gradient, moments), 12 written.
CPU_ADAM_BYTES: Final = NORM_BYTES + CLIP_BYTES + 28
"""Bytes per parameter over which a machine's rate of CPU-Adam was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted seconds of one optimizer step on each rank; phases include what waits in them."""

    forward_s: float
    backward_s: float
    step_s: float
    communication_s: float
    """Time that links are busy."""
    exposed_communication_s: float
    """The part of it that nothing hides; contained in the phases."""
    tokens: int
    """Tokens of the global batch."""

    @property
    def total_s(self) -> float:
        """Return the time of one step."""
        return self.forward_s + self.backward_s + self.step_s

    @property
    def least_s(self) -> float:
        """Return the same where the machine does better than most that were published."""
        return predicted_range(self.total_s)[0]

    @property
    def most_s(self) -> float:
        """The same where it does worse."""
        return predicted_range(self.total_s)[1]

    @property
    def tokens_per_s(self) -> float:
        """Return the speed of all ranks together."""
        return self.tokens / self.total_s

    @property
    def least_tokens_per_s(self) -> float:
        """The same at `most_s`."""
        return self.tokens / self.most_s

    @property
    def most_tokens_per_s(self) -> float:
        """The same at `least_s`."""
        return self.tokens / self.least_s


def step_seconds(resolved: Resolved, *, gpus_per_node: int, machine: Machine) -> StepTime:
    """Predict a step's time, with `gpus_per_node` of the ranks on each node.

    Each micro-batch: forward, backward. Each step: those of all its micro-batches, then the
    optimizer. Gradients are exchanged as `launcher.forecast.collectives` says.

    Raises:
        UserError: the machine has no rate for the precision, or none for collectives.
    """
    ranks_per_node = min(resolved.world_size, gpus_per_node)
    machine = machine.shared_by(ranks_per_node)
    sharding = resolved.config.sharding
    wire = Wire(resolved)
    traffic = forecast_of(resolved.config).traffic(wire)
    groups = groups_of(sharding, world_size=resolved.world_size, ranks_per_node=ranks_per_node)
    hooks = hook_operators(resolved, traffic.hooks)
    works = passes_work(resolved)
    forward = compute_s(works[0], resolved, machine, hooks[0])
    backward = compute_s(works[1], resolved, machine, hooks[1])
    moves = timed(resolved, traffic, groups, machine)
    update_s = optimizer_s(resolved, ranks_per_node=ranks_per_node, machine=machine)
    times = resolved.accumulation
    known = find_gpu(machine.name) is not None
    contention = (CONTENTION if known else 0.0) if machine.overlaps else None
    # (transfers, seconds of compute to hide behind, how often)
    # `last_backward` comes once a step: what the micro-batches before only accumulate.
    parts = {
        "forward": [(moves["forward"], forward, times)],
        "backward": [
            (moves["backward"], backward, times - 1),
            ([*moves["backward"], *moves["last_backward"]], backward, 1),
        ],
        "step": [(moves["step"], 0.0, 1)],
    }
    waits = {
        phase: sum(n * exposed_s(some, hide_s, contention) for some, hide_s, n in passes)
        for phase, passes in parts.items()
    }
    busy = sum(
        n * seconds for passes in parts.values() for some, _, n in passes for seconds, _ in some
    )
    return StepTime(
        forward_s=times * forward + waits["forward"],
        backward_s=times * backward + accumulate_s(resolved, machine) + waits["backward"],
        step_s=update_s + waits["step"],
        communication_s=busy,
        exposed_communication_s=sum(waits.values()),
        tokens=resolved.global_batch * resolved.seq_len,
    )


def exposed_s(
    transfers: Sequence[TimedTransfer], compute: float, contention: float | None
) -> float:
    """Seconds that a pass waits for its transfers.

    Blocks are alike, so that per block max(0, transfer - compute) sums up to the same of the
    totals; what comes before the first block's compute or after the last one's waits in full.
    Side by side each slows the other, by `contention` of the shorter; None: nothing overlaps.
    """
    hideable = sum(seconds for seconds, hides in transfers if hides)
    rest = sum(seconds for seconds, hides in transfers if not hides)
    if contention is None:
        return rest + hideable
    return rest + max(0.0, hideable - compute) + contention * min(hideable, compute)


def hook_operators(resolved: Resolved, hooks: Hooks) -> tuple[float, float]:
    """Return what a strategy's own Python takes of the host, in a forward and in a backward, in
    operators that it could dispatch meanwhile."""
    once = hooks.modules * FETCH_HOOK_OPERATORS + hooks.groups * GROUP_HOOK_OPERATORS
    model = resolved.own_model
    words = model.checkpointing.blocks(model.layers)
    # Recomputation runs a block's forward hooks in the backward as well.
    recomputed = sum(word != "none" for word in words) / model.layers
    again = hooks.modules * recomputed * FETCH_HOOK_OPERATORS
    return once, once + again + hooks.gradients * GRADIENT_HOOK_OPERATORS


def compute_s(work: Work, resolved: Resolved, machine: Machine, hooks: float = 0.0) -> float:
    """Seconds of the work itself; a GPU computes while the host starts the next operators, and
    runs hooks that take as long as so many of them.

    Raises:
        UserError: the machine computes nothing in this precision.
    """
    type_ = rated_type(resolved, machine)
    if machine.overlaps:
        # The host runs ahead of the GPU, so that only the slower of the two shows.
        one_by_one = 0.0 if resolved.config.loop.cuda_graphs else work.operators
        started_s = (one_by_one + hooks) * machine.operator_s
        return max(device_s(work, resolved, machine, type_), started_s)
    return (
        # on a CPU the same cores dispatch and compute, one thing after the other
        work.matmul_flops / machine.matmul_flops_per_s[type_]
        + work.attention_flops / machine.attention_flops_per_s[type_]
        + work.elementwise_bytes / machine.elementwise_bytes_per_s
        + work.copied_bytes / machine.copy_bytes_per_s
        + work.operators * machine.operator_s
    )


def rated_type(resolved: Resolved, machine: Machine) -> str:
    """The type of the matmuls, in which the machine computes. FP8_GAIN says what fp8 adds to bf16,
    `launcher.forecast.on_gpu`.

    Raises:
        UserError: it does not.
    """
    optim = resolved.config.optim
    rates, gpu = machine.matmul_flops_per_s, find_gpu(machine.name)
    if optim.arithmetic.fp8_linears and gpu is not None and gpu.fp8_flops_per_s is None:
        low = "bf16" if "bf16" in rates else "fp16"
        raise UserError(f"--precision fp8: {gpu.name} has no matmuls in fp8: use --precision {low}")
    if optim.arithmetic.computed == "fp32":
        type_ = optim.precision
    else:  # a profile has one of both
        type_ = "fp16" if optim.precision == "fp16" and "fp16" in rates else "bf16"
    if type_ not in machine.matmul_flops_per_s:
        known = ", ".join(machine.matmul_flops_per_s)
        raise UserError(
            f"--precision {optim.precision}: {machine.name} has no rate for {type_}: it has {known}"
        )
    return type_


def accumulate_s(resolved: Resolved, machine: Machine) -> float:
    """From the second micro-batch on each gradient is read, added to and written, in fp32."""
    again = resolved.accumulation - 1
    return again * 12 * resolved.own_model.trained_parameter_count / machine.copy_bytes_per_s


def optimizer_s(resolved: Resolved, *, ranks_per_node: int, machine: Machine) -> float:
    """Norm, clipping and the update of this rank's share, where its states are.

    On a GPU memory-bound: the norm reads 4 bytes per parameter, clipping reads and writes 8, the
    update what its kernels do; a low-precision copy is written with 2 more. Matmuls, as Muon's and
    APOLLO's, come on top. On a CPU (also for offloaded states) the measured or published rate of
    CPU-Adam, which the bytes of another optimizer change in proportion; no rate is known for a
    GPU's host to multiply at. On NVMe master and states are read and written too (ZeRO-Infinity,
    arXiv:2104.07857, section 5).
    """
    config, model = resolved.config, resolved.own_model
    shard_ranks = config.sharding.shard_ranks(resolved.world_size) // config.sharding.replicate
    strategy = strategy_of(config)
    element = strategy.dtypes(config).computed.itemsize
    sharded = strategy.variant(config.sharding).level > 0
    own = model.trained_parameter_count / (shard_ranks if sharded else 1)
    offload, fraction = config.sharding.offload_optimizer, config.sharding.offload_fraction
    if offload == "none":
        return _update_s(resolved, own, machine.device, element=element, machine=machine)
    offloaded = fraction * own
    seconds = _update_s(resolved, offloaded, "cpu", element=element, machine=machine)
    if fraction < 1:
        kept = own - offloaded
        seconds += _update_s(resolved, kept, machine.device, element=element, machine=machine)
    to_device = machine.host_to_device_bytes_per_s
    if to_device is not None and strategy.keeps_master:
        # The updated parameters return in the compute type; FSDP moves them as it gathers.
        seconds += element * offloaded / to_device
    if offload == "nvme":
        # A machine's disk rates are those of a whole node.
        swapped = state_bytes(model, config.optim) * own * ranks_per_node
        seconds += swapped / machine.disk_read_bytes_per_s
        seconds += swapped / machine.disk_write_bytes_per_s
    return seconds


def _update_s(
    resolved: Resolved, count: float, updated_on: str, *, element: int, machine: Machine
) -> float:
    """Return the update's time for so many parameters, computed with in `element` bytes each."""
    update_bytes, bf16_flops, fp32_flops = update_work(
        resolved.own_model, resolved.config.optim, updated_on
    )
    rates = machine.matmul_flops_per_s
    matmul_s = bf16_flops / rates.get("bf16", rates["fp32"]) + fp32_flops / rates["fp32"]
    matmul_s *= count
    if updated_on == "cuda":
        low = 0 if element == 4 else 2
        moved = count * (NORM_BYTES + CLIP_BYTES + update_bytes + low)
        return moved / machine.copy_bytes_per_s + matmul_s
    share = (NORM_BYTES + CLIP_BYTES + update_bytes) / CPU_ADAM_BYTES
    seconds = share * count / machine.cpu_adam_parameters_per_s
    return seconds + matmul_s if machine.device == "cpu" else seconds


@cache
def update_work(
    model: ModelConfig, optim: OptimChoice, device_type: str
) -> tuple[float, float, float]:
    """(bytes read and written, FLOPs of matmuls in bf16, of those in fp32) per trained parameter of
    the whole model's update."""
    entry = OPTIMIZERS[optim.optimizer]
    trained = [p for p in parameters_of(model) if p.trained]
    costs = [entry.costs(p.name, p.shape, optim, device_type) for p in trained]
    count = model.trained_parameter_count
    return (
        sum(each.update_bytes for each in costs) / count,
        sum(each.update_flops for each in costs) / count,
        sum(each.update_fp32_flops for each in costs) / count,
    )
