"""Arithmetic of a token: its FLOPs, and a block's linear products in their order."""

from __future__ import annotations

from typing import NamedTuple

from launcher.model.checkpointing import LINEARS
from launcher.model.config import ModelConfig


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Model FLOPs of forward and backward for one token of a sequence of `seq_len` tokens.

    6 N + 12 L d T from appendix B of the PaLM paper (arXiv:2204.02311): N matmul parameters at
    2 FLOPs in forward and 4 in backward; L layers of Q K^T and A V over T positions, all heads d
    wide. As there, no discount for the causal half, a window or recomputation, so that figures
    compare with published ones. Frozen weights have no gradients: 4 N, and 6 of the adapters'.
    """
    attention = 12 * config.layers * config.attention_dim * seq_len
    if config.lora is None:
        return 6 * config.matmul_parameter_count + attention
    return 4 * config.matmul_parameter_count + 6 * config.trained_parameter_count + attention


class LinearProduct(NamedTuple):
    """One linear product of a block."""

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
