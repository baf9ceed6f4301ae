"""What an optimizer updates, as pieces of the model's flattened parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements [start, start + numel) of the flattened parameter `name`, which are those from
    `offset` on of the (local, flattened) `tensor` that an optimizer updates."""

    name: str
    start: int
    numel: int
    tensor: Tensor
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Updated:
    """A rank's optimizer, and all that it updates: masters where there are some, from which what is
    computed with follows, or the parameters themselves."""

    optimizer: torch.optim.Optimizer
    pieces: Sequence[Piece]

    def stored(self, tensor: Tensor) -> list[Tensor]:
        """A tensor that is updated and, in pure bf16, the rest of each value that is kept beside
        it."""
        state: dict[str, Any] = self.optimizer.state[tensor]
        rest = state.get("compensation")
        return [tensor] if rest is None else [tensor, rest]
