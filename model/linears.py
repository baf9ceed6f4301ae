"""Projections of a block: plain, with a low-rank adapter (LoRA, arXiv:2106.09685, as in PEFT), and
over frozen weights in 4 or 8 bits: NF4 (arXiv:2305.14314) or int8, both with quantised scales.

A quantised weight is one tensor of bytes, a row of it a row of the weight: codes, one byte for the
scale of each 64 of them, and the smallest and largest scale of the row in fp32. So whatever shards
parameters by rows or by elements shards these alike, and need not know the meaning of the bytes.
A weight takes 0.516 or 1.016 bytes per element, and 8 bytes per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from launcher.model.config import ModelConfig, Quantization
from launcher.model.config_checks import FP8_MULTIPLE
from launcher.model.derived import as_one
from launcher.model.lora_config import BLOCK, Lora, LoraTarget
from launcher.model.loss import compute_dtype
from launcher.model.parts import parts_of

PACKED: Final = ".packed"
"""Suffix of a quantised weight's name."""
_RANGE_BYTES = 8
QUANTIZED_ELEMENTS: Final = 2**22
"""Elements that `quantize` computes at a time."""
QUANTIZING_BYTES: Final = 13
"""Per element of these: the value over its scale in fp32, its code in int64 and in uint8."""
# Quantiles of the normal distribution, with a zero of its own (appendix E of the paper).
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def row_bytes(inner: int, kind: Quantization) -> int:
    """Bytes of a row of `inner` elements."""
    return _code_bytes(inner, kind) + inner // BLOCK + _RANGE_BYTES


def inner_of(row: int, kind: Quantization) -> int:
    """Elements of a row of so many bytes."""
    # A block of 64 elements takes 32 bytes of codes, or 64, and one of its scale.
    return (row - _RANGE_BYTES) * BLOCK // (BLOCK // 2 + 1 if kind == "nf4" else BLOCK + 1)


def weight_of(name: str) -> str:
    """Return the name of a quantised weight in the unquantised model."""
    return name.removesuffix(PACKED) + ".weight"


def _code_bytes(inner: int, kind: Quantization) -> int:
    return inner // 2 if kind == "nf4" else inner


