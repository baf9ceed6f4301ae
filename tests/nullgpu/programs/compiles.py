"""Compile a function that has constants, and print which are in its code."""

import re

import torch
from torch._inductor.utils import run_and_get_code


@torch.compile
def masked(x: torch.Tensor) -> torch.Tensor:
    twice = torch.full_like(x, 3.0) * 2.0
    return torch.where(x > 0, x, twice + torch.full_like(x, 1.5))


x = torch.randn(64, 64, device="cuda", requires_grad=True)
_result, codes = run_and_get_code(masked, x)
constants = set(re.findall(r"tl\.full\(\[[\d, ]*\], ([\d.]+), tl\.float32\)", "".join(codes)))
print("constants", *sorted(map(float, constants)))
model = torch.nn.Linear(64, 64, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(x).sum().backward()
    optimizer.step()
