"""Run a program on the null GPU, and judge what it needed."""

import argparse
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.forecast.fit import Verdict, verdict
from launcher.forecast.machine import Machine
from launcher.measure.hardware import GPUS_PER_NODE, Gpu, gpu_named
from launcher.measure.records import Status
from launcher.tools.rehearse import null_gpu
from launcher.tools.rehearse.command import interpreter, ranks_per_node
from launcher.tools.rehearse.seconds import StepSeconds, step_seconds
from launcher.tools.rehearse.stage import Stage, read_stage
from launcher.tools.rehearse.timeline import Timeline
from launcher.tools.rehearse.topology import machine_of, read_topology
from launcher.tools.rehearse.verdict import (
    CardFit,
    lacking_format,
    on_every_gpu,
    outside_bytes,
)
from launcher.tools.watch import folder as folders
from launcher.tools.watch.program import run_program
from launcher.util.errors import WHY, ExitCode, UserError, refused
from launcher.util.files import check_new_file

# Per GPU: a 70B model's weights, gradients and moments in fp32 are half of it. Addresses cost no
# host memory, but there are 64 TiB of them, and torch reserves 9/8 of a GPU's memory for each
# expandable segment, of which every stream has two.
UNLIMITED_GIB = 2048
LEAST_STEPS = 2
"""The first step makes the optimizer's states; only a later one runs its backward beside them."""
WITHOUT_LIMIT = "without-limit"
ONE_STEP_MORE = "one-step-more"
EXIT_CODES: dict[Verdict, int] = {"fits": 0, "does not fit": 1, "tight": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """The program on the GPU asked for, and if it ran out of memory there, also without a limit,
    unless it does not train a second time."""

    gpu: Gpu
    gpus: int
    stage: Stage
    whole: Stage
    """The stage that has seen all steps: this one, or the one without a limit."""
    seconds: Mapping[int, StepSeconds]
    """Seconds of a step, by rank, on the GPU asked for."""
    cards: Sequence[CardFit] = ()

    @property
    def slowest(self) -> int | None:
        """Return the rank whose step takes longest."""
        return max(self.seconds, key=lambda rank: self.seconds[rank].total_s, default=None)

    @property
    def verdict(self) -> Verdict | None:
        """Return whether it fits; None where the program failed before that could be seen."""
        if self.stage.ran_out:
            return "does not fit"
        if not self.stage.ended_well or not self.stage.ranks:
            return None
        # What was recorded is the way that the program took with this much memory, so only its
        # having gone on counts, and no replay of the allocations.
        if self.stage.caught:
            return "fits"
        found = (card.verdict for card in self.cards if card.gpu == self.gpu.name)
        return next(found, None) or self._by_peaks()

    def _by_peaks(self) -> Verdict:
        """Without a sequence of allocations (the program records its own): reserved peaks."""
        beside = self.stage.beside()
        reserved = max(
            self.stage.others_bytes,
            *((r.reserved_peak_bytes or 0) + beside.get(r.number, 0) for r in self.stage.ranks),
        )
        return verdict(reserved + outside_bytes(self.stage.world_size), self.gpu.memory_bytes)

    @property
    def exit_code(self) -> int:
        """Return the exit code of the verb."""
        found = self.verdict
        return ExitCode.FAILED if found is None else EXIT_CODES[found]


def rehearse(options: argparse.Namespace, command: Sequence[str]) -> Rehearsal:
    """Run the program; once more without a limit where it runs out of memory.

    Raises:
        UserError: an unknown GPU, no torch with CUDA, no compiler, no such program.
    """
    topology = {} if options.topology is None else read_topology(options.topology)
    gpu = gpu_named(options.gpu)
    at_most = min(options.world_size or 1, GPUS_PER_NODE)
    gpus = options.gpus or ranks_per_node(command) or at_most
    alone = _alone(options, command, gpus)
    answers = dict(map(_answer, options.answer))
    interpreter(command)  # refused before there is a folder
    if options.snapshot is not None:
        check_new_file(options.snapshot)
    settings = {
        "mode": "rehearse",
        "steps": max(LEAST_STEPS, options.steps),
        "answers": answers,
        "snapshot": options.snapshot is not None,
    }
    folder = folders.new_folder(options.out, command, "rehearse")
    stage = _run(command, [gpu] * gpus, folder, settings, alone)
    if stage.ran_out_later:  # in the step for seconds: it is to be recorded, too
        settings["steps"] += 1
        folder = folders.new_folder(folder / ONE_STEP_MORE, command, "rehearse")
        stage = _run(command, [gpu] * gpus, folder, settings, alone)
    whole = stage
    if stage.ran_out:
        large = replace(gpu, memory_gib=UNLIMITED_GIB)
        inner = folders.new_folder(folder / WITHOUT_LIMIT, command, "rehearse")
        # the step that ran out, too
        settings["steps"] = max(settings["steps"], stage.steps + 1)
        unlimited = _run(command, [large] * gpus, inner, settings, alone)
        if unlimited.ranks:  # a program may refuse to start twice: its output folder is there
            whole = unlimited
    machine = partial(machine_of, gpus_per_node=gpus, topology=topology)
    seconds = {n: step_seconds(one, machine(gpu.name)) for n, one in whole.timelines.items()}
    if options.snapshot is not None:
        _save_snapshot(whole, options.snapshot)
    result = Rehearsal(gpu=gpu, gpus=gpus, stage=stage, whole=whole, seconds=seconds)
    return replace(result, cards=_cards(result, machine))


def _cards(result: Rehearsal, machine: Callable[[str], Machine]) -> list[CardFit]:
    """Return what was recorded on every GPU of the table; nothing where some of it is missing."""
    whole = result.whole
    complete = bool(whole.ranks) and len(whole.recordings) == len(whole.ranks)
    # A program that failed would have needed more, and one that caught it may need what there is.
    if not whole.ended_well or not complete or whole.caught:
        return []
    cards = on_every_gpu(whole)
    # the slowest rank sets the pace of all
    if result.slowest is None:
        return cards
    timeline = whole.timelines[result.slowest]
    return [_timed(card, timeline, machine(card.gpu)) for card in cards]


def _timed(card: CardFit, timeline: Timeline, machine: Machine) -> CardFit:
    """Return a card with the seconds of a step, unless the program cannot run on it."""
    lacks = lacking_format(gpu_named(card.gpu), timeline.formats)
    step_s = None if lacks == "fp8" else step_seconds(timeline, machine).total_s
    return replace(card, lacks=lacks, step_s=step_s)


def _save_snapshot(stage: Stage, path: Path) -> None:
    """Copy the worst rank's memory snapshot, or say that there is none.

    Raises:
        UserError: the file cannot be written.
    """
    written = stage.folder / f"allocations-rank{stage.worst.number if stage.ranks else 0}.pickle"
    if not written.exists():
        why = "the program records its own history, or ended before it used a GPU"
        print(f"shardscale: --snapshot {path} was not written: {why}", file=sys.stderr)
        return
    with refused(OSError, f"--snapshot {path} cannot be written ({WHY})"):
        shutil.copyfile(written, path)


def _run(
    command: Sequence[str],
    gpus: Sequence[Gpu],
    folder: Path,
    settings: Mapping[str, Any],
    alone: dict[str, str],
) -> Stage:
    here = {"folder": str(folder.resolve())}
    environment = folders.observed_environment({**here, **settings}) | alone
    environment |= null_gpu.environment(interpreter(command), gpus, inherited=environment)
    folders.write_status(folder, Status(state="running", phase="start"))
    # standard output is for the report alone, which may be JSON
    code = run_program(command, environment, stdout_to_stderr=True)
    return read_stage(folder, code)


def _alone(options: argparse.Namespace, command: Sequence[str], gpus: int) -> dict[str, str]:
    """Return the variables with which one rank runs without the others.

    Raises:
        UserError: a rank or a world size that cannot be.
    """
    rank, world = options.only_rank, options.world_size
    launched = ranks_per_node(command)
    if rank is None:
        if world is not None:
            raise UserError(f"--world-size {world} goes with --only-rank: say which rank runs")
        return {}
    if world is None and launched is None:
        raise UserError(f"--only-rank {rank} of how many ranks? Give --world-size N")
    if world is not None and launched is not None:
        raise UserError(
            f"--world-size {world} beside a launcher of {launched} ranks: start python itself, "
            "which gets RANK and WORLD_SIZE, or leave --world-size out"
        )
    if rank != 0:
        raise UserError(f"--only-rank {rank}: rank 0 opens every group, so no other can run alone")
    variables = {null_gpu.ALONE: "1", null_gpu.ONLY_RANK: str(rank)}
    if world is not None:
        # no launcher in the command sets these
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        with socket.create_server(("localhost", 0)) as free:  # others may rehearse meanwhile
            port = free.getsockname()[1]
        places |= {"LOCAL_WORLD_SIZE": min(world, gpus), "MASTER_PORT": port}
        variables |= {name: str(value) for name, value in places.items()}
        variables["MASTER_ADDR"] = "localhost"
    return variables


def _answer(text: str) -> tuple[str, Any]:
    match = re.fullmatch(r"(.+:\d+)=(.+)", text)
    values = {"true": True, "false": False}
    try:
        if match is not None:
            value = match[2].lower()
            return match[1], values[value] if value in values else float(value)
    except ValueError:
        pass
    raise UserError(f"--answer {text!r} is none: write FILE:LINE=VALUE, as train.py:88=3.2")
