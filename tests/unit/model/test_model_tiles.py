"""The MLP in tiles: the same losses and gradients, and nothing as wide as it and as long as the
batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.model import recompute
from launcher.model.config import ActivationCheckpointing, ModelConfig
from launcher.model.gpt import GPT

CONFIG = ModelConfig(
    vocab_size=64, context=32, layers=2, heads=4, d_model=32, d_ff=112, loss_chunk=24
)
LLAMA: dict[str, Any] = {
    **{"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 2, "tied": False},
    **{"bias": "none"},
}
ROWS = 4 * 32
MODES: tuple[ActivationCheckpointing, ...] = ("none", "selective", "full", "offload")
Step = tuple[Tensor, dict[str, Tensor]]


def step(config: ModelConfig, *, autocast: bool = False) -> Step:
    """Loss and gradients."""
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(0, config.vocab_size, (4, 32))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(tokens, tokens.roll(-1, 1))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def furthest(one: Step, other: Step) -> float:
    """The largest difference of a gradient or the loss, relative to its own norm."""
    found = {"loss": one[0], **one[1]}
    expected = {"loss": other[0], **other[1]}
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / e.norm()) for n, e in expected.items())


@pytest.mark.parametrize("family", [{}, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mlp_tile", [1, 23, ROWS, 10 * ROWS])
def test_the_same_losses_and_gradients(
    family: dict[str, Any], mode: ActivationCheckpointing, mlp_tile: int
) -> None:
    config = replace(CONFIG, **family)
    tiled = replace(config, mlp_tile=mlp_tile, activation_checkpointing=mode)
    assert furthest(step(tiled), step(config)) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_recomputing_draws_the_same_dropout(
    mode: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, dropout=0.3, mlp_tile=23)
    with monkeypatch.context() as patch:
        patch.setattr(recompute, "checkpoint", lambda function, x, **how: function(x))
        kept = step(config)  # the same tiles under the same seed, nothing recomputed
    assert furthest(kept, step(replace(CONFIG, mlp_tile=23))) > 0.1
    assert furthest(step(replace(config, activation_checkpointing=mode)), kept) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_gradients_under_autocast_are_summed_in_full_precision(
    mode: ActivationCheckpointing,
) -> None:
    """32 tiles that shared one bf16 weight would have three times the error of none."""
    exact = step(CONFIG)
    tiled = replace(CONFIG, mlp_tile=ROWS // 32, activation_checkpointing=mode)
    assert furthest(step(tiled, autocast=True), exact) < 1.2 * furthest(
        step(CONFIG, autocast=True), exact
    )


class Widest(TorchDispatchMode):
    """The most rows of anything as wide as the MLP, and how many products of matrices ran."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows, self.matmuls = width, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.matmuls += func.overloadpacket.__name__ in {"mm", "addmm"}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.size(-1) == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mlp_tile", [None, 40])
def test_nothing_of_the_mlps_width_is_longer_than_a_tile(
    mode: ActivationCheckpointing, mlp_tile: int | None
) -> None:
    with Widest(112) as widest:
        step(replace(CONFIG, mlp_tile=mlp_tile, activation_checkpointing=mode))
    assert widest.rows == (mlp_tile or ROWS)


@pytest.mark.parametrize("gradients", [False, True])
def test_evaluation_is_in_tiles_and_recomputes_nothing(gradients: bool) -> None:
    model = GPT(replace(CONFIG, mlp_tile=40)).eval()
    tokens = torch.zeros(4, 32, dtype=torch.int64)
    with Widest(112) as evaluation, torch.set_grad_enabled(gradients):
        loss = model(tokens, tokens)
        forward = evaluation.matmuls
        if gradients:
            loss.backward()
    assert evaluation.rows == 40
    with Widest(112) as training:
        model.train()(tokens, tokens).backward()
    recomputed = CONFIG.layers * 4  # a tile's first product; backward asks for no second one
    assert training.matmuls - evaluation.matmuls == (
        recomputed if gradients else training.matmuls - forward
    )
