"""Whole heads or hidden units removed, as many in each layer: a smaller model of the same kind.

A group's importance is the sum over its weights: of magnitudes over all that compute or read it
(as filters are pruned, arXiv:1608.08710), of Wanda's products over those that read it (as
arXiv:2312.11983 extends Wanda to structures).
"""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.strategies.recipe import materialize_whole
from launcher.tools.prune.choice import PruneOptions
from launcher.tools.prune.select import importance


def narrower(config: ModelConfig, options: PruneOptions) -> ModelConfig:
    """The smaller model; heads keep their width, which is said, since it is no longer the model's
    width over their number."""
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
    """The smaller model, with the weights of the groups that stay, in their order."""
    config, device = model.config, model.wte.weight.device
    computes, reads = (
        ("attn.qkv", "attn.proj") if options.pattern == "heads" else ("mlp.fc", "mlp.out")
    )
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    rows, columns = (numbers.to(device) for numbers in _groups(config, options))
    smaller = narrower(config, options)
    staying = len(rows) - options.removed_of(len(rows))
    for layer in range(config.layers):
        before, behind = f"blocks.{layer}.{computes}", f"blocks.{layer}.{reads}.weight"
        scores = importance(tensors[behind], None if norms is None else norms[behind])
        sums = scores.sum(dim=0)[columns].sum(dim=1)
        if norms is None:
            sums += tensors[f"{before}.weight"].abs().sum(dim=1)[rows].sum(dim=1)
        stays = sums.topk(staying).indices.sort().values
        # Rows of queries come before those of keys, in each group as in the matrix.
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
    """[groups, n] each: the rows that compute a group, and the columns that read it."""
    if options.pattern == "mlp":
        columns = torch.arange(config.ffn_dim).view(-1, 1)
        # A gate and what it multiplies are in one matrix, one below the other.
        parts = [columns + number * config.ffn_dim for number in range(len(config.up_sizes))]
        return torch.cat(parts, dim=1), columns
    groups = config.kv_head_count
    queries, keys, values = torch.arange(config.qkv_dim).split(list(config.qkv_sizes))
    rows = torch.cat([part.view(groups, -1) for part in (queries, keys, values)], dim=1)
    return rows, queries.view(groups, -1)
