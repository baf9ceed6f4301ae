"""What a micro-batch costs a rank in arithmetic, memory traffic and operators."""

from dataclasses import dataclass, replace

from launcher.config.resolve import Resolved
from launcher.model.attention import kernel_for
from launcher.model.config import ModelConfig, Norm
from launcher.model.loss import automatic_chunk_rows
from launcher.plan.operators import (
    block_operators,
    mlp_tiles,
    one_kernel,
    outer_operators,
    tile_operators,
    tiles_operators,
    tokens_of,
)
from launcher.strategies import strategy_of


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

    FLOPs: 2 for each weight of a matmul, adapters' too, attention counted apart; a fused kernel
    skips the masked half of the T x T scores. A chunked loss computes its gradients here
    (model/loss.py).
    """
    model, tokens = resolved.own_model, tokens_of(resolved)
    documents = resolved.config.data.document_attention
    attention = attention_flops(model, resolved.seq_len, documents=documents)
    head = 2 * model.vocab_size * model.d_model
    matmul = 2 * (model.matmul_parameter_count + _adapters(model))
    if _chunked(resolved):
        matmul += _gradients(model) * head
    return Work(
        matmul_flops=tokens * matmul,
        attention_flops=tokens * attention,
        elementwise_bytes=tokens * (_block_bytes(resolved) + _loss_bytes(resolved)),
        copied_bytes=_weight_cast_bytes(resolved)
        + max(0, mlp_tiles(resolved) - 1) * _mlp_cast_bytes(resolved),
        operators=model.layers
        * (block_operators(resolved).forward + tiles_operators(resolved).forward)
        + outer_operators(resolved).forward,
    )


def backward_work(resolved: Resolved) -> Work:
    """One micro-batch backward: twice the matmuls of the forward, or once those with frozen
    weights, and what is recomputed.

    A fused attention kernel recomputes its scores: 5 matmuls for the forward's 2
    (FlashAttention-2, arXiv:2307.08691, section 3.1.2). Full checkpointing recomputes the blocks,
    wherever their inputs have waited; selective checkpointing recomputes only what is between
    matmuls and attention (model/recompute.py). Tiles of the MLP are recomputed one by one, inside
    recomputed blocks once more but for the last.
    """
    model, tokens = resolved.own_model, tokens_of(resolved)
    documents = resolved.config.data.document_attention
    forward = attention_flops(model, resolved.seq_len, documents=documents)
    attention = (2.5 if kernel_for(model).fused else 2.0) * forward
    head = 2 * model.vocab_size * model.d_model
    frozen_or_not = 2 * model.matmul_parameter_count - head
    blocks = frozen_or_not + 2 * _adapters(model)
    matmul = _gradients(model) * (frozen_or_not + (0 if _chunked(resolved) else head))
    matmul += 2 * 2 * _adapters(model)
    elementwise = 2 * _block_bytes(resolved)
    each = block_operators(resolved)
    operators = model.layers * each.backward + outer_operators(resolved).backward
    mode = model.activation_checkpointing
    if mode != "none":
        elementwise += _block_bytes(resolved)
        operators += model.layers * each.recomputed
    copied = _weight_cast_bytes(resolved)
    whole, recomputed = mode in ("full", "offload"), 0.0
    if whole:
        recomputed += blocks
        attention += forward
        copied *= 2
    if tiles := mlp_tiles(resolved):
        # Recomputing a block runs its tiles, but for the last.
        share = (tiles - 1) / tiles if whole else 1.0
        recomputed += share * 2 * _recomputed_in_tiles(model)
        elementwise += 0 if mode == "selective" else share * _tile_elements_bytes(resolved)
        operators += model.layers * tiles_operators(resolved).backward
        if whole:
            operators += model.layers * (tiles - 1) * tile_operators(resolved).forward
        elif mode == "none":
            operators += model.layers * tile_operators(resolved).recomputed
        copied += (2 * tiles - 1 + (tiles - 2 if whole else 0)) * _mlp_cast_bytes(resolved)
    return Work(
        matmul_flops=tokens * (matmul + recomputed),
        attention_flops=tokens * attention,
        elementwise_bytes=tokens * elementwise,
        copied_bytes=copied,
        operators=operators,
    )


def attention_flops(model: ModelConfig, seq_len: int, *, documents: bool = False) -> float:
    """Forward, per token, of all layers: Q K^T and A V over T positions, all heads wide, 2 FLOPs
    each, less what the kernel skips because the mask hides it."""
    share = _visible_share(model, seq_len, documents=documents)
    return 4 * model.layers * model.attention_dim * seq_len * share


def _norm_passes(norm: Norm, device_type: str) -> int:
    """How often a norm reads or writes as much as its input."""
    return 2 if one_kernel(norm, device_type) else 7


def _mlp_parameters(model: ModelConfig) -> int:
    """Weights of the MLPs' matmuls."""
    return model.layers * sum(inner * outer for inner, outer in model.linear_shapes[2:])


def _recomputed_in_tiles(model: ModelConfig) -> int:
    """Weights of the matmuls that a tile's backward runs again: it asks for the last one's output
    only where dropout comes after."""
    first, last = (inner * outer for inner, outer in model.linear_shapes[2:])
    return model.layers * (first + (last if model.dropout else 0))


