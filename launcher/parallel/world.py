"""This process among the ranks, its device, and the start and end of the process group."""

import dataclasses
import datetime
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from launcher.parallel.rendezvous import stay_on_this_node, store_of_ranks
from launcher.util.errors import Failure, UserError, one_line
from launcher.util.flags import is_number
from launcher.util.sizes import counted
from launcher.util.startup import allocator_variable, importing

OWN_AGENT = "SHARDSCALE_TORCHRUN"  # for ranks of our own torchrun: nodes, or MIN:MAX of them


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process among the ranks."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    """Where its model computes."""

    @property
    def is_main(self) -> bool:
        """This rank writes files and messages that exist once per run."""
        return self.rank == 0

    def agreed(self, value: Any) -> Any:
        """Return the main rank's value, on every rank (all call this)."""
        message = [value]
        if self.size > 1:
            dist.broadcast_object_list(message, src=0)
        return message[0]

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank (all call this)."""
        values = [value]
        if self.size > 1:
            values *= self.size
            dist.all_gather_object(values, value)
        return values


def place_from_environment() -> World:
    """Read the place that torchrun or Slurm has set; the only process of a run without.

    Raises:
        UserError: a variable that is no number, or contradicts another.
    """
    environment = os.environ
    # srun alone starts tasks that know nothing of each other. A batch script has no step's tasks.
    tasks = number_of(environment, "SLURM_STEP_NUM_TASKS", default=1)
    if tasks > 1 and not environment.keys() & {"RANK", "WORLD_SIZE"}:
        raise UserError(
            f"srun has started {tasks} tasks, and each would train alone: start one torchrun per "
            "node with srun, as slurm/train.sbatch does, or one task"
        )
    size = number_of(environment, "WORLD_SIZE", least=1, default=1)
    rank = number_of(environment, "RANK", default=0, most=size - 1)
    local_size = number_of(environment, "LOCAL_WORLD_SIZE", least=1, default=size, most=size)
    local_rank = number_of(environment, "LOCAL_RANK", default=0, most=min(rank, local_size - 1))
    number_of(environment, "MASTER_PORT", default=0, most=2**16 - 1)
    number_of(environment, "TORCHELASTIC_RESTART_COUNT", default=0)
    cpu = torch.device("cpu")  # until `start` chooses
    return World(rank=rank, local_rank=local_rank, size=size, local_size=local_size, device=cpu)


def ranks_from_environment() -> tuple[int, int]:
    """Return (world size, ranks on this node), as `place_from_environment` has them."""
    place = place_from_environment()
    return place.size, place.local_size


def number_of(
    environment: Mapping[str, str], name: str, *, default: int, least: int = 0, most: int = 2**31
) -> int:
    """Return a variable that holds a whole number.

    Raises:
        UserError: it holds something else.
    """
    text = environment.get(name)
    if text is None:
        return default
    if not is_number(text, int) or not least <= int(text) <= most:
        raise UserError(
            f"the environment has {name}={text!r}, but it must be a whole number from {least} to "
            f"{most}: unset it, and start ranks with torchrun"
        )
    return int(text)


def _has_own_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether Slurm gives each task of a step one GPU and hides the others (`srun
    --gpus-per-task=1`), so that it is device 0 of each."""
    if "RANK" not in environment or "TORCHELASTIC_RUN_ID" in environment:
        return False  # ranks of torchrun share what its task sees
    per_task = environment.get("SLURM_TRES_PER_TASK", "").replace("=", ":").split(",")
    return environment.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1" or any(
        "gpu" in part and part.endswith(":1") for part in per_task
    )


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
    if gpus < ranks_per_node and not (gpus == 1 and _has_own_gpu(os.environ)):
        start = f"start {gpus} with --nproc {gpus}, or " if gpus else ""
        raise UserError(
            f"this machine has {counted(gpus, 'GPU')} for {counted(ranks_per_node, 'rank')}: "
            f"{start}train on the CPU with --device cpu"
        )
    return "cuda"


def start(
    device_type: str, *, timeout_s: float, needs_group: bool, expandable_segments: bool = False
) -> World:
    """Join the process group (NCCL for GPU tensors, gloo for host tensors).

    Args:
        needs_group: start one even for a single process, which FSDP and DeepSpeed require.
        expandable_segments: of a GPU's allocator, where the user's variable leaves that open.

    Raises:
        UserError: the environment lacks the rendezvous of the ranks.
        Failure: other ranks did not join in time.
    """
    place = place_from_environment()
    if place.size > 1 or "RANK" in os.environ:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise UserError(
                    f"the environment has no {name}, but ranks of a world of {place.size}: start "
                    "them with torchrun, or unset WORLD_SIZE and RANK"
                )
    device = torch.device(device_type)
    if device_type == "cuda":
        own = torch.cuda.device_count() == 1 and _has_own_gpu(os.environ)
        device = torch.device("cuda", 0 if own else place.local_rank)
        if expandable_segments:
            expand_segments()
        torch.cuda.set_device(device)
    # torch's optimizers need it: imported before memory is watched and zero.Init patches torch.
    with importing():
        importlib.import_module("torch._dynamo")
    # torch 2.13 renames two collectives that 2.11, and DeepSpeed, have under the old names only.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")
    # So many last collectives are remembered, for the report of one that hangs.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
    if place.size > 1 or needs_group:
        if place.size == 1:  # DeepSpeed asks the environment, too
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        if place.size in (1, place.local_size):
            stay_on_this_node()
        _join(place, device, timeout_s)
    return dataclasses.replace(place, device=device)


def _join(place: World, device: torch.device, timeout_s: float) -> None:
    """Join the process group.

    Raises:
        Failure: other ranks did not join in time.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store_of_ranks(
                place.rank,
                place.size,
                nodes=-(-place.size // place.local_size),
                timeout=timeout,
            ),
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        reason = str(error).partition("\n")[0]
        raise Failure(
            f"rank {place.rank}: not all of {place.size} ranks have joined within "
            f"--collective-timeout-s {timeout_s:g}: start all of them, or give more seconds "
            f"({one_line(reason)})"
        ) from None


def expand_segments() -> None:
    """Have torch's CUDA allocator take expandable segments from now on, unless the user has set its
    variable.

    By a setter, as the variable is read when CUDA starts, and asking for a GPU's compute capability
    has started it by now.
    """
    if allocator_variable() is None:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


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
        # The agent ends the others when the first leaves with a code: all is reported by now.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for act in _LAST_ACTS:
        act()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
