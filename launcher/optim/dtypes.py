"""--precision in torch's types: nobody else decides what is stored, computed and sent in which."""

from dataclasses import dataclass

import torch

from launcher.optim.choice import OptimChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """What a run's numbers are in."""

    stored: torch.dtype
    """Weights that the optimizer updates (master weights, where the model has a copy), and the
    gradients that it gets."""
    computed: torch.dtype
    """Matmuls and their results."""
    parameters: torch.dtype
    """What the model's forward finds as parameters: the stored ones, or a copy to compute with."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The type to compute in where the parameters are of another."""
        return None if self.computed == self.parameters else self.computed

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, so that small gradients do not vanish."""
        return self.computed == torch.float16


def dtypes(optim: OptimChoice, *, copies: bool = False) -> Dtypes:
    """Mixed precision keeps fp32 weights; bf16-pure has nothing else than bf16.

    `copies` is for strategies that give the model low-precision parameters; autocast casts them
    under the others.
    """
    low = {"fp32": torch.float32, "fp16": torch.float16}.get(optim.precision, torch.bfloat16)
    stored = torch.float32 if optim.keeps_fp32 else low
    return Dtypes(stored=stored, computed=low, parameters=low if copies else stored)
