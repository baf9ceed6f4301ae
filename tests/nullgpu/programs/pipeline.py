"""A pipeline of two stages, one on each rank; each prints in which mode its stage runs."""

import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")
module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2))).to(device)
stage = PipelineStage(module, rank, 2, device)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.AdamW(module.parameters())
batch = torch.randn(16, 512, device=device)
for _ in range(4):
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch, losses=[])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
