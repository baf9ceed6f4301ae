"""`shardscale plan`: what fits, how close, how fast, before anything runs."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence

import yaml

from launcher.config.arguments import parse_run_config, with_micro_batch
from launcher.config.schema import RunConfig
from launcher.errors import ExitCode, UserError
from launcher.measure.hardware import GPUS, Gpu
from launcher.model.config import NAMED
from launcher.plan.assess import Assessment, Place, assess_all, fixed_bytes, gpu_name, ranked
from launcher.plan.calibration import Calibration
from launcher.plan.candidates import PRECISIONS, choices, given_fields
from launcher.plan.machine import Machine
from launcher.plan.options import parse_options
from launcher.plan.table import (
    allocator_lines,
    as_records,
    best_of_each,
    closing_lines,
    opening_lines,
    table,
)
from launcher.plan.waiting import Waiting
from launcher.sizes import gib, parse_bytes
from launcher.tables import say

GPUS_PER_NODE = 8


def main(argv: Sequence[str]) -> int:
    """Returns an exit code of `ExitCode`."""
    try:
        options, training = parse_options(argv)
        place, notes = find_place(options)
        config = parse_run_config(training, "shardscale plan", place.world_size)
        waiting = Waiting()
        silent = options.quiet or str(options.json) == "-"
        try:
            found = plan(
                config,
                given_fields(training, config),
                place,
                goal=options.goal,
                progress=_silence if silent else waiting,
            )
        finally:
            waiting.close()
        show(found, options, training, place, notes)
    except UserError as error:
        print(f"shardscale: {error}", file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.DONE


def _silence(done: int, total: int) -> None:
    pass


def plan(
    config: RunConfig,
    fixed: set[str],
    place: Place,
    *,
    goal: str,
    progress: Callable[[int, int], None] = _silence,
) -> list[Assessment]:
    """Every choice, best first.

    Raises:
        UserError: no choice is valid.
    """
    models = [config]
    if goal == "largest-model":
        names = sorted(NAMED, key=lambda name: -NAMED[name].parameter_count)
        models = [config.replace(model=name) for name in names]
    for candidate in models:
        seen = fixed | {"model"}
        found = assess_all(
            choices(
                candidate,
                seen,
                world_size=place.world_size,
                ranks_per_node=place.ranks_per_node,
                device_type=place.device_type,
                precisions=[p for p in PRECISIONS if p in place.machine.matmul_flops_per_s],
            ),
            place,
            progress,
        )
        if any(a.verdict == "fits" for a in found):
            break
    return ranked(found, goal)


def find_place(options: argparse.Namespace) -> tuple[Place, list[str]]:
    """The machine to plan for, and what was assumed about it or learnt from runs on it.

    Raises:
        UserError: no GPU is named and none has so much memory, or the GPU is not known.
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
        notes.append(
            f"times assume an {gpu.name}, the known GPU nearest to {gib(memory_bytes)}: name yours "
            "with --gpu, or measure it with shardscale profile"
        )
    else:
        raise UserError(
            "which GPU? give --gpu NAME, --gpu-memory SIZE, or --profile FILE; known GPUs are "
            + ", ".join(gpu.name for gpu in GPUS)
        )
    grouped = options.gpus > 1
    calibration = None
    if machine.device == "cuda" and not options.no_calibration:
        calibration = Calibration.load()
        notes += calibration.describe(gpu_name(machine), grouped=grouped)
    learnt = calibration and calibration.fixed_bytes(gpu_name(machine), grouped=grouped)
    place = Place(
        machine=machine,
        # Ratios were learnt against data sheets: what a profile has measured needs none.
        calibration=calibration if options.profile is None else None,
        world_size=options.gpus,
        ranks_per_node=min(per_node, options.gpus),
        memory_bytes=memory_bytes or machine.memory_bytes,
        fixed_bytes=learnt or fixed_bytes(machine, options.gpus),
    )
    if place.memory_bytes <= place.fixed_bytes:
        raise UserError(
            f"--gpu-memory {memory}: a process takes {gib(place.fixed_bytes)} of a GPU before its "
            "first tensor: give more"
        )
    return place, notes


def show(
    found: list[Assessment],
    options: argparse.Namespace,
    training: Sequence[str],
    place: Place,
    notes: Sequence[str],
) -> None:
    """Print the table and the command, and write what was asked for."""
    best, command = found[0], command_of(found[0], training, place)
    text = json.dumps(as_records(found, place), indent=2) + "\n"
    to_screen = str(options.json) == "-"
    # Files first: whoever reads the screen may stop reading.
    if options.json is not None and not to_screen:
        options.json.write_text(text, encoding="utf-8")
    if options.page is not None:
        from launcher.plan.page import write_page

        write_page(options.page, found, place, command)
    applied = options.apply is not None and best.verdict != "does not fit"
    if applied:
        flat = best.run.config.replace(device="auto").flat()
        options.apply.write_text(yaml.safe_dump(flat, sort_keys=False), encoding="utf-8")
    if to_screen:
        print(text, end="")
    else:
        for line in opening_lines(best, place, notes):
            say(line)
        shown = found if options.all else best_of_each(found)
        table(shown, place, price=options.price_per_gpu_hour, choices=len(found))
        for line in (*allocator_lines(shown, place), *closing_lines(found, place)):
            say(line)
        if best.verdict != "does not fit":
            print(f"\n  {command}")
    if options.apply is not None and not applied:
        raise UserError(f"--apply {options.apply}: nothing fits, so nothing is written")


def command_of(best: Assessment, training: Sequence[str], place: Place) -> str:
    """What to type to run it: the user's own flags, and those that the plan has chosen."""
    default = RunConfig().flat()
    asked = parse_run_config(training, "shardscale plan", place.world_size).flat()
    chosen = best.run.config.flat()
    names = (
        *("strategy", "zero", "reshard_after_forward", "replicate", "offload_optimizer"),
        *("offload_param", "precision", "activation_checkpointing", "micro_batch", "global_batch"),
    )
    flags = list(training)
    if asked["micro_batch"] == "auto":
        flags = with_micro_batch(flags, chosen["micro_batch"])
        asked["micro_batch"] = chosen["micro_batch"]
    for name in names:
        value = chosen.get(name)
        if value == asked.get(name, default.get(name)) or (name == "strategy" and "zero" in chosen):
            continue
        option = "--" + name.replace("_", "-")
        flags += [f"--no-{option[2:]}"] if value is False else [option, str(value)]
    nodes = -(-place.world_size // place.ranks_per_node)
    start = ["torchrun"]
    if nodes > 1:
        start += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29400"]
    start += ["--nproc", str(place.ranks_per_node), "-m", "launcher.train"]
    return shlex.join([*start, *flags])


def _gpu_of_memory(memory_bytes: int) -> Gpu:
    """The known GPU whose memory is nearest, of those that compute in bf16."""
    modern = [gpu for gpu in GPUS if gpu.bf16_flops_per_s is not None]
    return min(modern, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
