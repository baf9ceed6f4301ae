"""One rank of a process group that trains with every optimizer under every strategy.

    torchrun --nproc 2 optimizer_rank.py TEXT FOLDER [KIND...]

Each run saves half-way into FOLDER/KIND-STRATEGY, then a fresh engine goes on from the checkpoint
of a single process, FOLDER/KIND-single.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from optimizer_cases import AFTER, BEFORE, KINDS, STRATEGIES, Kind, arguments
from rank_loop import rank_of_group, release, report, steps

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.parallel.world import World
from launcher.run.prepare import Prepared, prepare
from launcher.strategies.engine import Engine, LossScale
from launcher.train import build_engine


def main() -> None:
    text, folder, *names = sys.argv[1:]
    pairs = [(KINDS[name], strategy) for name in names for strategy in KINDS[name].strategies]
    with rank_of_group() as world:
        cases = (
            (
                {"kind": kind.name, "strategy": strategy},
                partial(run, kind, strategy, text, Path(folder), world),
            )
            for kind, strategy in pairs
        )
        report(folder, world, cases)


def run(kind: Kind, strategy: str, text: str, folder: Path, world: World) -> dict[str, Any]:
    """Losses of a whole run and of one that resumes, and what the states take."""
    prepared = prepared_run(kind, STRATEGIES[strategy], text, world)
    engine = build(prepared, world)
    losses, norms = steps(prepared.resolved, prepared.corpus, world, engine, range(1, BEFORE + 1))
    Checkpointer(folder / f"{kind.name}-{strategy}").save(BEFORE, engine, {})
    more, more_norms = steps(
        prepared.resolved, prepared.corpus, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1)
    )
    device = engine.count_states().ledger(world.device).device
    release(engine)
    engine = build(prepared, world)
    Checkpointer(folder / "unused").load(folder / f"{kind.name}-single", engine)
    resumed, _ = steps(
        prepared.resolved, prepared.corpus, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1)
    )
    release(engine)
    return {
        "begun": begun(kind, prepared, folder, world) if kind.given else None,
        "losses": losses + more,
        "norms": norms + more_norms,
        "resumed": resumed,
        "states_bytes": device.optimizer_bytes,
    }


def begun(kind: Kind, prepared: Prepared, folder: Path, world: World) -> list[float]:
    """Losses of a run with a new optimizer, from weights that one process has saved half-way."""
    engine = build(prepared, world)
    with open_stored(folder / f"{kind.name}-single") as weights:
        Checkpointer(folder / "unused").begin_with(weights, engine)
    losses, _ = steps(prepared.resolved, prepared.corpus, world, engine, range(1, AFTER + 1))
    release(engine)
    return losses


def prepared_run(kind: Kind, strategy: tuple[str, ...], text: str, world: World) -> Prepared:
    """The run of one case."""
    prepared = prepare(
        arguments(kind, strategy, text, ranks=world.size),
        world_size=world.size,
        ranks_per_node=world.size,
    )
    if kind.emulated_fp8:
        resolved = prepared.resolved
        resolved = replace(resolved, config=resolved.config.replace(precision="fp8"))
        prepared = replace(prepared, resolved=resolved)
    return prepared


def build(prepared: Prepared, world: World) -> Engine:
    """A fresh engine."""
    torch.manual_seed(prepared.resolved.config.loop.seed + world.rank)
    engine = build_engine(prepared.resolved, world)
    # Its beginning at 65536 overflows, and not in every strategy as often.
    engine.set_loss_scale(LossScale(scale=1024.0, good_steps=0))
    return engine


if __name__ == "__main__":
    main()
