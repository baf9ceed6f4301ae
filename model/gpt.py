"""The decoder itself, built from plain torch modules."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model import fused
from launcher.model.attention import kernel_for
from launcher.model.casts import cast_together
from launcher.model.config import ModelConfig
from launcher.model.layers import (
    ACTIVATIONS,
    Rotation,
    compared,
    head_norm,
    keeping,
    norm,
    norm_beside,
    rotation,
)
from launcher.model.linears import (
    PACKED,
    freeze,
    inner_of,
    is_adapter,
    linear,
    quantize,
    weight_of,
)
from launcher.model.loss import compute_dtype, linear_cross_entropy
from launcher.model.recompute import recomputing

_INITIAL_STD = 0.02

# Strategies wrap these modules, so two rules hold below:
# - A module reads only its own parameters. One that is stored elsewhere and fetched for the forward
#   of the module that owns it would be empty anywhere else.
# - Linears see [B*T, d], so that matmul and bias are one addmm whatever F.linear has been replaced
#   with. A replacement that adds the bias in place to a 3-D product changes the very tensor that
#   selective checkpointing kept, without a version bump, and backward would see the bias twice.


class SharedInputs:
    """Inputs that all blocks share beside [B, T, d], made once per forward.

    No tuple and no dataclass: FSDP looks for tensors in those, and would cast the rotation to the
    type of the parameters, for each block anew.

    Args:
        shape: (B, T).
        mask: prepared for T by the attention kernel.
        rotation: None where positions are learned.
    """

    def __init__(self, shape: torch.Size, mask: Any, rotation: Rotation | None) -> None:
        self.shape, self.mask, self.rotation = shape, mask, rotation


class Attention(nn.Module):
    """Causal self-attention of grouped queries with a fused qkv projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attend = kernel_for(config).function
        self.head_size = config.head_size
        self.window = config.window
        self.dropout = config.dropout
        self.sizes = list(config.qkv_sizes)
        self.qkv = linear(config, "qkv", config.d_model, *self.sizes, bias=config.has_bias("qkv"))
        self.normed = config.qk_norm
        self.q_norm = head_norm(config)
        self.k_norm = head_norm(config)
        inner, bias = config.attention_dim, config.has_bias("proj")
        self.proj = linear(config, "proj", inner, config.d_model, bias=bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sequences: SharedInputs) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        q, k, v = (part.transpose(1, 2) for part in self.heads(x, sequences))
        dropout = self.dropout if self.training else 0.0
        y = self.attend(q, k, v, mask=sequences.mask, window=self.window, dropout=dropout)
        return self.output(y).view_as(x)

    def heads(self, x: Tensor, sequences: SharedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, d] -> q [B, T, H, head_dim], and k and v with as many heads as they have."""
        qkv, rotation = self.qkv(x.flatten(0, 1)), sequences.rotation
        if rotation is not None and not self.normed and fused.takes(qkv):  # one launch for q and k
            turned = sum(self.sizes[:2]) // self.head_size
            qkv, rotation = fused.Rotate.apply(qkv, *rotation, turned), None
        q, k, v = (
            part.view(*sequences.shape, -1, self.head_size)
            for part in qkv.split(self.sizes, dim=-1)
        )
        return compared(q, self.q_norm, rotation), compared(k, self.k_norm, rotation), v

    def output(self, y: Tensor) -> Tensor:
        """Output projection of the heads, [B, H, T, head_dim] -> [B*T, d]."""
        y = self.proj(y.transpose(1, 2).reshape(y.size(0) * y.size(2), -1))
        y = self.residual_dropout(y)
        return y


class MLP(nn.Module):
    """Two projections with GELU (tanh approximation) or ReLU between; SwiGLU (arXiv:2002.05202) has
    its gate and what it multiplies in one first projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.has_bias("mlp")
        self.fc = linear(config, "mlp", config.d_model, *config.up_sizes, bias=bias)
        self.out = linear(config, "mlp", config.ffn_dim, config.d_model, bias=bias)
        self.activation = ACTIVATIONS[config.activation]
        self.keeping = keeping(config)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x.flatten(0, 1))
        active = self.activation(hidden)
        with self.keeping(active, partial(self.activation, hidden)):
            y: Tensor = self.out(active)
        y = self.residual_dropout(y)
        return y.view_as(x)


