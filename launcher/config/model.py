"""The section of the config that says which decoder is trained."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from launcher.errors import UserError
from launcher.model.config import ModelConfig, named


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """Which decoder: a named size, and any dimension changed by hand."""

    model: str = "nano"
    """Named size: nano, seed-134m, gpt2, gpt2-medium, gpt2-large, gpt2-xl, 2.7b, 6.7b, 13b."""
    layers: int | None = None
    """Number of decoder blocks."""
    heads: int | None = None
    """Attention heads; must divide d_model."""
    d_model: int | None = None
    """Width of the residual stream."""
    d_ff: int | None = None
    """Width of the MLP (4 x d_model when not given)."""
    context: int | None = None
    """Learned positions: the longest sequence the model can read."""
    vocab_size: int | None = None
    """Rows of the embedding; also the size of the BPE vocabulary that is trained."""
    activation: Literal["gelu", "relu"] | None = None
    """Non-linearity of the MLP."""
    attention_bias: bool | None = None
    """Biases in the QKV and output projections of attention."""
    mlp_bias: bool | None = None
    """Biases in the MLP."""
    tied: bool | None = None
    """Whether the output head shares the token embedding's weight."""
    dropout: float | None = None
    """Dropout probability (embedding, attention, residual)."""
    attention: Literal["auto", "eager", "sdpa", "flash", "flex"] = "auto"
    """Attention kernel: eager (the textbook form), sdpa (PyTorch's), flash (FlashAttention), flex
    (FlexAttention), or auto: the fastest that is installed and able."""
    sdpa_backend: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """What sdpa uses inside: PyTorch's own choice (auto), or the one named."""
    window: int | None = None
    """Sliding causal window: a token sees itself and this many tokens before it."""
    activation_checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """Recompute activations in the backward: selective keeps every matmul and attention output,
    full keeps only each block's input, offload keeps that in host memory (GPUs)."""
    loss_chunk: int | None = None
    """Rows of logits held at once by the loss: automatic when not given, 0 = all of them."""

    def build(self) -> ModelConfig:
        """The model's own config.

        Raises:
            UserError: unknown name, or dimensions that do not go together.
        """
        changes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        name = changes.pop("model")
        try:
            return named(name, **{k: v for k, v in changes.items() if v is not None})
        except ValueError as error:
            raise UserError(str(error)) from None
