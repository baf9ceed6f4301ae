"""Groups of the host's memory, as Fabric's rank_zero_first and checkpoints open them."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

if sys.argv[1] == "default":
    dist.init_process_group()
else:
    dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
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
