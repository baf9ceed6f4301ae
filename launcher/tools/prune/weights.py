"""Remove weights: single ones (unstructured or 2:4), or whole heads and hidden units.

The importance of a head or unit sums over its weights: magnitudes of all weights that compute or
read it (as for filters in arXiv:1608.08710), Wanda's products of those that read it (as
arXiv:2312.11983 extends Wanda to structures).
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.parts import ATTENTION, MLP, is_projection, projection_name
from launcher.strategies.build_inputs import materialize_whole
from launcher.tools.prune.choice import GROUP, KEPT_OF_GROUP, PruneOptions


def importance(weight: Tensor, norms: Tensor | None) -> Tensor:
    """Score weight [out, in] by magnitude, or by Wanda's |weight| x norm (arXiv:2306.11695).

    `norms` [in] are the L2 norms of the input features.
    """
    return weight.abs() if norms is None else weight.abs() * norms


def kept(scores: Tensor, options: PruneOptions) -> Tensor:
    """Mark the weights to keep: scores [out, in] -> bool [out, in].

    Exactly the requested fraction goes, per matrix or per row, or two of each four consecutive
    weights in a row. Ties are broken arbitrarily.
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
    """Zero weights of the model's projections; returns name -> bool mask of kept weights."""
    masks = {}
    for name, weight in model.named_parameters():
        if is_projection(name):
            scores = importance(weight, None if norms is None else norms[name])
            masks[name] = kept(scores, options)
            weight.masked_fill_(~masks[name], 0)
    return masks


def narrower(config: ModelConfig, options: PruneOptions) -> ModelConfig:
    """Return the smaller model's config.

    Heads keep their width, so `head_dim` is set: it is no longer d_model / heads.
    """
    if options.pattern == "mlp":
        return dataclasses.replace(config, d_ff=config.ffn_dim - options.removed_of(config.ffn_dim))
    groups = config.kv_head_count - options.removed_of(config.kv_head_count)
    return dataclasses.replace(
        config,
        heads=groups * (config.heads // config.kv_head_count),
        kv_heads=None if config.kv_head_count == config.heads else groups,
        head_dim=config.head_size,
    )


def prune_groups(model: GPT, norms: Mapping[str, Tensor] | None, options: PruneOptions) -> GPT:
    """Build the smaller model from the weights of the groups that stay, in their order."""
    config, device = model.config, model.device
    computes, reads = ATTENTION if options.pattern == "heads" else MLP
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    rows, columns = (numbers.to(device) for numbers in _groups(config, options))
    smaller = narrower(config, options)
    staying = len(rows) - options.removed_of(len(rows))
    for layer in range(config.layers):
        before = projection_name(layer, computes)
        behind = f"{projection_name(layer, reads)}.weight"
        scores = importance(tensors[behind], None if norms is None else norms[behind])
        sums = scores.sum(dim=0)[columns].sum(dim=1)
        if norms is None:
            sums += tensors[f"{before}.weight"].abs().sum(dim=1)[rows].sum(dim=1)
        stays = sums.topk(staying).indices.sort().values
        # Ascending, so that queries precede keys and values as in the full matrix.
        kept_rows = rows[stays].flatten().sort().values
        for name in (f"{before}.weight", f"{before}.bias"):
            if name in tensors:
                tensors[name] = tensors[name][kept_rows]
        tensors[behind] = tensors[behind][:, columns[stays].flatten()]
    with torch.device("meta"):
        pruned = GPT(smaller)
    materialize_whole(pruned, lambda name, _: tensors[name], device=device, dtype=torch.float32)
    return pruned.eval().requires_grad_(False)


def _groups(config: ModelConfig, options: PruneOptions) -> tuple[Tensor, Tensor]:
    """Return, as [groups, n] each, the rows that compute a group and the columns that read it."""
    if options.pattern == "mlp":
        columns = torch.arange(config.ffn_dim).view(-1, 1)
        # The gate and the up projection are stacked in one matrix.
        parts = [columns + number * config.ffn_dim for number in range(len(config.up_sizes))]
        return torch.cat(parts, dim=1), columns
    groups = config.kv_head_count
    queries, keys, values = torch.arange(config.qkv_dim).split(list(config.qkv_sizes))
    rows = torch.cat([part.view(groups, -1) for part in (queries, keys, values)], dim=1)
    return rows, queries.view(groups, -1)
