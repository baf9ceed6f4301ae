"""The decoder over a rank's part of each matrix."""

from typing import Final, cast

from torch import nn

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, LMHead
from launcher.model.norms import LayerNorm, RMSNorm
from launcher.parallel.tensor.cut import bounds
from launcher.parallel.tensor.group import TensorGroup
from launcher.parallel.tensor.layers import (
    CutEmbedding,
    GatheredLinear,
    RowNorm,
    SummedDropout,
    SummedLinear,
)
from launcher.parallel.tensor.loss import CutHead

_KNOWN: Final = (nn.Linear, LayerNorm, RMSNorm, nn.Embedding, LMHead)


def connect(model: GPT, config: ModelConfig, tensor_group: TensorGroup) -> None:
    """Have a GPT of a part of `config` compute within its group what one of `config` computes.

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
        if (with_peers := _connected(name, module, config, tensor_group)) is not None:
            model.set_submodule(name, with_peers)


def _connected(
    name: str, module: nn.Module, config: ModelConfig, tensor_group: TensorGroup
) -> nn.Module | None:
    """What stands for a module, with its parameters; None where nothing is cut."""
    first = bounds(config.vocab_size, tensor_group.share)[0]
    if isinstance(module, LayerNorm | RMSNorm):
        return RowNorm(module, tensor_group)
    if isinstance(module, nn.Linear):
        if name.endswith(("attn.qkv", "mlp.fc")):
            return GatheredLinear(module, tensor_group)
        return SummedLinear(module, tensor_group, last=name.endswith("mlp.out"))
    if isinstance(module, LMHead):
        return CutHead(module, tensor_group, vocab_size=config.vocab_size, first=first)
    if name == "wte":
        return CutEmbedding(cast(nn.Embedding, module).weight, first)
    if name == "wpe":
        begin, end = bounds(config.context, tensor_group.share)
        return CutEmbedding(nn.Embedding(end - begin, config.d_model).weight, begin)
    return SummedDropout(cast(nn.Dropout, module), tensor_group) if name == "drop" else None
