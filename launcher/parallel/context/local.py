"""The decoder over a rank's part of each sequence."""

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT, Attention
from launcher.model.rope import Rotation
from launcher.parallel.context.group import ContextGroup
from launcher.parallel.context.ring import ring
from launcher.parallel.context.ulysses import ulysses, whole_mask


class LocalSequenceGPT(GPT):
    """A GPT that gets T/ranks tokens of each sequence and counts their positions in all of T.

    Only attention sees more than that. Everything else works on tokens one by one, so that
    strategies take the ranks of a sequence for further data ranks.
    """

    def __init__(self, config: ModelConfig, context_group: ContextGroup) -> None:
        super().__init__(config)
        self.context_group = context_group
        goes_round = context_group.part.method == "ring"
        if not goes_round:
            self.prepare_mask = whole_mask(self.prepare_mask, context_group)
        for block in self.blocks:
            attention = block.get_submodule("attn")
            assert isinstance(attention, Attention)
            attention.attend = (
                ring(context_group) if goes_round else ulysses(attention.attend, context_group)
            )

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens [B, T/ranks] at `positions`, counted as if they were whole sequences."""
        count = tokens.size(1)
        shift = self._positions(count, tokens.device) - torch.arange(count, device=tokens.device)
        return super().embed(tokens, positions + shift)

    def rotation(self, positions: Tensor) -> Rotation | None:
        """That of this rank's tokens."""
        return super().rotation(self._positions(len(positions), positions.device))

    def _positions(self, count: int, device: torch.device) -> Tensor:
        part = self.context_group.part
        pieces = part.pieces(part.ranks * count)
        return torch.cat([torch.arange(p.start, p.stop, device=device) for p in pieces])
