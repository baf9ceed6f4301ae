"""What one training step launches: operators and kernels by device time, from torch's profiler.

    python bench/gpu/operators.py FOLDER TRAIN_FLAG...

Made-up tokens; three steps before the one that counts. Writes FOLDER/operators.txt, the table, and
FOLDER/operators.json: name, calls, microseconds on the device and on the host of each.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # nothing is installed there

from launcher.config.arguments import parse_run_config  # noqa: E402
from launcher.config.resolve import resolve  # noqa: E402
from launcher.data import Sequences  # noqa: E402
from launcher.optim.choice import learning_rate  # noqa: E402
from launcher.parallel.world import leave, start  # noqa: E402
from launcher.strategies import strategy_of  # noqa: E402
from launcher.strategies.engine import train_step  # noqa: E402
from launcher.train import build_engine, to_device  # noqa: E402

STEPS = 4
ROWS = 80


def main() -> None:
    folder, flags = Path(sys.argv[1]), sys.argv[2:]
    config = parse_run_config([*flags, "--steps", str(STEPS)])
    resolved = resolve(config, world_size=1, device_type="cuda")
    config = resolved.config
    world = start("cuda", timeout_s=300, needs_group=strategy_of(config).needs_group)
    engine = build_engine(resolved, world)
    generator = np.random.default_rng(0)

    def step(number: int) -> None:
        shape = (resolved.global_batch, resolved.seq_len + 1)
        tokens = generator.integers(0, resolved.model.vocab_size, shape, dtype=np.int64)
        batches = to_device(Sequences(tokens), config.data.micro_batch, world.device)
        lr = learning_rate(number, config.optim, STEPS)
        train_step(engine, batches, lr, phase=lambda _: nullcontext())

    for number in range(1, STEPS):
        step(number)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step(STEPS)
        torch.cuda.synchronize()
    averages = profile.key_averages()
    table = averages.table(sort_by="self_cuda_time_total", row_limit=ROWS, max_name_column_width=90)
    (folder / "operators.txt").write_text(table)
    rows = [
        {
            "name": row.key,
            "calls": row.count,
            "device_us": row.self_device_time_total,
            "host_us": row.self_cpu_time_total,
        }
        for row in averages
    ]
    (folder / "operators.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(table)
    leave(0, together=False)


if __name__ == "__main__":
    main()
