"""The machine to plan for: GPUs of a data sheet, or one that was measured."""

import argparse
from collections.abc import Set
from dataclasses import dataclass
from functools import partial

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.forecast.calibration import Calibration
from launcher.forecast.candidates import PRECISIONS, Choice, choices
from launcher.forecast.fit import STAGING_BYTES, outside_bytes
from launcher.forecast.machine import Machine
from launcher.measure.hardware import GPUS, GPUS_PER_NODE, KNOWN_GPUS, Gpu
from launcher.model.checkpointing import parse
from launcher.strategies import variant_of
from launcher.util.errors import UserError
from launcher.util.sizes import gib, parse_bytes

_SAME_MEMORY = 0.1
"""Relative difference up to which two GPUs count as of the same memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The machine to plan for."""

    machine: Machine
    world_size: int
    ranks_per_node: int
    memory_bytes: int
    """Memory of each device."""
    calibration: Calibration | None = None
    """Corrections of times, learnt from finished runs on such machines."""
    fixed_bytes: int
    """Memory a process takes beside tensors: CUDA context, NCCL, transient kernel workspaces."""

    @property
    def gpu(self) -> str | None:
        """Name of the GPU; None on a CPU."""
        return self.machine.name if self.machine.device == "cuda" else None

    def learnt_ratio(self, run: Resolved) -> float:
        """Return the measured over the predicted seconds of such runs; 1 where none is known."""
        label = variant_of(run.config).label
        known = self.calibration and self.calibration.time_ratio(
            self.machine.name, run.config.optim.precision, label
        )
        return known or 1.0


def find_cluster(options: argparse.Namespace) -> tuple[Cluster, list[str]]:
    """Return the machine to plan for, and notes on what was assumed or learnt about it.

    Raises:
        UserError: no GPU is given, the GPU is not known, or its memory is too small.
    """
    memory = options.gpu_memory
    memory_bytes = None if memory is None else parse_bytes(memory, "--gpu-memory")
    per_node = options.gpus_per_node or min(options.gpus, GPUS_PER_NODE)
    notes: list[str] = []
    if options.profile is not None:
        machine = Machine.load(options.profile)
    elif options.gpu is not None:
        machine = Machine.of_gpu(options.gpu, ranks_per_node=per_node)
    elif memory_bytes is not None:
        gpu = _gpu_of_memory(memory_bytes)
        machine = Machine.of_gpu(gpu.name, ranks_per_node=per_node)
        notes.append(_assumed(gpu))
    else:
        raise UserError(
            "which GPU? give --gpu NAME, --gpu-memory SIZE, or --profile FILE; known GPUs are "
            + KNOWN_GPUS
        )
    grouped = options.gpus > 1
    calibration, outside = None, 0
    if machine.device == "cuda":
        if not options.no_calibration:
            calibration = Calibration.load()
            notes += calibration.describe(machine.name, grouped=grouped)
        outside = STAGING_BYTES + outside_bytes(machine.name, grouped=grouped, learnt=calibration)
    cluster = Cluster(
        machine=machine,
        # Ratios were learnt against data sheets: what a profile has measured needs none.
        calibration=calibration if options.profile is None else None,
        world_size=options.gpus,
        ranks_per_node=min(per_node, options.gpus),
        memory_bytes=memory_bytes or machine.memory_bytes,
        fixed_bytes=outside,
    )
    if cluster.memory_bytes <= cluster.fixed_bytes:
        raise UserError(
            f"--gpu-memory {memory}: a process takes {gib(cluster.fixed_bytes)} of a GPU beside "
            "its tensors: give more"
        )
    return cluster, notes


def choices_on(cluster: Cluster, config: RunConfig, fixed: Set[str]) -> list[Choice]:
    """Return all candidates for a machine that keep the fields in `fixed`; see `choices`."""
    rated = cluster.machine.matmul_flops_per_s
    precisions = [precision for precision in PRECISIONS if precision in rated]
    if "fp16" in rated and "bf16" not in rated:  # fp16 only here: loss scaling may skip steps
        precisions.insert(0, "fp16")
    find = partial(
        choices,
        config,
        fixed,
        world_size=cluster.world_size,
        ranks_per_node=cluster.ranks_per_node,
        device_type=cluster.machine.device,
        precisions=precisions,
    )
    if parse(config.model.activation_checkpointing).budget_bytes is None:
        return find()
    from launcher.forecast.forked import in_workers  # a page in a browser has no processes

    (found,) = in_workers(find, [()])  # which records traces
    return found


def _assumed(gpu: Gpu) -> str:
    """Name the data sheet that the speeds come from, and the speed range of that memory size."""
    assert gpu.bf16_flops_per_s is not None
    rates = {
        other.name: other.bf16_flops_per_s / gpu.bf16_flops_per_s
        for other in GPUS
        if other.bf16_flops_per_s is not None
        and abs(other.memory_bytes / gpu.memory_bytes - 1) < _SAME_MEMORY
    }
    text = f"speeds are of the data sheet of {gpu.name}"
    if len(rates) > 1:
        slow, fast = min(rates, key=lambda name: rates[name]), max(rates, key=lambda n: rates[n])
        text += (
            f"; GPUs of that memory compute {rates[slow]:.1f} ({slow}) to {rates[fast]:.1f} "
            f"({fast}) times as fast, which can change what is best"
        )
    return f"{text}: name yours with --gpu, or measure it with shardscale profile"


def _gpu_of_memory(memory_bytes: int) -> Gpu:
    """Return the known GPU with bf16 whose memory is nearest."""
    modern = [gpu for gpu in GPUS if gpu.bf16_flops_per_s is not None]
    return min(modern, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
