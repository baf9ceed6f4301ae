"""The shape of a decoder and its exact parameter arithmetic.

Imports no torch, so that a command line can validate a model and count its parameters at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Activation = Literal["gelu", "relu"]
AttentionKind = Literal["auto", "eager", "sdpa", "flash", "flex"]
SdpaBackend = Literal["auto", "flash", "cudnn", "efficient", "math"]
ActivationCheckpointing = Literal["none", "selective", "full", "offload"]

MOST_LAYERS = 100_000
MOST_PER_DIMENSION = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A GPT-2-style decoder: learned positions, pre-LayerNorm, one MLP per block.

    Raises ValueError, in one sentence with the value and the fix, for a shape that cannot be built.
    """

    # A checkpoint's model is read as this, and a field more would be another function.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    vocab_size: int
    """Rows of the token embedding and of the output head."""
    context: int
    """Longest sequence in tokens: the rows of the position embedding."""
    layers: int
    """Number of blocks."""
    heads: int
    """Attention heads per block; must divide d_model."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the MLP; None means 4 * d_model."""
    activation: Activation = "gelu"
    """MLP activation; gelu is GPT-2's tanh approximation."""
    attention_bias: bool = True
    """Biases on the qkv and output projections of attention."""
    mlp_bias: bool = True
    """Biases on both MLP projections."""
    tied: bool = True
    """Use the token embedding as the output head; otherwise the head has its own weight."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and residual branches."""
    attention: AttentionKind = "auto"
    """Attention kernel; model.attention.choose says what auto is, and which can run."""
    sdpa_backend: SdpaBackend = "auto"
    """What attention sdpa must use inside; auto leaves it to PyTorch."""
    window: int | None = None
    """Sliding causal window: token i sees tokens i - window to i; None sees all before it."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """What backward recomputes: nothing, all but matmuls and attention, or whole blocks."""
    loss_chunk: int | None = None
    """Tokens per chunk of the loss; None chooses by size, 0 computes all logits at once."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "context", "layers", "heads", "d_model"):
            _require_positive(field, getattr(self, field))
        if self.d_ff is not None:
            _require_positive("d_ff", self.d_ff)
        if self.d_model % self.heads:
            raise ValueError(
                f"{self.heads} heads do not divide d_model {self.d_model}; "
                f"use {_nearest_divisors(self.d_model, self.heads)} heads."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} is outside [0, 1); use 0 to turn it off.")
        if self.window is not None and not 1 <= self.window <= self.context:
            raise ValueError(
                f"window {self.window} is outside 1 to the context of {self.context} tokens; "
                "choose a value in that range or none for full causal attention."
            )
        if self.loss_chunk is not None and self.loss_chunk < 0:
            raise ValueError(
                f"loss_chunk {self.loss_chunk} is negative; use a number of tokens, "
                "0 to turn chunking off, or leave it out for the automatic choice."
            )
        if self.loss_chunk:
            _require_positive("loss_chunk", self.loss_chunk)
        _require_one_of("activation", self.activation, Activation)
        _require_one_of("attention", self.attention, AttentionKind)
        _require_one_of("sdpa_backend", self.sdpa_backend, SdpaBackend)
        _require_one_of(
            "activation_checkpointing", self.activation_checkpointing, ActivationCheckpointing
        )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads

    @property
    def ffn_dim(self) -> int:
        """Width of the MLP, with the default resolved."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def block_parameter_count(self) -> int:
        """Parameters of one block: two LayerNorms, attention, MLP."""
        layer_norms = 4 * self.d_model
        attention_biases = 4 * self.d_model if self.attention_bias else 0
        mlp_biases = self.ffn_dim + self.d_model if self.mlp_bias else 0
        return layer_norms + self._block_matmul_parameter_count + attention_biases + mlp_biases

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied head counted once."""
        embeddings = (self.vocab_size + self.context) * self.d_model
        head = 0 if self.tied else self.vocab_size * self.d_model
        final_layer_norm = 2 * self.d_model
        return embeddings + self.layers * self.block_parameter_count + final_layer_norm + head

    @property
    def matmul_parameter_count(self) -> int:
        """Weights that take part in a matmul: the N of the 6 N FLOP rule.

        The head counts also when it is tied; embedding look-ups, positions, biases and norms
        do not.
        """
        return self.layers * self._block_matmul_parameter_count + self.vocab_size * self.d_model

    @property
    def _block_matmul_parameter_count(self) -> int:
        return 4 * self.d_model**2 + 2 * self.d_model * self.ffn_dim


def _require_positive(field: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{field} {value} is not positive; use 1 or more.")
    most = MOST_LAYERS if field == "layers" else MOST_PER_DIMENSION
    if value > most:
        raise ValueError(f"{field} {value} is more than any model has; use at most {most:,}.")


def _require_one_of(field: str, value: str, literal: Any) -> None:
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{field} {value!r} is unknown; choose one of {', '.join(choices)}.")


def _nearest_divisors(number: int, target: int) -> str:
    """The divisors of `number` just below and just above `target`, as 'a or b'."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    below = [n for n in divisors if n < target][-1:]
    above = [n for n in divisors if n > target][:1]
    return " or ".join(str(n) for n in below + above)


def _gpt2(layers: int, heads: int, d_model: int) -> ModelConfig:
    return ModelConfig(vocab_size=50257, context=1024, layers=layers, heads=heads, d_model=d_model)


def _gpt3(layers: int, heads: int, d_model: int) -> ModelConfig:
    return replace(_gpt2(layers, heads, d_model), context=2048)


# GPT-2 sizes as released; 2.7b to 13b from table 2.1 of the GPT-3 paper (arXiv:2005.14165), 13b
# with d_model 5120, which its 40 heads divide, where the paper prints 5140.
NAMED: dict[str, ModelConfig] = {
    "nano": ModelConfig(vocab_size=4096, context=128, layers=4, heads=4, d_model=192),
    "seed-134m": ModelConfig(
        vocab_size=32_000,
        context=256,
        layers=12,
        heads=12,
        d_model=768,
        attention_bias=False,
        tied=False,
    ),
    "gpt2": _gpt2(12, 12, 768),
    "gpt2-medium": _gpt2(24, 16, 1024),
    "gpt2-large": _gpt2(36, 20, 1280),
    "gpt2-xl": _gpt2(48, 25, 1600),
    "2.7b": _gpt3(32, 32, 2560),
    "6.7b": _gpt3(32, 32, 4096),
    "13b": _gpt3(40, 40, 5120),
}


def named(name: str, **overrides: Any) -> ModelConfig:
    """The named size with some fields replaced.

    Raises ValueError for an unknown name, listing the known ones, or for an impossible shape.
    """
    if name not in NAMED:
        raise ValueError(f"model {name!r} is unknown; choose one of {', '.join(NAMED)}.")
    return replace(NAMED[name], **overrides)
