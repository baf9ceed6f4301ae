"""One rank of the process group that trains with states on a disk, case after case.

    torchrun --nproc 2 offload_rank.py TEXT FOLDER SAVER... -- [SAVER=LOADER...]

First each saver trains, saving on the way; then loaders go on from savers' checkpoints. Rank 0
appends a JSON line for each to FOLDER/results.jsonl.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint_cases import AFTER, BEFORE
from checkpoint_rank import built, figures
from offload_cases import BY_NAME

from launcher.checkpoint import Checkpointer
from launcher.parallel.world import World, leave, start


def main() -> None:
    text, folder, *names = sys.argv[1:]
    savers, pairs = names[: names.index("--")], names[names.index("--") + 1 :]
    world = start("cpu", timeout_s=60, needs_group=True)
    with (Path(folder) / "results.jsonl").open("a", encoding="utf-8") as file:

        def report(result: dict[str, Any]) -> None:
            if world.is_main:
                file.write(json.dumps(result) + "\n")
                file.flush()

        for name in savers:
            report(save(name, text, Path(folder), world))
        for pair in pairs:
            saver, loader = pair.split("=")
            report(load(saver, loader, text, Path(folder), world))
    leave(0, together=True)


def save(name: str, text: str, folder: Path, world: World) -> dict[str, Any]:
    with built(case_of(name, folder), text, world) as (prepared, engine):
        checkpointer = Checkpointer(folder / name)
        before = figures(prepared, world, engine, range(1, BEFORE + 1))
        assert checkpointer.save(BEFORE, engine, {}) is not None
        ledger = dataclasses.asdict(engine.count_states().ledger(world.device))
        after = figures(prepared, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1))
        ledgers: list[Any] = [None] * world.size
        dist.all_gather_object(ledgers, ledger)
        parameters = prepared.resolved.model.parameter_count
    return {
        "name": name,
        "from": None,
        "before": before,
        "after": after,
        "ledgers": ledgers,
        "parameters": parameters,
    }


def case_of(name: str, folder: Path) -> Any:
    return dataclasses.replace(BY_NAME[name], nvme_path=str(folder / "swap"))


def load(saver: str, loader: str, text: str, folder: Path, world: World) -> dict[str, Any]:
    with built(case_of(loader, folder), text, world) as (prepared, engine):
        loaded = Checkpointer(folder / "unused").load(folder / saver, engine)
        assert loaded is not None
        after = figures(prepared, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1))
    return {"name": loader, "from": saver, "after": after}


if __name__ == "__main__":
    main()
