"""Kernels of norms, SwiGLU and the rotary embedding against torch's own formulas in fp32.

`python tests/layer_kernel_cases.py`, with TRITON_INTERPRET=1, has Triton's interpreter run them on
the CPU, and prints a line of JSON per case. On a GPU, `compared` is called as it is.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.model import fused
from launcher.model.config import ModelConfig
from launcher.model.gpt import GPT
from launcher.model.layers import rotate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Of a few elements, less than a tile of a kernel, and more where a kernel has tiles.
WIDTHS = (3, 96, 1100)
KINDS = ("layer norm", "rms norm", "rms norm, beside", "swiglu", "rotary", "rotary, within others")
CASES = [(kind, dtype, width) for kind in KINDS for dtype in DTYPES for width in WIDTHS]
HEADS, TOKENS, ROWS = 3, 5, 1030  # more rows than programs, of which one has the last ones
EPS = 1e-5


def compared(kind: str, dtype_name: str, width: int, device: str) -> dict[str, float]:
    """Errors of the result and of each gradient as shares of its largest number, in last places of
    the type."""
    torch.manual_seed(0)
    dtype = DTYPES[dtype_name]
    inputs, ours, theirs = _case(kind, dtype, width)
    there = [each.detach().to(device).requires_grad_() for each in inputs]
    exact = [each.detach().float().requires_grad_() for each in inputs]
    found, expected = ours(*there), theirs(*exact)
    assert found.dtype == dtype
    slope = torch.randn(expected.shape).to(dtype)
    # As of what lies otherwise.
    across = slope.transpose(0, 1).contiguous().transpose(0, 1)
    gradients = torch.autograd.grad(found, there, across.to(device))
    expected_gradients = torch.autograd.grad(expected, exact, slope.float())
    pairs = {"result": (found, expected)}
    for number, pair in enumerate(zip(gradients, expected_gradients, strict=True)):
        pairs[f"gradient {number}"] = pair
    return {name: _error(mine.cpu(), its, dtype) for name, (mine, its) in pairs.items()}


def _error(mine: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    assert mine.shape == expected.shape
    largest = max(float(expected.abs().max()), 1e-2)
    off = float((mine.float() - expected.detach()).abs().max())
    return off / largest / torch.finfo(dtype).eps


Case = tuple[list[Tensor], Callable[..., Tensor], Callable[..., Tensor]]


def _case(kind: str, dtype: torch.dtype, width: int) -> Case:
    """Inputs, of which weights are in fp32; ours, and torch's formula."""
    if kind == "layer norm":
        inputs = [torch.randn(2, ROWS // 2, width).to(dtype), torch.randn(width)]
        return (
            [*inputs, torch.randn(width)],
            lambda x, w, b: fused.Norm.apply(x, w, b, EPS, False),
            lambda x, w, b: F.layer_norm(x, [width], w, b, EPS),
        )
    if kind == "rms norm":
        return (
            [torch.randn(2, ROWS // 2, width).to(dtype), torch.randn(width)],
            lambda x, w: fused.Norm.apply(x, w, None, EPS, False),
            lambda x, w: F.rms_norm(x, [width], w, EPS),
        )
    if kind == "rms norm, beside":
        return (
            [torch.randn(2, ROWS // 2, width).to(dtype), torch.randn(width)],
            lambda x, w: torch.stack(fused.Norm.apply(x, w, None, EPS, True)),
            lambda x, w: torch.stack((x, F.rms_norm(x, [width], w, EPS))),
        )
    if kind == "swiglu":
        return (
            [torch.randn(7, 2 * width).to(dtype)],
            fused.SwiGLU.apply,
            lambda x: F.silu(x[:, :width]) * x[:, width:],
        )
    angle = torch.randn(TOKENS, 1, width)
    cos, sin = angle.cos(), angle.sin()
    size = HEADS * 2 * width

    def ours(x: Tensor) -> Tensor:
        there = (cos.to(x.device), sin.to(x.device))
        made = x.flatten(0, 1) * 1  # a copy to change
        turned: Tensor = fused.Rotate.apply(made, *there, HEADS)
        assert made._version == 1
        return torch.cat(turned.split(width, dim=-1), dim=-1).view(x.shape)

    def theirs(x: Tensor) -> Tensor:
        heads = x[..., :size].view(*x.shape[:-1], HEADS, 2 * width)
        return torch.cat([rotate(heads, (cos, sin)).flatten(2), x[..., size:]], dim=-1)

    x = torch.randn(2, TOKENS, (1 if kind == "rotary" else 2) * size).to(dtype)
    return [x], ours, theirs


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"position": "rope", "norm": "rms", "activation": "swiglu", "kv_heads": 1},
    "qwen": {"position": "rope", "norm": "rms", "activation": "swiglu", "qk_norm": True},
}
CHECKPOINTING = ("none", "selective", "keep=qkv", "full")
DECODERS = [(shape, mode) for shape in SHAPES for mode in CHECKPOINTING]


def decoder(shape: str, mode: str, device: str) -> float:
    """Largest difference of a gradient, as a share of its largest number, that a decoder has with
    these kernels and without: kept products are changed where they are."""
    sizes = {"vocab_size": 50, "context": 8, "layers": 2, "heads": 2, "d_model": 16, "d_ff": 24}
    config = ModelConfig(**{**SHAPES[shape], **sizes}, activation_checkpointing=mode)
    torch.manual_seed(0)
    model = GPT(config).to(device)
    tokens = torch.randint(0, 50, (2, 8), device=device)
    gradients = []
    for fuses in (True, False):
        with patch.object(fused, "fuses", lambda device_type, fuses=fuses: fuses):
            model.zero_grad()
            model(tokens, tokens.roll(-1, dims=1)).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for ours, theirs in zip(*gradients, strict=True)
    )


def edges(device: str) -> dict[str, bool]:
    """Check rows with NaN, infinity and zeros, unaligned memory, and no rows."""
    torch.manual_seed(0)
    x = torch.randn(6, 96)
    x[1, 5], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
    weight, bias = torch.randn(96), torch.randn(96)
    there = [each.to(device) for each in (x, weight, bias)]
    close = partial(torch.allclose, rtol=1e-4, atol=1e-5, equal_nan=True)
    unaligned = torch.randn(6 * 96 + 1, device=device)[1:].view(6, 96)

    def norm(x: Tensor, *with_: Tensor | None) -> Tensor:
        out: Tensor = fused.Norm.apply(x, *with_, EPS, False)
        return out.cpu()

    empty = torch.empty(0, 96, device=device, requires_grad=True)
    trained = [each.clone().requires_grad_() for each in there[1:]]
    nothing = fused.SwiGLU.apply(fused.Norm.apply(empty, *trained, EPS, False))
    nothing.sum().backward()
    assert empty.grad is not None
    summed = [each.grad.abs().max() for each in trained if each.grad is not None]
    gates = x.to(device)
    return {
        "layer norm is torch's": close(norm(*there), F.layer_norm(x, [96], weight, bias, EPS)),
        "rms norm is torch's": close(
            norm(there[0], there[1], None), F.rms_norm(x, [96], weight, EPS)
        ),
        "unaligned is as aligned": torch.equal(
            norm(unaligned, *there[1:]), norm(unaligned.clone(), *there[1:])
        ),
        "swiglu is torch's": close(fused.SwiGLU.apply(gates).cpu(), F.silu(x[:, :48]) * x[:, 48:]),
        "no rows add nothing to weights": len(summed) == 2 and not any(summed),
        "no rows have no gradient": nothing.shape == (0, 48) and empty.grad.shape == (0, 96),
    }


def assert_as_torch(dtype_name: str, found: dict[str, float]) -> None:
    """Rounding of the type, and of fp32 in long sums."""
    most = 16 if dtype_name == "fp32" else 1
    assert all(error <= most for error in found.values()), found


if __name__ == "__main__":
    print(json.dumps({"case": ["edges", "", 0], "found": edges("cpu")}))
    for shape, mode in DECODERS:
        print(json.dumps({"case": [shape, mode, 0], "found": decoder(shape, mode, "cpu")}))
    for case in CASES:
        print(json.dumps({"case": case, "found": compared(*case, "cpu")}))
