"""Quantised weights: what they are worth, that they can be cut anywhere, and what loading takes."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launcher.checkpoint.pretrained.transformed import Quantized
from launcher.measure.live_trace import LiveTrace
from launcher.model.config import ModelConfig, Quantization
from launcher.model.foreign.adapters import AdaptedLinear
from launcher.model.gpt import GPT
from launcher.model.linears import (
    _NF4,
    QuantizedLinear,
    QuantizedLoRALinear,
    dequantize,
    inner_of,
    quantize,
    row_bytes,
)
from launcher.model.lora_config import BLOCK, Lora
from launcher.model.parts import is_projection
from launcher.strategies.flat_shards import PARAM, Shard
from launcher.strategies.parameters import parameter_shapes

KINDS: tuple[Quantization, ...] = ("nf4", "int8")
MODEL: dict[str, Any] = {"vocab_size": 257, "context": 32, "layers": 2, "heads": 4, "d_model": 128}


def weight_of(rows: int, inner: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(rows, 1, generator=generator)  # rows of very different size
    return torch.randn(rows, inner, generator=generator) * sizes * 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_each_element_is_the_nearest_value_times_its_scale(kind: Quantization) -> None:
    weight = weight_of(16, 256)
    weight[3] = 0  # as padding has it
    got = dequantize(quantize(weight, kind), 256, kind, torch.float32)
    scales = weight.view(16, -1, BLOCK).abs().amax(-1)
    low, high = scales.amin(-1, keepdim=True), scales.amax(-1, keepdim=True)
    # 8 bits between a row's smallest and largest scale: off by half a step at most.
    step = (high - low) / 255
    values = torch.tensor(_NF4) if kind == "nf4" else torch.arange(-127, 128) / 127
    gap = values.diff().max() / 2
    worst = (gap * scales + step)[..., None].expand(-1, -1, BLOCK).reshape(16, 256)
    assert ((got - weight).abs() <= worst + 1e-9).all()
    assert (got[3] == 0).all()
    error = (got - weight).norm() / weight.norm()
    assert error < {"nf4": 0.11, "int8": 0.01}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_weight_is_quantised_some_rows_at_a_time(kind: Quantization) -> None:
    weight = weight_of(9000, 1024)  # more than two pieces
    rows = [quantize(weight[[row]], kind) for row in (0, 4095, 4096, 8999)]
    with LiveTrace() as memory:
        packed = quantize(weight, kind)
    assert torch.equal(packed[[0, 4095, 4096, 8999]], torch.cat(rows))
    # The result twice, and what pieces of 16 MiB need: of the whole 72 MiB would be more alone.
    assert memory.peak_bytes() < 2 * packed.nbytes + 6 * 2**24


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.57), ("int8", 1.07)])
@pytest.mark.parametrize("inner", [192, 576, 768, 4096])
def test_bytes_per_parameter(kind: Quantization, most: float, inner: int) -> None:
    assert quantize(weight_of(8, inner), kind).shape == (8, row_bytes(inner, kind))
    assert row_bytes(inner, kind) / inner <= most
    assert inner_of(row_bytes(inner, kind), kind) == inner


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_is_that_of_its_dequantised_weight(kind: Quantization, bias: bool) -> None:
    linear = QuantizedLinear(128, 48, bias=bias, kind=kind)
    weight = weight_of(48, 128)
    linear.packed.copy_(quantize(weight, kind))
    if linear.bias is not None:
        torch.nn.init.normal_(linear.bias)
    plain = dequantize(linear.packed, 128, kind, torch.float32)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    gradients = []
    for function in (linear, lambda x: F.linear(x, plain, linear.bias)):
        inputs = x.clone().requires_grad_()
        y = function(inputs)
        y.square().sum().backward()
        gradients.append((y.detach(), inputs.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_may_have_no_token(kind: Quantization) -> None:
    lora = Lora(rank=4, alpha=8.0)
    linears = (
        QuantizedLinear(128, 48, bias=True, kind=kind),
        QuantizedLoRALinear(128, (48,), lora=lora, bias=True, kind=kind),
        AdaptedLinear(128, [48], lora=lora, linear=torch.nn.Linear(128, 48)),
    )
    for linear in linears:
        x = torch.empty(2, 0, 128, requires_grad=True)
        linear(x).sum().backward()
        assert x.grad is not None


class Whole:
    """Weights in memory, which counts what is asked for at a time."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.most = tensors, 0

    def has(self, name: str) -> bool:
        return name in self.tensors

    def read_into(self, shard: Shard) -> None:
        flat = self.tensors[shard.name].flatten()
        shard.data.copy_(flat[shard.start : shard.start + shard.data.numel()])
        self.most = max(self.most, shard.data.numel())


