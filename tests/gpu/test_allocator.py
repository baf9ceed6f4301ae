"""The allocator's model against torch's own statistics. Skipped without a GPU."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from launcher.forecast.allocator import replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

MIB = 2**20

# In a process of its own: expandable segments are chosen when the allocator starts.
ON_THE_GPU = """
import json, sys, torch

case = json.load(sys.stdin)
if case["limit_bytes"]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((case["limit_bytes"] + 512) / total)
held, failed = {}, None
for storage, size in case["events"]:
    if size == 0:
        del held[storage]
        continue
    try:
        held[storage] = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        failed = storage
        break
stats = torch.cuda.memory_stats()
names = ("allocated_bytes.all.current", "reserved_bytes.all.current",
         "allocated_bytes.all.peak", "reserved_bytes.all.peak")
print(json.dumps([*(stats[name] for name in names), failed]))
"""


def random_events(seed: int, *, most_bytes: int) -> list[tuple[int, int]]:
    """Allocations and frees of sizes around every rule, with at most `most_bytes` alive."""
    rng = random.Random(seed)
    sizes = (
        lambda: rng.randint(1, 4096),
        lambda: rng.randint(1, 2 * MIB),
        lambda: rng.randint(MIB, 12 * MIB),
        lambda: rng.randint(9 * MIB, 60 * MIB),
        lambda: rng.choice((MIB, 2 * MIB, 10 * MIB, 20 * MIB)) + rng.choice((-512, 0, 1)),
    )
    events: list[tuple[int, int]] = []
    alive: dict[int, int] = {}
    for number in range(3000):
        size = rng.choice(sizes)()
        while alive and (sum(alive.values()) + size > most_bytes or rng.random() < 0.3):
            freed = rng.choice(list(alive))
            del alive[freed]
            events.append((freed, 0))
        alive[number] = size
        events.append((number, size))
    return events


@pytest.mark.parametrize("limit_bytes", [None, 1600 * MIB], ids=["no limit", "limit"])
@pytest.mark.parametrize("expandable", [False, True], ids=["segments", "expandable"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_replay_holds_what_the_gpu_holds(
    seed: int, expandable: bool, limit_bytes: int | None
) -> None:
    events = random_events(seed, most_bytes=1024 * MIB)
    case = {"events": events, "limit_bytes": limit_bytes}
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_GPU],
        input=json.dumps(case),
        env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    allocated, reserved, peak_allocated, peak_reserved, failed = json.loads(done.stdout)
    use = replay(events, limit_bytes=limit_bytes, expandable_segments=expandable)
    assert (use.out_of_memory, failed) == (False, None)
    # The driver hands out addresses in another order, so that ties of best fit go elsewhere.
    assert use.peak_allocated_bytes == pytest.approx(peak_allocated, rel=0.01)
    assert use.peak_reserved_bytes == pytest.approx(peak_reserved, rel=0.03)
    assert use.allocated_bytes == pytest.approx(allocated, rel=0.01)
    assert use.reserved_bytes == pytest.approx(reserved, rel=0.03)
