"""Groups of the host's memory, as Fabric's rank_zero_first and checkpoints open them, and groups
that NCCL splits from one which is bound to a device, as a mesh of two dimensions does."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group(None if sys.argv[1] == "default" else "nccl", device_id=device)
alone = dist.split_group(split_ranks=[[rank] for rank in range(dist.get_world_size())])
assert dist.get_world_size(alone) == 1
torch.cuda.set_device(device)
group = dist.new_group(backend="gloo")
group.monitored_barrier()
dist.monitored_barrier(group)
total = torch.ones(3)
dist.all_reduce(total, group=group)
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, "here", group=group)
dist.destroy_process_group(group)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters())
for _ in range(9):
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    print("everybody", everybody, flush=True)
