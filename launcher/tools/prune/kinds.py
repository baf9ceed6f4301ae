"""What is left of each kind of weight, counted in the tensors themselves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from launcher.model.config import ModelConfig
from launcher.model.quantized import is_projection
from launcher.strategies.parameters import parameter_shapes
from launcher.util.sizes import MIB
from launcher.util.tables import Column

FP32_BYTES, BF16_BYTES = 4, 2
_NAMES = {
    "attn.qkv": "queries, keys, values",
    "attn.proj": "attention output",
    "mlp.fc": "MLP in",
    "mlp.out": "MLP out",
}
REST = "everything else"
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
    """All projections of one kind, or everything else."""

    name: str
    before: int
    """Weights of the model that was pruned."""
    after: int
    zeros: int
    """Of those after."""
    masked: bool

    @property
    def sparsity(self) -> float:
        """Zeros over weights."""
        return self.zeros / self.after

    def dense_bytes(self, value_bytes: int) -> int:
        """With a value for each weight."""
        return value_bytes * self.after

    def sparse_bytes(self, value_bytes: int) -> int:
        """With a bit for each weight, which says whether a value follows. 2:4 takes the same: two
        values of four, and 2 bits for the place of each."""
        if not self.masked:
            return self.dense_bytes(value_bytes)
        return value_bytes * (self.after - self.zeros) + -(-self.after // 8)


def kinds_of(before: ModelConfig, after: Mapping[str, Tensor], *, masked: bool) -> list[Kind]:
    """Of a model, and the parameters of what was made of it, of which projections may be masked."""
    elements = {name: math.prod(shape) for name, shape in parameter_shapes(before).items()}
    found = []
    for part, name in (*_NAMES.items(), ("", REST)):
        names = [n for n in after if part in n and is_projection(n) == bool(part)]
        found.append(
            Kind(
                name=name,
                before=sum(elements[n] for n in names),
                after=sum(after[n].numel() for n in names),
                zeros=sum(after[n].numel() - int(after[n].count_nonzero()) for n in names),
                masked=masked and bool(part),
            )
        )
    return found


def row(kind: Kind) -> list[str]:
    """The cells of `COLUMNS`."""
    counts = [f"{count:,}" for count in (kind.before, kind.after, kind.zeros)]
    sizes = (kind.dense_bytes(FP32_BYTES), kind.sparse_bytes(FP32_BYTES))
    return [kind.name, *counts, f"{kind.sparsity:.2%}", *(f"{size / MIB:.2f}" for size in sizes)]
