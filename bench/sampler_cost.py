"""What the sampler and the ledger cost: blocks of steps with them and without, in turn, in one run.

    python bench/sampler_cost.py [--pairs 24] [--block 12] [--device cpu] [--output FILE]

Each pair of neighbouring blocks gives one ratio of tokens/s, on over off; the median counts.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from overhead import summarize

from launcher.measure.nvml import resolve_uuid
from launcher.measure.sampler import Sampler
from launcher.parallel.world import leave, start
from launcher.run.prepare import prepare
from launcher.run.session import Session
from launcher.train import train


class BlockSession(Session):
    """A session whose sampler, and whose ledger on a GPU, run in every second block only."""

    block = 12
    seconds: list[float]

    def steps(self) -> Iterator[int]:
        self.sampler.stop()
        self.seconds = []
        ledger_steps = iter(super().steps())
        done = False
        while not done:
            sampler = self._start() if len(self.seconds) % 2 else None
            began = time.perf_counter()
            for _ in range(self.block):
                step = next(ledger_steps, None)
                if step is None:
                    done = True
                    break
                yield step
            if not done:
                self.seconds.append(time.perf_counter() - began)
            if sampler is not None:
                sampler.stop()

    def _start(self) -> Sampler:
        sampler = Sampler(uuid=resolve_uuid(self._world.device), emit=self.journal.from_sampler)
        sampler.start()
        return sampler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--block", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    steps = options.block * 2 * (options.pairs + 1)  # the first pair warms up
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text(Path(argparse.__file__).read_text() * 2)
        argv = ["--steps", str(steps), "--data", str(corpus), "--device", options.device]
        argv += ["--out", f"{folder}/run"]
        prepared = prepare(argv, world_size=1, ranks_per_node=1)
        world = start(options.device, timeout_s=60, needs_group=False)
        BlockSession.block = options.block
        with BlockSession(prepared, world) as session:
            train(prepared, world, session)
        off, on = session.seconds[2::2], session.seconds[3::2]
        ratios = [without / with_it for without, with_it in zip(off, on, strict=False)]
    result = summarize(ratios)
    print(f"RESULT tokens/s with the sampler / without: {result}", flush=True)
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    leave(0, together=True)


if __name__ == "__main__":
    main()