def _visible_share(model: ModelConfig, seq_len: int, *, documents: bool) -> float:
    """Of the T x T scores, those that the kernel computes, and no less for short documents, which
    nobody knows before the data is read."""
    kernel = kernel_for(model)
    if not kernel.fused or (documents and not kernel.skips_window):
        return 1.0
    if model.window is None or model.window >= seq_len:
        return 0.5
    return model.window / seq_len if kernel.skips_window else 1.0


def _chunked(resolved: Resolved) -> bool:
    model, rows = resolved.own_model, tokens_of(resolved)
    if model.loss_chunk is not None:
        return model.loss_chunk > 0
    fused = _fused_loss(resolved)
    return automatic_chunk_rows(rows, model.vocab_size, model.d_model, fused=fused) > 0


def _fused_loss(resolved: Resolved) -> bool:
    """Whole matrices have it on a GPU."""
    config = resolved.config
    return config.loop.device != "cpu" and config.sharding.tensor_parallel == 1


def _activation_bytes(resolved: Resolved) -> float:
    """Per element."""
    config = resolved.config
    return float(strategy_of(config).dtypes(config).computed.itemsize)


def block_input_bytes(resolved: Resolved) -> float:
    """What a checkpointed block keeps of a micro-batch: the residual stream."""
    rows = tokens_of(resolved) / resolved.config.sharding.tensor_parallel
    return _activation_bytes(resolved) * rows * resolved.model.d_model


def _block_bytes(resolved: Resolved) -> float:
    """Read and written per token, forward, by what is not a matmul."""
    model, ranks = resolved.own_model, resolved.config.sharding.tensor_parallel
    elements = block_elements(model, resolved.config.loop.device, ranks)
    return model.layers * elements * _activation_bytes(resolved)


def _tile_elements_bytes(resolved: Resolved) -> float:
    """As `_block_bytes`, of the MLP's half."""
    model, ranks = resolved.own_model, resolved.config.sharding.tensor_parallel
    elements = (3 + _norm_passes(model.norm, resolved.config.loop.device)) * model.d_model // ranks
    elements += _activation_passes(model) * model.ffn_dim
    return model.layers * elements * _activation_bytes(resolved)


def _adapters(model: ModelConfig) -> int:
    """Weights of all adapters' matmuls."""
    return model.layers * model.block_adapter_count


def _gradients(model: ModelConfig) -> int:
    """Matmuls of a backward for one of the forward with the model's own weights."""
    return 2 if model.lora is None else 1


def _activation_passes(model: ModelConfig) -> int:
    return 5 if model.activation == "swiglu" else 2


def block_elements(model: ModelConfig, device_type: str, ranks: int = 1) -> int:
    """That of one block, in elements: two norms (2 d each in one kernel), two residual sums (3 d
    each), the copy of the attention's output (2 of its width), and the activation (2 d_ff; swiglu's
    silu and product 5 d_ff), and what puts tiles together (2 d). Of queries and keys, a norm and
    the rotation (4 products, 2 sums and a copy: 9 of their width). What is d wide, each of `ranks`
    has a part of. Adapters, of which no rank has parts, add to what projections have computed (2 of
    its width) and drop some of their input (3 of its width)."""
    elements = (6 + 2 * _norm_passes(model.norm, device_type)) * model.d_model // ranks
    elements += 2 * model.attention_dim
    elements += _activation_passes(model) * model.ffn_dim
    elements += 2 * model.d_model // ranks if model.mlp_tile else 0
    elements += _adapter_elements(model)
    per_head = _norm_passes("rms", device_type) if model.qk_norm else 0
    per_head += 9 if model.position == "rope" else 0
    return elements + per_head * (model.heads + model.kv_head_count) * model.head_size


def _adapter_elements(model: ModelConfig) -> int:
    if model.lora is None:
        return 0
    dropped = 3 if model.lora.dropout else 0
    named = zip(("qkv", "proj", "mlp", "mlp"), model.linear_shapes, strict=True)
    return sum(
        2 * outer + dropped * inner for name, (inner, outer) in named if name in model.lora.targets
    )


def _loss_bytes(resolved: Resolved) -> float:
    """fp32 logits per token: written, read and written by log_softmax, and once more by the
    gradient (forward and backward together; the chunked loss has both in the forward). Fused they
    are read twice and written once, as they are computed."""
    passes = 3 * _activation_bytes(resolved) if _fused_loss(resolved) else 5 * 4
    return passes * resolved.own_model.vocab_size


def _weight_cast_bytes(resolved: Resolved) -> float:
    """autocast reads fp32 weights and writes low-precision ones in every forward, and the reverse
    for gradients in the backward; frozen ones are of low precision already."""
    autocast = strategy_of(resolved.config).dtypes(resolved.config).autocast is not None
    model = resolved.own_model
    cast = model.matmul_parameter_count if model.lora is None else _adapters(model)
    return 6.0 * cast if autocast else 0.0


def _mlp_cast_bytes(resolved: Resolved) -> float:
    """The MLPs' part of it, which each tile has anew."""
    model = resolved.own_model
    share = _mlp_parameters(model) / model.matmul_parameter_count
    if model.lora is not None:
        others = tuple(target for target in model.lora.targets if target != "mlp")
        without = replace(model.lora, targets=others) if others else None
        share = 1 - _adapters(replace(model, lora=without)) / _adapters(model)
    return share * _weight_cast_bytes(resolved)
