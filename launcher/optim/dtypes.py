"""--precision in torch's types, for the strategies that train with plain PyTorch."""

from dataclasses import dataclass

import torch

from launcher.optim.choice import OptimChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """What parameters (and so their gradients) are stored in, and what is computed in."""

    stored: torch.dtype
    computed: torch.dtype

    @property
    def autocast(self) -> torch.dtype | None:
        """The type to compute in where the stored one is another."""
        return None if self.computed == self.stored else self.computed


def dtypes(optim: OptimChoice) -> Dtypes:
    """Mixed precision keeps fp32 weights; bf16-pure has nothing else than bf16."""
    low = {"fp32": torch.float32, "fp16": torch.float16}.get(optim.precision, torch.bfloat16)
    return Dtypes(
        stored=torch.bfloat16 if optim.precision == "bf16-pure" else torch.float32, computed=low
    )