def quantize(weight: Tensor, kind: Quantization) -> Tensor:
    """weight [out, in] fp32 -> [out, row_bytes(in)] uint8.

    Some rows at a time: what is computed on the way takes four times the memory of the weight.
    """
    pieces = weight.split(max(1, QUANTIZED_ELEMENTS // weight.size(1)))
    return torch.cat([_quantized(piece, kind) for piece in pieces])


def _quantized(weight: Tensor, kind: Quantization) -> Tensor:
    rows = weight.size(0)
    blocks = weight.view(rows, -1, BLOCK)
    scales = blocks.abs().amax(-1)  # [rows, in / BLOCK]
    low, high = scales.amin(-1, keepdim=True), scales.amax(-1, keepdim=True)
    step = (high - low) / 255
    # 0 / 0 where all scales of a row are equal, and a scale of 0 where a block has zeros only.
    steps = torch.where(step > 0, (scales - low) / step, 0).round()
    # Codes go by the scale that is read back, which is rounded to one of 256 steps.
    relative = blocks / (low + steps * step).clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    if kind == "nf4":
        values = weight.new_tensor(_NF4)
        nearest = torch.bucketize(relative, (values[1:] + values[:-1]) / 2).to(torch.uint8)
        pairs = nearest.view(rows, -1, 2)
        codes = pairs[..., 0] * 16 + pairs[..., 1]
    else:
        codes = (relative * 127).round().clamp(-127, 127).add(128).to(torch.uint8).view(rows, -1)
    ranges = torch.cat([low, high], dim=1).view(torch.uint8)
    return torch.cat([codes, steps.to(torch.uint8), ranges], dim=1)


def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Both values of each byte, [256, 2]."""
    values = torch.tensor(_NF4, dtype=dtype, device=device)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)


@cache
def _gpu_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy to a GPU makes the host wait: once is enough."""
    return _table(dtype, device)


def dequantize(packed: Tensor, inner: int, kind: Quantization, dtype: torch.dtype) -> Tensor:
    """[out, row_bytes(in)] uint8 -> [out, in] of `dtype`."""
    rows, end = packed.size(0), _code_bytes(inner, kind)
    # A copy, since a row's last 8 bytes may lie at any address, and fp32 needs multiples of 4.
    low, high = packed[:, -_RANGE_BYTES:].contiguous().view(torch.float32).split(1, dim=1)
    scales = (low + packed[:, end:-_RANGE_BYTES] * ((high - low) / 255)).to(dtype)
    if kind == "nf4":
        table = _gpu_table if packed.is_cuda else _table
        weight = F.embedding(packed[:, :end].int(), table(dtype, packed.device))
    else:
        weight = packed[:, :end].to(dtype).sub_(128).mul_(1 / 127)
    weight.view(rows, -1, BLOCK).mul_(scales[..., None])
    return weight.view(rows, inner)


class _QuantizedLinear(torch.autograd.Function):
    """x W^T + bias, which keeps the bytes of W and not W: backward makes it once more."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, kind: Quantization
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.inner, ctx.kind, ctx.dtype = x.size(1), kind, x.dtype
        dtype = compute_dtype(x)

        def product() -> Tensor:
            weight = dequantize(packed, ctx.inner, kind, dtype)
            with torch.autocast(x.device.type, enabled=False):
                return F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

        return as_one(product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        grad_x = grad @ dequantize(packed, ctx.inner, ctx.kind, grad.dtype)
        return grad_x.to(ctx.dtype), None, None, None


class QuantizedLinear(nn.Module):
    """`nn.Linear` with a frozen, quantised weight."""

    def __init__(self, inner: int, outer: int, *, bias: bool, kind: Quantization) -> None:
        super().__init__()
        self.kind = kind
        packed = torch.empty(outer, row_bytes(inner, kind), dtype=torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outer), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out]."""
        y: Tensor = _QuantizedLinear.apply(x.flatten(0, -2), self.packed, self.bias, self.kind)
        return y.view(*x.shape[:-1], y.size(-1))


ADAPTERS = ("lora_a", "lora_b")


class Adapter(nn.Module):
    """Mixin that adds scale B A x to a projection's output for x.

    Args:
        inner: width of x.
        sizes: rows of W, as many for each of the matrices that it is made of. Each has `rank` rows
            of A and its own rows of B.
        lora: rank, scale and dropout.
        options: the projection's own.
    """

    def __init__(self, inner: int, sizes: Sequence[int], *, lora: Lora, **options: Any) -> None:
        super().__init__(inner, sum(sizes), **options)
        self.sizes = list(sizes)
        self.scale = lora.scale
        self.dropout = nn.Dropout(lora.dropout)
        self.lora_a = nn.Parameter(torch.empty(len(sizes) * lora.rank, inner))
        self.lora_b = nn.Parameter(torch.zeros(sum(sizes), lora.rank))

    def forward(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out]."""
        rows = x.flatten(0, -2)
        low = F.linear(self.dropout(rows), self.lora_a)
        # Small against the products: one matrix of blocks, where each has its own rows of A.
        b = torch.block_diag(*self.lora_b.split(self.sizes)) if self.sizes[1:] else self.lora_b
        y = torch.addmm(super().forward(rows), low, b.t(), alpha=self.scale)
        return y.view(*x.shape[:-1], y.size(-1))


class LoRALinear(Adapter, nn.Linear):
    """W x + bias + scale B A x, of which only A and B are trained."""


class QuantizedLoRALinear(Adapter, QuantizedLinear):
    """A `LoRALinear` over a quantised W."""


def linear(
    config: ModelConfig, target: LoraTarget, inner: int, *sizes: int, bias: bool
) -> nn.Module:
    """Make a projection of a block, [*, inner] -> [*, sum(sizes)], with its adapter if any."""
    quantized: dict[str, Any] = {"bias": bias}
    if config.quantize_base != "none":
        quantized["kind"] = config.quantize_base
    if config.lora is not None and target in config.lora.targets:
        kind = QuantizedLoRALinear if "kind" in quantized else LoRALinear
        return kind(inner, sizes, lora=config.lora, **quantized)
    plain = QuantizedLinear if "kind" in quantized else nn.Linear
    return plain(inner, sum(sizes), **quantized)


def fp8_linears(decoder: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a decoder's blocks whose products can be in fp8: their sizes are
    multiples of a tile, and their outputs do not choose experts, which rounding would change."""
    experts = {getattr(module, "num_experts", None) for module in decoder.modules()}
    return [
        linear
        for linear in parts_of(decoder).blocks.modules()
        if type(linear) is nn.Linear
        and linear.in_features % FP8_MULTIPLE == linear.out_features % FP8_MULTIPLE == 0
        and linear.out_features not in experts
    ]


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return name.rpartition(".")[2] in ADAPTERS


def freeze(module: nn.Module) -> None:
    """Train adapters alone."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
