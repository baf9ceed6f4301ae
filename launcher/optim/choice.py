"""The section of the config that says which optimizer updates what, in which precision."""

import math
from dataclasses import dataclass
from typing import Literal

from launcher.errors import UserError
from launcher.flags import MOST_STEPS, flag, require_at_most, require_positive

Precision = Literal["fp32", "bf16", "bf16-pure", "fp16", "fp8"]
OptimizerName = Literal["adamw", "adam", "sgd", "adafactor", "adamw8bit", "muon", "apollo"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]
Moments = Literal["fp32", "bf16", "int8"]
"""How both moments of AdamW are stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimChoice:
    """The optimizer, its precision, and the schedule of its learning rate."""

    precision: Precision = "fp32"
    """fp32; bf16 or fp16 (with loss scaling): compute in it, with fp32 master weights and fp32
    gradient reduction; bf16-pure: weights, gradients and moments in bf16, with compensated
    updates; fp8: bf16 with matmuls in fp8."""
    compensation: bool = True
    """bf16-pure: keep beside each weight what rounding has cut off, in bf16; without it states take
    2 bytes per parameter less, and updates below the weight's last bit are lost."""
    tf32: bool = False
    """GPUs: let fp32 matmuls round their inputs to TF32 (10 bits of mantissa)."""
    optimizer: OptimizerName = "adamw"
    """adamw, adam (decay as L2 in the gradient), sgd (with momentum), adafactor (factored second
    moments, no first), adamw8bit (both moments in 8 bits); or for the matrices of blocks, with
    adamw for the rest: muon, or apollo (adamw's step sizes by row, from a projected gradient)."""
    apollo_rank: int | None = None
    """apollo: columns of a projected gradient, and so of both moments (64 when not given)."""
    moments_dtype: Literal["fp32", "bf16"] | None = None
    """AdamW: type of both moments (fp32; bf16 with --precision bf16-pure)."""
    optimizer_in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free the gradient: single, fsdp;
    without accumulation and clipping."""
    schedule: Schedule = "cosine"
    """Of the learning rate after the warm-up: cosine or linear down to the end, constant, or wsd
    (warm-up, stable, decay: constant, then linear down over the last steps)."""
    decay_steps: int | None = None
    """wsd: steps of the decay (20% of the schedule when not given)."""
    lr: float = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = 0.1
    """Learning rate at the end of the schedule, relative to the peak."""
    warmup_steps: int | None = None
    """Steps of linear warm-up (2% of the schedule when not given)."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the two moments."""
    eps: float = 1e-8
    """Adam's epsilon."""
    momentum: float = 0.9
    """SGD's momentum; 0 = none."""
    clip: float = 1.0
    """Largest global gradient norm; 0 = no clipping (the norm is still reported)."""

    @property
    def keeps_fp32(self) -> bool:
        """Whether the weights that are updated are in fp32."""
        return self.precision != "bf16-pure"

    def __post_init__(self) -> None:
        require_positive(self, "lr", "eps", "decay_steps", "apollo_rank")
        for name in ("weight_decay", "clip", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"{flag(name)} {value} must be 0 or more")
        require_at_most(self, "weight_decay", "clip")
        require_at_most(self, "warmup_steps", most=MOST_STEPS)
        if not 0 <= self.min_lr_ratio <= 1:
            raise UserError(f"--min-lr-ratio {self.min_lr_ratio} must be between 0 and 1")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise UserError(f"--betas has {beta}, but both must be at least 0 and below 1")
        if not 0 <= self.momentum < 1:
            raise UserError(f"--momentum {self.momentum} must be at least 0 and below 1")
