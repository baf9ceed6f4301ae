"""One rank of a process group that trains a pruned model, case after case.

    torchrun --nproc 2 pruned_rank.py TEXT PRUNED FOLDER CASE...

Variants save on the way; when all have, each goes on from another one's checkpoint.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pruned_cases import BY_NAME, FEW_STEPS, SAVED, Case, source_of
from rank_loop import of_all_ranks, rank_of_group, release, report, steps

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.pretrained.stored import open_stored
from launcher.forecast.predict import predict
from launcher.parallel.world import World
from launcher.run.prepare import Prepared, prepare
from launcher.strategies.engine import Engine
from launcher.strategies.flat_shards import MASK, PARAM
from launcher.train import build_engine

LINES = ("params", "master", "masks", "grads", "optimizer", "buffers")


def main() -> None:
    text, pruned, folder, *names = sys.argv[1:]
    with rank_of_group() as world:
        variants = [name for name in names if BY_NAME[name].exact and world.size > 1]
        for act, acting in ((begin, names), (resume, variants)):
            work = (
                (
                    {"name": name, "act": act.__name__},
                    partial(act, BY_NAME[name], text, pruned, Path(folder), world),
                )
                for name in acting
            )
            report(folder, world, work)


def begin(case: Case, text: str, pruned: str, folder: Path, world: World) -> dict[str, Any]:
    """Train on from the pruned weights."""
    prepared, engine = built(case, text, pruned, world)
    checkpointer = Checkpointer(folder / case.name, asynchronous=case.name.startswith("zero"))
    with open_stored(Path(pruned)) as weights:
        checkpointer.begin_with(weights, engine)
    losses, _ = steps(prepared.resolved, prepared.corpus, world, engine, range(1, SAVED + 1))
    if case.exact and world.size > 1:
        checkpointer.save(SAVED, engine, {})
        checkpointer.wait()
    rest = range(SAVED + 1, prepared.resolved.steps + 1)
    more, _ = steps(prepared.resolved, prepared.corpus, world, engine, rest) if rest else ([], [])
    found = {"losses": losses + more, **looked_at(engine, prepared, pruned, world)}
    release(engine)
    return found


def resume(case: Case, text: str, pruned: str, folder: Path, world: World) -> dict[str, Any]:
    """Go on from another variant's checkpoint, in an engine whose masks keep everything."""
    prepared, engine = built(case, text, pruned, world)
    Checkpointer(folder / "unused").load(folder / source_of(case).name, engine)
    numbers = range(SAVED + 1, SAVED + FEW_STEPS + 1)
    losses, _ = steps(prepared.resolved, prepared.corpus, world, engine, numbers)
    found = {"losses": losses, **looked_at(engine, prepared, pruned, world)}
    release(engine)
    return found


def built(case: Case, text: str, pruned: str, world: World) -> tuple[Prepared, Engine]:
    arguments = case.arguments(text, pruned, world.size)
    prepared = prepare(arguments, world_size=world.size, ranks_per_node=world.size)
    torch.manual_seed(prepared.resolved.config.loop.seed + world.rank)
    return prepared, build_engine(prepared.resolved, world)


def looked_at(engine: Engine, prepared: Prepared, pruned: str, world: World) -> dict[str, Any]:
    """On each rank: what is not zero among what was pruned and what was not, bits that are not
    those of the pruned model, and the ledger beside the prediction."""
    stays = dict(masks_in(Path(pruned)))
    counts = dict.fromkeys(("pruned_elements", "pruned_nonzero", "kept_nonzero", "wrong_bits"), 0)
    for shard in engine.training_state().loaded():
        stay = stays.get(shard.name)
        if stay is not None and shard.kind == PARAM:
            own, values = torch.from_numpy(stay[shard.start : shard.stop]), shard.data.cpu()
            counts["pruned_elements"] += int((~own).sum())
            counts["pruned_nonzero"] += int(values[~own].count_nonzero())
            counts["kept_nonzero"] += int(values[own].count_nonzero())
        elif shard.kind == MASK:
            assert stay is not None
            packed = np.packbits(stay, bitorder="little")[shard.start : shard.stop]
            counts["wrong_bits"] += int((packed != shard.data.cpu().numpy()).sum())
    held = engine.count_states().ledger(world.device).device
    predicted = predict(prepared.resolved, rank=world.rank).held.device
    mine = {
        **counts,
        "held": [dataclasses.asdict(held)[f"{line}_bytes"] for line in LINES],
        "predicted": [dataclasses.asdict(predicted)[f"{line}_bytes"] for line in LINES],
    }
    return {"ranks": of_all_ranks(mine, world)}


def masks_in(pruned: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Name -> bool of each flattened weight, from the file itself."""
    folder = pruned / "checkpoints" / "step-00000000"
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))["content"]
    for file in index["files"]:
        for piece in file["ranges"]:
            if piece["kind"] == "mask":
                place: Any = {"offset": piece["offset_bytes"], "count": piece["numel"]}
                packed = np.fromfile(folder / file["name"], "u1", **place)
                elements = int(np.prod(index["shapes"][piece["name"]]))
                bits = np.unpackbits(packed, count=elements, bitorder="little")
                yield piece["name"], bits.astype(bool)


if __name__ == "__main__":
    main()