class Drawn(Whole):
    """Weights that are nowhere before somebody reads them."""

    def read_into(self, shard: Shard) -> None:
        shard.data.normal_()


@pytest.mark.parametrize("kind", KINDS)
def test_any_range_is_that_of_the_whole(kind: Quantization, monkeypatch: Any) -> None:
    """FSDP's rows, and ZeRO-3's slices, which begin and end in the middle of a code's row."""
    monkeypatch.setattr(
        "launcher.checkpoint.pretrained.transformed.CHUNK_ELEMENTS", 3 * 128
    )  # three rows
    config = ModelConfig(**MODEL, lora=Lora(rank=2, alpha=4), quantize_base=kind)
    name = "blocks.1.attn.qkv.packed"
    rows, width = parameter_shapes(config)[name]
    weights = Whole({"blocks.1.attn.qkv.weight": weight_of(rows, 128)})
    source = Quantized(weights, config)
    assert source.has(name)
    whole = quantize(weights.tensors["blocks.1.attn.qkv.weight"], kind).flatten()
    for start, stop in ((0, rows * width), (5 * width, 9 * width), (width + 7, 4 * width - 3)):
        data = torch.zeros(stop - start, dtype=torch.uint8)
        source.read_into(Shard(name=name, kind=PARAM, start=start, data=data))
        assert torch.equal(data, whole[start:stop])
    assert weights.most <= 3 * 128


def test_loading_holds_a_few_rows(monkeypatch: Any) -> None:
    """Beside the bytes themselves, live memory is that of a chunk, whatever the matrix."""
    monkeypatch.setattr("launcher.checkpoint.pretrained.transformed.CHUNK_ELEMENTS", 4096)
    config = ModelConfig(**MODEL, lora=Lora(rank=2, alpha=4), quantize_base="nf4")
    name = "blocks.0.mlp.fc.packed"
    rows, width = parameter_shapes(config)[name]
    source = Quantized(Drawn({}), config)
    data = torch.zeros(rows * width, dtype=torch.uint8)
    with LiveTrace() as trace:
        source.read_into(Shard(name=name, kind=PARAM, start=0, data=data))
        peak = trace.peak_bytes()
    assert peak - data.numel() < 24 * 4096 < 4 * rows * 128


@pytest.mark.parametrize("kind", KINDS)
def test_projections_of_blocks_are_quantised_and_nothing_else(kind: Quantization) -> None:
    lora = Lora(rank=2, alpha=4, targets=("qkv",))
    plain = parameter_shapes(ModelConfig(**MODEL, lora=lora))
    quantized = GPT(ModelConfig(**MODEL, lora=lora, quantize_base=kind))
    found = dict(quantized.named_parameters())
    for name, shape in plain.items():
        if is_projection(name):
            packed = found.pop(name.removesuffix("weight") + "packed")
            assert packed.dtype == torch.uint8
            assert packed.numel() == shape[0] * row_bytes(shape[1], kind)
        else:
            assert found.pop(name).numel() == math.prod(shape)
    assert not found


def test_keeps_no_weight_for_backward() -> None:
    linear = QuantizedLinear(128, 512, bias=False, kind="nf4")
    linear.packed.zero_()
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(torch.randn(4, 128, requires_grad=True))
    assert kept == [linear.packed.data_ptr()]
