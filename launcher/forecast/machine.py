"""Rates that a machine reaches: from a file of `shardscale profile`, or from a known GPU's peaks.

The planner's only source of rates. All of them are per rank, with all ranks of the node at work.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from annotated_types import Ge, Gt

from launcher.forecast.efficiency import (
    COLLECTIVE_START_S,
    COPY_EFFICIENCY,
    CPU_ADAM_PARAMETERS_PER_S,
    DISK_READ_BYTES_PER_S,
    DISK_WRITE_BYTES_PER_S,
    EFFICIENCIES,
    NETWORK_EFFICIENCY,
    NETWORK_HOP_S,
    NVLINK_EFFICIENCY,
    NVLINK_HOP_S,
    PCIE_COPY_EFFICIENCY,
    PCIE_HOP_S,
    PCIE_RING_EFFICIENCY,
    architecture,
)
from launcher.forecast.traffic import Collective
from launcher.measure.hardware import gpu_named
from launcher.util.errors import WHY, naming, refused
from launcher.util.json_file import read_json, strictly

COLLECTIVES: Final[tuple[Collective, ...]] = get_args(Collective)
_NEEDED: Final = {
    "collectives": COLLECTIVES,
    "matmul_flops_per_s": ("fp32",),
    "attention_flops_per_s": ("fp32",),
}
"""Field -> keys that it has at least, unless it is None."""
_OF_PROFILE: Final = "a file that shardscale profile has written"

Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Flops = Mapping[str, Positive]
"""Type of the numbers -> FLOP/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One kind of collective over the links of a node.

    Time of n ranks = start_s + hops x hop_s + bytes each rank sends / bytes_per_s: `bytes_per_s`
    is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md).
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    start_s: NotNegative
    hop_s: NotNegative
    bytes_per_s: Positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One node, seen from one of its ranks."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    schema_version: Literal[1] = 1
    name: str
    device: Literal["cpu", "cuda"]
    source: str
    """Source of the figures."""
    ranks_per_node: Annotated[int, Gt(0)]
    """Ranks that shared the node's host (and, on CPUs, its cores) when this was measured."""
    memory_bytes: Annotated[int, Gt(0)]
    """Memory of the GPU, or of the host where the CPU computes."""
    matmul_flops_per_s: Flops
    """Achieved, by type: fp32, and bf16 where the device has it; on a GPU in products that leave no
    multiprocessor idle."""
    attention_flops_per_s: Flops
    """Achieved by the fused kernel, counting only the causal half."""
    copy_bytes_per_s: Positive
    """Read plus written."""
    elementwise_bytes_per_s: Positive
    """The same, for norms, activations and sums as they come in a block."""
    operator_s: NotNegative
    """Cost of starting one operator."""
    host_to_device_bytes_per_s: Positive | None
    device_to_host_bytes_per_s: Positive | None
    collectives: Mapping[Collective, Rate] | None
    """all_reduce, all_gather, reduce_scatter within a node; None where one process measured."""
    network_bytes_per_s: Positive
    """A rank's share of the node's network."""
    network_hop_s: NotNegative
    cpu_adam_parameters_per_s: Positive
    disk_read_bytes_per_s: Positive
    """Rate of the node's disk, all ranks together."""
    disk_write_bytes_per_s: Positive
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def overlaps(self) -> bool:
        """Return whether communication runs beside computation: a CPU's cores do both."""
        return self.device == "cuda"

    def shared_by(self, ranks_per_node: int) -> "Machine":
        """The same node with another number of ranks: host rates are divided among them, which on
        a CPU are all rates of computation."""
        share = self.ranks_per_node / ranks_per_node
        changes: dict[str, Any] = {
            "ranks_per_node": ranks_per_node,
            "cpu_adam_parameters_per_s": share * self.cpu_adam_parameters_per_s,
        }
        if self.device == "cpu":
            for name in ("matmul_flops_per_s", "attention_flops_per_s"):
                changes[name] = {k: share * rate for k, rate in getattr(self, name).items()}
            for name in ("copy_bytes_per_s", "elementwise_bytes_per_s"):
                changes[name] = share * getattr(self, name)
        return dataclasses.replace(self, **changes)

    @classmethod
    def of_gpu(cls, name: str, *, ranks_per_node: int = 8) -> "Machine":
        """A machine with a known GPU, from data sheets and published efficiencies.

        Raises:
            UserError: the GPU is not in the table; lists those that are.
        """
        gpu = gpu_named(name)
        share = EFFICIENCIES[architecture(gpu)]
        tensor = {"fp16": gpu.tensor_flops_per_s}
        if gpu.bf16_flops_per_s is not None:
            tensor["bf16"] = gpu.bf16_flops_per_s
            tensor["tf32"] = gpu.bf16_flops_per_s / 2  # on every data sheet that has both
        fp32 = {"fp32": share.matmul_fp32 * gpu.fp32_flops_per_s}
        host_link = PCIE_COPY_EFFICIENCY * gpu.host_bytes_per_s
        if gpu.nvlink_bytes_per_s is None:
            hop_s, link = PCIE_HOP_S, PCIE_RING_EFFICIENCY * gpu.pcie_bytes_per_s
        else:
            hop_s, link = NVLINK_HOP_S, NVLINK_EFFICIENCY * gpu.nvlink_bytes_per_s
        rate = Rate(start_s=COLLECTIVE_START_S, hop_s=hop_s, bytes_per_s=link)
        return cls(
            name=gpu.name,
            device="cuda",
            source=f"data sheet of {gpu.source}",
            ranks_per_node=ranks_per_node,
            memory_bytes=gpu.memory_bytes,
            matmul_flops_per_s=fp32 | {k: share.matmul * v for k, v in tensor.items()},
            attention_flops_per_s=fp32 | {k: share.attention * v for k, v in tensor.items()},
            copy_bytes_per_s=COPY_EFFICIENCY * gpu.memory_bytes_per_s,
            elementwise_bytes_per_s=share.elementwise * gpu.memory_bytes_per_s,
            operator_s=share.operator_s,
            host_to_device_bytes_per_s=host_link,
            device_to_host_bytes_per_s=host_link,
            collectives=dict.fromkeys(COLLECTIVES, rate),
            network_bytes_per_s=NETWORK_EFFICIENCY * gpu.network_bytes_per_s,
            network_hop_s=NETWORK_HOP_S,
            # the rate of one host, shared by its ranks
            cpu_adam_parameters_per_s=CPU_ADAM_PARAMETERS_PER_S / ranks_per_node,
            disk_read_bytes_per_s=DISK_READ_BYTES_PER_S,
            disk_write_bytes_per_s=DISK_WRITE_BYTES_PER_S,
        )

    def as_json(self) -> str:
        """The text of a profile file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Machine":
        """Read a profile file.

        Raises:
            UserError: missing, not JSON, of another version, or a value that cannot be; names it.
        """
        with naming("--profile"):
            content = read_json(path, what=_OF_PROFILE)
        rates = content.get("collectives")
        if isinstance(rates, dict):  # of a profile from before it was measured
            rates.setdefault("all_to_all", rates.get("all_gather"))
        said = f"--profile {path}: {WHY}: correct it or measure again with shardscale profile"
        with refused(ValueError, said):
            machine = strictly(cls, json.dumps(content))
            for name, keys in _NEEDED.items():
                known = getattr(machine, name)
                missing = [key for key in keys if known is not None and key not in known]
                if missing:
                    raise ValueError(f"lacks {name}.{missing[0]}")
        return machine
