"""A small model on the CPU before the one that is trained on the GPU."""

import torch
from torch import nn

small = nn.Linear(4, 4)
small(torch.randn(2, 4)).sum().backward()
model = nn.Sequential(nn.Linear(2048, 2048)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(6):
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
