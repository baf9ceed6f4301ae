"""The decoder over tensor-parallel shards of its matrices."""

from typing import Final

from torch import nn

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, LMHead
from launcher.model.layers import LayerNorm, RMSNorm
from launcher.model.parts import MLP, projection_of, projections
from launcher.parallel.groups import TensorGroup
from launcher.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    ScatteredDropout,
    SequenceParallelNorm,
    VocabParallelEmbedding,
)
from launcher.parallel.tensor.loss import VocabParallelHead
from launcher.parallel.tensor.shards import bounds

_KNOWN: Final = (nn.Linear, LayerNorm, RMSNorm, nn.Embedding, LMHead)


def shard_modules(model: GPT, config: ModelConfig, tensor_group: TensorGroup) -> None:
    """Replace the modules of a local GPT by ones that compute the full `config` within a group.

    Raises:
        TypeError: a module has parameters and is none of those that are known here. A subclass may
            compute something else, which the module that replaces it would drop.
    """
    model.config = config
    for name, module in list(model.named_modules()):
        if type(module) not in _KNOWN and any(True for _ in module.parameters(recurse=False)):
            raise TypeError(
                f"{name} is a {type(module).__qualname__}, which tensor parallelism cannot shard: "
                "add it to launcher/parallel/tensor/decoder.py"
            )
        if (sharded := _sharded(model, name, config, tensor_group)) is not None:
            model.set_submodule(name, sharded)


def _sharded(
    model: GPT, name: str, config: ModelConfig, tensor_group: TensorGroup
) -> nn.Module | None:
    """Return the sharded module with the parameters of the one called `name`; None where it
    stays."""
    module = model.get_submodule(name)
    first, _ = bounds(config.vocab_size, tensor_group.rank)
    match module:
        case LayerNorm() | RMSNorm():
            return SequenceParallelNorm(module, tensor_group)
        case nn.Linear():
            projection = projection_of(name)
            assert projection is not None
            if projections(config)[projection].into_residual:
                return RowParallelLinear(module, tensor_group, last=projection == MLP[-1])
            return ColumnParallelLinear(module, tensor_group)
        case LMHead():
            vocab_size = config.vocab_size
            return VocabParallelHead(module, tensor_group, vocab_size=vocab_size, first=first)
        case nn.Embedding() if module is model.wte:
            return VocabParallelEmbedding(module.weight, first)
        case nn.Embedding():  # of positions; a local config has all of them
            first, end = bounds(config.context, tensor_group.rank)
            return VocabParallelEmbedding(nn.Embedding(end - first, config.d_model).weight, first)
        case nn.Dropout() if module is model.drop:
            return ScatteredDropout(module, tensor_group)
    return None
