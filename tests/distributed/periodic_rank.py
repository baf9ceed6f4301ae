"""One rank of a process group that runs schedules of periodic actions, one after the other.

    torchrun --nproc 2 periodic_rank.py TEXT FOLDER VARIANT...

Each run is a session of its own in FOLDER/VARIANT/SCHEDULE. One more engine of the variant trains
without any of it, then goes on from every checkpoint that the sessions have left.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from periodic_cases import (
    BY_NAME,
    FIELDS,
    PERIODS,
    PREEMPTED,
    STEPS,
    STOP_SIGNAL_AT,
    UNDISTURBED,
    Variant,
)
from rank_loop import rank_of_group, release, report, steps

from launcher.checkpoint import Checkpointer, CheckpointFolder
from launcher.measure.records import EvalRecord
from launcher.parallel.world import World
from launcher.run.prepare import prepare
from launcher.run.session import Session
from launcher.train import build_engine, take_steps


def main() -> None:
    text, folder, *names = sys.argv[1:]
    with rank_of_group(timeout_s=300) as world:
        cases = (
            ({"variant": n}, partial(run, BY_NAME[n], text, Path(folder) / n, world)) for n in names
        )
        report(folder, world, cases)


def run(variant: Variant, text: str, folder: Path, world: World) -> dict[str, Any]:
    """Losses and gradient norms of the undisturbed run, and from each checkpoint on."""
    prepared = prepare(variant.arguments(text), world_size=world.size, ranks_per_node=world.size)
    resolved, corpus = prepared.resolved, prepared.corpus
    for schedule in variant.schedules:
        kind = Interrupted if schedule == PREEMPTED else Kept
        changes = {FIELDS[act]: every for act, every in PERIODS[schedule].items()}
        if schedule == PREEMPTED:
            changes["keep"] = 1
        else:
            changes["stop_after"] = STEPS
        config = resolved.config.replace(out=folder / schedule, **changes)
        one = replace(prepared, resolved=replace(resolved, config=config))
        with kind(one, world) as session:
            take_steps(one, world, session)
        release(session.engine)
    engine = build_engine(resolved, world)
    torch.manual_seed(resolved.config.loop.seed + world.rank)
    undisturbed = steps(resolved, corpus, world, engine, range(1, UNDISTURBED + 1))
    resumed = {}
    for schedule in variant.schedules:
        for path in CheckpointFolder(folder / schedule / "checkpoints").list():
            checkpoint, _ = Checkpointer(folder / "unused").load(path, engine)
            if (scale := checkpoint.extra["loss_scale"]) is not None:
                engine.set_loss_scale(scale)
            numbers = range(checkpoint.step + 1, min(checkpoint.step + 2, UNDISTURBED) + 1)
            resumed[f"{schedule}/{path.name}"] = steps(resolved, corpus, world, engine, numbers)
    release(engine)
    return {"undisturbed": undisturbed, "resumed": resumed}


class Kept(Session):
    """Lets the engine be taken apart at the end."""

    @property
    def engine(self) -> object:
        return self._engine


class Interrupted(Kept):
    """Asked by a signal to stop, right after an evaluation."""

    def evaluated(self, record: EvalRecord) -> None:
        super().evaluated(record)
        if record.step == STOP_SIGNAL_AT:
            self.agreement.stop_requested = True


if __name__ == "__main__":
    main()
