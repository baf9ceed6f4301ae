"""Options of low-rank adapters (LoRA, arXiv:2106.09685), trained beside frozen weights.

Imports no torch, as `launcher.model.config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

LoraTarget = Literal["qkv", "proj", "mlp"]
PROJECTIONS: Final[tuple[LoraTarget, ...]] = ("qkv", "proj", "mlp")
LAYERS: Final[Mapping[str, LoraTarget]] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value"), "qkv"),
    **dict.fromkeys(("o_proj", "out_proj", "dense"), "proj"),
    **dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "c_fc", "fc1", "fc2"), "mlp"
    ),
}
"""transformers' names of layers -> the projection of our own decoder that they are a part of."""
MOST_RANK: Final = 65_536
BLOCK: Final = 64
"""Elements of a quantised weight that share a scale; a row is a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Beside each projection W of `targets` two matrices A [rank, in] and B [out, rank], so that it
    computes W x + scale B A x; nothing else is trained.

    Where one matrix of ours is several of a family's (query, key and value; SwiGLU's gate and what
    it multiplies), each has an adapter of its own, as it has in PEFT.

    Raises ValueError, in one sentence with the value and the fix.
    """

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}  # noqa: RUF012

    rank: int
    """Rows of A and columns of B."""
    alpha: float
    """Factor of the adapter's product, over the rank."""
    dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped in training."""
    targets: tuple[str, ...] = ("qkv", "proj")
    """qkv and proj of attention, mlp for both (or all three) of the MLP's. Of a decoder of
    transformers, qkv and proj together are attention's linear layers, mlp the other ones of a
    block, and any other word is a layer's own name."""
    rslora: bool = False
    """Divide alpha by the root of the rank (arXiv:2312.03732): gradients then keep their size."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise ValueError(f"lora_rank {self.rank} is outside 1 to {MOST_RANK}; 8 is usual.")
        if not 0.0 < self.alpha < math.inf:
            raise ValueError(f"lora_alpha {self.alpha} must be above 0; twice the rank is usual.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(
                f"lora_dropout {self.dropout} is outside [0, 1); use 0 to turn it off."
            )
        if not all(self.targets) or len({*self.targets}) < len(self.targets) or not self.targets:
            raise ValueError(self._wrong_targets())

    def check_own_targets(self) -> None:
        """Refuse targets that our own decoder does not have; raises ValueError."""
        if not {*PROJECTIONS}.issuperset(self.targets):
            raise ValueError(self._wrong_targets())

    def _wrong_targets(self) -> str:
        given = ",".join(self.targets)
        parts = "".join(f" {name} is in {LAYERS[name]}." for name in self.targets if name in LAYERS)
        return (
            f"lora_targets {given!r} must name some of {', '.join(PROJECTIONS)}, once each; or be "
            f"all.{parts}"
        )

    @property
    def scale(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
