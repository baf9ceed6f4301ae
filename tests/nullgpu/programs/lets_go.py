"""Deletes a tensor after it has looked for elements; prints what is allocated then."""

import torch
from torch import nn


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    large = torch.zeros(256, 1024, 1024, device="cuda")
    rows = (large[0, 0] > 0).nonzero()
    del large
    print("allocated", torch.cuda.memory_allocated(), len(rows))
    model(torch.randn(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    step(model, optimizer)
