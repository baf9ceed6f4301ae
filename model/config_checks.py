"""Shapes of a decoder that cannot be built; each raises ValueError, with the value and the fix."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, get_args

from launcher.model.lora_config import PROJECTIONS

MOST_LAYERS = 100_000
MOST_PER_DIMENSION = 2**31 - 1
MOST_ROWS = 2**60  # tokens of a batch: no dimension of the model
MOST_ROPE = 1e30  # fp32 ends at 3.4e38
FP8_MULTIPLE = 16
"""Every dimension of an fp8 matmul is a multiple of this."""


def require_positive(field: str, value: int) -> None:
    """And no more than any model has."""
    if value < 1:
        raise ValueError(f"{field} {value} is not positive; use 1 or more.")
    most = {"layers": MOST_LAYERS, "mlp_tile": MOST_ROWS}.get(field, MOST_PER_DIMENSION)
    if value > most:
        raise ValueError(f"{field} {value} is more than any model has; use at most {most:,}.")


def require_one_of(field: str, value: str, literal: Any) -> None:
    """Require a value to be one of a Literal's."""
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{field} {value!r} is unknown; choose one of {', '.join(choices)}.")


def biased(text: str) -> tuple[str, ...]:
    """Return the projections that `bias` names: some of qkv, proj and mlp; raises ValueError."""
    names = {"all": PROJECTIONS, "none": ()}.get(text, tuple(text.split(",")))
    if len({*PROJECTIONS} & {*names}) < len(names):
        raise ValueError(
            f"bias {text!r} must name some of {', '.join(PROJECTIONS)}, once each; or be all or "
            "none."
        )
    return names


def spelled_bias(names: Collection[str]) -> str:
    """Return a `bias` of these projections, each set in one spelling."""
    if len(names) in (0, len(PROJECTIONS)):
        return "all" if names else "none"
    return ",".join(sorted(names, key=PROJECTIONS.index))


def check_heads(*, d_model: int, heads: int, kv_heads: int, head_dim: int | None) -> None:
    """Heads divide the width where no `head_dim` is given, and key heads the query heads."""
    if head_dim is None and d_model % heads:
        raise ValueError(
            f"{heads} heads do not divide d_model {d_model}; "
            f"use {_nearest_divisors(d_model, heads)} heads."
        )
    if heads % kv_heads:
        raise ValueError(
            f"{kv_heads} kv_heads do not divide {heads} heads; "
            f"use {_nearest_divisors(heads, kv_heads)} kv_heads."
        )


def check_rope(
    *, rotary: bool, head_size: int, theta: float, scaling: tuple[float, float, float, float] | None
) -> None:
    """Rotary positions turn pairs of a head's elements, by frequencies that there are."""
    if not 1.0 < theta <= MOST_ROPE:
        raise ValueError(f"rope_theta {theta} is outside 1 to {MOST_ROPE:g}; Llama 2 has 10000.")
    if rotary and head_size % 2:
        raise ValueError(
            f"position rope turns pairs, and a head of {head_size} is odd; use an even "
            "head_dim, or position learned."
        )
    if scaling is None:
        return
    factor, low, high, original = scaling
    if not rotary:
        raise ValueError("rope_scaling belongs to position rope; leave it out.")
    if not (1 <= factor <= MOST_ROPE and 0 < low < high <= MOST_ROPE >= original >= 1):
        raise ValueError(
            f"rope_scaling {factor:g} {low:g} {high:g} {original:g} is not a factor of at "
            "least 1, a low and a higher frequency factor and an original context; "
            "Llama 3.1 has 8 1 4 8192."
        )


def check_window(window: int | None, *, context: int) -> None:
    """A window is within what the model can see."""
    if window is not None and not 1 <= window <= context:
        raise ValueError(
            f"window {window} is outside 1 to the context of {context} tokens; "
            "choose a value in that range or none for full causal attention."
        )


def check_loss_chunk(loss_chunk: int | None) -> None:
    """0 is no chunks."""
    if loss_chunk is not None and loss_chunk < 0:
        raise ValueError(
            f"loss_chunk {loss_chunk} is negative; use a number of tokens, "
            "0 to turn chunking off, or leave it out for the automatic choice."
        )
    if loss_chunk is not None and loss_chunk > MOST_ROWS:
        raise ValueError(
            f"loss_chunk {loss_chunk} is more tokens than any batch has; use at most "
            f"{MOST_ROWS:,}, or 0 to turn chunking off."
        )


def _nearest_divisors(number: int, target: int) -> str:
    """The divisors of `number` just below and just above `target`, as 'a or b'."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    divisors = sorted({*small, *(number // n for n in small)})
    below = [n for n in divisors if n < target][-1:]
    above = [n for n in divisors if n > target][:1]
    return " or ".join(str(n) for n in below + above)
