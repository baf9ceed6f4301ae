"""The decoder itself, built from plain torch modules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.attention import kernel_for
from launcher.model.config import ModelConfig
from launcher.model.loss import automatic_chunk_rows, linear_cross_entropy
from launcher.model.recompute import checkpointed

_INITIAL_STD = 0.02

# Two rules hold below for the sake of whatever wraps the model:
# - A module reads only its own parameters. One that is stored elsewhere and fetched for the forward
#   of the module that owns it would be empty anywhere else.
# - Linears see [B*T, d], so that matmul and bias are one addmm whatever F.linear has been replaced
#   with. A replacement that adds the bias in place to a 3-D product changes the very tensor that
#   selective checkpointing kept, without a version bump, and backward would see the bias twice.


class Attention(nn.Module):
    """Causal multi-head self-attention with a fused qkv projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attend = kernel_for(config).function
        self.head_dim = config.head_dim
        self.window = config.window
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=config.attention_bias)
        self.proj = nn.Linear(config.d_model, config.d_model, bias=config.attention_bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        batch, seq_len, _ = x.shape
        # [B*T, 3 d] -> q, k, v of [B, H, T, head_dim]
        q, k, v = (
            part.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(x.flatten(0, 1)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = self.attend(q, k, v, mask=mask, window=self.window, dropout=dropout)
        y = self.proj(y.transpose(1, 2).reshape(batch * seq_len, -1))
        return self.residual_dropout(y).view_as(x)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Two projections with GELU (tanh approximation) or ReLU between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.d_model, config.ffn_dim, bias=config.mlp_bias)
        self.out = nn.Linear(config.ffn_dim, config.d_model, bias=config.mlp_bias)
        self.activation: Callable[[Tensor], Tensor] = (
            F.relu if config.activation == "relu" else partial(F.gelu, approximate="tanh")
        )
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(self.activation(self.fc(x.flatten(0, 1))))
        return self.residual_dropout(y).view_as(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-LayerNorm residual block, which recomputes itself in backward where the config says so.

    Recomputation is in here and not around it, so that compiling a block compiles both.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.ln_1 = nn.LayerNorm(config.d_model)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """x [B, T, d] and what the attention kernel prepared for T -> [B, T, d]."""
        if self.training and torch.is_grad_enabled():
            return checkpointed(self._forward, x, mask, config=self.config)
        return self._forward(x, mask)

    def _forward(self, x: Tensor, mask: Any) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class LMHead(nn.Module):
    """Output projection without bias, and the loss over it.

    The loss is computed in here, by the module that owns the weight, and not by the caller. With
    `weight=None` the head allocates its own; a tied head never does.
    """

    def __init__(self, config: ModelConfig, weight: Tensor | None) -> None:
        super().__init__()
        self.loss_chunk = config.loss_chunk
        if weight is None:
            weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
            nn.init.normal_(weight, std=_INITIAL_STD)
        self.weight = weight

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """hidden [B, T, d], targets [B, T] -> scalar mean loss, or logits [B, T, V] without."""
        if targets is None:
            return F.linear(hidden, self.weight)
        hidden = hidden.flatten(0, -2)
        chunk_rows = self.loss_chunk
        if chunk_rows is None:
            chunk_rows = automatic_chunk_rows(hidden.size(0), *self.weight.shape)
        return linear_cross_entropy(hidden, self.weight, targets.flatten(), chunk_rows=chunk_rows)


class GPT(nn.Module):
    """GPT-2-style decoder.

    A fresh instance carries torch's default values (none on the meta device); `initial_value`
    gives the ones to train from.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.prepare_mask = kernel_for(config).prepare
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.context, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.d_model)
        self.head = LMHead(config, self.wte.weight if config.tied else None)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean loss over targets that are not -100, or the logits when there are no targets.

        tokens [B, T] int64, targets [B, T] int64 -> fp32 scalar, or [B, T, V] in the compute
        dtype. Raises ValueError when T exceeds the context.
        """
        seq_len = tokens.size(1)
        if seq_len > self.config.context:
            raise ValueError(
                f"A sequence of {seq_len} tokens exceeds the model's context of "
                f"{self.config.context}; shorten it or raise the context."
            )
        positions = torch.arange(seq_len, device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        mask = self.prepare_mask(seq_len, self.config.window, tokens.device)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln_f(x), targets)  # type: ignore[no-any-return]


def initial_value(
    name: str,
    shape: Sequence[int],
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str,
) -> Tensor:
    """The whole fp32 starting value of the parameter `name` as GPT-2 initialises it.

    Weights are normal with std 0.02, the two projections into the residual stream with
    0.02 / sqrt(2 * layers); biases are 0 and LayerNorm weights 1. A pure function of seed, name,
    shape and config on one type of device, so a slice of a parameter can be cut from the same
    values anywhere and in any order.
    """
    if name.endswith(".bias"):
        return torch.zeros(*shape, device=device)
    if len(shape) == 1:
        return torch.ones(*shape, device=device)
    residual = name.endswith(("attn.proj.weight", "mlp.out.weight"))
    std = _INITIAL_STD / math.sqrt(2 * config.layers) if residual else _INITIAL_STD
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(*shape, device=device).normal_(std=std, generator=generator)
