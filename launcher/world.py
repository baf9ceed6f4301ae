"""Who this process is among the ranks, on which device, and how the group starts and ends."""

import datetime
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launcher.errors import UserError
from launcher.meeting import stay_on_this_node, store_of_ranks
from launcher.startup import importing

OWN_AGENT = "SHARDSCALE_TORCHRUN"  # set for ranks that our own torchrun has started


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One rank's place. `device` is where its model computes."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def agreed(self, value: Any) -> Any:
        """The main rank's value, on every rank (all call this)."""
        message = [value]
        if self.size > 1:
            dist.broadcast_object_list(message, src=0)
        return message[0]

    @property
    def distributed(self) -> bool:
        """Whether there is a process group."""
        return dist.is_initialized()


def ranks_from_environment() -> tuple[int, int]:
    """(world size, ranks on this node) as torchrun set them; (1, 1) without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return size, int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))


def choose_device(wanted: str, ranks_per_node: int) -> str:
    """`auto`, `cpu` or `cuda` -> the device type that `ranks_per_node` ranks will use.

    Raises:
        UserError: fewer GPUs than ranks on this node.
    """
    if wanted == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count()
    if wanted == "auto" and gpus == 0:
        return "cpu"
    if gpus < ranks_per_node:
        few = f"this machine has {gpus} GPU" + ("" if gpus == 1 else "s")
        start = f"start {gpus} with --nproc {gpus}, or " if gpus else ""
        raise UserError(
            f"{ranks_per_node} ranks need {ranks_per_node} GPUs, but {few}: "
            f"{start}train on the CPU with --device cpu"
        )
    return "cuda"


def start(device_type: str, *, timeout_s: float, needs_group: bool) -> World:
    """Join the process group (NCCL for GPU tensors, gloo for host tensors).

    `needs_group` starts one even for a single process, which FSDP and DeepSpeed require.

    Raises:
        UserError: ranks that no torchrun has started, and no place for them to meet.
    """
    size, local_size = ranks_from_environment()
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    # torch's optimizers need it: imported before memory is watched and zero.Init patches torch.
    with importing():
        importlib.import_module("torch._dynamo")
    # So many last collectives are remembered, for the report of one that hangs.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
    if size > 1 or needs_group:
        timeout = datetime.timedelta(seconds=timeout_s)
        if size == 1:  # DeepSpeed asks the environment, too
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        if size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            stay_on_this_node()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            store=store_of_ranks(rank, size, nodes=-(-size // local_size), timeout=timeout),
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if device_type == "cuda" else None,
        )
    return World(rank=rank, local_rank=local_rank, size=size, local_size=local_size, device=device)


_LAST_ACTS: list[Callable[[], None]] = []


def before_leaving(act: Callable[[], None]) -> None:
    """Have `leave` call `act`, which must not raise: interpreter teardown will not."""
    _LAST_ACTS.append(act)


def leave(code: int, *, together: bool) -> NoReturn:
    """End this worker at once, skipping interpreter teardown.

    gloo's loop thread may free a Python-owned tensor while the interpreter exits, which aborts
    about one run in five; `destroy_process_group` does not prevent it. So: wait for each other
    (`together`, when all is well), flush, and leave without teardown.
    """
    if together and dist.is_initialized():
        dist.barrier()
        # The agent ends the others when the first leaves with a code: all is said by now.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for act in _LAST_ACTS:
        act()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
