"""--precision as torch dtypes of storage, computation and parameters."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.optim.choice import OptimChoice

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Dtypes:
    """Data types of a run."""

    stored: "torch.dtype"
    """Weights that the optimizer updates (master weights, if the model has a copy), and its
    gradients."""
    computed: "torch.dtype"
    """Matmuls and their results."""
    parameters: "torch.dtype"
    """The model's parameters: the stored ones, or a copy to compute with."""

    @property
    def autocast(self) -> "torch.dtype | None":
        """Return the autocast type; None if the parameters have it."""
        return None if self.computed == self.parameters else self.computed

    @property
    def scaled(self) -> bool:
        """Return whether losses are scaled, so that small gradients do not underflow."""
        import torch

        return self.computed == torch.float16


def dtypes(optim: OptimChoice, *, copies: bool = False) -> Dtypes:
    """Return the data types of a precision: mixed ones keep fp32 weights, bf16-pure is all bf16.

    `copies` is for strategies that give the model low-precision parameters; others use autocast.
    """
    low = torch_dtype(optim.arithmetic.computed)
    stored = torch_dtype("fp32") if optim.arithmetic.keeps_fp32 else low
    return Dtypes(stored=stored, computed=low, parameters=low if copies else stored)


def torch_dtype(name: str) -> "torch.dtype":
    """Return the data type that flags and records call fp32, bf16 or fp16."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
