"""Rates that a machine reaches: from a file of `shardscale profile`, or from a known GPU's peaks.

The planner's only source of rates. All of them are per rank, with all ranks of the node at work.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from launcher.forecast.efficiency import (
    COLLECTIVE_START_S,
    COPY_EFFICIENCY,
    CPU_ADAM_PARAMETERS_PER_S,
    DISK_READ_BYTES_PER_S,
    DISK_WRITE_BYTES_PER_S,
    NETWORK_EFFICIENCY,
    NETWORK_HOP_S,
    NVLINK_EFFICIENCY,
    NVLINK_HOP_S,
    PCIE_COPY_EFFICIENCY,
    PCIE_HOP_S,
    PCIE_RING_EFFICIENCY,
    efficiency_of,
)
from launcher.forecast.traffic import Collective
from launcher.measure.hardware import gpu_named
from launcher.util.errors import UserError, naming
from launcher.util.json_file import read_json

SCHEMA_VERSION = 1
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """One kind of collective over the links of a node.

    Time of n ranks = start_s + hops x hop_s + bytes each rank sends / bytes_per_s: `bytes_per_s`
    is the bus bandwidth of nccl-tests (doc/PERFORMANCE.md).
    """

    start_s: float
    hop_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One node, seen from one of its ranks."""

    schema_version: int = SCHEMA_VERSION
    name: str
    device: Literal["cpu", "cuda"]
    source: str
    """Source of the figures."""
    ranks_per_node: int
    """Ranks that shared the node's host (and, on CPUs, its cores) when this was measured."""
    memory_bytes: int
    """Memory of the GPU, or of the host where the CPU computes."""
    matmul_flops_per_s: Mapping[str, float]
    """Achieved, by type: fp32, and bf16 where the device has it; on a GPU in products that leave no
    multiprocessor idle."""
    attention_flops_per_s: Mapping[str, float]
    """Achieved by the fused kernel, counting only the causal half."""
    copy_bytes_per_s: float
    """Read plus written."""
    elementwise_bytes_per_s: float
    """The same, for norms, activations and sums as they come in a block."""
    operator_s: float
    """Cost of starting one operator."""
    host_to_device_bytes_per_s: float | None
    device_to_host_bytes_per_s: float | None
    collectives: Mapping[str, Rate] | None
    """all_reduce, all_gather, reduce_scatter within a node; None where one process measured."""
    network_bytes_per_s: float
    """A rank's share of the node's network."""
    network_hop_s: float
    cpu_adam_parameters_per_s: float
    disk_read_bytes_per_s: float
    """Rate of the node's disk, all ranks together."""
    disk_write_bytes_per_s: float
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
        share = efficiency_of(gpu)
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
        try:
            return cls(**_checked(content))
        except _Fault as fault:
            raise UserError(
                f"--profile {path}: {fault}: correct it or measure again with shardscale profile"
            ) from None


_OF_PROFILE = "a file that shardscale profile has written"


class _Fault(Exception):
    """A fault of a profile, without the file's name."""


_MAY_BE_ABSENT = ("host_to_device_bytes_per_s", "device_to_host_bytes_per_s", "collectives")
_TEXTS = ("name", "source")
_MAY_BE_ZERO = ("start_s", "hop_s", "operator_s", "network_hop_s")


def _checked(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise _Fault(f"holds {content!r:.40}, but must be a JSON object")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise _Fault(f"schema_version is {content.get('schema_version')!r}, not {SCHEMA_VERSION}")
    names = {field.name for field in dataclasses.fields(Machine)}
    for name in sorted(names ^ content.keys()):
        raise _Fault(f"{name} is {'missing' if name in names else 'unknown'}")
    return {name: _value(name, value) for name, value in content.items()}


def _value(name: str, value: Any) -> Any:
    if value is None and name in _MAY_BE_ABSENT:
        return None
    if name == "device":
        if value not in ("cpu", "cuda"):
            raise _Fault(f"device is {value!r}, but must be cpu or cuda")
        return value
    if name in _TEXTS:
        if not isinstance(value, str):
            raise _Fault(f"{name} is {value!r:.40}, but must be text")
        return value
    if name == "collectives":
        if isinstance(value, dict):  # of a profile from before it was measured
            value = {"all_to_all": value.get("all_gather"), **value}
        rates = _table(name, value, COLLECTIVES)
        return {kind: Rate(**_rate(f"{name}.{kind}", rates[kind])) for kind in COLLECTIVES}
    if name.endswith("_flops_per_s"):
        rates = _table(name, value, ("fp32",))
        return {kind: _number(f"{name}.{kind}", rate) for kind, rate in rates.items()}
    if name == "versions":
        return _table(name, value, ())
    return _number(name, value)


def _table(name: str, value: Any, needed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Fault(f"{name} is {value!r:.40}, but must be a JSON object")
    for key in needed:
        if key not in value:
            raise _Fault(f"{name}.{key} is missing")
    return value


def _rate(name: str, value: Any) -> dict[str, float]:
    fields = tuple(field.name for field in dataclasses.fields(Rate))
    table = _table(name, value, fields)
    return {field: _number(f"{name}.{field}", table[field]) for field in fields}


def _number(name: str, value: Any) -> float:
    zero = name.split(".")[-1] in _MAY_BE_ZERO
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= sys.float_info.max or (value == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        raise _Fault(f"{name} is {value!r:.40}, but must be a number, {least}")
    number: float = value
    return number
