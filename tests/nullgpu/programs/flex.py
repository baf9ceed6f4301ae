"""Steps of compiled FlexAttention, once with the causal mask and once without one."""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

TOKENS, HEADS, WIDTH = 8192, 2, 64


def causal(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(1, TOKENS, 3 * HEADS, WIDTH).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        every: Tensor = flex_attention(q, k, v)
        hidden: Tensor = flex_attention(q, k, v, block_mask=mask)
        return every + hidden


mask = create_block_mask(causal, None, None, TOKENS, TOKENS, device="cuda")
model = Attention().cuda().bfloat16()
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    x = torch.randn(1, TOKENS, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    compiled(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
