"""FSDP2's recipe of two ranks: a model without memory, sharded, then drawn where it lies."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
with torch.device("meta"):
    layers = [torch.nn.Linear(512, 512) for _ in range(2)]
model = torch.nn.Sequential(*layers)
for layer in layers:
    fully_shard(layer)
fully_shard(model)
model.to_empty(device="cuda")
for layer in layers:
    layer.reset_parameters()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.randn(8, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
