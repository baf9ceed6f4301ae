"""A decoder of transformers over a rank's tokens of each sequence.

transformers looks up attention and its masks by name. Under a name of ours, tokens are exchanged
for heads around the function that the model would have taken, whose mask is one of all tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from launcher.model.foreign.attention import SINKS, SINKS_ARGUMENT, attention_modules
from launcher.model.foreign.config import ForeignConfig
from launcher.model.foreign.decoder import ForeignDecoder
from launcher.parallel.context.ulysses import to_heads, to_tokens
from launcher.parallel.groups import ContextGroup

_GROUP = "context_group"
_WHOLE = "whole_attention"
"""Attributes of a module with attention: its group, and the function for whole sequences."""


class LocalSequenceDecoder(ForeignDecoder):
    """A decoder of transformers that gets T/ranks tokens of each sequence, and counts their
    positions in all of T."""

    def __init__(self, config: ForeignConfig, context_group: ContextGroup) -> None:
        super().__init__(config)
        self.context_group = context_group
        chosen = self.causal.config._attn_implementation
        for module in attention_modules(self.causal):
            setattr(module, _GROUP, context_group)
            setattr(module, _WHOLE, _function(module, chosen))
        self.causal.config._attn_implementation = _registered(chosen, context_group.rank.size)

    def positions(self, tokens: Tensor, starts: Tensor | None) -> Tensor | None:
        """Return those of this rank's tokens [B, T/ranks], int64 [1, T/ranks]."""
        assert starts is None
        rank = self.context_group.rank
        (local,) = rank.local_ranges(rank.size * tokens.size(1))
        return torch.arange(local.start, local.stop, device=tokens.device)[None]


class _WithSinks:
    """A module with attention, as functions see it that read its sinks: those of a rank's heads."""

    def __init__(self, module: Any, sinks: Tensor) -> None:
        self._module = module
        setattr(self, SINKS, sinks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _function(module: Any, chosen: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Each file of transformers' models has an eager function of its own.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    found: Callable[..., tuple[Tensor, Tensor | None]]
    found = ALL_ATTENTION_FUNCTIONS.get_interface(chosen, eager)
    return found


def _registered(chosen: str, ranks: int) -> str:
    """Return the name under which transformers finds attention, and the masks of `chosen` for the
    tokens of all ranks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"ulysses-{ranks}-{chosen}"
    make_mask = ALL_MASK_ATTENTION_FUNCTIONS[chosen]

    def make_whole_mask(*, q_length: int, kv_length: int, **how: Any) -> Tensor | None:
        how["attention_mask"] = None  # no token is padding
        mask: Tensor | None = make_mask(
            q_length=ranks * q_length, kv_length=ranks * kv_length, **how
        )
        return mask

    ALL_ATTENTION_FUNCTIONS.register(name, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, make_whole_mask)
    return name


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **how: Any
) -> tuple[Tensor, None]:
    """query [B, H, T/ranks, e] -> [B, T/ranks, H, e], as transformers' attention functions do."""
    group: ContextGroup = getattr(module, _GROUP)
    of_heads = [to_heads(x, group) for x in (query, key, value)]
    seen = module
    if (sinks := how.get(SINKS_ARGUMENT)) is not None:
        how[SINKS_ARGUMENT] = local = sinks.chunk(group.rank.size)[group.rank.index]
        seen = _WithSinks(module, local)
    mixed, _ = getattr(module, _WHOLE)(seen, *of_heads, mask, **how)
    return to_tokens(mixed.transpose(1, 2), group).transpose(1, 2).contiguous(), None
