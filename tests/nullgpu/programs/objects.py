"""Every collective of Python objects, and small tensors: prints what this rank has got, as JSON."""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
found: dict[str, Any] = {}
summed = torch.tensor([rank + 1, 5], device="cuda")
dist.all_reduce(summed)
found["summed"] = summed.tolist()
broadcast = [{"rank": rank, "text": "y" * 10 * (rank + 1)}]
dist.broadcast_object_list(broadcast, src=size - 1)
found["broadcast"] = broadcast
gathered: list[Any] = [None] * size
dist.all_gather_object(gathered, "z" * (rank + 1))
found["gathered"] = gathered
to_first: list[Any] | None = [None] * size if rank == 0 else None
dist.gather_object([rank] * 3, to_first, dst=0)
found["to_first"] = to_first
scattered: list[Any] = [None]
dist.scatter_object_list(scattered, [f"to {i}" for i in range(size)] if rank == 0 else None, src=0)
found["scattered"] = scattered[0]
large: list[Any] | None = [None] * size if rank == 0 else None  # as a checkpoint's plan
dist.gather_object(bytes([rank]) * (300_000 + rank), large, dst=0)
found["large"] = [(len(one), one[-1]) for one in large or ()]
pair = dist.new_group([0, 1])
if rank < 2:
    ours = [rank * 7, "two"]
    dist.broadcast_object_list(ours, src=1, group=pair)
    found["in a pair"] = ours
dist.barrier()
sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")  # in one piece, beside those of others
dist.destroy_process_group()
