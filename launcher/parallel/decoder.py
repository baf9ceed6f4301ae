"""The decoder of one rank of a mesh."""

from launcher.config.model import part_of
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.parallel.context.group import ContextGroup
from launcher.parallel.tensor.group import TensorGroup


def decoder(
    config: ModelConfig, context_group: ContextGroup | None, tensor_group: TensorGroup | None
) -> GPT:
    """Build the model on the device and under the modes of the context that this is called in."""
    own = (
        config
        if tensor_group is None
        else part_of(config, tensor_group.share.ranks, tensor_group.share.index)
    )
    if context_group is None:
        model = GPT(own)
    else:
        from launcher.parallel.context.local import LocalSequenceGPT

        model = LocalSequenceGPT(own, context_group)
    if tensor_group is not None:
        from launcher.parallel.tensor.decoder import connect

        connect(model, config, tensor_group)
    return model
