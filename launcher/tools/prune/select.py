"""Which single weights stay, by the importance of each."""

from collections.abc import Mapping

import torch
from torch import Tensor

from launcher.model.gpt import GPT
from launcher.model.quantized import is_projection
from launcher.tools.prune.choice import GROUP, KEPT_OF_GROUP, PruneOptions


def importance(weight: Tensor, norms: Tensor | None) -> Tensor:
    """weight [out, in] -> its magnitudes or, with the L2 norm [in] of what it is multiplied with,
    Wanda's |weight| x norm (arXiv:2306.11695)."""
    return weight.abs() if norms is None else weight.abs() * norms


def kept(scores: Tensor, options: PruneOptions) -> Tensor:
    """scores [out, in] -> bool [out, in]: what stays.

    Exactly as many go as the sparsity says, of each matrix or each row, or two of each four that
    follow each other in a row; of equal scores any.
    """
    if options.pattern == "2:4":
        compete, removed = scores.view(-1, GROUP), GROUP - KEPT_OF_GROUP
    else:
        compete = scores if options.by_row else scores.view(1, -1)
        removed = options.removed_of(compete.size(1))
    smallest = compete.topk(removed, dim=1, largest=False, sorted=False).indices
    mask = torch.ones_like(compete, dtype=torch.bool).scatter_(1, smallest, False)
    return mask.view_as(scores)


def prune_in_place(
    model: GPT, norms: Mapping[str, Tensor] | None, options: PruneOptions
) -> dict[str, Tensor]:
    """Set weights of the model's projections to zero; name -> bool, what stays."""
    masks = {}
    for name, weight in model.named_parameters():
        if is_projection(name):
            scores = importance(weight, None if norms is None else norms[name])
            masks[name] = kept(scores, options)
            weight.masked_fill_(~masks[name], 0)
    return masks
