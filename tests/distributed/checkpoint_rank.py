"""One rank of a process group that saves, or loads, one case after the other.

    torchrun --nproc 2 checkpoint_rank.py save|load|both|die TEXT FOLDER CASE...

`save` trains each case, saving on the way, into FOLDER/CASE; `load` lets each case continue from
the checkpoints that it is paired with; `both` does one after the other; `die` saves
and then loses its last rank in the middle of the next save.
"""

import os
import signal
import sys
import traceback
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_cases import AFTER, BEFORE, BY_NAME, PAIRS, Case
from rank_loop import Work, rank_of_group, release, report, steps

from launcher.checkpoint import Checkpointer
from launcher.checkpoint.rng import generator_states
from launcher.parallel.world import World, ranks_from_environment
from launcher.run.prepare import Prepared, prepare
from launcher.strategies.engine import Engine
from launcher.train import build_engine


def main() -> None:
    mode, text, folder, *names = sys.argv[1:]
    cases = [BY_NAME[name] for name in names]
    with rank_of_group() as world:
        if mode != "load":
            saves: Work = (
                ({"name": case.name, "from": None}, partial(save, case, text, Path(folder), world))
                for case in cases
            )
            report(folder, world, saves)
        if mode == "die":
            die(cases[0], text, Path(folder), world)
        elif mode != "save":
            for case in cases:
                load(case, text, folder, world)


def save(case: Case, text: str, folder: Path, world: World) -> dict[str, Any]:
    """Train, save, train on while the save runs."""
    with built(case, text, world) as (prepared, engine):
        checkpointer = Checkpointer(folder / case.name, asynchronous=case.asynchronous)
        before = figures(prepared, world, engine, range(1, BEFORE + 1))
        saved = checkpointer.save(BEFORE, engine, {"strategy": case.name})
        after = figures(prepared, world, engine, range(BEFORE + 1, BEFORE + AFTER + 1))
        saved = checkpointer.wait() or saved
        assert saved is not None
        return {
            "before": before,
            "after": after,
            "size_bytes": saved.size_bytes,
            "parameters": prepared.resolved.model.trained_parameter_count,
        }


def load(case: Case, text: str, folder: str, world: World) -> None:
    """Into a fresh engine first, then into the same engine again, whatever it has become."""
    with built(case, text, world) as (prepared, engine):

        def go_on(saver: Case) -> dict[str, Any]:
            checkpointer = Checkpointer(Path(folder) / "unused")
            loaded, passed_over = checkpointer.load(Path(folder) / saver.name, engine)
            assert passed_over == []
            # compared now: the steps that follow draw from them
            restored = generator_states() in loaded.rng[world.rank : world.rank + 1]
            first = loaded.step + 1
            return {
                "after": figures(prepared, world, engine, range(first, first + AFTER)),
                "rng_restored": restored,
            }

        savers = [saver for saver, loader in PAIRS if loader == case]
        work = (({"name": case.name, "from": s.name}, partial(go_on, s)) for s in savers)
        report(folder, world, work)


def die(case: Case, text: str, folder: Path, world: World) -> None:
    """SIGKILL on the last rank when it has written some of its second save."""
    with built(case, text, world) as (prepared, engine):
        checkpointer = Checkpointer(folder / case.name, asynchronous=True)
        figures(prepared, world, engine, range(1, 3))
        if world.rank == world.size - 1:
            setattr(zlib, "crc32", lambda _: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010
        checkpointer.save(2 * BEFORE, engine, {})
        checkpointer.wait()


class built:
    """A fresh engine, dropped at the end together with DeepSpeed's hooks and buffers."""

    def __init__(self, case: Case, text: str, world: World) -> None:
        size, local_size = ranks_from_environment()
        self.prepared = prepare(case.arguments(text), world_size=size, ranks_per_node=local_size)
        torch.manual_seed(self.prepared.resolved.config.loop.seed + world.rank)
        self.engine = build_engine(self.prepared.resolved, world)

    def __enter__(self) -> tuple[Prepared, Engine]:
        return self.prepared, self.engine

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            traceback.print_exception(error)
        release(self.engine)
        del self.engine


def figures(prepared: Prepared, world: World, engine: Engine, numbers: range) -> dict[str, Any]:
    """Losses and gradient norms of the numbered steps."""
    losses, norms = steps(prepared.resolved, prepared.corpus, world, engine, numbers)
    return {"losses": losses, "norms": norms}


if __name__ == "__main__":
    main()
