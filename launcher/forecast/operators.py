"""How many operators torch dispatches in a micro-batch: what a host takes its time for."""

from collections.abc import Sequence
from typing import NamedTuple

from launcher.config.resolve import Resolved
from launcher.model.config import ModelConfig, Norm


class Operators(NamedTuple):
    """Operators that torch dispatches in fp32, views included, and what recomputation adds to those
    of the backward."""

    forward: int
    backward: int
    recomputed: int

    def times(self, number: int) -> "Operators":
        """`number` of them."""
        return Operators(*(number * part for part in self))


# Counted with a TorchDispatchMode around model.gpt. A block without norms and biases, and what is
# outside the blocks without the last norm: embeddings, head and loss.
_BLOCK, _OUTER = Operators(26, 46, 46), Operators(15, 19, 0)
_BIAS, _SWIGLU = Operators(0, 3, 0), Operators(2, 6, 3)
_REBUILT = {"gelu": 3, "swiglu": 5}  # kept by its source
_NORM = Operators(1, 3, 7)
_COMPOSED_NORM = Operators(7, 18, 17)  # RMSNorm on a CPU, which has no kernel for it
_TURNED = Operators(16, 20, 16)
_TABLE = Operators(9, -4, 0)  # in the place of an embedding of positions
# The MLP's half of a block, in tiles: of one without norm and biases, and what puts them together.
_TILE, _TOGETHER = Operators(8, 14, 20), Operators(5, 4, 0)
# What frozen weights leave out, of a block and outside of them (with the first block's input, which
# has no gradient); an adapter, one of a matrix that is several, and the dropout of its input.
_FROZEN, _FROZEN_OUTER = Operators(0, -24, -24), Operators(0, -21, 0)
_ADAPTER, _SPLIT, _DROPPED = Operators(4, 17, 11), Operators(2, 7, 2), Operators(4, 1, 4)
# The same of norms that are composed: of a block's, of its heads', and of the last one.
_FROZEN_NORM, _FROZEN_HEAD_NORM = Operators(0, -2, -2), Operators(0, -4, -4)
_FROZEN_LAST_NORM = Operators(0, -11, 0)
# What a quantised weight adds to a product with it, in each direction.
_QUANTIZED = {"nf4": Operators(24, 23, 0), "int8": Operators(18, 17, 0)}


def block_operators(resolved: Resolved) -> Operators:
    """Of one block, without what rebuilds an activation."""
    model, device = resolved.model, resolved.config.loop.device
    biases = model.has_qkv_bias + model.attention_bias + 2 * model.mlp_bias
    biases *= model.lora is None
    parts = [_BLOCK, _norm_operators(model.norm, device).times(2), _BIAS.times(biases)]
    parts += _adapters_operators(model, device)
    parts.append(quantized_operators(model))
    parts += [_SWIGLU] if model.activation == "swiglu" else []
    parts += [_TURNED] if model.position == "rope" else []
    parts += [_norm_operators("rms", device).times(2)] if model.qk_norm else []
    return _sum(parts)


def quantized_operators(model: ModelConfig) -> Operators:
    """What makes the four weights of a block whole, for its products."""
    return _QUANTIZED.get(model.quantize_base, Operators(0, 0, 0)).times(4)


def _adapters_operators(model: ModelConfig, device_type: str) -> list[Operators]:
    """What adapters change in a block."""
    lora = model.lora
    if lora is None:
        return []
    projections = ("qkv", "proj", "mlp", "mlp")
    adapters = sum(name in lora.targets for name in projections)
    split = ("qkv" in lora.targets) + ("mlp" in lora.targets and len(model.up_sizes) > 1)
    dropped = _DROPPED.times(adapters if lora.dropout else 0)
    parts = [_FROZEN, _ADAPTER.times(adapters), _SPLIT.times(split), dropped]
    if not one_kernel(model.norm, device_type):
        parts.append(_FROZEN_NORM.times(2))
    if model.qk_norm and not one_kernel("rms", device_type):
        parts.append(_FROZEN_HEAD_NORM.times(2))
    return parts


def rebuilt_operators(model: ModelConfig) -> int:
    """That rebuild the activation in the backward of a block that is not checkpointed, for what is
    trained behind it."""
    if model.lora is not None and "mlp" not in model.lora.targets:
        return 0
    return _REBUILT.get(model.activation, 0)


def tile_operators(resolved: Resolved) -> Operators:
    """Of one tile of a block's MLP, with its norm and residual sum."""
    model, device = resolved.model, resolved.config.loop.device
    parts = [_TILE, _norm_operators(model.norm, device), _BIAS.times(2 * model.mlp_bias)]
    return _sum([*parts, *([_SWIGLU] if model.activation == "swiglu" else [])])


def tiles_operators(resolved: Resolved) -> Operators:
    """What tiles add to a block, each recomputed but for the first, which stands for the MLP."""
    tiles, (forward, backward, recomputed) = mlp_tiles(resolved), tile_operators(resolved)
    if not tiles:
        return Operators(0, 0, 0)
    further = Operators(forward, backward + recomputed, 0).times(tiles - 1)
    return _sum([_TOGETHER, further])


def outer_operators(resolved: Resolved) -> Operators:
    """Of the embeddings, the last norm, the head and the loss."""
    model, device = resolved.model, resolved.config.loop.device
    parts = [_OUTER, _norm_operators(model.norm, device)]
    parts += [_TABLE] if model.position == "rope" else []
    if model.lora is not None:
        parts.append(_FROZEN_OUTER)
        parts += [] if one_kernel(model.norm, device) else [_FROZEN_LAST_NORM]
        first = _QUANTIZED.get(model.quantize_base, Operators(0, 0, 0))
        parts.append(Operators(0, -first.backward, 0))  # of the input without a gradient
    return _sum(parts)


def tokens_of(resolved: Resolved) -> int:
    """Of a micro-batch, on this rank."""
    return resolved.config.data.micro_batch * resolved.local_seq_len


def mlp_tiles(resolved: Resolved) -> int:
    """Into how many the MLP cuts a micro-batch; 0 where it does not."""
    rows = resolved.model.mlp_tile
    own = tokens_of(resolved) // resolved.config.sharding.tensor_parallel
    return -(-own // rows) if rows else 0


def _sum(parts: Sequence[Operators]) -> Operators:
    return Operators(*map(sum, zip(*parts, strict=True)))


def one_kernel(norm: Norm, device_type: str) -> bool:
    """Whether a norm is; a CPU composes RMSNorm of several."""
    return norm == "layer" or device_type == "cuda"


def _norm_operators(norm: Norm, device_type: str) -> Operators:
    return _NORM if one_kernel(norm, device_type) else _COMPOSED_NORM
