"""The shape of a decoder and its exact parameter arithmetic.

Imports no torch, so that a command line can validate a model and count its parameters at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from launcher.model.checkpointing import ActivationCheckpointing as ActivationCheckpointing
from launcher.model.checkpointing import Checkpointing, parse
from launcher.model.config_checks import (
    biased,
    check_heads,
    check_loss_chunk,
    check_rope,
    check_window,
    require_one_of,
    require_positive,
    spelled_bias,
)
from launcher.model.lora_config import Lora

Position = Literal["learned", "rope"]
Norm = Literal["layer", "rms"]
Activation = Literal["gelu", "relu", "swiglu"]
AttentionKind = Literal["auto", "eager", "sdpa", "flash", "flex"]
SdpaBackend = Literal["auto", "flash", "cudnn", "efficient", "math"]
Quantization = Literal["none", "int8", "nf4"]
RopeScaling = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder of pre-norm blocks: GPT-2's by default; Llama, Qwen and Mistral by its options.

    Raises ValueError, in one sentence with the value and the fix, for a shape that cannot be built.
    """

    # A checkpoint's model is read as this, and a field more would be another function.
    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    vocab_size: int
    """Rows of the token embedding and of the output head."""
    context: int
    """Longest sequence in tokens: the rows of learned positions, the range of rotary ones."""
    layers: int
    """Number of blocks."""
    heads: int
    """Query heads per block; must divide d_model where no head_dim is given."""
    kv_heads: int | None = None
    """Key and value heads, each shared by heads / kv_heads query heads; None means heads."""
    head_dim: int | None = None
    """Width of one head; None means d_model / heads."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the MLP; None means 4 * d_model."""
    position: Position = "learned"
    """A learned vector per position, or rotary embedding of queries and keys (no parameters)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Llama 3's stretched frequencies: factor, low and high frequency factor, original context."""
    norm: Norm = "layer"
    """LayerNorm, or RMSNorm, which has no bias and subtracts no mean."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    qk_norm: bool = False
    """RMSNorm of each query and key head."""
    activation: Activation = "gelu"
    """gelu is GPT-2's tanh approximation; swiglu multiplies silu of one projection by another."""
    bias: str = "all"
    """Projections with biases: some of qkv, proj and mlp with commas between, all, or none."""
    tied: bool = True
    """Use the token embedding as the output head; otherwise the head has its own weight."""
    dropout: float = 0.0
    """Dropout probability on embeddings, attention weights and residual branches."""
    attention: AttentionKind = "auto"
    """Attention kernel; model.attention.choose says what auto is, and which can run."""
    sdpa_backend: SdpaBackend = "auto"
    """Backend of attention sdpa; auto leaves it to PyTorch."""
    window: int | None = None
    """Sliding causal window: token i sees tokens i - window to i; None sees all before it."""
    activation_checkpointing: str = "none"
    """Activations that blocks save or recompute; model.checkpointing parses it."""
    loss_chunk: int | None = None
    """Tokens per chunk of the loss; None chooses by size, 0 computes all logits at once."""
    mlp_tile: int | None = None
    """Tokens that the MLP works on at a time, recomputed in backward; None is all, kept."""
    lora: Lora | None = None
    """Adapters, which alone are trained; None trains everything."""
    quantize_base: Quantization = "none"
    """Storage of the frozen projections beside adapters."""
    masks: bool = False
    """Pruned weights of projections stay zero in training."""

    def __post_init__(self) -> None:
        for field in ("vocab_size", "context", "layers", "heads", "d_model"):
            require_positive(field, getattr(self, field))
        for field in ("kv_heads", "head_dim", "d_ff", "mlp_tile"):
            if getattr(self, field) is not None:
                require_positive(field, getattr(self, field))
        # One spelling, so that equal models compare equal.
        object.__setattr__(self, "bias", spelled_bias(biased(self.bias)))
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout {self.dropout} is outside [0, 1); use 0 to turn it off.")
        if self.lora is not None:
            self.lora.check_own_targets()
        check_window(self.window, context=self.context)
        check_loss_chunk(self.loss_chunk)
        for field, literal in _CHOICES.items():
            require_one_of(field, getattr(self, field), literal)
        if self.checkpointing.budget_bytes is None:
            self.checkpointing.blocks(self.layers)
        check_heads(
            d_model=self.d_model,
            heads=self.heads,
            kv_heads=self.kv_head_count,
            head_dim=self.head_dim,
        )
        if not 0.0 < self.norm_eps < 1.0:
            raise ValueError(f"norm_eps {self.norm_eps} is outside 0 to 1; GPT-2 has 1e-5.")
        check_rope(
            rotary=self.position == "rope",
            head_size=self.head_size,
            theta=self.rope_theta,
            scaling=self.rope_scaling,
        )

    @property
    def checkpointing(self) -> Checkpointing:
        """The activation checkpointing of all blocks."""
        return parse(self.activation_checkpointing)

    @property
    def blocks(self) -> tuple[ModelConfig, ...]:
        """Return each block's own config, in which all blocks checkpoint as it does."""
        words = self.checkpointing.blocks(self.layers)
        own = {word: replace(self, activation_checkpointing=word) for word in set(words)}
        return tuple(own[word] for word in words)

    @property
    def head_size(self) -> int:
        """Width of one attention head, with the default resolved."""
        return self.d_model // self.heads if self.head_dim is None else self.head_dim

    @property
    def kv_head_count(self) -> int:
        """Key and value heads, with the default resolved."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def attention_dim(self) -> int:
        """Width of all query heads together: what the output projection reads."""
        return self.heads * self.head_size

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Rows of the fused projection: of query, key and value heads."""
        kv_dim = self.kv_head_count * self.head_size
        return (self.attention_dim, kv_dim, kv_dim)

    @property
    def qkv_dim(self) -> int:
        """All rows of the fused projection."""
        return sum(self.qkv_sizes)

    @property
    def up_sizes(self) -> tuple[int, ...]:
        """Rows of the MLP's first projection: swiglu's gate and value are one matrix."""
        return (self.ffn_dim,) * (2 if self.activation == "swiglu" else 1)

    @property
    def up_dim(self) -> int:
        """All rows of the MLP's first projection."""
        return sum(self.up_sizes)

    def has_bias(self, projection: str) -> bool:
        """Return whether qkv, proj or mlp has biases."""
        return projection in biased(self.bias)

    @property
    def ffn_dim(self) -> int:
        """Width of the MLP, with the default resolved."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    def computes(self) -> dict[str, Any]:
        """Return the fields that give weights their meaning (`WHAT_IT_COMPUTES`) with defaults
        resolved, and None for those without effect."""
        found = {name: getattr(self, name) for name in WHAT_IT_COMPUTES}
        found |= {"d_ff": self.ffn_dim, "kv_heads": self.kv_head_count}
        found["head_dim"] = self.head_size
        if self.position != "rope":
            found |= {"rope_theta": None, "rope_scaling": None}
        return found

    @property
    def block_parameter_count(self) -> int:
        """Parameters of one block: two norms, attention, MLP."""
        qk_norms = 2 * self.head_size if self.qk_norm else 0
        rows = {"qkv": self.qkv_dim, "proj": self.d_model, "mlp": self.up_dim + self.d_model}
        vectors = qk_norms + sum(rows[name] for name in biased(self.bias))
        matrices = self._block_matmul_parameter_count + self.block_adapter_count
        return matrices + 2 * self._norm_parameter_count + vectors

    @property
    def adapter_widths(self) -> tuple[int, ...]:
        """Width between both matrices of each projection's adapter, a rank per matrix that the
        projection fuses; 0 without an adapter."""
        if self.lora is None:
            return (0,) * len(self.linear_shapes)
        parts = (("qkv", len(self.qkv_sizes)), ("proj", 1), ("mlp", len(self.up_sizes)), ("mlp", 1))
        return tuple(n * self.lora.rank if name in self.lora.targets else 0 for name, n in parts)

    @property
    def block_adapter_count(self) -> int:
        """Parameters of one block's adapters."""
        if self.lora is None:
            return 0
        shapes = zip(self.linear_shapes, self.adapter_widths, strict=True)
        return sum(w * inner + self.lora.rank * outer for (inner, outer), w in shapes if w)

    @property
    def trained_block_parameter_count(self) -> int:
        """Parameters of one block that have gradients."""
        return self.block_parameter_count if self.lora is None else self.block_adapter_count

    @property
    def trained_parameter_count(self) -> int:
        """Parameters that have gradients: all, or those of adapters."""
        if self.lora is None:
            return self.parameter_count
        return self.layers * self.block_adapter_count

    @property
    def embedding_parameter_count(self) -> int:
        """Parameters of the token embedding, and of learned positions."""
        positions = self.context if self.position == "learned" else 0
        return (self.vocab_size + positions) * self.d_model

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied head counted once."""
        head = 0 if self.tied else self.vocab_size * self.d_model
        blocks = self.layers * self.block_parameter_count
        return self.embedding_parameter_count + blocks + self._norm_parameter_count + head

    @property
    def matmul_parameter_count(self) -> int:
        """Weights that take part in a matmul: the N of the 6 N FLOP rule.

        The head counts also when it is tied; embedding look-ups, positions, biases and norms
        do not.
        """
        return self.layers * self._block_matmul_parameter_count + self.vocab_size * self.d_model

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of a block's projections: qkv, attention's output, the MLP's first and last."""
        return (
            (self.d_model, self.qkv_dim),
            (self.attention_dim, self.d_model),
            (self.d_model, self.up_dim),
            (self.ffn_dim, self.d_model),
        )

    @property
    def _block_matmul_parameter_count(self) -> int:
        return sum(inner * outer for inner, outer in self.linear_shapes)

    @property
    def _norm_parameter_count(self) -> int:
        return (2 if self.norm == "layer" else 1) * self.d_model


_CHOICES = {
    "position": Position,
    "norm": Norm,
    "activation": Activation,
    "attention": AttentionKind,
    "sdpa_backend": SdpaBackend,
    "quantize_base": Quantization,
}

WHAT_IT_COMPUTES = (
    *("vocab_size", "context", "layers", "heads", "kv_heads", "head_dim", "d_model", "d_ff"),
    *("position", "rope_theta", "rope_scaling", "norm", "norm_eps", "qk_norm"),
    *("activation", "bias", "tied"),
)
"""The fields that give a model's weights their meaning."""