class Block(nn.Module):
    """Pre-norm residual block, which recomputes itself in backward where the config says so.

    Recomputation is in here and not around it, so that compiling a block compiles both.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.ln_1 = norm(config)
        self.attn = Attention(config)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, sequences: SharedInputs) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        training = self.training and torch.is_grad_enabled()
        attn, mlp = self.attn, self.mlp
        cast = (self.ln_1, attn.qkv, attn.proj, self.ln_2, mlp.fc, mlp.out)
        return recomputing(
            *(self._attend, self._transform, x, sequences, self.config, training),
            casting=partial(cast_together, cast),
        )

    def _attend(self, x: Tensor, sequences: SharedInputs) -> Tensor:
        x, normed = norm_beside(self.ln_1, x)
        return x.add(self.attn(normed, sequences))

    def _transform(self, x: Tensor) -> Tensor:
        x, normed = norm_beside(self.ln_2, x)
        return x.add(self.mlp(normed))


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
        rows, targets = hidden.flatten(0, -2), targets.flatten()
        return linear_cross_entropy(rows, self.weight, targets, chunk_rows=self.loss_chunk)


class GPT(nn.Module):
    """The decoder: GPT-2's, Llama's, Qwen's or Mistral's, as its config says.

    A fresh instance carries torch's default values (none on the meta device); `initial_value`
    gives the ones to train from.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.prepare_mask = kernel_for(config).prepare
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        learned = config.position == "learned"
        self.wpe = nn.Embedding(config.context, config.d_model) if learned else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(own) for own in config.blocks)
        self.ln_f = norm(config)
        self.head = LMHead(config, self.wte.weight if config.tied else None)
        if config.lora is not None:
            freeze(self)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Mean loss over targets that are not -100, or the logits when there are no targets.

        tokens [B, T] int64, targets [B, T] int64 -> fp32 scalar, or [B, T, V] in the compute
        dtype. With starts [B, T] int64, the index in its sequence of the first token of each
        token's document, attention stays inside documents, and learned positions count from there
        (to rotary ones only differences matter). Raises ValueError when T exceeds the context.
        """
        seq_len = tokens.size(1)
        if seq_len > self.config.context:
            raise ValueError(
                f"A sequence of {seq_len} tokens exceeds the model's context of "
                f"{self.config.context}; shorten it or raise the context."
            )
        positions = torch.arange(seq_len, device=tokens.device)
        x = self.embed(tokens, positions if starts is None else positions - starts)
        window, dtype = self.config.window, compute_dtype(x)
        mask = self.prepare_mask(seq_len, window, tokens.device, starts, dtype)
        sequences = SharedInputs(tokens.shape, mask, self.rotation(positions))
        for block in self.blocks:
            x = block(x, sequences)
        loss_or_logits: Tensor = self.head(self.ln_f(x), targets)
        return loss_or_logits

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, T] at positions [T] or [B, T], all int64 -> [B, T, d]."""
        x: Tensor = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        x = self.drop(x)
        return x.to(compute_dtype(x))  # which the residual stream keeps through all blocks

    def logits(self, x: Tensor) -> Tensor:
        """Output of the last block [..., d] -> logits [..., V]."""
        logits: Tensor = self.head(self.ln_f(x))
        return logits

    @property
    def device(self) -> torch.device:
        """Device of its parameters."""
        return self.wte.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of its parameters."""
        return self.wte.weight.dtype

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Rotation of queries and keys at positions [T]; None with learned positions."""
        return rotation(self.config, positions) if self.wpe is None else None


def initial_value(
    name: str,
    shape: Sequence[int],
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device | str,
) -> Tensor:
    """The whole starting value of the parameter `name` as GPT-2 initialises it, in fp32; of a
    quantised weight its bytes.

    Weights are normal with std 0.02, the two projections into the residual stream with
    0.02 / sqrt(2 * layers); biases are 0 and LayerNorm weights 1. An adapter's A is uniform up to
    1 / sqrt(in), its B 0, as PEFT has them. A pure function of seed, name, shape and config on one
    type of device, so any rank can take its shard of a parameter from the same values, in any
    order.
    """
    if name.endswith(PACKED):
        inner = inner_of(shape[1], config.quantize_base)
        weight, whole = weight_of(name), (shape[0], inner)
        value = initial_value(weight, whole, config, seed=seed, device=device)
        return quantize(value, config.quantize_base)
    if name.endswith((".bias", ".lora_b")):
        return torch.zeros(*shape, device=device)
    if len(shape) == 1:
        return torch.ones(*shape, device=device)
    residual = name.endswith(("attn.proj.weight", "mlp.out.weight"))
    std = _INITIAL_STD / math.sqrt(2 * config.layers) if residual else _INITIAL_STD
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    if is_adapter(name):
        most = 1 / math.sqrt(shape[1])
        return torch.empty(*shape, device=device).uniform_(-most, most, generator=generator)
    return torch.empty(*shape, device=device).normal_(std=std, generator=generator)
