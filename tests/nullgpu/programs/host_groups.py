"""Groups of the host's memory, as Fabric's rank_zero_first and checkpoints open them, and a mesh
of two dimensions, whose groups NCCL splits from one that is bound to a device."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

if sys.argv[1] == "default":
    dist.init_process_group()
else:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("copies", "shards"))
    assert [mesh["copies"].size(), mesh["shards"].size()] == [1, dist.get_world_size()]
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
