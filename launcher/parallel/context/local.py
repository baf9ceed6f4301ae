"""The decoder over a rank's tokens of each sequence."""

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, Attention
from launcher.model.layers import Rotation
from launcher.parallel.context.ring import ring
from launcher.parallel.context.ulysses import full_mask, ulysses
from launcher.parallel.groups import ContextGroup


class LocalSequenceGPT(GPT):
    """A GPT that gets T/ranks tokens of each sequence and counts their positions in all of T.

    Only attention sees more than that. Everything else works on tokens one by one, so that to
    strategies context-parallel ranks are further data-parallel ones.
    """

    def __init__(self, config: ModelConfig, context_group: ContextGroup) -> None:
        super().__init__(config)
        self.context_group = context_group
        is_ring = context_group.rank.method == "ring"
        if not is_ring:
            self.prepare_mask = full_mask(self.prepare_mask, context_group)
        for attention in (m for m in self.modules() if isinstance(m, Attention)):
            attention.attend = (
                ring(context_group) if is_ring else ulysses(attention.attend, context_group)
            )

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, T/ranks] at `positions`, counted as if they were whole sequences."""
        count = tokens.size(1)
        shift = self._positions(count, tokens.device) - torch.arange(count, device=tokens.device)
        return super().embed(tokens, positions + shift)

    def rotation(self, positions: Tensor) -> Rotation | None:
        """Return the rotation of this rank's tokens."""
        return super().rotation(self._positions(len(positions), positions.device))

    def _positions(self, count: int, device: torch.device) -> Tensor:
        rank = self.context_group.rank
        ranges = rank.local_ranges(rank.size * count)
        return torch.cat([torch.arange(r.start, r.stop, device=device) for r in ranges])
