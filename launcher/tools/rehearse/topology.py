"""The nodes that a rehearsal's seconds are for: a data sheet's, or as a small file says."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from launcher.config.yaml_file import read_yaml
from launcher.forecast.machine import Machine, Rate
from launcher.util.errors import UserError, naming

_FIELDS: Final = {
    "gpus_per_node": "GPUs of a node",
    "link_gbytes_per_s": "bus bandwidth of a collective inside a node, as nccl-tests prints it",
    "network_gbytes_per_s": "one GPU's share of the node's network, one direction",
    "network_latency_us": "of one message between nodes",
    "host_gbytes_per_s": "between one GPU and the host's memory, one direction",
}


def read_topology(path: Path) -> dict[str, float]:
    """Read a file of `name: number` lines; all names may be left out.

    Raises:
        UserError: it cannot be read, has another name, or a value that is no positive number.
    """
    with naming("--topology"):
        content: Any = read_yaml(path)
    if not isinstance(content, dict):
        raise UserError(f"--topology {path} holds {content!r:.40}: write lines of name: number")
    known = ", ".join(_FIELDS)
    for name, value in content.items():
        if name not in _FIELDS:
            raise UserError(f"--topology {path}: {name!r} is unknown: it may say {known}")
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not 0 < value < float("inf"):
            raise UserError(
                f"--topology {path}: {name} is {value!r:.40}, but must be a number above 0: "
                f"{_FIELDS[name]}"
            )
        if name == "gpus_per_node" and value != int(value):
            raise UserError(f"--topology {path}: gpus_per_node is {value}, but must be whole")
    return {name: float(value) for name, value in content.items()}


def machine_of(gpu: str, gpus_per_node: int, topology: Mapping[str, Any]) -> Machine:
    """Return a machine with this GPU, of the data sheet where the topology says nothing."""
    machine = Machine.of_gpu(gpu, ranks_per_node=int(topology.get("gpus_per_node", gpus_per_node)))
    assert machine.collectives is not None
    changes: dict[str, Any] = {}
    if (link := topology.get("link_gbytes_per_s")) is not None:
        changes["collectives"] = {
            kind: Rate(start_s=rate.start_s, hop_s=rate.hop_s, bytes_per_s=1e9 * link)
            for kind, rate in machine.collectives.items()
        }
    if (network := topology.get("network_gbytes_per_s")) is not None:
        changes["network_bytes_per_s"] = 1e9 * network
    if (latency := topology.get("network_latency_us")) is not None:
        changes["network_hop_s"] = 1e-6 * latency
    if (host := topology.get("host_gbytes_per_s")) is not None:
        changes["host_to_device_bytes_per_s"] = changes["device_to_host_bytes_per_s"] = 1e9 * host
    return replace(machine, **changes)
