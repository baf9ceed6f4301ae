"""How a session begins: one folder for all ranks, new or reopened, and the record of the run."""

import shutil
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.measure.folder import RunFolder
from launcher.measure.records import RunRecord
from launcher.measure.rewind import rank_files, rewind
from launcher.model.cost import flops_per_token
from launcher.origin import Origin
from launcher.preflight import Prepared, default_run_folder
from launcher.world import World


def open_folder(prepared: Prepared, world: World) -> tuple[RunFolder, Origin]:
    """Make the run folder or go on in it, as the main rank sees it; all ranks call this.

    Other nodes may see a shared file system a little later, so they take its word.

    Raises:
        UserError: on the main rank, when a living run has the folder.
    """
    out = prepared.resolved.config.loop.out or default_run_folder(prepared.resolved)
    agreed: list[Any] = [(out, prepared.origin)]
    if world.size > 1:
        dist.broadcast_object_list(agreed, src=0)
    path, origin = agreed[0]
    folder = RunFolder(path)
    if world.is_main:
        begin = folder.reopen if origin.reopens else folder.create
        begin(prepared.resolved.config.flat())
        deepspeed = prepared.resolved.config.sharding.deepspeed
        if deepspeed is not None:
            # What config.yaml has no field for, such as bucket sizes, stands only there.
            shutil.copyfile(deepspeed, path / "deepspeed.json")
        if prepared.corpus.tokenizer_path is not None:
            # The text it was trained on may change; who exports the model needs this one.
            shutil.copyfile(prepared.corpus.tokenizer_path, path / "tokenizer.json")
    if world.size > 1:
        dist.barrier()
    return folder, origin


def rewind_absent_ranks(folder: Path, step: int, world: World) -> None:
    """Take back the later steps of ranks that only an earlier life of the run had."""
    if world.is_main:
        for rank, path in rank_files(folder).items():
            if rank >= world.size:
                rewind(path, step)


def run_record(prepared: Prepared, world: World, name: str) -> RunRecord:
    """What this rank's file says first."""
    resolved = prepared.resolved
    config, model = resolved.config, resolved.model
    on_gpu = world.device.type == "cuda"
    return RunRecord(
        run=name,
        rank=world.rank,
        world_size=world.size,
        hostname=socket.gethostname(),
        device=str(world.device),
        device_name=torch.cuda.get_device_name(world.device) if on_gpu else None,
        strategy=resolved.strategy_label,
        strategy_also_called=resolved.also_called,
        precision=config.optim.precision,
        model=config.model.model,
        attention=str(resolved.attention.on(world.device, seq_len=resolved.seq_len)),
        parameters=model.parameter_count,
        matmul_parameters=model.matmul_parameter_count,
        flops_per_token=flops_per_token(model, resolved.seq_len),
        micro_batch=config.data.micro_batch,
        accumulation=resolved.accumulation,
        global_batch=resolved.global_batch,
        seq_len=resolved.seq_len,
        steps=resolved.steps,
        started_unix_s=time.time(),
    )
