"""The decoder of a config: our own, or one of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from launcher.model import gpt
from launcher.model.config import ModelConfig
from launcher.model.foreign.config import ForeignConfig
from launcher.model.linears import is_adapter


def new_decoder(config: ModelConfig) -> nn.Module:
    """Build a decoder under the device and modes of the caller's context."""
    if isinstance(config, ForeignConfig):
        from launcher.model.foreign.decoder import ForeignDecoder

        return ForeignDecoder(config)
    return gpt.GPT(config)


def prepare(config: ModelConfig) -> None:
    """Make what decoders of a config share, before modes of the caller change how modules are
    built: zero.Init would shard it, fake tensors would have no values."""
    if isinstance(config, ForeignConfig):
        from launcher.model.foreign.decoder import head_function

        head_function(config.document, config.attention)


def initial_value(name: str, shape: Sequence[int], config: ModelConfig, **how: Any) -> Tensor:
    """Return the whole starting value of a parameter, in fp32.

    Args:
        how: seed and device, on one type of which the value is a pure function of the arguments,
            so that any rank can take its shard of it.
    """
    if isinstance(config, ForeignConfig) and not is_adapter(name):
        from launcher.model.foreign import decoder

        return decoder.initial_value(name, shape, config, **how)
    return gpt.initial_value(name, shape, config, **how)
