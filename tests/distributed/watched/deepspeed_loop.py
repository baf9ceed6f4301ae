"""A program of somebody else: bare DeepSpeed, ZeRO-2."""

import os

import deepspeed
import deepspeed.ops
import torch
from torch import nn

# An optional shared-memory all-reduce, which DeepSpeed would compile for a minute of CPU time.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
for step in range(4):
    inputs, targets = torch.randn(8, 32), torch.randint(8, (8,))
    loss = nn.functional.cross_entropy(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    if rank == 0:
        print("loss", step, repr(loss.item()), flush=True)
