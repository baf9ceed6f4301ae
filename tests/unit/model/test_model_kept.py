"""What a block keeps for backward, and in which types, where nothing is checkpointed."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.measure.live_trace import LiveTrace
from launcher.model.config import Activation, ModelConfig
from launcher.model.gpt import GPT, MLP
from launcher.model.layers import LayerNorm, RMSNorm

ROWS = 2 * 16
CONFIG: dict[str, Any] = {
    **{"vocab_size": 64, "context": 16, "layers": 3, "heads": 4, "d_model": 32, "d_ff": 96},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen3": {"norm": "rms", "position": "rope", "activation": "swiglu", "qk_norm": True},
}


def model(**options: Any) -> GPT:
    torch.manual_seed(1)
    return GPT(ModelConfig(**CONFIG, **options))


def kept_and_gradients(module: GPT, *, autocast: bool) -> tuple[int, list[Tensor]]:
    """Bytes that a forward leaves, and the gradients of its backward."""
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(2))
    with LiveTrace() as trace:
        before = trace.current_bytes
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(tokens, tokens)
        kept = trace.current_bytes - before
    loss.backward()
    return kept, [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "relu"])
def test_the_widest_tensor_is_rebuilt_and_not_kept(activation: Activation, autocast: bool) -> None:
    kept, gradients = kept_and_gradients(model(activation=activation), autocast=autocast)
    plain = model(activation=activation)
    for mlp in (m for m in plain.modules() if isinstance(m, MLP)):
        mlp.keeping = lambda *_: contextlib.nullcontext()
    with_it, expected = kept_and_gradients(plain, autocast=autocast)
    element = 2 if autocast else 4
    saved = 0 if activation == "relu" else 3 * ROWS * 96 * element  # of 3 blocks
    assert with_it - kept == saved
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_leaves_the_residual_stream_and_norms_in_its_type(family: str) -> None:
    module = model(**FAMILIES[family])
    seen: set[torch.dtype] = set()

    def look(of: nn.Module, inputs: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        seen.update({inputs[0].dtype, *(each.dtype for each in outputs)})

    for part in module.modules():
        if isinstance(part, LayerNorm | RMSNorm):
            part.register_forward_hook(look)
    _, gradients = kept_and_gradients(module, autocast=True)
    assert seen == {torch.bfloat16}
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_of_bf16_is_that_of_fp32_rounded(kind: type[LayerNorm | RMSNorm]) -> None:
    torch.manual_seed(3)
    norm = kind(256, eps=1e-5)
    nn.init.normal_(norm.weight, mean=1.0, std=0.1)
    x = (3 + 5 * torch.randn(64, 256)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    exact = norm(x.float())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=2**-6, atol=2**-7)
