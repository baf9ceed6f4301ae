"""Steps of a model on two GPUs of one process, with most of it on the second."""

import torch
from torch import nn

first, second = nn.Linear(1024, 1024).to("cuda:0"), nn.Linear(1024, 8192).to("cuda:1")
optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
for _ in range(6):
    x = torch.randn(4096, 1024, device="cuda:0")
    second(first(x).to("cuda:1")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats(1)
