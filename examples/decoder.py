"""A decoder of your own, which `--decoder examples.decoder:build` trains under any strategy."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    """Fields that --model FILE.json and flags of the same names set."""

    vocab_size: int = 4096
    context: int = 128
    layers: int = 4
    heads: int = 4
    d_model: int = 192


class Block(nn.Module):
    """Attention and a squared-ReLU MLP side by side, with joint projections."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.d, self.heads = config.d_model, config.heads
        self.norm = nn.RMSNorm(self.d)
        self.into, self.out = nn.Linear(self.d, 7 * self.d), nn.Linear(5 * self.d, self.d)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, d_model] -> the same."""
        qkv, wide = self.into(self.norm(x)).split((3 * self.d, 4 * self.d), dim=-1)
        q, k, v = qkv.unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([mixed, F.relu(wide).square()], dim=-1))


class Decoder(nn.Module):
    """Embeddings, one list of blocks, and a head whose output is returned."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, tokens] int64 -> logits [batch, tokens, vocab_size]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: Config) -> nn.Module:
    """Build it: on the meta device, under fake tensors, or sharded."""
    return Decoder(config)
