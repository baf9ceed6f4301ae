"""Follow what transformers finds in a batch's padding: a batch that has any needs a mask of
attention, for which torch has other kernels that keep more for the backward."""

from __future__ import annotations

import functools
from typing import Any

MODULE = "transformers.masking_utils"
_FUNCTIONS = (
    "_preprocess_mask_arguments",
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
)


def prepare(module: Any) -> None:
    """Follow the functions that read a mask of tokens on the host; newer transformers has them."""
    for name in _FUNCTIONS:
        if hasattr(module, name):
            setattr(module, name, _followed(getattr(module, name)))


def _followed(function: Any) -> Any:
    import torch

    from shardscale_rehearsal.follow import followed

    follows = followed(function)

    @functools.wraps(function)
    def follow(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return follows(*args, **kwargs)

    return follow
