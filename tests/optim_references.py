"""Optimizers that are not ours, each built over parameters by their names in our model."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.optim.apollo import projection

BETAS, EPS = (0.8, 0.95), 1e-6
APOLLO_RANK = 8
Named = dict[str, nn.Parameter]
Build = Callable[[Named, float], list[torch.optim.Optimizer]]


def groups(named: Named, decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices and embeddings, none for biases and norms."""
    matrices = [p for p in named.values() if p.dim() == 2]
    vectors = [p for p in named.values() if p.dim() == 1]
    found = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


def adamw(named: Named, decay: float, *, fused: bool = False) -> list[torch.optim.Optimizer]:
    options: dict[str, Any] = {"betas": BETAS, "eps": EPS, "foreach": False, "fused": fused}
    return [torch.optim.AdamW(groups(named, decay), **options)]


def fused_adamw(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    """To the last bit as ours: bf16 rounds what differs by one to another value."""
    return adamw(named, decay, fused=True)


def adam(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(groups(named, decay), betas=BETAS, eps=EPS, foreach=False)]


def sgd(momentum: float) -> Build:
    def build(named: Named, decay: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(groups(named, decay), lr=0.0, momentum=momentum, foreach=False)]

    return build


def adafactor(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(groups(named, decay))]


def hidden_and_rest(named: Named) -> tuple[Named, Named]:
    hidden = {n: p for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
    return hidden, {n: p for n, p in named.items() if n not in hidden}


def muon(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    hidden, rest = hidden_and_rest(named)
    theirs = torch.optim.Muon(groups(hidden, decay), adjust_lr_fn="match_rms_adamw")
    return [theirs, *(fused_adamw(rest, decay) if rest else [])]


def transformers_adafactor(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    from transformers.optimization import Adafactor

    return [Adafactor(groups(named, decay), lr=0.0, relative_step=False)]


def bitsandbytes_adamw(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    library = pytest.importorskip("bitsandbytes")
    return [library.optim.AdamW8bit(groups(named, decay), betas=BETAS, eps=EPS)]


class Textbook(torch.optim.Optimizer):
    """A decoupled decay, and an update that is a function of gradient, states and step."""

    def __init__(
        self, params: Sequence[dict[str, Any]], update: Callable[[Tensor, dict[str, Any]], Tensor]
    ) -> None:
        super().__init__(params, {"lr": 0.0})
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(self._update(parameter.grad, state), alpha=group["lr"])


class Rounded(torch.optim.Optimizer):
    """AdamW over fp32 weights, of which the model has the nearest bf16, with moments in bf16."""

    def __init__(self, params: Sequence[dict[str, Any]]) -> None:
        super().__init__(params, {"lr": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["whole"] = parameter.detach().float()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                update = moments(
                    parameter.grad.float(), state, lambda _, value: value.bfloat16().float()
                )
                state["whole"].mul_(1 - group["lr"] * group["weight_decay"])
                state["whole"].sub_(update, alpha=group["lr"])
                parameter.copy_(state["whole"])


def moments(
    gradient: Tensor, state: dict[str, Any], keep: Callable[[str, Tensor], Tensor]
) -> Tensor:
    """AdamW's step from moments that are kept by `keep`."""
    (beta1, beta2), step = BETAS, state["step"]
    first = state.get("first", torch.zeros_like(gradient))
    second = state.get("second", torch.zeros_like(gradient))
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    state["first"], state["second"] = keep("first", first), keep("second", second)
    result: Tensor = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + EPS)
    return result


def in_bf16(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    def update(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return moments(gradient, state, lambda _, value: value.bfloat16().float())

    return [Textbook(groups(named, decay), update)]


def in_compensated_bf16(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    """Moments in bf16, and weights that are rounded from fp32."""
    return [Rounded(groups(named, decay))]


def in_8_bits(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    """The nearest of torchao's levels in each block of 256, scaled by the largest with its sign."""
    from torchao.optim.quant_utils import create_dynamic_map

    def keep(name: str, value: Tensor) -> Tensor:
        if value.numel() < 4096:
            return value
        levels = torch.tensor(create_dynamic_map(name == "first"))
        blocks = value.view(-1, 256)
        scales = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
        codes = (blocks / scales)[..., None].sub(levels).abs().argmin(-1)
        codes = torch.where((name == "second") & (blocks > 0), codes.clamp(min=1), codes)
        return levels[codes].mul(scales).view_as(value)

    def update(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return moments(gradient, state, keep)

    return [Textbook(groups(named, decay), update)]


def apollo(named: Named, decay: float) -> list[torch.optim.Optimizer]:
    """Algorithm 1 of the paper with the projection on the right."""

    def update(gradient: Tensor, state: dict[str, Any]) -> Tensor:
        columns = gradient.shape[1]
        small = gradient @ projection(columns, APOLLO_RANK, 0, gradient.device)
        scaled = moments(small, state, lambda _, value: value)
        size = scaled.norm(dim=1) / small.norm(dim=1).clamp(min=1e-12)
        scale: Tensor = math.sqrt(columns / APOLLO_RANK) * size[:, None]
        return scale * gradient

    hidden, rest = hidden_and_rest(named)
    return [Textbook(groups(hidden, decay), update), *adamw(rest, decay)]
