"""Sparsity and bytes per kind of weight, counted in the tensors themselves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.parts import ATTENTION, MLP, is_projection, projection_of
from launcher.strategies.parameters import parameter_shapes
from launcher.util.sizes import MIB
from launcher.util.tables import Column

FP32_BYTES, BF16_BYTES = 4, 2
_TITLES = ("queries, keys, values", "attention output", "MLP in", "MLP out")
REST = "everything else"
SPARSE_CAPABILITY = (8, 0)  # sparse tensor cores came with Ampere
COLUMNS = (
    Column(title="weights", rank=0),
    Column(title="before", rank=1, right=True),
    Column(title="after", rank=0, right=True),
    Column(title="zeros", rank=0, right=True),
    Column(title="sparsity", rank=0, right=True),
    Column(title="dense MiB", rank=0, right=True),
    Column(title="sparse MiB", rank=0, right=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Counts of all projections of one kind, or of everything else."""

    name: str
    before: int
    """Weights before pruning."""
    after: int
    zeros: int
    """Zeros among the weights after pruning."""
    masked: bool

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return self.zeros / self.after

    def dense_bytes(self, value_bytes: int) -> int:
        """Return the bytes with one value per weight."""
        return value_bytes * self.after

    def sparse_bytes(self, value_bytes: int) -> int:
        """Return the bytes with a bitmask and the nonzero values.

        2:4 takes the same: two values of four, with a 2-bit index each.
        """
        if not self.masked:
            return self.dense_bytes(value_bytes)
        return value_bytes * (self.after - self.zeros) + -(-self.after // 8)


def kinds_of(before: ModelConfig, after: Mapping[str, Tensor], *, masked: bool) -> list[Kind]:
    """Count the kinds of weights in `after`, the parameters made from a model like `before`."""
    elements = {name: math.prod(shape) for name, shape in parameter_shapes(before).items()}
    found = []
    for part, name in (*zip((*ATTENTION, *MLP), _TITLES, strict=True), (None, REST)):
        names = [n for n in after if (projection_of(n) if is_projection(n) else None) == part]
        found.append(
            Kind(
                name=name,
                before=sum(elements[n] for n in names),
                after=sum(after[n].numel() for n in names),
                zeros=sum(after[n].numel() - int(after[n].count_nonzero()) for n in names),
                masked=masked and part is not None,
            )
        )
    return found


def row(kind: Kind) -> list[str]:
    """Format the cells of `COLUMNS`."""
    counts = [f"{count:,}" for count in (kind.before, kind.after, kind.zeros)]
    sizes = (kind.dense_bytes(FP32_BYTES), kind.sparse_bytes(FP32_BYTES))
    return [kind.name, *counts, f"{kind.sparsity:.2%}", *(f"{size / MIB:.2f}" for size in sizes)]


def two_of_four_note(device: torch.device) -> str:
    """Describe the device's support for 2:4 sparse kernels, and how to use them."""
    if device.type != "cuda":
        return (
            "2:4: torch's semi-structured kernels need a GPU of compute capability 8.0 or newer; a "
            "CPU gains no speed from it"
        )
    name = torch.cuda.get_device_name(device)
    if torch.cuda.get_device_capability(device) < SPARSE_CAPABILITY:
        return (
            f"2:4: torch's semi-structured kernels need compute capability 8.0, which {name} lacks"
        )
    return (
        f"2:4: {name} has torch's semi-structured kernels: convert a bf16 weight with "
        "torch.sparse.to_sparse_semi_structured"
    )
