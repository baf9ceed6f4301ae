"""The head of a decoder of transformers: from its last block's norm to its logits.

Some scale their logits, some cap them, each under a name of its own. So the model is asked: its
forward runs with a known hidden state and known products of the head, and the logits that come out
tell what it does. A model that does anything else is refused, not approximated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launcher.model.loss import linear_cross_entropy

_CLOSE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitFunction:
    """logits = softcap * tanh(scale * products / softcap), or scale * products without a cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        scaled = products * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


class _Output:
    """Output of a base model: a hidden state, and None for everything else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def logit_function(causal: Any) -> LogitFunction:
    """Find out how a model makes logits of its head's products; needs no weights.

    Raises:
        ValueError: in a way that our loss over chunks does not know.
    """
    decoder, head, read = causal.get_decoder(), causal.get_output_embeddings(), []
    with torch.device("cpu"), torch.no_grad():  # the caller's device may be meta
        products = torch.linspace(-200.0, 200.0, head.out_features).view(1, 1, -1)
        # 1 gives the scale, infinity the cap; the others check the formula.
        products[..., :2] = torch.tensor([1.0, torch.inf])
        hidden = torch.linspace(-1.0, 1.0, head.in_features).view(1, 1, -1)

        def record(x: Tensor) -> Tensor:
            read.append(x)
            return products

        decoder.forward, head.forward = lambda *_, **__: _Output(hidden), record
        try:
            logits = causal(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits.float()
        finally:
            del decoder.forward, head.forward
    found = _solved(*logits[0, 0, :2].tolist())
    known = len(read) == 1 and torch.equal(read[0].float(), hidden)
    if not (known and torch.allclose(found(products), logits, rtol=_CLOSE, atol=_CLOSE)):
        raise ValueError("its head makes logits in a way that the loss over chunks does not know")
    return found


def _solved(at_one: float, at_infinity: float) -> LogitFunction:
    if math.isinf(at_infinity):
        return LogitFunction(scale=at_one)
    scale = at_infinity * math.atanh(at_one / at_infinity)
    if math.isclose(scale, 1.0, rel_tol=_CLOSE):
        scale = 1.0  # fp32 cannot tell
    return LogitFunction(scale=scale, softcap=at_infinity)


def is_product(head: nn.Module) -> bool:
    """Return whether a head computes what a Linear does; one of its class may do more."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


class ForeignHead(nn.Module):
    """The output projection of a decoder of transformers, and the loss over it.

    It takes the place of the model's own Linear, so that the loss is computed by the module that
    owns the weight: FSDP and ZeRO-3 gather it for that.
    """

    def __init__(self, linear: Any, function: LogitFunction, *, chunk_rows: int | None) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.function, self.chunk_rows = function, chunk_rows

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """hidden [B, T, d], targets [B, T] -> scalar mean loss, or logits [B, T, V] without."""
        if targets is None:
            return self.function(F.linear(hidden, self.weight, self.bias))
        rows, weight = hidden.flatten(0, -2), self.weight
        if self.function.scale != 1.0:  # a scaled hidden state has scaled products
            rows = rows * self.function.scale
        if self.bias is not None:  # a further column, over a further input of 1
            rows = torch.cat([rows, rows.new_full((rows.size(0), 1), self.function.scale)], dim=1)
            weight = torch.cat([weight, self.bias[:, None]], dim=1)
        return self.loss(rows, weight, targets)

    def loss(self, rows: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of rows [B*T, d] under a head's weight, of targets [B, T]."""
        return linear_cross_entropy(
            rows,
            weight,
            targets.flatten(),
            chunk_rows=self.chunk_rows,
            softcap=self.function.softcap,
        )
