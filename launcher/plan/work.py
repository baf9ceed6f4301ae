"""What a micro-batch costs a rank in arithmetic, memory traffic and operators."""

from dataclasses import dataclass

from launcher.config.resolve import Resolved
from launcher.model.config import ModelConfig
from launcher.model.cost import flops_per_token
from launcher.model.loss import automatic_chunk_rows
from launcher.optim.dtypes import dtypes
from launcher.strategies import strategy_of

# Operators per block that torch dispatches in fp32, views included: forward, backward, and what
# recomputation adds to the backward. Counted with a TorchDispatchMode around model.gpt.
FORWARD_OPERATORS, BACKWARD_OPERATORS, RECOMPUTE_OPERATORS = 28, 64, 60
# What is outside the blocks: embeddings, last norm, head and loss.
OUTER_FORWARD_OPERATORS, OUTER_BACKWARD_OPERATORS = 16, 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one pass of one rank over one micro-batch takes."""

    matmul_flops: float
    attention_flops: float
    elementwise_bytes: float
    copied_bytes: float
    operators: float


def forward_work(resolved: Resolved) -> Work:
    """One micro-batch forward.

    FLOPs: a third of `model.cost.flops_per_token`, attention counted apart; a fused kernel skips
    the masked half of the T x T scores. A chunked loss computes its gradients here (model/loss.py).
    """
    model, tokens = resolved.model, _tokens(resolved)
    attention = attention_flops(model, resolved.seq_len)
    whole = flops_per_token(model, resolved.seq_len) / 3
    matmul = whole - 4 * model.layers * model.d_model * resolved.seq_len
    if _chunked(resolved):
        matmul += 4 * model.vocab_size * model.d_model
    return Work(
        matmul_flops=tokens * matmul,
        attention_flops=tokens * attention,
        elementwise_bytes=tokens * (_block_bytes(resolved) + _loss_bytes(model)),
        copied_bytes=_weight_cast_bytes(resolved),
        operators=model.layers * FORWARD_OPERATORS + OUTER_FORWARD_OPERATORS,
    )


def backward_work(resolved: Resolved) -> Work:
    """One micro-batch backward: twice the matmuls of the forward, and what is recomputed.

    A fused attention kernel recomputes its scores: 5 matmuls for the forward's 2
    (FlashAttention-2, arXiv:2307.08691, section 3.1.2). Full checkpointing recomputes the blocks,
    wherever their inputs have waited; selective checkpointing recomputes only what is between
    matmuls and attention (model/recompute.py).
    """
    model, tokens = resolved.model, _tokens(resolved)
    forward = attention_flops(model, resolved.seq_len)
    attention = (2.0 if model.attention == "eager" else 2.5) * forward
    head = 2 * model.vocab_size * model.d_model
    blocks = 2 * model.matmul_parameter_count - head
    matmul = 2 * blocks + (0 if _chunked(resolved) else 2 * head)
    elementwise = 2 * _block_bytes(resolved)
    operators = model.layers * BACKWARD_OPERATORS + OUTER_BACKWARD_OPERATORS
    mode = model.activation_checkpointing
    if mode != "none":
        elementwise += _block_bytes(resolved)
        operators += model.layers * RECOMPUTE_OPERATORS
    if mode in ("full", "offload"):
        matmul += blocks
        attention += forward
    return Work(
        matmul_flops=tokens * matmul,
        attention_flops=tokens * attention,
        elementwise_bytes=tokens * elementwise,
        copied_bytes=_weight_cast_bytes(resolved) * (2 if mode in ("full", "offload") else 1),
        operators=operators,
    )


def attention_flops(model: ModelConfig, seq_len: int) -> float:
    """Forward, per token, of all layers: Q K^T and A V over T positions of width d, 2 FLOPs each,
    less what the kernel skips because the mask hides it."""
    return 4 * model.layers * model.d_model * seq_len * _visible_share(model, seq_len)


def _tokens(resolved: Resolved) -> int:
    return resolved.config.data.micro_batch * resolved.seq_len


def _visible_share(model: ModelConfig, seq_len: int) -> float:
    """Of the T x T scores, those that the kernel computes. Eager computes all, and so does SDPA
    with a window, which it takes as a mask; flash and flex skip what the window hides."""
    if model.attention == "eager":
        return 1.0
    if model.window is None or model.window >= seq_len:
        return 0.5
    return model.window / seq_len if model.attention in ("flash", "flex") else 1.0


def _chunked(resolved: Resolved) -> bool:
    model, rows = resolved.model, _tokens(resolved)
    if model.loss_chunk is not None:
        return model.loss_chunk > 0
    return automatic_chunk_rows(rows, model.vocab_size, model.d_model) > 0


def _activation_bytes(resolved: Resolved) -> float:
    """Per element. Under autocast the residual stream and norms are fp32, the rest is not."""
    config = resolved.config
    types = dtypes(config.optim)
    if types.computed.itemsize == 4:
        return 4.0
    autocast = types.autocast and not strategy_of(config).casts_parameters(config.sharding)
    return 3.0 if autocast else 2.0


def block_input_bytes(resolved: Resolved) -> float:
    """What a checkpointed block keeps of a micro-batch: the residual stream (see above)."""
    element = 2.0 if _activation_bytes(resolved) == 2.0 else 4.0
    return element * _tokens(resolved) * resolved.model.d_model


def _block_bytes(resolved: Resolved) -> float:
    """Read and written per token, forward, by what is not a matmul: two norms (2 d each), the copy
    of the attention's output (2 d), the activation (2 d_ff) and two residual sums (3 d each)."""
    model = resolved.model
    elements = 12 * model.d_model + 2 * model.ffn_dim
    return model.layers * elements * _activation_bytes(resolved)


def _loss_bytes(model: ModelConfig) -> float:
    """fp32 logits per token: written, read and written by log_softmax, and once more by the
    gradient (forward and backward together; the chunked loss has both in the forward)."""
    return 5 * 4 * model.vocab_size


def _weight_cast_bytes(resolved: Resolved) -> float:
    """autocast reads fp32 weights and writes low-precision ones in every forward, and the reverse
    for gradients in the backward."""
    autocast = _activation_bytes(resolved) == 3.0
    return 6.0 * resolved.model.matmul_parameter_count if autocast else 0.0
