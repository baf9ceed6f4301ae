"""How a session begins: one folder for all ranks, new or reopened, and the record of the run."""

import math
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import torch

from launcher.config.resolve import Resolved
from launcher.config.schema import LoopChoice
from launcher.measure.records import RunRecord
from launcher.model.cost import flops_per_token
from launcher.parallel.mesh import across_nodes
from launcher.parallel.world import World
from launcher.run import launch
from launcher.run.folder import RunFolder
from launcher.run.origin import AUTO, Origin, check_launch
from launcher.run.preflight import Prepared, default_run_folder
from launcher.strategies import variant_of
from launcher.util.errors import UserError

Announce = Callable[[RunFolder], None]


def open_folder(
    prepared: Prepared, world: World, announce: Announce = lambda folder: None
) -> tuple[RunFolder, Origin]:
    """Make the run folder or go on in it, as the main rank sees it; all ranks call this.

    Other nodes may see a shared file system a little later, so they take its word. `announce` is
    called before anything is written.

    Raises:
        UserError: on all ranks, when the folder is another run's, or cannot be written to.
    """
    out = prepared.resolved.config.loop.out or default_run_folder(prepared.resolved)
    path, origin = world.agreed((out, prepared.origin))
    folder = RunFolder(path)
    announce(folder)
    agents = world.gathered(launch.agent())
    begun = _begin(folder, origin, prepared, agents) if world.is_main else None
    refusal = world.agreed(begun)
    if refusal is not None:
        raise refusal
    return folder, origin


def _begin(
    folder: RunFolder, origin: Origin, prepared: Prepared, agents: list[str]
) -> UserError | None:
    try:
        asked = prepared.resolved.config.loop.resume == AUTO
        if origin.reopens and not asked and launch.is_restarted(os.environ):
            check_launch(folder.path, agents, os.environ)
        config = prepared.resolved.config.flat()
        folder.begin(config, reopens=origin.reopens, agents=agents)
        deepspeed = prepared.resolved.config.sharding.deepspeed
        if deepspeed is not None:
            # What config.yaml has no field for, such as bucket sizes, stands only there.
            kept = folder.path / "deepspeed.json"
            if not kept.exists() or not deepspeed.samefile(kept):  # a run may go on with that
                shutil.copyfile(deepspeed, kept)
        if prepared.corpus.tokenizer_path is not None:
            # The text it was trained on may change; who exports the model needs this one.
            shutil.copyfile(prepared.corpus.tokenizer_path, folder.path / "tokenizer.json")
        tokenizer = prepared.resolved.config.data.tokenizer
        if Path(tokenizer).suffix:  # a file, which other programs may have saved more beside
            from launcher.checkpoint.pretrained.companions import carry_beside

            carry_beside(tokenizer, folder.path)
    except FileExistsError:
        return UserError(
            f"--out {folder.path}: another run has just taken this folder: choose another one"
        )
    except UserError as error:
        return error
    except OSError as error:
        if not origin.reopens:
            shutil.rmtree(folder.path, ignore_errors=True)
        return UserError(
            f"--out {folder.path}: cannot be written to ({error.strerror}): choose another place"
        )
    return None


def introduction(prepared: Prepared, record: RunRecord, folder: Path, world: World) -> list[str]:
    """What the console says first."""
    sharding = prepared.resolved.config.sharding
    ranks = "1 process" if record.world_size == 1 else f"{record.world_size} processes"
    data_ranks = sharding.data_ranks(record.world_size)
    reason = prepared.resolved.attention.reason
    if sharding.context_parallel_method == "ring":
        reason = "keys and values go around the ranks of a sequence"
    if record.context_parallel > 1:
        ranks += f", {record.context_parallel} to a sequence ({sharding.context_parallel_method})"
    if record.tensor_parallel > 1:
        ranks += f", {record.tensor_parallel} to a matrix"
    model = prepared.resolved.model
    trained = ""
    if model.lora is not None:
        bits = "" if model.quantize_base == "none" else f" of {model.quantize_base}"
        trained = f" ({model.trained_parameter_count:,} trained beside frozen ones{bits})"
    if model.masks:
        trained = " (what was pruned of them stays zero)"
    return [
        f"{record.model}: {record.parameters:,} parameters{trained}, {record.precision}; "
        f"{record.strategy} "
        f"(= {record.strategy_also_called}) on {ranks}, {record.device_name or record.device}",
        f"attention: {record.attention}: {reason}",
        *prepared.resolved.budget_lines(),
        *across_nodes(sharding, world.local_size),
        *_deepspeed_lines(sharding.deepspeed),
        prepared.recipe,
        f"corpus: {prepared.corpus.description}",
        f"{record.steps} steps of {record.global_batch} x {record.seq_len} tokens: micro-batch "
        f"{record.micro_batch} x {data_ranks} ranks x {record.accumulation} accumulated; "
        f"seed {prepared.resolved.config.loop.seed}; run folder {folder}",
        _said_of_saves(prepared.resolved.config.loop),
    ]


def _deepspeed_lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    from launcher.config.deepspeed_file import opening_lines

    return opening_lines(file)


def _said_of_saves(loop: LoopChoice) -> str:
    minutes = loop.saves_after_s / 60
    when = [
        *([] if not loop.save_every else [f"every {loop.save_every} steps"]),
        *([] if minutes == math.inf else [f"every {minutes:g} minutes (--save-minutes)"]),
        *(["at the end"] if loop.saves_last else []),
    ]
    return f"saves {', '.join(when)}" if when else "saves only where a signal stops it"


def run_record(prepared: Prepared, world: World, name: str) -> RunRecord:
    """What this rank's file says first."""
    resolved = prepared.resolved
    config, model = resolved.config, resolved.model
    variant = variant_of(config)
    on_gpu = world.device.type == "cuda"
    return RunRecord(
        run=name,
        rank=world.rank,
        world_size=world.size,
        hostname=socket.gethostname(),
        device=str(world.device),
        device_name=torch.cuda.get_device_name(world.device) if on_gpu else None,
        strategy=variant.label,
        strategy_also_called=variant.also_called,
        context_parallel=config.sharding.context_parallel,
        tensor_parallel=config.sharding.tensor_parallel,
        precision=config.optim.precision,
        model=config.model.label,
        attention=_attention(resolved, world.device),
        activation_checkpointing=model.activation_checkpointing,
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


def _attention(resolved: Resolved, device: torch.device) -> str:
    if resolved.config.sharding.context_parallel_method == "ring":
        return "ring"
    return str(resolved.attention.on(device, seq_len=resolved.seq_len))
