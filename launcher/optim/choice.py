"""The config section of optimizer, precision and learning rate, and the schedule it defines."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from launcher.util.errors import UserError
from launcher.util.flags import MOST_STEPS, flag, require_at_most, require_positive

Precision = Literal["auto", "fp32", "tf32", "bf16", "bf16-pure", "fp16", "fp8"]
OptimizerName = Literal["adamw", "adam", "sgd", "adafactor", "adamw8bit", "muon", "apollo"]
Schedule = Literal["cosine", "linear", "constant", "wsd"]
Moments = Literal["fp32", "bf16", "int8"]
"""Storage of both moments of AdamW."""
Task = Literal["training from scratch", "full fine-tuning", "LoRA"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """Types that a precision computes in and keeps, and its name in DeepSpeed's files."""

    computed: Literal["fp32", "bf16", "fp16"]
    """Type of matmuls and of communicated gradients, and name of DeepSpeed's section."""
    keeps_fp32: bool = True
    """The weights that are updated are in fp32."""
    tf32_matmuls: bool = False
    """Matmuls round their fp32 operands to TF32, on GPUs."""
    fp8_linears: bool = False
    """Linears round their operands to fp8, which DeepSpeed's engine does not do."""
    switches: tuple[str, ...] = ()
    """Switches that are on in DeepSpeed's section, beside `enabled`."""


PRECISIONS: Final[Mapping[Precision, Arithmetic]] = {
    "fp32": Arithmetic(computed="fp32"),
    "tf32": Arithmetic(computed="fp32", tf32_matmuls=True),
    "bf16": Arithmetic(computed="bf16"),
    "bf16-pure": Arithmetic(
        computed="bf16",
        keeps_fp32=False,
        switches=("bf16_master_weights_and_grads", "bf16_optimizer_states"),
    ),
    "fp16": Arithmetic(computed="fp16"),
    "fp8": Arithmetic(computed="bf16", fp8_linears=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Peak learning rate, its schedule, and weight decay: what depends on the task."""

    lr: float
    schedule: Schedule
    min_lr_ratio: float
    warmup_steps: float
    weight_decay: float


WSD_DECAY_RATIO: Final = 0.2
"""Default length of the decay in a warm-up-stable-decay schedule, relative to all steps."""
FROM_SCRATCH: Final = Recipe(
    lr=1e-3, schedule="cosine", min_lr_ratio=0.1, warmup_steps=0.02, weight_decay=0.1
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimChoice:
    """The optimizer, its precision, and the schedule of its learning rate."""

    precision: Precision = "auto"
    """auto: bf16 on a GPU that computes in it, else fp32. fp32; tf32: fp32, with inputs of matmuls
    rounded to 10 bits of mantissa (GPUs); bf16 or fp16 (with loss scaling): compute in it, with
    fp32 master weights and fp32 gradient reduction; bf16-pure: weights, gradients and moments in
    bf16, with compensated updates; fp8: bf16 with matmuls in fp8."""
    compensation: bool = True
    """bf16-pure: keep beside each weight what rounding has cut off, in bf16; without it states take
    2 bytes per parameter less, and updates below the weight's last bit are lost."""
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
    schedule: Schedule | None = None
    """Learning rate after the warm-up: cosine or linear down to the end, constant, or wsd
    (warm-up, stable, decay: constant, then linear down over the last steps). When not given:
    constant for LoRA, else cosine."""
    decay_steps: int | None = None
    """wsd: steps of the decay (20% of the schedule when not given)."""
    lr: float | None = None
    """Peak learning rate. When not given: 1e-3 from scratch, 2e-5 to train all weights of
    --init-from, 2e-4 for LoRA; adafactor, whose rate is relative to a weight, 1e-2, 1e-3, 1e-3."""
    min_lr_ratio: float | None = None
    """Learning rate at the end of the schedule, relative to the peak (when not given: 0.1 from
    scratch, else 0)."""
    warmup_steps: float | None = None
    """Steps of linear warm-up; below 1: a fraction of the schedule (when not given: 0.02 from
    scratch, else 0.03)."""
    weight_decay: float | None = None
    """Decoupled weight decay, on matrices only (when not given: 0.1 from scratch, else 0)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the two moments."""
    eps: float = 1e-8
    """Adam's epsilon."""
    momentum: float = 0.9
    """SGD's momentum; 0 = none."""
    clip: float = 1.0
    """Largest global gradient norm; 0 = no clipping (the norm is still reported)."""

    @property
    def arithmetic(self) -> Arithmetic:
        """Types and switches of the precision; those of fp32 until `auto` is resolved."""
        return PRECISIONS["fp32" if self.precision == "auto" else self.precision]

    def recipe(self, default: Recipe = FROM_SCRATCH) -> Recipe:
        """Return the fields of a recipe, with `default` for those that are not given."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(Recipe)}
        return dataclasses.replace(default, **{k: v for k, v in given.items() if v is not None})

    def __post_init__(self) -> None:
        require_positive(self, "lr", "eps", "decay_steps", "apollo_rank")
        for name in ("weight_decay", "clip", "warmup_steps"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"{flag(name)} {value} must be 0 or more")
        require_at_most(self, "weight_decay", "clip")
        require_at_most(self, "warmup_steps", most=MOST_STEPS)
        if self.warmup_steps is not None and (self.warmup_steps >= 1 or not self.warmup_steps):
            if self.warmup_steps != int(self.warmup_steps):
                raise UserError(
                    f"--warmup-steps {self.warmup_steps} must be a whole number of steps, or a "
                    "fraction of the schedule below 1"
                )
            object.__setattr__(self, "warmup_steps", int(self.warmup_steps))
        if self.min_lr_ratio is not None and not 0 <= self.min_lr_ratio <= 1:
            raise UserError(f"--min-lr-ratio {self.min_lr_ratio} must be between 0 and 1")
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise UserError(f"--betas has {beta}, but both must be at least 0 and below 1")
        if not 0 <= self.momentum < 1:
            raise UserError(f"--momentum {self.momentum} must be at least 0 and below 1")


def steps_of_warmup(warmup_steps: float, steps: int) -> int:
    """Return the steps of a warm-up that may be given as a ratio of a schedule's steps."""
    if 0 < warmup_steps < 1:
        # The rounding error of 0.29 * 100 must not take a step away.
        return max(1, int(warmup_steps * steps + 1e-9))
    return int(warmup_steps)


def learning_rate(step: int, choice: OptimChoice, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (from 1) of `steps`: linear warm-up, then
    the schedule down to `min_lr_ratio` of the peak.

    A pure function, so that a resumed run continues with the same rates.
    """
    recipe = choice.recipe()
    warmup = steps_of_warmup(recipe.warmup_steps, steps)
    if step <= warmup:
        return recipe.lr * step / warmup
    if recipe.schedule == "constant":
        return recipe.lr
    begin = warmup
    if recipe.schedule == "wsd":
        decay = choice.decay_steps if choice.decay_steps is not None else WSD_DECAY_RATIO * steps
        begin = max(warmup, steps - math.ceil(decay))
    done = min(1.0, max(0.0, (step - begin) / max(1, steps - begin)))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if recipe.schedule == "cosine" else 1.0 - done
    return recipe.lr * (recipe.min_lr_ratio + (1.0 - recipe.min_lr_ratio) * left)
