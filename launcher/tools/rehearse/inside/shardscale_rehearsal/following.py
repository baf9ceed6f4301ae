"""Let functions of libraries compute on the host what they read there of the device (follow.py)."""

from __future__ import annotations

import functools
from typing import Any

FUNCTIONS = {
    # A batch that has padding needs a mask of attention, for which torch has other kernels that
    # keep more for the backward; newer transformers has these functions.
    "transformers.masking_utils": (
        *("_preprocess_mask_arguments", "_ignore_causal_mask_sdpa"),
        "_ignore_bidirectional_mask_sdpa",
    ),
    # What the network of proposals does with the masks of its sampler (detection.py).
    "torchvision.models.detection.rpn": ("RegionProposalNetwork.compute_loss",),
}
"""Module -> its functions, and methods of its classes."""


def prepare(module: Any) -> None:
    """Follow the functions of a module, those that its version has."""
    for path in FUNCTIONS[module.__name__]:
        class_, _, name = path.rpartition(".")
        owner = getattr(module, class_) if class_ else module
        if hasattr(owner, name):
            setattr(owner, name, followed(getattr(owner, name)))


def followed(function: Any) -> Any:
    """Return the function so that what it computes of known values is known."""
    import torch

    @functools.wraps(function)
    def follow(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        # not before the first call: it takes parts of torch that not every program imports
        from shardscale_rehearsal.follow import call_followed

        return call_followed(function, *args, **kwargs)

    return follow
