"""A decoder of your own: `--decoder examples.decoder:build` trains it under any strategy.

torchrun --nproc 2 -m launcher.train --decoder examples.decoder:build --layers 2 --zero 3
"""

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
    """Attention with linear position biases (ALiBi), then a gated MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, self.heads = config.d_model, config.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 8 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[B, T, d] and attention's bias [heads, T, T] -> [B, T, d]."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(x.dtype))
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        gate, value = self.up(self.norm_2(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(F.silu(gate) * value)
        return out


class Decoder(nn.Module):
    """Embedding, blocks, head: the last Linear's output is returned."""

    slopes: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        slopes = 2.0 ** (-8.0 * torch.arange(1, config.heads + 1) / config.heads)
        self.register_buffer("slopes", slopes.view(-1, 1, 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] int64 -> logits [B, T, vocabulary]."""
        position = torch.arange(tokens.size(1), device=tokens.device)
        distance = position[None, :] - position[:, None]
        bias = (self.slopes * distance).masked_fill(distance > 0, float("-inf"))
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, bias)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def init_weights(self, module: nn.Module) -> None:
        """Draw what one module owns; without this, its reset_parameters() does."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


def build(config: Config) -> nn.Module:
    """Build it: on the meta device, under fake tensors, or sharded."""
    return Decoder(config)
