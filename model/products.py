"""A block's linear products, in the order in which it computes them."""

from __future__ import annotations

from typing import NamedTuple

from launcher.model.checkpointing import LINEARS
from launcher.model.config import ModelConfig


class LinearProduct(NamedTuple):
    """One of them."""

    kept_with: str | None
    """The named product that has to be kept for this to be; None where it never is."""
    shape: tuple[int, int]
    """Sizes of the right operand, (in, out)."""
    weights: int
    """Elements of that, without zeros between the blocks of an adapter."""
    of_adapter: bool


def linear_products(model: ModelConfig) -> list[LinearProduct]:
    """Return each projection's product, between both of its adapter where it has one.

    Backward does not ask for the output of the last, which is only added to the residual stream,
    and recomputation ends before it; so the MLP's second projection is not kept. It is where
    something behind it is asked for: its adapter's input, or the bytes that a quantised one saves.

    An adapter's first product is kept with the projection's: it is narrow, and saves as many FLOPs
    for a byte. Its second is as wide as the projection's, and cheap: it is computed once more.
    """
    found: list[LinearProduct] = []
    names = (*LINEARS, LINEARS[-1])
    passed = model.quantize_base != "none"
    parts = zip(names, model.linear_shapes, model.adapter_widths, strict=True)
    for number, (name, (inner, outer), width) in enumerate(parts):
        kept_with = name if number < len(LINEARS) or width or passed else None
        own = LinearProduct(kept_with, (inner, outer), inner * outer, of_adapter=False)
        if model.lora is None or not width:
            found.append(own)
            continue
        low = LinearProduct(name, (inner, width), inner * width, of_adapter=True)
        high = LinearProduct(None, (width, outer), model.lora.rank * outer, of_adapter=True)
        found += [low, own, high]
    return found
