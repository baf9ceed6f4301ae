"""One rank of the process group that trains with states on a disk, case after case.

    torchrun --nproc 2 offload_rank.py TEXT FOLDER SAVER... -- [SAVER=LOADER...]

First each saver trains, saving on the way; then loaders go on from savers' checkpoints.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint_rank import built, figures
from offload_cases import AFTER, BEFORE, BY_NAME
from rank_loop import of_all_ranks, rank_of_group, report

from launcher.checkpoint import Checkpointer
from launcher.parallel.world import World


def main() -> None:
    text, folder, *names = sys.argv[1:]
    savers, pairs = names[: names.index("--")], names[names.index("--") + 1 :]
    with rank_of_group() as world:
        where = (text, Path(folder), world)
        saves = (({"name": s, "from": None}, partial(save, s, *where)) for s in savers)
        report(folder, world, saves)
        loads = (
            ({"name": loader, "from": saver}, partial(load, saver, loader, *where))
            for saver, loader in (pair.split("=") for pair in pairs)
        )
        report(folder, world, loads)


def save(name: str, text: str, folder: Path, world: World) -> dict[str, Any]:
    with built(case_of(name, folder), text, world) as (prepared, engine):
        checkpointer = Checkpointer(folder / name)
        before = figures(prepared, world, engine, range(1, BEFORE + 1))
        assert checkpointer.save(BEFORE, engine, {}) is not None
        ledger = dataclasses.asdict(engine.count_states().ledger(world.device))
        after = figures(prepared, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1))
        parameters = prepared.resolved.model.parameter_count
    return {
        "before": before,
        "after": after,
        "ledgers": of_all_ranks(ledger, world),
        "parameters": parameters,
    }


def case_of(name: str, folder: Path) -> Any:
    return dataclasses.replace(BY_NAME[name], nvme_path=str(folder / "swap"))


def load(saver: str, loader: str, text: str, folder: Path, world: World) -> dict[str, Any]:
    with built(case_of(loader, folder), text, world) as (prepared, engine):
        Checkpointer(folder / "unused").load(folder / saver, engine)
        after = figures(prepared, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1))
    return {"after": after}


if __name__ == "__main__":
    main()
