"""The decoder over tensor-parallel shards of its matrices."""

from typing import Final, cast

from torch import nn

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, LMHead
from launcher.model.norms import LayerNorm, RMSNorm
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
        if (sharded := _sharded(name, module, config, tensor_group)) is not None:
            model.set_submodule(name, sharded)


def _sharded(
    name: str, module: nn.Module, config: ModelConfig, tensor_group: TensorGroup
) -> nn.Module | None:
    """The sharded module with the parameters of `module`; None where nothing is sharded."""
    first = bounds(config.vocab_size, tensor_group.rank)[0]
    if isinstance(module, LayerNorm | RMSNorm):
        return SequenceParallelNorm(module, tensor_group)
    if isinstance(module, nn.Linear):
        if name.endswith(("attn.qkv", "mlp.fc")):
            return ColumnParallelLinear(module, tensor_group)
        return RowParallelLinear(module, tensor_group, last=name.endswith("mlp.out"))
    if isinstance(module, LMHead):
        return VocabParallelHead(module, tensor_group, vocab_size=config.vocab_size, first=first)
    if name == "wte":
        return VocabParallelEmbedding(cast(nn.Embedding, module).weight, first)
    if name == "wpe":
        begin, end = bounds(config.context, tensor_group.rank)
        return VocabParallelEmbedding(nn.Embedding(end - begin, config.d_model).weight, begin)
    return ScatteredDropout(cast(nn.Dropout, module), tensor_group) if name == "drop" else None
