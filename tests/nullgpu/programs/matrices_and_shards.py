"""Tensor parallelism over all ranks beside FSDP2: every rank reads the same 2 x 32 tokens."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (1, dist.get_world_size()), mesh_dim_names=("data", "tensor"))
model = torch.nn.Sequential(
    torch.nn.Embedding(100, 64), torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)
).cuda()
parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.randint(0, 100, (2, 32), device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
