"""One rank of a gloo run: trains with DDP while a sampler watches this rank's own GPU."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from launcher.measure.sampler import Sampler
from launcher.util.json_file import Record

PATIENCE_S = 60.0  # only a broken sampler makes a run last that long


def main(out: Path, uuids: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    records: list[Record] = []
    sampler = Sampler(
        uuid=uuids[rank],
        emit=records.append,
        memory_every_s=0.01,
        rest_every_s=0.03,
        line_every_s=0.01,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    inputs = torch.randn(64, 4) + rank
    losses = []
    sampler.start()
    deadline = time.monotonic() + PATIENCE_S
    waiting = torch.ones(())
    while waiting.item():
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.01 * parameter.grad)
        losses.append(loss.item())
        ended = any(getattr(record, "name", "") == "gpu_lost" for record in records)
        enough = ended or len(records) >= 20 or time.monotonic() > deadline
        waiting = torch.tensor(0.0 if enough else 1.0)
        dist.all_reduce(waiting)
    result = {
        "summary": dataclasses.asdict(sampler.stop()),
        "records": [record.as_dict() for record in records],
        "losses": losses,
    }
    (out / f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # gloo may abort in interpreter teardown; see launcher/parallel/world.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","))
