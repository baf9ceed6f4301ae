"""Sample as many boxes as torchvision's detectors do, which find them by masks on the device.

A sampler takes a fixed number of anchors or boxes of each image and marks them in masks as large as
what it takes them from: with every element of a mask set, all would be trained on.
"""

from __future__ import annotations

import functools
from typing import Any

from shardscale_rehearsal.following import followed


def prepare_sampler(module: Any) -> None:
    """Know the masks of a sampler: the first boxes are positive, the next negative."""
    sampler = module.BalancedPositiveNegativeSampler
    sample = sampler.__call__

    @functools.wraps(sample)
    def sample_known(self: Any, *args: Any, **kwargs: Any) -> Any:
        masks = sample(self, *args, **kwargs)
        positive = int(self.batch_size_per_image * self.positive_fraction)
        for mask in masks[0]:
            _hold_range(mask, 0, positive)
        for mask in masks[1]:
            _hold_range(mask, positive, self.batch_size_per_image)
        return masks

    sampler.__call__ = sample_known


def prepare_heads(module: Any) -> None:
    """Follow the masks, and know which of the boxes that were sampled have a class."""
    heads = module.RoIHeads
    select = heads.select_training_samples

    @functools.wraps(select)
    def select_known(self: Any, *args: Any, **kwargs: Any) -> Any:
        selected = select(self, *args, **kwargs)
        sampler = self.fg_bg_sampler
        for labels in selected[2]:  # of each image, in the order of the masks
            positive = int(sampler.batch_size_per_image * sampler.positive_fraction)
            _hold_range(labels, 0, positive)
        return selected

    heads.select_training_samples = select_known
    heads.forward = followed(heads.forward)


def _hold_range(tensor: Any, first: int, last: int) -> None:
    """Hold 1 for the elements of a range, and 0 for the others."""
    import torch
    from shardscale_observer.held import hold

    if tensor.is_cuda:
        places = torch.arange(tensor.numel())
        hold(tensor, (places >= first) & (places < last))
