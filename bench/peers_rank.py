"""One rank of bench/peers.py: memory of each side alone, then all of them step by step in turn.

torchrun --nproc N bench/peers_rank.py TASK_JSON
"""

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bare_loops import Setting, Step
from overhead import setting, summarize
from peer_loops import PEERS, Peer, peer_step
from torch import Tensor

from launcher.data import GlobalBatches
from launcher.measure.memory import MemoryMeter, TracedMemory, memory_meter
from launcher.parallel.world import World, leave, start
from launcher.run.prepare import Prepared, prepare
from launcher.run.session import Session
from launcher.train import to_device, train

WARMUP_STEPS = 5
MEMORY_STEPS = 3


class AlternatingSession(Session):
    """A session in which each peer does a step before each of the launcher's, on as large a batch.

    Everything between two of the launcher's steps is charged to the launcher.
    """

    def __init__(self, prepared: Prepared, world: World, peers: Mapping[str, Step]) -> None:
        super().__init__(prepared, world)
        self.device = world.device
        self.peers = peers
        self.batches = Batches(prepared, world)
        self.launcher_s: list[float] = []
        self.peers_s: dict[str, list[float]] = {name: [] for name in peers}

    def steps(self) -> Iterator[int]:
        for number in super().steps():
            for name, step in self.peers.items():
                began = self._now_s()
                step(*self.batches[number])
                self.peers_s[name].append(self._now_s() - began)
            began = self._now_s()
            yield number
            self.launcher_s.append(self._now_s() - began)

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class Batches:
    """Real batches of the launcher's size, in another order."""

    def __init__(self, prepared: Prepared, world: World) -> None:
        resolved = prepared.resolved
        self.world = world
        self.micro_batch = resolved.config.data.micro_batch
        self.batches = GlobalBatches(
            prepared.corpus.train,
            seq_len=resolved.seq_len,
            global_batch=resolved.global_batch,
            seed=1,
        )

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.batches.rank_slice(step, rank=self.world.rank, world_size=self.world.size)
        tokens, targets = to_device(rows, self.micro_batch, self.world.device)[0]
        return tokens, targets


def main() -> None:
    task = json.loads(sys.argv[1])
    # Alone and without a group, as a user would be: in a group of one, accelerate wraps in DDP.
    world = start(task["device"], timeout_s=600, needs_group=task["case"] != "single")
    folder = Path(task["folder"])

    def prepared(name: str, *flags: str) -> Prepared:
        argv = [*task["train"], *flags, "--out", str(folder / name)]
        return prepare(argv, world_size=world.size, ranks_per_node=world.local_size)

    # The memory of each alone. On a GPU the allocator knows it without tracing.
    memory = ["--steps", str(MEMORY_STEPS)]
    memory += ["--memory-trace"] if task["device"] == "cpu" else []
    launcher_bytes = {
        name: worst(launcher_peak_bytes(prepared(f"memory-{name}", *extra, *memory), world), world)
        for name, extra in task["flags"].items()
    }
    plain = prepared("peers", *memory)
    same = dataclasses.replace(
        setting(plain), device_type=task["device"], compile=task["peers_compile"]
    )
    peers_bytes = {
        name: worst(peer_peak_bytes(PEERS[name], same, plain, world), world)
        for name in task["peers"]
    }
    # The time of all in turn.
    peers = {name: peer_step(PEERS[name], same) for name in task["peers"]}
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for name, extra in task["flags"].items():
        timed = prepared(f"timed-{name}", *extra, "--steps", str(task["steps"]))
        with AlternatingSession(timed, world, peers) as session:
            train(timed, world, session)
        found[name] = summary(session, timed, launcher_bytes[name], peers_bytes)
    if world.is_main:
        (folder / "found.json").write_text(json.dumps(found))
    leave(0, together=True)


def launcher_peak_bytes(prepared: Prepared, world: World) -> int:
    before = held_bytes(world)
    with Session(prepared, world) as session:
        train(prepared, world, session)
    return steady_peak(session.memory) - before


def peer_peak_bytes(peer: Peer, same: Setting, prepared: Prepared, world: World) -> int:
    before = held_bytes(world)
    memory = memory_meter(world.device, trace=True)
    batches = Batches(prepared, world)
    with memory.trace if isinstance(memory, TracedMemory) else nullcontext():
        with memory.phase("build"):
            step = peer_step(peer, same)
        for number in range(1, MEMORY_STEPS + 1):
            memory.period("first_step" if number == 1 else "steady")
            with memory.phase("step"):
                step(*batches[number])
    return steady_peak(memory) - before


def held_bytes(world: World) -> int:
    """Return the bytes that the side before has left on a GPU; on a CPU none, where tracing counts
    only what is born under it."""
    gc.collect()
    return torch.cuda.memory_allocated() if world.device.type == "cuda" else 0


def steady_peak(memory: MemoryMeter) -> int:
    return max(size for (period, _), size in memory.peaks.items() if period == "steady")


def worst(peak_bytes: int, world: World) -> int:
    peaks = [peak_bytes] * world.size
    if dist.is_initialized():
        dist.all_gather_object(peaks, peak_bytes)
    return max(peaks)


def summary(
    session: AlternatingSession, prepared: Prepared, launcher_bytes: int, peers: Mapping[str, int]
) -> dict[str, Any]:
    tokens = prepared.resolved.global_batch * prepared.resolved.seq_len
    launcher_s = session.launcher_s[WARMUP_STEPS:]

    def per_s(durations: list[float]) -> float:
        return round(tokens / statistics.median(durations), 1)

    found: dict[str, Any] = {
        "launcher": {"tokens_per_s": per_s(launcher_s), "peak_bytes": launcher_bytes},
    }
    for name, peak_bytes in peers.items():
        durations = session.peers_s[name][WARMUP_STEPS:]
        ratios = [theirs / ours for theirs, ours in zip(durations, launcher_s, strict=True)]
        found[name] = {
            "tokens_per_s": per_s(durations),
            "peak_bytes": peak_bytes,
            "tokens_per_s_ratio": summarize(ratios),
        }
    return found


if __name__ == "__main__":
    main()
