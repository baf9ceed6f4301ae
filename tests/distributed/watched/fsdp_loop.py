"""A program of somebody else: a plain loop with FSDP2, which leaves by sys.exit(5)."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))] * 1)
model.append(nn.Linear(32, 8))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(dist.get_rank())
for step in range(4):
    inputs, targets = torch.randn(8, 32), torch.randint(8, (8,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("loss", step, repr(loss.item()), flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(5 if "fail" in sys.argv else 0)
