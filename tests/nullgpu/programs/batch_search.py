"""Halve the batch until a step fits, as trainers do that look for one; prints what each left."""

import itertools

import torch

layers = ((torch.nn.Linear(4096, 4096), torch.nn.GELU()) for _ in range(24))
with torch.device("cuda"):
    model = torch.nn.Sequential(*itertools.chain(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(batch: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(batch, 4096, device="cuda")).mean().backward()
    optimizer.step()


batch = 131072
while True:
    try:
        step(batch)
        break
    except torch.OutOfMemoryError:
        pass
    print("left", torch.cuda.memory_allocated(), flush=True)
    batch //= 2
print("found", batch, flush=True)
