"""What steps have come to, read off the device in one go."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedStep:
    """What a rank knows of a step: its mean loss over its micro-batches, its allocated peak."""

    step: int
    loss: Tensor
    grad_norm: Tensor | float
    applied: Tensor | bool
    lr: float
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The same of all ranks, as plain numbers."""

    loss: float
    grad_norm: float
    applied: bool


def read_together(*groups: Sequence[Tensor | float]) -> list[list[float]]:
    """Scalars as plain numbers, in the groups they came in.

    All that is on a GPU comes in one copy: the host waits for it once, not once per number.

    Args:
        groups: scalars, within a group of one type where they are tensors on a GPU.
    """
    there = [[value for value in group if _on_gpu(value)] for group in groups]
    stacked = [torch.stack(group).double() for group in there if group]
    copied = iter(torch.cat(stacked).tolist() if stacked else ())
    return [
        [next(copied) if _on_gpu(value) else float(value) for value in group] for group in groups
    ]


def _on_gpu(value: Tensor | float) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.device.type == "cuda"
