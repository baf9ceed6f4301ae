"""Steps of a compiled FlexAttention, whose products are in functions that its kernels call."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(128, 3 * 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, 256, 6, 64).transpose(1, 2).chunk(3, dim=1)
        out: torch.Tensor = flex_attention(q, k, v)
        return out


model = Attention().cuda().bfloat16()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    compiled(torch.randn(1, 256, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
