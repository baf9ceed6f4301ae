"""Rates of this machine, measured by processes that all work at the same time."""

import argparse
import multiprocessing
import os
import platform
import socket
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.forecast.benchmarks import Bench, Effort
from launcher.forecast.efficiency import NETWORK_EFFICIENCY, NETWORK_HOP_S
from launcher.forecast.machine import Machine, Rate
from launcher.measure.hardware import ASSUMED_NETWORK_BYTES_PER_S, cpu_name, find_gpu
from launcher.measure.host_memory import host_bytes
from launcher.model.config import ModelConfig
from launcher.model.sizes import named
from launcher.parallel.rendezvous import stay_on_this_node
from launcher.parallel.world import choose_device
from launcher.util.errors import WHY, ExitCode, Failure, UserError, naming, refused, tell
from launcher.util.files import check_new_file
from launcher.util.processes import die_with, usable_cores
from launcher.util.startup import deaf_children


def write_profile(options: argparse.Namespace) -> int:
    """Measure and write the file; 0, or 4 when a measuring process failed."""
    try:
        device_type = choose_device(options.device, options.nproc or 1)
        on_gpu = device_type == "cuda"
        nproc = options.nproc or (torch.cuda.device_count() if on_gpu else min(2, usable_cores()))
        with naming("--out"):
            check_new_file(options.out)
        if on_gpu:
            _check_computes()
        machine = measure(
            _model(options.model),
            device_type=device_type,
            nproc=nproc,
            effort=Effort.for_device(device_type),
            disk_folder=options.out.absolute().parent,
            say=tell,
        )
        with options.out.open("x", encoding="utf-8") as file:
            file.write(machine.as_json())
    except Failure as error:
        tell(error)
        return ExitCode.FAILED
    print(f"{machine.name}: written to {options.out}")
    return ExitCode.DONE


def measure(
    model: ModelConfig,
    *,
    device_type: str,
    nproc: int,
    effort: Effort,
    disk_folder: Path,
    say: Callable[[str], None],
) -> Machine:
    """Measure with `nproc` processes at work at the same time, as in training.

    Raises:
        Failure: a process ended before it had anything to say; it printed why itself.
    """
    say(f"measuring with {nproc} process{'es' if nproc > 1 else ''} on {device_type}")
    figures = _mean(_run_ranks(model, device_type, nproc, effort, disk_folder, say))
    if rates := figures["collectives"]:
        figures["collectives"] = {kind: Rate(**rate) for kind, rate in rates.items()}
    name = cpu_name() if device_type == "cpu" else torch.cuda.get_device_name(0)
    gpu = find_gpu(name) if device_type == "cuda" else None
    network = ASSUMED_NETWORK_BYTES_PER_S if gpu is None else gpu.network_bytes_per_s
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device_type == "cuda":
        nccl: tuple[int, ...] = torch.cuda.nccl.version()
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl))}
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
    else:
        memory_bytes = host_bytes()
    return Machine(
        name=name,
        device="cuda" if device_type == "cuda" else "cpu",
        source=f"measured on {socket.gethostname()}; the network between nodes is assumed",
        ranks_per_node=nproc,
        memory_bytes=memory_bytes,
        network_bytes_per_s=NETWORK_EFFICIENCY * network,
        network_hop_s=NETWORK_HOP_S,
        versions=versions,
        **figures,
    )


def _model(name: str) -> ModelConfig:
    with refused(ValueError, f"--model: {WHY}"):
        return named(name)


def _check_computes() -> None:
    """Reject a null GPU, whose kernels are infinitely fast."""
    ones = torch.ones(64, 64, device="cuda")
    found, expected = float((ones @ ones).sum()), float(64**3)
    if found != expected:
        raise UserError(
            f"--device cuda: a product of ones on {torch.cuda.get_device_name(0)} sums to "
            f"{found:g}, not {expected:g}: what computes nothing has no speed; measure on a GPU "
            "that does, or with --device cpu"
        )


def _run_ranks(
    model: ModelConfig,
    device_type: str,
    nproc: int,
    effort: Effort,
    disk_folder: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Return what each rank found; rank 0 also tells how far it is."""
    # spawn: once this process has used CUDA, a forked one cannot
    context = multiprocessing.get_context("spawn")
    processes = []
    pipes: list[Connection[Any, Any]] = []
    with tempfile.TemporaryDirectory(prefix="shardscale-") as shared:
        try:
            for rank in range(nproc):
                ours, theirs = context.Pipe(duplex=False)
                disk = disk_folder if rank == 0 else None
                who = (os.getpid(), rank, nproc)
                arguments = (*who, device_type, model, effort, shared, disk, theirs)
                processes.append(context.Process(target=_rank, args=arguments, daemon=True))
                with deaf_children():
                    processes[-1].start()
                theirs.close()  # else the end of the process would go unnoticed
                pipes.append(ours)
            return [_result(pipe, rank, say) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(pipe: "Connection[Any, Any]", rank: int, say: Callable[[str], None]) -> dict[str, Any]:
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            raise Failure(f"measuring process {rank} failed; see above") from None
        if isinstance(message, dict):
            return message
        say(message)


def _rank(
    parent: int,
    rank: int,
    nproc: int,
    device_type: str,
    model: ModelConfig,
    effort: Effort,
    shared: str,
    disk_folder: Path | None,
    pipe: "Connection[Any, Any]",
) -> None:
    """One measuring process."""
    die_with(parent)
    stay_on_this_node()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // nproc))
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    if nproc > 1:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            init_method=f"file://{shared}/rendezvous",
            rank=rank,
            world_size=nproc,
            device_id=device if device_type == "cuda" else None,
        )
    say = pipe.send if rank == 0 else lambda text: None
    # torch 2.13 renames two collectives that 2.11 has only under the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`torch.distributed")
    found = Bench(model, device, effort, say).run(disk_folder)
    if nproc > 1:
        dist.barrier()  # none may leave while another still communicates
    pipe.send(found)
    # As in launcher.parallel.world.leave: gloo's threads may abort an interpreter's teardown.
    os._exit(0)


def _mean(found: Sequence[Any]) -> Any:
    """The ranks' mean of every figure; what only rank 0 measured is its own."""
    first = found[0]
    if isinstance(first, dict):
        return {name: _mean([one[name] for one in found if name in one]) for name in first}
    return None if first is None else statistics.fmean(found)
