"""Bytes that a micro-batch reads and writes beside its matmuls, on one rank."""

from dataclasses import replace

from launcher.config.resolve import Resolved
from launcher.forecast.operators import one_kernel, tokens_of
from launcher.model.attention import fuses_scores
from launcher.model.config import ModelConfig, Norm
from launcher.strategies import strategy_of


def block_input_bytes(resolved: Resolved) -> float:
    """What a checkpointed block keeps of a micro-batch: the residual stream."""
    rows = tokens_of(resolved) / resolved.config.sharding.tensor_parallel
    return _activation_bytes(resolved) * rows * resolved.model.d_model


def block_bytes(resolved: Resolved) -> float:
    """Read and written per token, forward, by what is not a matmul."""
    model, ranks = resolved.own_model, resolved.config.sharding.tensor_parallel
    size = _activation_bytes(resolved)
    elements = block_elements(model, resolved.config.loop.device, ranks, element_bytes=size)
    return model.layers * elements * size + dropout_bytes(resolved)


def tile_bytes(resolved: Resolved) -> float:
    """As `block_bytes`, of the MLP's half."""
    model, ranks = resolved.own_model, resolved.config.sharding.tensor_parallel
    elements = (3 + _norm_passes(model.norm, resolved.config.loop.device)) * model.d_model // ranks
    elements += _activation_passes(model) * model.ffn_dim
    return model.layers * elements * _activation_bytes(resolved)


def block_elements(
    model: ModelConfig, device_type: str, ranks: int = 1, *, element_bytes: float = 4
) -> int:
    """That of one block, in elements: two norms (2 d each in one kernel), two residual sums (3 d
    each), the copy of the attention's output (2 of its width), and the activation (2 d_ff; swiglu's
    silu and product 5 d_ff), and what puts tiles together (2 d). Of queries and keys, a norm and
    the rotation (`_rotated`). What is d wide, each of `ranks` has a part of. Adapters, of which no
    rank has parts, add to what projections have computed (2 of its width) and drop some of their
    input (3 of its width)."""
    elements = (6 + 2 * _norm_passes(model.norm, device_type)) * model.d_model // ranks
    elements += 2 * model.attention_dim
    elements += _activation_passes(model) * model.ffn_dim
    elements += 2 * model.d_model // ranks if model.mlp_tile else 0
    elements += _adapter_elements(model)
    per_head = _norm_passes("rms", device_type) if model.qk_norm else 0
    per_head += _rotated(element_bytes) if model.position == "rope" else 0
    return elements + per_head * (model.heads + model.kv_head_count) * model.head_size


def _rotated(element_bytes: float) -> int:
    """Of queries' or keys' width: 4 products, 2 sums and a copy (9), in fp32 whatever the type,
    with a cast there and one back (launcher.model.layers.rotate)."""
    return 9 if element_bytes == 4 else 2 * 9 + 2 * 3


def _adapter_elements(model: ModelConfig) -> int:
    if model.lora is None:
        return 0
    dropped = 3 if model.lora.dropout else 0
    named = zip(("qkv", "proj", "mlp", "mlp"), model.linear_shapes, strict=True)
    return sum(
        2 * outer + dropped * inner for name, (inner, outer) in named if name in model.lora.targets
    )


def _norm_passes(norm: Norm, device_type: str) -> int:
    """How often a norm reads or writes as much as its input."""
    return 2 if one_kernel(norm, device_type) else 7


def _activation_passes(model: ModelConfig) -> int:
    return 5 if model.activation == "swiglu" else 2


def loss_bytes(resolved: Resolved) -> float:
    """fp32 logits per token: written, read and written by log_softmax, and once more by the
    gradient (forward and backward together; the chunked loss has both in the forward). Fused they
    are read twice and written once, as they are computed."""
    passes = 3 * _activation_bytes(resolved) if fused_loss(resolved) else 5 * 4
    return passes * resolved.own_model.vocab_size


def fused_loss(resolved: Resolved) -> bool:
    """Whole matrices have it on a GPU."""
    config = resolved.config
    return config.loop.device != "cpu" and config.sharding.tensor_parallel == 1


def weight_cast_bytes(resolved: Resolved) -> float:
    """Of all weights of matmuls that are trained; frozen ones are of low precision already."""
    model = resolved.own_model
    cast = model.matmul_parameter_count if model.lora is None else _adapters(model)
    return cast_bytes(resolved, cast)


def dequantized_bytes(resolved: Resolved) -> float:
    """Read and written to make quantised weights whole once: codes, an index of 4 bytes for two of
    NF4, and the weight, which is written and scaled in place (int8's in three steps)."""
    model, element = resolved.own_model, _activation_bytes(resolved)
    passes = {"none": 0.0, "nf4": 4.5 + 3 * element, "int8": 1 + 7 * element}
    weights = sum(inner * outer for inner, outer in model.linear_shapes)
    return model.layers * weights * passes[model.quantize_base]


def mlp_cast_bytes(resolved: Resolved) -> float:
    """The MLPs' part of it, which each tile has anew."""
    model = resolved.own_model
    share = _mlp_parameters(model) / model.matmul_parameter_count
    if model.lora is not None:
        others = tuple(target for target in model.lora.targets if target != "mlp")
        without = replace(model.lora, targets=others) if others else None
        share = 1 - _adapters(replace(model, lora=without)) / _adapters(model)
    return share * weight_cast_bytes(resolved)


def cast_bytes(resolved: Resolved, weights: float) -> float:
    """autocast reads fp32 weights and writes low-precision ones in every forward, and the reverse
    for gradients in the backward."""
    autocast = strategy_of(resolved.config).dtypes(resolved.config).autocast is not None
    return 6.0 * weights if autocast else 0.0


def dropout_bytes(resolved: Resolved) -> float:
    """Of both residual branches, per token, forward: read, written, and a mask of a byte."""
    model = resolved.own_model
    if not model.dropout or resolved.config.loop.device == "cpu":
        return 0.0
    return model.layers * 2 * model.d_model * (2 * _activation_bytes(resolved) + 1)


def score_bytes(resolved: Resolved) -> tuple[float, float]:
    """Of all T x T scores, per token, forward and backward, where attention is not fused
    (`launcher.model.attention.dense.eager`): product, scale, mask and their reverse in the compute
    type, softmax in fp32, and dropout with a mask of a byte."""
    model, config = resolved.own_model, resolved.config
    if fuses_scores(model) or config.loop.device == "cpu":
        return 0.0, 0.0
    element = _activation_bytes(resolved)
    dropped = 2 * element + 1 if model.dropout else 0.0
    scores = model.layers * model.heads * resolved.seq_len
    return scores * (8 * element + 8 + dropped), scores * (11 * element + 16 + dropped)


def _adapters(model: ModelConfig) -> int:
    return model.layers * model.block_adapter_count


def _mlp_parameters(model: ModelConfig) -> int:
    """Weights of the MLPs' matmuls."""
    return model.layers * sum(inner * outer for inner, outer in model.linear_shapes[2:])


def _activation_bytes(resolved: Resolved) -> float:
    """Per element."""
    config = resolved.config
    return float(strategy_of(config).dtypes(config).computed.itemsize)
